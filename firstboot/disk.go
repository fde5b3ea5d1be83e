package firstboot

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// slack is what may lie unused behind DATA: the backup GPT and alignment.
const slack = 8 << 20

// journal is the most an ext4 journal takes of a file system.
const journal = 256 << 20

// oneDisk checks that what is mounted is of one disk. Two dd copies of an image
// have equal GUIDs, and the kernel takes whichever it sees first: / of one and
// /var of the other is a machine that is neither.
func oneDisk(e *Env) error {
	root, err := e.rootDisk()
	part, disk := e.mountedFrom("/var")
	if err != nil || disk == "" || disk == root.Name {
		return nil // or a node that edgebake did not build
	}
	fix := "take one of the disks out; or write one again with edgebake flash, which gives a disk GUIDs of its own"
	if rewriting(e, "") != "" {
		fix += "; keep " + disk + ", which has the data of this machine"
	}
	return Permanent(fmt.Errorf("/ is on %s and /var on %s, of another disk: %s", root.Root, part, loaderWords(e.disksWith(e.loaderPart()))), fix)
}

// rewriting is a fix that has a person write the image to this machine's disk again,
// with what is lost then.
func rewriting(e *Env, fix string) string {
	switch {
	case e.exists(configs.EtcdDataDir + "/member"):
		return fix + "; this machine's data of etcd is lost then: first see that more than half of all control-plane nodes run without it, or copy " + snapshotDir + " to another computer"
	case isMember(e):
		return fix + "; what pods keep on the disk is lost then, and the Site needs a token for the machine to join again"
	}
	return fix
}

// loaderWords says which disk the boot loader means.
func loaderWords(disks []string) string {
	switch len(disks) {
	case 0:
		return "two copies of one image are in this machine"
	case 1:
		return "the boot loader was started from " + disks[0]
	}
	return "two copies of one image are in this machine, and the boot loader's own partition is on each of " + strings.Join(disks, " and ")
}

// diskPhase makes DATA fill the device. systemd-repart and systemd-growfs do
// it early at boot; this looks, and calls them where they did not.
func diskPhase() Phase {
	return Phase{
		Name: "disk", Doc: "DATA fills the device", Timeout: 5 * time.Minute,
		Check: func(_ context.Context, e *Env) (Verdict, error) {
			d, err := e.lookUpRootDisk()
			if err != nil {
				return Todo, err
			}
			data := d.part(ondisk.LabelData)
			if data == nil {
				return Todo, Permanent(fmt.Errorf("disk %s has no partition %s", d.Name, ondisk.LabelData),
					rewriting(e, "the image was not written whole; write it to the device again"))
			}
			if d.Size-(data.Start+data.Size) > slack {
				return Todo, nil
			}
			fs, err := e.FSSize("/var")
			if err != nil {
				return Todo, fmt.Errorf("reading the size of DATA's file system: %w", err)
			}
			// ext4 tells its size without its tables and journal; one that
			// was not grown at all is far smaller than that.
			if fs < data.Size-data.Size/8-journal {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			d, err := e.lookUpRootDisk()
			if err != nil {
				return err
			}
			data := d.part(ondisk.LabelData)
			if data == nil {
				return fmt.Errorf("disk %s has no partition %s", d.Name, ondisk.LabelData)
			}
			if d.Size-(data.Start+data.Size) > slack {
				e.Waiting("systemd-repart to grow %s", data.Name)
				if err := e.Run(ctx, Cmd{Args: []string{"systemd-repart", "--dry-run=no", "/dev/" + d.Name}}); err != nil {
					return fmt.Errorf("growing partition %s: %w", data.Name, err)
				}
			}
			e.Waiting("the file system on %s to grow", data.Name)
			if err := e.Run(ctx, Cmd{Args: []string{"/usr/lib/systemd/systemd-growfs", "/var"}}); err != nil {
				return fmt.Errorf("growing the file system of %s: %w", data.Name, err)
			}
			return nil
		},
	}
}
