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
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
)

const (
	// SnapshotLock is held while a snapshot is made.
	SnapshotLock = "/run/edgebake-snapshot.lock"
	// snapshotDate is the format of a snapshot's file name: the time at which it was made.
	snapshotDate = "20060102-150405.db"
	// snapshotEvery is the maximum age of the newest snapshot.
	snapshotEvery = 24 * time.Hour
	// SnapshotsKept and snapshotsMaxBytes limit the number of snapshots and their total size. The
	// oldest are removed first; the newest always stays.
	SnapshotsKept     = 7
	snapshotsMaxBytes = 2 << 30
	// SnapshotLeaves is the percentage of the disk that must stay free after a snapshot. With less
	// space, kubelet removes images and stops pods.
	SnapshotLeaves = 15
	// snapshotTime limits the time of one snapshot: a database has up to 8 GiB.
	snapshotTime = 20 * time.Minute
)

// Snapshot writes the data of etcd on this machine to a file in SnapshotDir, and returns its
// path. Old snapshots are removed.
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
	client.Timeout = 0 // ctx limits the time instead
	ctx, cancel := context.WithTimeout(ctx, snapshotTime)
	defer cancel()
	unlock, err := e.Lock(ctx, SnapshotLock) // an operator may be making one too
	if err != nil {
		return "", fmt.Errorf("waiting for another snapshot to finish: %w", err)
	}
	defer unlock()
	if err := spaceForSnapshot(e); err != nil {
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

// Snapshots lists the snapshots, newest first. Names with a date in the future, from a wrong clock,
// come last: otherwise snapshots with correct dates would be removed first.
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

// spaceForSnapshot removes old snapshots, except the newest, if the next one would leave too little
// space. On a full disk, etcd stops; kubelet stops pods even earlier.
func spaceForSnapshot(e *machine.Env) error {
	fail := func(err error) error { return fmt.Errorf("checking the space for a snapshot: %w", err) }
	size := int64(0) // of the database; the next snapshot is about as large
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
	keep, left := len(all), free-size
	for keep > 1 && left < least {
		keep--
		left += all[keep].size
	}
	if left < least { // removing all would not be enough, so they stay
		return run.Advise(fail(fmt.Errorf("it needs %s, but of the %s that are free on /var, %s must stay free (%d %% of the disk)", bytesize.Human(size), bytesize.Human(free), bytesize.Human(least), SnapshotLeaves)),
			"free space on the disk (`crictl rmi --prune`, `journalctl --vacuum-size=100M`), or use a larger one")
	}
	for _, old := range all[keep:] {
		if err := e.Remove(member.SnapshotDir + "/" + old.Name); err != nil {
			return fail(err)
		}
	}
	return nil
}

// dropHalfSnapshots removes incomplete snapshots left by a power cut. The next snapshot does not
// overwrite them, because their names contain the date. The caller holds SnapshotLock.
func dropHalfSnapshots(e *machine.Env) error {
	entries, err := os.ReadDir(e.Path(member.SnapshotDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("looking for snapshots: %w", err)
	}
	for _, en := range entries {
		if strings.HasPrefix(en.Name(), ".") {
			if err := e.Remove(member.SnapshotDir + "/" + en.Name()); err != nil {
				return fmt.Errorf("removing an incomplete snapshot: %w", err)
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

// SnapshotPhase makes a snapshot if the newest one is older than a day. If that fails, it adds a
// note, and the later phases run anyway.
func SnapshotPhase(active *site.Active) run.Phase {
	p := &snapshotPhase{active: active}
	return run.Phase{
		Name: "snapshot", Doc: "a snapshot of etcd is at most a day old", Timeout: snapshotTime + time.Minute,
		Check: p.check, Run: p.run,
	}
}

// snapshotPhase is the phase snapshot of one pass.
type snapshotPhase struct {
	active *site.Active
	tried  bool // a snapshot was tried in this pass
}

func (p *snapshotPhase) check(_ context.Context, e *machine.Env) (run.Verdict, error) {
	all, err := Snapshots(e)
	if err != nil {
		e.Note("the daily snapshot of etcd failed: %s", machine.OneLine(err))
		return run.Done, nil
	}
	if len(all) > 0 {
		taken, err := time.Parse(snapshotDate, all[0].Name)
		// All snapshots may have dates in the future.
		if err == nil && e.Now().Sub(taken) < snapshotEvery && !taken.After(e.Now()) {
			return run.Done, nil
		}
	}
	if p.tried {
		return run.Done, nil
	}
	return run.Todo, nil
}

func (p *snapshotPhase) run(ctx context.Context, e *machine.Env) error {
	p.tried = true
	if path, err := snapshot(ctx, e, p.active.Site); err != nil {
		e.Note("the daily snapshot of etcd failed: %s", machine.OneLine(err))
	} else {
		e.Log.Info("saved a snapshot of etcd", "file", path)
	}
	return nil
}
