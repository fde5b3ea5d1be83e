package installer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
)

// Netboot writes the files for UEFI HTTP boot to dir and replaces existing files. The firmware
// downloads boot.img, a disk with only the EFI system partition, into memory and boots it. The
// installer reads the other file, the image, from url.
func Netboot(ctx context.Context, dir, url string, o Options, progress func(done, total int64)) error {
	o.Install.URL = url
	ps, err := o.parts()
	if err != nil {
		return err
	}
	boot := ps.esp(o.Payload.Image.Name, time.Unix(o.Payload.Image.SourceDate, 0).UTC())
	esp := disk.Partition{Label: ondisk.LabelESP, FS: disk.FAT32, Size: espSize(boot, 512), Nodes: boot}
	if err := file.CheckSpace(dir, o.Payload.Size()+esp.Size, "the installer"); err != nil {
		return fmt.Errorf("making the installer: %w", err)
	}
	tmp, err := os.MkdirTemp(dir, ".edgebake-netboot-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	// Finish both files before renaming them, because a boot disk rejects an image that it was not
	// made for.
	if err := o.write(ctx, filepath.Join(tmp, ondisk.InstallBootImage), 512, func(int64, int64) {}, esp); err != nil {
		return err
	}
	if err := copyPayload(ctx, filepath.Join(tmp, ondisk.InstallImage), o, progress); err != nil {
		return err
	}
	// Sync the file before it gets its name.
	if err := toDisk(filepath.Join(tmp, ondisk.InstallImage)); err != nil {
		return err
	}
	for _, name := range []string{ondisk.InstallImage, ondisk.InstallBootImage} {
		if err := os.Rename(filepath.Join(tmp, name), filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("putting %s in place: %w", name, err)
		}
	}
	return file.SyncDir(dir)
}

// toDisk syncs a file.
func toDisk(name string) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
