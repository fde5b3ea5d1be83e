package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
)

const (
	// SnapshotLock is held by whoever takes one.
	SnapshotLock = "/run/edgebake-snapshot.lock"
	// snapshotDate is a snapshot's name: when it was taken.
	snapshotDate = "20060102-150405.db"
	// snapshotEvery is how old the newest may become.
	snapshotEvery = 24 * time.Hour
	// Beyond so many, or so many bytes of them, the oldest go. One stays.
	SnapshotsKept     = 7
	snapshotsMaxBytes = 2 << 30
	// SnapshotLeaves is the part of the disk (%) that a snapshot leaves free: kubelet
	// removes images and stops pods where less is.
	SnapshotLeaves = 15
	// snapshotTime bounds one: a database has 8 GiB at most.
	snapshotTime = 20 * time.Minute
)

// Snapshot writes what etcd on this machine holds to a file in SnapshotDir, and
// returns its path. Old ones go.
func Snapshot(ctx context.Context, e *machine.Env) (string, error) {
	image, err := site.ImageInfo(e)
	if err != nil {
		return "", err
	}
	active, err := site.Read(e, image, nil)
	if err != nil {
		return "", err
	}
	if active.Site.NodeType != configs.NodeControlPlane {
		return "", fmt.Errorf("this machine is of node type %s and has no etcd: run this on a control-plane node", active.Site.NodeType)
	}
	return snapshot(ctx, e, active.Site)
}

func snapshot(ctx context.Context, e *machine.Env, site *configs.Site) (string, error) {
	client, err := etcdClient(e)
	if err != nil {
		return "", err
	}
	defer client.CloseIdleConnections()
	client.Timeout = 0 // ctx has the end
	ctx, cancel := context.WithTimeout(ctx, snapshotTime)
	defer cancel()
	release, err := e.Lock(ctx, SnapshotLock) // a person may take one besides
	if err != nil {
		return "", fmt.Errorf("waiting for another snapshot: %w", err)
	}
	defer release()
	if err := roomForSnapshot(e); err != nil {
		return "", err
	}
	path := member.SnapshotDir + "/" + snapshotName(e.Now())
	err = e.Stream(path, machine.Mode(0o600), func(w io.Writer) error {
		return memberEtcd(client, site.Self()).Snapshot(ctx, w)
	})
	if err != nil {
		return "", fmt.Errorf("writing a snapshot to %s: %w", path, err)
	}
	return path, dropSnapshots(e)
}

func snapshotName(taken time.Time) string { return taken.UTC().Format(snapshotDate) }

// SavedSnapshot is a file of SnapshotDir.
type SavedSnapshot struct {
	Name string
	size int64
}

// Snapshots lists those there are, the newest first. Names are dates; those of the
// future were taken by a clock that was wrong, and come last: first they would push out
// all that the right clock dates.
func Snapshots(e *machine.Env) ([]SavedSnapshot, error) {
	entries, err := os.ReadDir(e.Path(member.SnapshotDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("looking for snapshots: %w", err)
	}
	var out []SavedSnapshot
	for _, en := range entries {
		info, err := en.Info()
		if err == nil && info.Mode().IsRegular() && strings.HasSuffix(en.Name(), ".db") && !strings.HasPrefix(en.Name(), ".") {
			out = append(out, SavedSnapshot{en.Name(), info.Size()})
		}
	}
	now := snapshotName(e.Now())
	slices.SortFunc(out, func(a, b SavedSnapshot) int {
		if future := a.Name > now; future != (b.Name > now) {
			return map[bool]int{true: 1, false: -1}[future]
		}
		return -cmp.Compare(a.Name, b.Name)
	})
	return out, nil
}

// roomForSnapshot drops old snapshots, but for the newest, where the next one leaves
// too little of the disk: etcd stops where it cannot write, and kubelet stops pods
// well before.
func roomForSnapshot(e *machine.Env) error {
	fail := func(err error) error { return fmt.Errorf("making room for a snapshot: %w", err) }
	size := int64(0) // of the database: what a snapshot of it has
	if info, err := os.Stat(e.Path(configs.EtcdDataDir + "/member/snap/db")); err == nil {
		size = info.Size()
	}
	if err := dropHalfSnapshots(e); err != nil {
		return err
	}
	all, err := Snapshots(e)
	if err != nil {
		return fail(err)
	}
	total, err := e.FSSize("/var")
	if err != nil {
		return fail(err)
	}
	free, err := e.FSFree("/var")
	if err != nil {
		return fail(err)
	}
	least := total / 100 * SnapshotLeaves
	keep, room := len(all), free-size
	for keep > 1 && room < least {
		keep--
		room += all[keep].size
	}
	if room < least { // with none of them there would be too little: they stay
		return run.Advise(fail(fmt.Errorf("it has %s, and of the %s that are free on /var, %s must stay (%d %% of the disk)", configs.HumanSize(size), configs.HumanSize(free), configs.HumanSize(least), SnapshotLeaves)),
			"remove from the disk what is not needed (`crictl rmi --prune`, `journalctl --vacuum-size=100M`), or use a larger one")
	}
	for _, old := range all[keep:] {
		if err := e.Remove(member.SnapshotDir + "/" + old.Name); err != nil {
			return fail(err)
		}
	}
	return nil
}

// dropHalfSnapshots removes what a power cut has left. Its name is a date, so the
// next one does not write over it. Whoever takes a snapshot holds the lock.
func dropHalfSnapshots(e *machine.Env) error {
	entries, err := os.ReadDir(e.Path(member.SnapshotDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("looking for snapshots: %w", err)
	}
	for _, en := range entries {
		if strings.HasPrefix(en.Name(), ".") {
			if err := e.Remove(member.SnapshotDir + "/" + en.Name()); err != nil {
				return fmt.Errorf("removing half a snapshot: %w", err)
			}
		}
	}
	return nil
}

func dropSnapshots(e *machine.Env) error {
	all, err := Snapshots(e)
	if err != nil {
		return err
	}
	total := int64(0)
	for i, s := range all {
		if total += s.size; i == 0 || i < SnapshotsKept && total <= snapshotsMaxBytes {
			continue
		}
		if err := e.Remove(member.SnapshotDir + "/" + s.Name); err != nil {
			return fmt.Errorf("removing an old snapshot: %w", err)
		}
	}
	return nil
}

// SnapshotPhase keeps a snapshot that is not older than a day. That there is
// none is said, and holds nothing up.
func SnapshotPhase(active *site.Active) run.Phase {
	tried := false
	return run.Phase{
		Name: "snapshot", Doc: "there is a snapshot of etcd that is not older than a day", Timeout: snapshotTime + time.Minute,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			all, err := Snapshots(e)
			if err != nil {
				e.Note("no snapshot of etcd: %s", machine.OneLine(err))
				return run.Done, nil
			}
			if len(all) > 0 {
				taken, err := time.Parse(snapshotDate, all[0].Name)
				// All may be of the future.
				if err == nil && e.Now().Sub(taken) < snapshotEvery && !taken.After(e.Now()) {
					return run.Done, nil
				}
			}
			if tried {
				return run.Done, nil
			}
			return run.Todo, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			tried = true
			if path, err := snapshot(ctx, e, active.Site); err != nil {
				e.Note("no snapshot of etcd: %s", machine.OneLine(err))
			} else {
				e.Log.Info("saved a snapshot of etcd", "file", path)
			}
			return nil
		},
	}
}
