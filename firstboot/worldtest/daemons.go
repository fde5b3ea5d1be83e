package worldtest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// The daemons of a world that use what they loaded last, as resolved and
// wpa_supplicant do: a file that is written or removed is nothing to them until
// they are told.

const (
	ResolvedUnit = "systemd-resolved.service"
	Wants        = "/etc/systemd/system/multi-user.target.wants/"
)

func WpaUnit(card string) string { return "wpa_supplicant@" + card + ".service" }

// cardOf is the card of a unit of wpa_supplicant; "": it is none.
func cardOf(unit string) string {
	card, ok := strings.CutPrefix(unit, "wpa_supplicant@")
	if !ok {
		return ""
	}
	return strings.TrimSuffix(card, ".service")
}

func daemon(unit string) bool { return unit == ResolvedUnit || cardOf(unit) != "" }

// OnDisk is what a daemon would load now.
func (w *World) OnDisk(unit string) (string, error) {
	if card := cardOf(unit); card != "" {
		b, err := os.ReadFile(filepath.Join(w.Root, "/etc/wpa_supplicant/wpa_supplicant-"+card+".conf"))
		if err != nil {
			return "", errors.New("the control process exited with error code")
		}
		return string(b), nil
	}
	files, err := filepath.Glob(filepath.Join(w.Root, "/etc/systemd/resolved.conf.d/*.conf"))
	if err != nil {
		return "", err
	}
	all := ""
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		all += string(b)
	}
	return all, nil
}

// turnDaemon carries out a verb of systemctl.
func (w *World) turnDaemon(verb, unit string) error {
	link := filepath.Join(w.Root, Wants+unit)
	runs := w.Units[unit] == "active"
	switch {
	case verb == "enable":
		err := os.MkdirAll(filepath.Dir(link), 0o755)
		if err == nil {
			err = os.Symlink("/usr/lib/systemd/system/wpa_supplicant@.service", link)
		}
		if errors.Is(err, os.ErrExist) {
			return nil
		}
		return err
	case verb == "disable":
		if err := os.Remove(link); !errors.Is(err, os.ErrNotExist) {
			return err
		}
	case verb == "stop":
		w.Units[unit] = "inactive"
		delete(w.Loaded, unit)
	case verb == "restart", verb == "start" && !runs, verb == "try-restart" && runs:
		text, err := w.OnDisk(unit)
		if err != nil {
			w.Units[unit] = "failed"
			delete(w.Loaded, unit)
			return err
		}
		w.Units[unit], w.Started[unit], w.Loaded[unit] = "active", w.Now, text
	}
	return nil
}

// startDaemons is what a boot starts.
func (w *World) startDaemons() {
	w.T.Helper()
	clear(w.Loaded)
	links, err := filepath.Glob(filepath.Join(w.Root, Wants+"wpa_supplicant@*"))
	if err == nil {
		err = w.turnDaemon("start", ResolvedUnit)
	}
	if err != nil {
		w.T.Fatal(err)
	}
	for _, l := range links {
		if err := w.turnDaemon("start", filepath.Base(l)); err != nil {
			fmt.Fprintln(&w.Log, "starting", filepath.Base(l), err) // systemd goes on
		}
	}
}

// lookup asks the DNS server that resolved uses.
func (w *World) lookup(host string) (netip.Addr, error) {
	addr, known := w.Zone[host]
	if !known {
		return netip.ParseAddr(host)
	}
	if w.DeadDNS != "" && strings.Contains(w.Loaded[ResolvedUnit], w.DeadDNS) {
		return netip.Addr{}, fmt.Errorf("lookup %s: i/o timeout", host)
	}
	return netip.ParseAddr(addr)
}
