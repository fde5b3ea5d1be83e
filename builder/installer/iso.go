package installer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder/procgroup"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/file"
)

// isoESP is the name of the EFI system partition's file in the ISO image.
const isoESP = "esp.img"

// ISO writes an installer as an ISO image, for optical drives and for the virtual drives of remote
// consoles. UEFI boots the EFI system partition in it (El Torito), and the edgebake image is a
// separate file in it. The ISO image also boots from a stick. ISO requires xorriso.
func ISO(ctx context.Context, to string, o Options, progress func(done, total int64)) error {
	if _, err := exec.LookPath("xorriso"); err != nil {
		return errors.New("making an ISO needs xorriso: apt-get install xorriso")
	}
	o.Install.Volume = "EDGEBAKE_" + strings.ToUpper(o.Install.ID[:min(16, len(o.Install.ID))])
	ps, err := o.parts()
	if err != nil {
		return err
	}
	when := time.Unix(o.Payload.Image.SourceDate, 0).UTC()
	if err := file.CheckSpace(filepath.Dir(to), o.Payload.Size()+espSize(ps.esp(o.Payload.Image.Name, when), 512), "the installer"); err != nil {
		return fmt.Errorf("making the ISO %s: %w", to, err)
	}
	tmp, err := os.MkdirTemp("", "edgebake-iso-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	content := filepath.Join(tmp, "content")
	if err := os.Mkdir(content, 0o755); err != nil {
		return err
	}
	esp, image := filepath.Join(content, isoESP), filepath.Join(content, ondisk.InstallImage)
	if err := writeFAT(esp, ps, o, when); err != nil {
		return inTemp(err)
	}
	if err := copyPayload(ctx, image, o, progress); err != nil {
		return inTemp(err)
	}
	out, err := os.CreateTemp(filepath.Dir(to), "."+filepath.Base(to)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	stamp := when.Format("20060102150405") + "00"
	// Put the ESP into the volume instead of appending it: if the ESP is larger than El Torito can
	// describe, the firmware reads up to the end of the volume.
	cmd := procgroup.Command(ctx, "xorriso", "-as", "mkisofs", "-quiet", "-iso-level", "3", "-R", "-V", o.Install.Volume,
		"--modification-date="+stamp, "--set_all_file_dates", stamp, "-o", out.Name(),
		"-e", isoESP, "-no-emul-boot", "-efi-boot-part", "--efi-boot-image", content)
	cmd.Env = append(cmd.Env, "LC_ALL=C", "TZ=UTC")
	if output, err := cmd.CombinedOutput(); err != nil {
		if bytes.Contains(output, []byte("No space left on device")) {
			return fmt.Errorf("making the ISO %s: %w", to, file.Explain(syscall.ENOSPC, filepath.Dir(to)))
		}
		return fmt.Errorf("making the ISO: xorriso: %w\n%s", err, bytes.TrimSpace(output))
	}
	if err := out.Sync(); err != nil {
		return err
	}
	if err := os.Rename(out.Name(), to); err != nil {
		return err
	}
	return file.SyncDir(filepath.Dir(to))
}

// inTemp adds advice to an error if the directory for temporary files is full.
func inTemp(err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%w; set TMPDIR to use another directory for temporary files", file.Explain(err, os.TempDir()))
	}
	return err
}

// writeFAT writes the EFI system partition to a file.
func writeFAT(file string, ps *parts, o Options, when time.Time) error {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	nodes := ps.esp(o.Payload.Image.Name, when)
	size := (espSize(nodes, 512) + 1<<20 - 1) >> 20 << 20
	if err := f.Truncate(size); err != nil {
		return err
	}
	if err := fat.Write(f, nodes, blobs{o.Payload}, fat.Options{Type: 32, Label: ondisk.LabelESP, Size: size, Time: when}); err != nil {
		return err
	}
	return f.Close()
}

// copyPayload writes the image with its Site to a file.
func copyPayload(ctx context.Context, file string, o Options, progress func(done, total int64)) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	size := o.Payload.Size()
	for at := int64(0); at < size; at += 16 << 20 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(16<<20, size-at)
		if _, err := io.Copy(io.NewOffsetWriter(f, at), io.NewSectionReader(o.Payload, at, n)); err != nil {
			return err
		}
		progress(at+n, size)
	}
	return f.Close()
}
