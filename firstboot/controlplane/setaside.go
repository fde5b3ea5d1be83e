package controlplane

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// EtcdMember is the directory of etcd's own data.
const EtcdMember = configs.EtcdDataDir + "/member"

// AsideDir is the prefix of directories with etcd data that was set aside. The time of the move
// follows it.
const AsideDir = ondisk.StateDir + "/etcd-set-aside"

// asideHealthy is a file in these directories that lists the days on which etcd was healthy.
const asideHealthy = "/healthy-days"

// asideDays is the number of days with a healthy etcd after which data that was set aside is
// removed.
const asideDays = 7

// moveAside renames etcd's data, and returns the new path.
func moveAside(e *machine.Env) (string, error) {
	base := AsideDir + "-" + e.Now().UTC().Format("20060102-150405")
	to := base
	for n := 2; e.Exists(to); n++ { // the clock may have been set back
		to = fmt.Sprintf("%s-%d", base, n)
	}
	if err := e.Rename(EtcdMember, to); err != nil {
		return "", fmt.Errorf("moving etcd's data aside: %w", err)
	}
	return to, nil
}

// SetAsideLogless moves etcd's database aside if it has no write-ahead log, because etcd cannot
// start with it. A rejected start or a damaged disk leaves such a database. Data with a log is an
// error.
func SetAsideLogless(e *machine.Env) error {
	wal, _, _, err := etcdmember.ReadLog(e.Path(EtcdMember + "/wal"))
	if err == nil && wal {
		err = errors.New("it contains etcd's write-ahead log")
	}
	if err != nil {
		return fmt.Errorf("preparing %s: %w", EtcdMember, err)
	}
	if !e.Exists(EtcdMember) {
		return nil
	}
	to, err := moveAside(e)
	if err != nil {
		return err
	}
	e.Log.Info("moved an etcd database without a write-ahead log aside", "to", to)
	return pruneLogless(e, to)
}

// pruneLogless removes databases without a log that were set aside, except the latest and the
// largest of the others. Rejected starts leave empty ones, and at most one contains data.
func pruneLogless(e *machine.Env, latest string) error {
	dirs, err := asideDirs(e)
	if err != nil {
		return err
	}
	var logless []string
	for _, dir := range dirs {
		if wal, _, _, err := etcdmember.ReadLog(e.Path(dir + "/wal")); err == nil && !wal && dir != latest {
			logless = append(logless, dir)
		}
	}
	size := func(dir string) int64 {
		info, err := os.Stat(e.Path(dir + "/snap/db"))
		if err != nil {
			return 0
		}
		return info.Size()
	}
	slices.SortStableFunc(logless, func(a, b string) int { return cmp.Compare(size(b), size(a)) })
	for _, dir := range logless[min(1, len(logless)):] {
		e.Log.Info("removing an older etcd database without a write-ahead log, which was moved aside", "dir", dir)
		if err := e.RemoveAll(dir); err != nil {
			return fmt.Errorf("removing etcd's data that was moved aside: %w", err)
		}
	}
	return nil
}

// asideDirs lists the directories with data that was set aside, sorted by name.
func asideDirs(e *machine.Env) ([]string, error) {
	found, err := filepath.Glob(e.Path(AsideDir) + "*")
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, dir := range found {
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			dirs = append(dirs, strings.TrimPrefix(dir, strings.TrimSuffix(e.Path("/"), "/")))
		}
	}
	return dirs, nil
}

// ageSetAside counts the days on which etcd is healthy; after asideDays of them, it removes the data
// that was set aside. The count restarts when etcd is not healthy, because the data may be needed.
func ageSetAside(e *machine.Env, well bool) error {
	dirs, err := asideDirs(e)
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		days := strings.Fields(e.Text(dir + asideHealthy))
		today := e.Now().UTC().Format(time.DateOnly)
		switch {
		case !well && len(days) > 0:
			errs = append(errs, e.Remove(dir+asideHealthy))
		case !well || slices.Contains(days, today):
		case len(days) >= asideDays:
			e.Log.Info("removing etcd's data that was moved aside: etcd has been healthy since", "dir", dir, "days", len(days))
			errs = append(errs, e.RemoveAll(dir))
		default:
			_, err := e.Write(dir+asideHealthy, []byte(strings.Join(append(days, today), "\n")+"\n"), machine.Mode(0o600))
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("checking etcd's data that was moved aside: %w", err)
	}
	return nil
}
