package network

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// First boot keeps the network settings that last reached an API server (on a control-plane node:
// another machine). If those of a corrected Site reach less, it restores the kept ones.

// netFile is a file of the network settings, a link that enables a unit, or a link to /dev/null
// that masks a file of the image.
type netFile struct {
	Mode fs.FileMode `json:"mode"`
	UID  int         `json:"uid,omitempty"` // networkd, which is not root, must be able to read keys in .netdev files
	GID  int         `json:"gid,omitempty"`
	Data []byte      `json:"data"`
	Link string      `json:"link,omitempty"`
}

func (f netFile) equal(g netFile) bool {
	return f.Mode == g.Mode && f.UID == g.UID && f.GID == g.GID && f.Link == g.Link && bytes.Equal(f.Data, g.Data)
}

// Files returns the settings in place, by path.
func Files(e *machine.Env) (map[string]netFile, error) {
	out, err := wpaLinks(e)
	if err != nil {
		return nil, err
	}
	for _, dir := range networkDirs {
		if err := collectSettings(e, dir, settingsDepth, out); err != nil {
			return nil, fmt.Errorf("reading the network settings: %w", err)
		}
	}
	return out, nil
}

const (
	// settingsDepth exceeds the depth that the daemons read: one level of drop-ins.
	settingsDepth = 4
	// maxSetting exceeds the size of any settings file, in bytes.
	maxSetting = 1 << 20
)

// collectSettings adds the files and links below dir to out. A Site may make a user the owner of
// the directory, so it follows no link, and skips special and large files.
func collectSettings(e *machine.Env, dir string, depth int, out map[string]netFile) error {
	entries, err := os.ReadDir(e.Path(dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	root := beneath.Root{Dir: e.Root}
	for _, en := range entries {
		p := filepath.Join(dir, en.Name())
		st, err := root.Lstat(p)
		if err == nil {
			switch {
			case st.Link != "":
				out[p] = netFile{Link: st.Link}
			case st.IsDir() && depth > 1:
				err = collectSettings(e, p, depth-1, out)
			case st.Mode().IsRegular() && st.Size() <= maxSetting:
				var data []byte
				var opened fs.FileInfo
				if data, opened, err = root.ReadFile(p); err == nil {
					f := netFile{Mode: opened.Mode().Perm(), Data: data}
					if sys, ok := opened.Sys().(*syscall.Stat_t); ok {
						f.UID, f.GID = int(sys.Uid), int(sys.Gid)
					}
					out[p] = f
				}
			}
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// wpaLinks returns the links that start wpa_supplicant at boot.
func wpaLinks(e *machine.Env) (map[string]netFile, error) {
	paths, err := filepath.Glob(e.Path("/etc/systemd/system/*.wants/wpa_supplicant@*.service"))
	if err != nil {
		return nil, fmt.Errorf("looking for the units of the Wi-Fi: %w", err)
	}
	out := map[string]netFile{}
	for _, full := range paths {
		target, err := os.Readlink(full)
		if err != nil {
			return nil, fmt.Errorf("reading the network settings: %w", err)
		}
		out["/"+strings.TrimPrefix(strings.TrimPrefix(full, e.Root), "/")] = netFile{Link: target}
	}
	return out, nil
}

func digestOf(files map[string]netFile) string {
	h := sha256.New()
	for _, p := range slices.Sorted(maps.Keys(files)) {
		f := files[p]
		// Include mode and owner: with wrong ones, a daemon could not read the file.
		fmt.Fprintf(h, "%s\x00%s\x00%o %d %d\x00%d\x00", p, f.Link, f.Mode, f.UID, f.GID, len(f.Data))
		h.Write(f.Data)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func goodFiles(e *machine.Env) (map[string]netFile, bool) {
	b, err := e.Read(goodNetwork + "/good.json")
	if err != nil {
		return nil, false
	}
	var out map[string]netFile
	if json.Unmarshal(b, &out) != nil {
		return nil, false
	}
	return out, true
}

// IsNew reports whether the settings differ from those last recorded as good. Settings that networkd
// has not loaded do not count as new, because they cannot be tested.
func IsNew(e *machine.Env) bool {
	now, err := Files(e)
	if err != nil || e.Exists(unloadedNetwork) {
		return false
	}
	good, ok := goodFiles(e)
	return !ok || digestOf(now) != digestOf(good)
}

// SaveGood records the current settings as good.
func SaveGood(e *machine.Env) error {
	now, err := Files(e)
	if err != nil {
		return err
	}
	b, err := json.Marshal(now)
	if err == nil {
		_, err = e.Write(goodNetwork+"/good.json", b, machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("saving the network settings that work: %w", err)
	}
	return forgetTrial(e)
}

// trial is saved before the former network settings replace the Site's for a trial. After a power
// cut, the next boot uses it to restore the Site's.
type trial struct {
	// State shows which settings are in place.
	State trialState `json:"state"`
	// New contains the Site's settings, which have reached nothing so far.
	New map[string]netFile `json:"new"`
	// Count is how often the former settings were tried.
	Count int `json:"count"`
	// Boot identifies the boot in which the last trial began. At is the time of its start, in
	// seconds since the epoch.
	Boot string `json:"boot"`
	At   int64  `json:"at"`
}

type trialState string

const (
	onTrial    trialState = "trial"  // the former settings, perhaps only in part
	keptFormer trialState = "former" // the former settings reach more, and were kept
	keptNew    trialState = "new"    // the former settings do not reach more
)

// TrialFile records the trial of the former network settings.
const TrialFile = goodNetwork + "/trial.json"

// TrialPauses are the pauses before each trial, so that a dead uplink does not make a node change
// its addresses forever. After the last trial, only a reboot permits another one.
var TrialPauses = [...]time.Duration{0, 10 * time.Minute, time.Hour}

func readTrial(e *machine.Env) (*trial, bool) {
	b, err := e.Read(TrialFile)
	if err != nil {
		return &trial{}, false
	}
	t := new(trial)
	if err := json.Unmarshal(b, t); err != nil || t.New == nil {
		return &trial{}, false
	}
	return t, true
}

func (t *trial) write(e *machine.Env) error {
	b, err := json.Marshal(t)
	if err == nil {
		_, err = e.Write(TrialFile, b, machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("recording the trial of the previous network settings: %w", err)
	}
	return nil
}

// MayTry reports whether former settings exist and may be tried now.
func MayTry(e *machine.Env) bool {
	if _, ok := goodFiles(e); !ok || !IsNew(e) {
		return false
	}
	t, ok := readTrial(e)
	if !ok || t.Boot != machine.BootID(e) {
		return true
	}
	if t.Count >= len(TrialPauses) {
		return false
	}
	since := e.Now().Sub(time.Unix(t.At, 0))
	return since < 0 || since >= TrialPauses[t.Count] // negative if the clock was set back
}

// rollBack tries the former settings, if MayTry permits it, and then the new ones again. It keeps
// the former settings only if they reach more. It returns what is reached, and whether the former
// settings are in place.
func rollBack(ctx context.Context, e *machine.Env, u Uplink, with Reached) (Reached, bool, error) {
	good, ok := goodFiles(e)
	if !ok || !MayTry(e) {
		return with, false, nil
	}
	now, err := Files(e)
	if err != nil {
		return with, false, err
	}
	t, _ := readTrial(e)
	t.State, t.New, t.Count, t.Boot, t.At = onTrial, now, t.Count+1, machine.BootID(e), e.Now().Unix()
	if err := t.write(e); err != nil {
		return with, false, err
	}
	e.Waiting("%s to answer with the previous network settings", u.peers)
	if err := setNetwork(ctx, e, now, good); err != nil {
		return with, false, err
	}
	former := u.wait(ctx, e)
	if former.Extent <= with.Extent {
		return with, false, takeBack(ctx, e)
	}
	e.Waiting("%s to answer, after switching back to the new network settings", u.peers)
	if err := setNetwork(ctx, e, good, now); err != nil {
		return with, false, err
	}
	if again := u.wait(ctx, e); again.Extent >= former.Extent {
		t.State = keptNew
		return again, false, t.write(e)
	}
	if err := setNetwork(context.WithoutCancel(ctx), e, now, good); err != nil {
		return with, false, err
	}
	t.State = keptFormer
	if err := t.write(e); err != nil {
		return with, false, err
	}
	e.Log.Error(fmt.Sprintf("the corrected Site's network settings do not reach %s: the previous settings are back", u.peers), "by", former.by)
	e.Console(fmt.Sprintf("the new network settings do not reach %s: the previous settings are back. Correct the Site.", u.peers))
	return u.wait(ctx, e), true, nil
}

// TrialCutOff reports whether a trial of the former settings was interrupted.
func TrialCutOff(e *machine.Env) bool {
	t, ok := readTrial(e)
	return ok && t.State == onTrial
}

// takeBack replaces the settings on trial with the Site's.
func takeBack(ctx context.Context, e *machine.Env) error {
	t, ok := readTrial(e)
	if !ok {
		return nil
	}
	former, _ := goodFiles(e) // without any, setNetwork compares with the current settings
	// The attempt may have timed out, but the settings must be put back.
	if err := setNetwork(context.WithoutCancel(ctx), e, former, t.New); err != nil {
		return err
	}
	t.State = keptNew
	return t.write(e)
}

// EndTrial restores the Site's settings before another Site is applied: otherwise remains of the
// former settings would stay forever. applied means that a Site was applied to this root file
// system.
func EndTrial(ctx context.Context, e *machine.Env, applied bool) error {
	t, ok := readTrial(e)
	if !ok {
		return nil
	}
	if !applied {
		// The trial was on the other root file system. On this one, its files would count as the
		// image's.
		return forgetTrial(e)
	}
	now, err := Files(e)
	if err != nil {
		return err
	}
	if digestOf(now) != digestOf(t.New) {
		if err := takeBack(ctx, e); err != nil {
			return err
		}
	}
	return forgetTrial(e)
}

func forgetTrial(e *machine.Env) error {
	if err := e.Remove(TrialFile); err != nil {
		return fmt.Errorf("removing the record of the trial of network settings: %w", err)
	}
	return nil
}

// setNetwork replaces the network settings with files, and makes daemons reload files that were
// changed or removed. before contains settings that daemons may have loaded, in addition to those
// in place.
func setNetwork(ctx context.Context, e *machine.Env, before, files map[string]netFile) error {
	now, err := Files(e)
	if err != nil {
		return err
	}
	differ := map[string]bool{}
	for _, others := range []map[string]netFile{before, now} {
		for p := range others {
			differ[p] = differ[p] || !has(files, p, others[p])
		}
		for p := range files {
			differ[p] = differ[p] || !has(others, p, files[p])
		}
	}
	maps.DeleteFunc(differ, func(_ string, d bool) bool { return !d })
	for _, p := range slices.Sorted(maps.Keys(now)) {
		if _, keep := files[p]; keep {
			continue
		}
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing network setting %s: %w", p, err)
		}
		for dir := filepath.Dir(p); inNetworkDirs(dir); dir = filepath.Dir(dir) {
			// e.Remove keeps a directory that is not empty.
			if err := e.Remove(dir); err != nil {
				return fmt.Errorf("removing network setting %s: %w", dir, err)
			}
		}
	}
	for _, p := range slices.Sorted(maps.Keys(files)) {
		f := files[p]
		switch {
		case f.Link == "":
			_, err = e.Write(p, f.Data, machine.Owner{Mode: f.Mode, UID: f.UID, GID: f.GID})
		case !has(now, p, f):
			err = e.Symlink(f.Link, p)
		}
		if err != nil {
			return fmt.Errorf("writing network setting %s: %w", p, err)
		}
	}
	return Load(ctx, e, slices.Sorted(maps.Keys(differ)))
}

// inNetworkDirs reports whether dir is below one of networkDirs.
func inNetworkDirs(dir string) bool {
	return slices.ContainsFunc(networkDirs[:], func(top string) bool { return strings.HasPrefix(dir, top+"/") })
}

func has(files map[string]netFile, p string, f netFile) bool {
	is, ok := files[p]
	return ok && is.equal(f)
}

// wpaTimeout is how long a Wi-Fi unit may take to start. It waits for its network card, which may
// be missing.
const wpaTimeout = 30 * time.Second

// Load makes the daemons load the settings at these paths. If a Wi-Fi unit does not start, the
// other settings are loaded anyway.
func Load(ctx context.Context, e *machine.Env, paths []string) error {
	links, err := wpaLinks(e)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(paths, func(p string) bool { return strings.HasPrefix(p, "/etc/systemd/system/") }) {
		if err := e.Unit(ctx, "daemon-reload", ""); err != nil {
			return fmt.Errorf("reloading systemd: %w", err)
		}
	}
	for _, u := range WPAUnits(paths) {
		verb := WPAVerb(e, u)
		for p := range links {
			if verb == "try-restart" && filepath.Base(p) == u {
				verb = "restart"
			}
		}
		if err := e.BoundedUnit(ctx, wpaTimeout, verb, u); err != nil {
			e.Log.Warn("loading the Wi-Fi settings", "unit", u, "verb", verb, "error", err)
		}
	}
	var errs []error
	DeleteDevices(ctx, e, paths)
	if err := Reload(ctx, e); err != nil {
		errs = append(errs, fmt.Errorf("loading the network settings: %w", err))
	}
	if slices.ContainsFunc(paths, func(p string) bool { return strings.HasPrefix(p, "/etc/systemd/resolved.conf.d/") }) {
		if err := e.BoundedUnit(ctx, machine.JobTimeout, "restart", "systemd-resolved.service"); err != nil {
			errs = append(errs, fmt.Errorf("loading the DNS settings: %w", err))
		}
	}
	return errors.Join(errs...)
}
