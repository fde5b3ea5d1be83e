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

// Netboot makes in dir what UEFI HTTP boot starts: a disk with the EFI system
// partition alone, which the firmware fetches into memory and starts as if it
// were plugged in, and the image, which the installer reads from the URL. What
// is there is replaced.
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
	// Both parts belong to one another: they are put in place together, and a
	// boot disk rejects an image that it was not made with.
	if err := o.write(ctx, filepath.Join(tmp, ondisk.InstallBootImage), 512, func(int64, int64) {}, esp); err != nil {
		return err
	}
	if err := copyPayload(ctx, filepath.Join(tmp, ondisk.InstallImage), o, progress); err != nil {
		return err
	}
	// The new name must not be on the disk before the bytes are.
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

// toDisk waits until a file is on the disk.
func toDisk(name string) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
