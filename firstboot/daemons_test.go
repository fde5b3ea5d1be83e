package firstboot

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
	resolvedUnit = "systemd-resolved.service"
	wants        = "/etc/systemd/system/multi-user.target.wants/"
)

func wpaUnit(card string) string { return "wpa_supplicant@" + card + ".service" }

// cardOf is the card of a unit of wpa_supplicant; "": it is none.
func cardOf(unit string) string {
	card, ok := strings.CutPrefix(unit, "wpa_supplicant@")
	if !ok {
		return ""
	}
	return strings.TrimSuffix(card, ".service")
}

func daemon(unit string) bool { return unit == resolvedUnit || cardOf(unit) != "" }

// onDisk is what a daemon would load now.
func (w *world) onDisk(unit string) (string, error) {
	if card := cardOf(unit); card != "" {
		b, err := os.ReadFile(filepath.Join(w.root, "/etc/wpa_supplicant/wpa_supplicant-"+card+".conf"))
		if err != nil {
			return "", errors.New("the control process exited with error code")
		}
		return string(b), nil
	}
	files, err := filepath.Glob(filepath.Join(w.root, "/etc/systemd/resolved.conf.d/*.conf"))
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
func (w *world) turnDaemon(verb, unit string) error {
	link := filepath.Join(w.root, wants+unit)
	runs := w.units[unit] == "active"
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
		w.units[unit] = "inactive"
		delete(w.loaded, unit)
	case verb == "restart", verb == "start" && !runs, verb == "try-restart" && runs:
		text, err := w.onDisk(unit)
		if err != nil {
			w.units[unit] = "failed"
			delete(w.loaded, unit)
			return err
		}
		w.units[unit], w.started[unit], w.loaded[unit] = "active", w.now, text
	}
	return nil
}

// startDaemons is what a boot starts.
func (w *world) startDaemons() {
	w.t.Helper()
	clear(w.loaded)
	links, err := filepath.Glob(filepath.Join(w.root, wants+"wpa_supplicant@*"))
	if err == nil {
		err = w.turnDaemon("start", resolvedUnit)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	for _, l := range links {
		if err := w.turnDaemon("start", filepath.Base(l)); err != nil {
			fmt.Fprintln(&w.log, "starting", filepath.Base(l), err) // systemd goes on
		}
	}
}

// lookup asks the DNS server that resolved uses.
func (w *world) lookup(host string) (netip.Addr, error) {
	addr, known := w.zone[host]
	if !known {
		return netip.ParseAddr(host)
	}
	if w.deadDNS != "" && strings.Contains(w.loaded[resolvedUnit], w.deadDNS) {
		return netip.Addr{}, fmt.Errorf("lookup %s: i/o timeout", host)
	}
	return netip.ParseAddr(addr)
}
