package firstboot

import (
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
)

// The network settings that last reached a master are kept whole. When a
// corrected site's settings reach none and the kept ones do, they come back:
// nobody is there to undo a typing error.

// netFile is one file of the network settings.
type netFile struct {
	Mode fs.FileMode `json:"mode"`
	Data []byte      `json:"data"`
}

// networkFiles are the settings now in place.
func networkFiles(e *Env) (map[string]netFile, error) {
	out := map[string]netFile{}
	for _, dir := range networkDirs {
		entries, err := os.ReadDir(e.path(dir))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the network settings: %w", err)
		}
		for _, en := range entries {
			if !en.Type().IsRegular() {
				continue
			}
			p := filepath.Join(dir, en.Name())
			b, err := e.read(p)
			if err != nil {
				return nil, fmt.Errorf("reading the network settings: %w", err)
			}
			st, err := en.Info()
			if err != nil {
				return nil, fmt.Errorf("reading the network settings: %w", err)
			}
			out[p] = netFile{st.Mode().Perm(), b}
		}
	}
	return out, nil
}

func digestOf(files map[string]netFile) string {
	h := sha256.New()
	for _, p := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(h, "%s\x00%d\x00", p, len(files[p].Data))
		h.Write(files[p].Data)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func goodFiles(e *Env) (map[string]netFile, bool) {
	b, err := e.read(goodNetwork + "/good.json")
	if err != nil {
		return nil, false
	}
	var out map[string]netFile
	if json.Unmarshal(b, &out) != nil {
		return nil, false
	}
	return out, true
}

// networkIsNew reports whether the settings in place have not reached a
// master yet. Settings that were given up do not count as new.
func networkIsNew(e *Env) bool {
	now, err := networkFiles(e)
	if err != nil {
		return false
	}
	good, ok := goodFiles(e)
	return !ok || digestOf(now) != digestOf(good)
}

// keepNetwork remembers the settings in place as good.
func keepNetwork(e *Env) error {
	now, err := networkFiles(e)
	if err != nil {
		return err
	}
	b, err := json.Marshal(now)
	if err == nil {
		_, err = e.write(goodNetwork+"/good.json", b, Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("keeping the network settings that work: %w", err)
	}
	return nil
}

// rollBack tries the settings that last reached a master, and returns the one
// they reach; "" where there are none, or they fare no better. Then it was
// not the settings, and the new ones stay.
func rollBack(ctx context.Context, e *Env, masters []string) (string, error) {
	good, ok := goodFiles(e)
	if !ok || !networkIsNew(e) {
		return "", nil
	}
	now, err := networkFiles(e)
	if err != nil {
		return "", err
	}
	e.Waiting("a master to answer with the former network settings")
	if err := setNetwork(ctx, e, good); err != nil {
		return "", err
	}
	master, reachErr := waitForMaster(ctx, e, masters)
	if reachErr != nil {
		// The attempt's time may be up; putting the settings back is not
		// given up for that.
		return "", setNetwork(context.WithoutCancel(ctx), e, now)
	}
	e.Log.Error("the corrected site's network settings reach no master: the former ones are back", "master", master)
	e.Console("the new network settings reach no master: the former ones are back. Correct the site.")
	return master, nil
}

// setNetwork makes files the network settings, and no others.
func setNetwork(ctx context.Context, e *Env, files map[string]netFile) error {
	now, err := networkFiles(e)
	if err != nil {
		return err
	}
	for p := range now {
		if _, keep := files[p]; !keep {
			if err := e.Remove(p); err != nil {
				return fmt.Errorf("removing network setting %s: %w", p, err)
			}
		}
	}
	for _, p := range slices.Sorted(maps.Keys(files)) {
		if _, err := e.write(p, files[p].Data, Mode(files[p].Mode)); err != nil {
			return fmt.Errorf("writing network setting %s: %w", p, err)
		}
	}
	if err := e.Run(ctx, Cmd{Args: []string{"networkctl", "reload"}}); err != nil {
		return fmt.Errorf("loading the network settings: %w", err)
	}
	for _, u := range wpaUnits(slices.Sorted(maps.Keys(files))) {
		if err := e.Unit(ctx, "try-restart", u); err != nil {
			return fmt.Errorf("loading the Wi-Fi settings: %w", err)
		}
	}
	if slices.ContainsFunc(slices.Collect(maps.Keys(files)), func(p string) bool { return strings.Contains(p, "resolved.conf.d") }) {
		if err := e.Unit(ctx, "restart", "systemd-resolved.service"); err != nil {
			return fmt.Errorf("loading the DNS settings: %w", err)
		}
	}
	return nil
}
