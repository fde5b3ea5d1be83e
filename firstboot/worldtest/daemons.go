package worldtest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// This file simulates resolved and wpa_supplicant, which read their files when they start.

const (
	ResolvedUnit = "systemd-resolved.service"
	WantsDir     = "/etc/systemd/system/multi-user.target.wants/"
)

func WpaUnit(card string) string { return "wpa_supplicant@" + card + ".service" }

// cardOf returns the network card of a wpa_supplicant unit; "" for other units.
func cardOf(unit string) string {
	card, ok := strings.CutPrefix(unit, "wpa_supplicant@")
	if !ok {
		return ""
	}
	return strings.TrimSuffix(card, ".service")
}

func daemon(unit string) bool { return unit == ResolvedUnit || cardOf(unit) != "" }

// DaemonConfig returns the configuration that a daemon would load now.
func (w *World) DaemonConfig(unit string) (string, error) {
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

// controlDaemon carries out systemctl for these daemons.
func (w *World) controlDaemon(verb, unit string) error {
	link := filepath.Join(w.Root, WantsDir+unit)
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
		delete(w.LoadedConfig, unit)
	case verb == "restart", verb == "start" && !runs, verb == "try-restart" && runs:
		text, err := w.DaemonConfig(unit)
		if err != nil {
			w.Units[unit] = "failed"
			delete(w.LoadedConfig, unit)
			return err
		}
		w.Units[unit], w.Started[unit], w.LoadedConfig[unit] = "active", w.Now, text
	}
	return nil
}

// startDaemons starts the enabled daemons, as a boot does.
func (w *World) startDaemons() {
	w.T.Helper()
	clear(w.LoadedConfig)
	links, err := filepath.Glob(filepath.Join(w.Root, WantsDir+"wpa_supplicant@*"))
	if err == nil {
		err = w.controlDaemon("start", ResolvedUnit)
	}
	if err != nil {
		w.T.Fatal(err)
	}
	for _, l := range links {
		if err := w.controlDaemon("start", filepath.Base(l)); err != nil {
			fmt.Fprintln(&w.Log, "starting", filepath.Base(l), err) // systemd continues
		}
	}
}

// resolve looks up a name with the DNS server that resolved uses.
func (w *World) resolve(host string) (netip.Addr, error) {
	addr, known := w.DNSRecords[host]
	if !known {
		return netip.ParseAddr(host)
	}
	if w.DeadDNSServer != "" && strings.Contains(w.LoadedConfig[ResolvedUnit], w.DeadDNSServer) {
		return netip.Addr{}, fmt.Errorf("lookup %s: i/o timeout", host)
	}
	return netip.ParseAddr(addr)
}
