package controlplane

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
)

const (
	// SnapshotOnStick is the name of a snapshot on a stick.
	SnapshotOnStick = "etcd-snapshot.db"
	// RestoreDir is the directory in which etcdutl restores a snapshot. The restored data then
	// replaces etcd's data in one step.
	RestoreDir = ondisk.StateDir + "/restore"
	// fromStick is the copy of a stick's snapshot.
	fromStick = RestoreDir + "/snapshot.db"
)

// restoreSnapshot makes etcd's data from the snapshot that the Site names, with the program etcdutl
// of etcd's container image. An interrupted restore starts again.
func restoreSnapshot(ctx context.Context, e *machine.Env, active *site.Active) error {
	sum := strings.ToLower(active.Site.ControlPlane.Restore)
	etcd, err := etcdImage(active.Image)
	if err != nil {
		return err
	}
	file, err := stageSnapshot(e, sum)
	if err != nil {
		return err
	}
	self := active.Site.Self()
	args := []string{"ctr", "--namespace", "k8s.io", "run", "--rm",
		"--mount", "type=bind,src=" + e.Path(member.SnapshotDir) + ",dst=/snapshots,options=rbind:ro",
		"--mount", "type=bind,src=" + e.Path(RestoreDir) + ",dst=/restore,options=rbind:rw",
		etcd, "edgebake-restore-" + hex.EncodeToString(e.Random(4))}
	args = append(args, etcdmember.RestoreArgs(file, "/restore/data", self.Name, self.PeerURL(), etcdmember.Token(active.Site.ControlPlane.ID, sum[:16]+"-"+active.Site.ControlPlane.RequestedAt))...)
	out := &machine.Tail{Log: func(line string) { e.Log.Info("etcdutl: " + line) }}
	if err := e.Run(ctx, machine.Cmd{Args: args, Output: out}); err != nil {
		return run.Advise(fmt.Errorf("restoring the snapshot %s with etcdutl: %w: %s", file, err, out.Last()), "if the snapshot is damaged, name another one")
	}
	made := RestoreDir + "/data/member"
	if wal, member, _, err := etcdmember.ReadLog(e.Path(made + "/wal")); err != nil || !wal || member == "" {
		return errors.Join(fmt.Errorf("restoring the snapshot %s with etcdutl: it wrote no usable write-ahead log", file), err)
	}
	if err := e.Sync(RestoreDir); err != nil { // etcdutl may not sync
		return fmt.Errorf("syncing the restored data: %w", err)
	}
	if err := SetAsideLogless(e); err != nil {
		return err
	}
	if err := saveMembership(e, active.Site); err != nil {
		return err
	}
	saveInFirmware(e, RestoredVar, restoreRequest(active.Site))
	if err := e.Rename(made, EtcdMember); err != nil {
		return fmt.Errorf("moving the restored data to %s: %w", EtcdMember, err)
	}
	return e.RemoveAll(RestoreDir)
}

// stageSnapshot makes the snapshot readable for etcdutl, and returns its path in etcdutl's
// container.
func stageSnapshot(e *machine.Env, sum string) (string, error) {
	if err := errors.Join(e.RemoveAll(RestoreDir), e.Mkdir(RestoreDir, machine.Mode(0o700)), e.Mkdir(member.SnapshotDir, machine.Mode(0o700))); err != nil {
		return "", fmt.Errorf("restoring a snapshot: %w", err)
	}
	return findSnapshot(e, sum)
}

// findSnapshot looks in SnapshotDir and on sticks for the snapshot with this SHA-256, and returns
// its path in etcdutl's container.
func findSnapshot(e *machine.Env, sum string) (string, error) {
	all, err := Snapshots(e)
	if err != nil {
		return "", err
	}
	for _, s := range all {
		if got, err := file.SHA256(e.Path(member.SnapshotDir + "/" + s.Name)); err == nil && got == sum {
			return "/snapshots/" + s.Name, nil
		}
	}
	var errs []error
	for _, dev := range e.RemovableSlots() {
		err := e.Stream(fromStick, machine.Mode(0o600), func(w io.Writer) error { return e.SlotFile(dev, SnapshotOnStick, w) })
		if err != nil {
			errs = append(errs, fmt.Errorf("stick %s: %w", dev, err))
			continue
		}
		got, err := file.SHA256(e.Path(fromStick))
		if err == nil && got == sum {
			return "/restore/" + path.Base(fromStick), nil
		}
		errs = append(errs, err, e.Remove(fromStick), fmt.Errorf("stick %s: %s has the SHA-256 %s, not %s", dev, SnapshotOnStick, got, sum))
	}
	return "", run.Advise(errors.Join(append(errs, fmt.Errorf("there is no snapshot with the SHA-256 %s on this machine, nor on a stick", sum))...),
		"copy it to "+member.SnapshotDir+", or plug in a stick named EDGEBAKE that contains it as "+SnapshotOnStick)
}

// etcdImage returns the reference of etcd's container image.
func etcdImage(image ondisk.ImageInfo) (string, error) {
	at := slices.IndexFunc(image.Images, func(i ondisk.ImageRef) bool {
		name, _, _ := strings.Cut(path.Base(i.Ref), ":")
		return name == "etcd"
	})
	if at < 0 {
		return "", errors.New("this image has no container image of etcd")
	}
	return image.Images[at].Ref, nil
}
