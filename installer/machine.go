package installer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/procgroup"
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/firstboot/console"
	"github.com/edgebake/edgebake/firstboot/facts"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// ReadConfig reads the installer's configuration.
func ReadConfig(file string) (ondisk.Install, error) {
	var c ondisk.Install
	b, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil {
		return c, fmt.Errorf("reading %s: %w: make the installer again", file, err)
	}
	return c, nil
}

// sourceDir is the directory on which the partition with the image is mounted.
const sourceDir = "/run/edgebake-installer"

// New returns the Env of the machine on which this program runs. It must run in the installer's
// initrd.
func New(c ondisk.Install) *Env {
	return &Env{
		Say:   func(line string) { console.Say(console.Active, "/dev", line) },
		Sleep: sleep,
		Source: func(ctx context.Context) (Source, error) {
			switch {
			case c.URL != "":
				r, err := transfer.OpenRemote(ctx, c.URL, sleep)
				if err != nil {
					return Source{}, err
				}
				return Source{Image: media.ImageSource{Name: c.URL, Remote: r, Size: r.Size()}}, nil
			case c.Volume != "":
				return volume(c.Volume)
			}
			return partition(c.Partition)
		},
		Disks:   disks,
		Machine: func() siteconf.Machine { return facts.Read("/") },
		BootNext: func(_ string, found media.DiskContent) error {
			const vars = "/sys/firmware/efi/efivars"
			if err := mount("efivarfs", vars, "efivarfs", 0); err != nil {
				return err
			}
			return bootNext(vars, runtime.GOARCH, found)
		},
		PowerOff: func() error { unix.Sync(); return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF) },
		Reboot:   func() error { unix.Sync(); return unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART) },
		Gone: func(s Source) bool {
			if c.Volume != "" { // an optical drive stays when its disc is removed
				_ = unix.Unmount(sourceDir, unix.MNT_DETACH)
				return volumeOf(s.Disk) != c.Volume
			}
			_, err := os.Stat(s.Disk)
			return s.Disk != "" && errors.Is(err, os.ErrNotExist)
		},
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// disks lists the disks after udev has examined those known to the kernel.
func disks(ctx context.Context) ([]device.Disk, error) {
	// Ignore a timeout: a later list contains the missing disks.
	_ = procgroup.Command(ctx, "udevadm", "settle", "--timeout=30").Run()
	found, err := device.List(ctx)
	if err != nil {
		return nil, err
	}
	return found.Disks(), nil
}

// partition mounts the partition with the image.
func partition(uuid string) (Source, error) {
	dev, err := filepath.EvalSymlinks("/dev/disk/by-partuuid/" + uuid)
	if err != nil {
		return Source{}, fmt.Errorf("no partition %s yet: leave the stick plugged in", uuid)
	}
	sys, err := filepath.EvalSymlinks("/sys/class/block/" + filepath.Base(dev))
	if err != nil {
		return Source{}, err
	}
	if err := mountSource(dev, "ext4"); err != nil {
		return Source{}, err
	}
	return Source{Image: mounted(), Disk: "/dev/" + filepath.Base(filepath.Dir(sys))}, nil
}

// mounted returns the image on the mounted file system.
func mounted() media.ImageSource {
	return media.ImageSource{Name: filepath.Join(sourceDir, ondisk.InstallImage)}
}

// volume mounts the ISO 9660 volume with that name from an optical drive or a stick.
func volume(name string) (Source, error) {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return Source{}, err
	}
	for _, e := range entries {
		dev := "/dev/" + e.Name()
		if volumeOf(dev) != name {
			continue
		}
		if err := mountSource(dev, "iso9660"); err != nil {
			return Source{}, err
		}
		return Source{Image: mounted(), Disk: dev}, nil
	}
	return Source{}, fmt.Errorf("no drive has the volume %s yet: leave the disc or stick inserted", name)
}

// volumeOf returns the name of the ISO 9660 volume on a device (ECMA-119, 8.4),
// or "".
func volumeOf(dev string) string {
	f, err := os.Open(dev)
	if err != nil {
		return ""
	}
	defer f.Close()
	b := make([]byte, 2048)
	if _, err := f.ReadAt(b, 16*2048); err != nil || string(b[1:6]) != "CD001" {
		return ""
	}
	return strings.TrimRight(string(b[40:72]), " ")
}

// mountSource mounts the image's file system again for each attempt: after a stick was unplugged
// and attached again, the old mount only returns errors, even if the device has the same name.
func mountSource(dev, fs string) error {
	_ = unix.Unmount(sourceDir, unix.MNT_DETACH)
	if err := os.MkdirAll(sourceDir, 0o700); err != nil {
		return err
	}
	return mount(dev, sourceDir, fs, unix.MS_RDONLY)
}

// mount mounts a file system, unless it is mounted already.
func mount(dev, dir, fs string, flags uintptr) error {
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == dev && f[1] == dir {
			return nil
		}
	}
	if err := unix.Mount(dev, dir, fs, flags|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", dev, err)
	}
	return nil
}
