package network

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

const wpaConf = "/etc/wpa_supplicant/wpa_supplicant-"

// WPAUnits returns the wpa_supplicant units whose settings, or links that enable them, are in
// paths.
func WPAUnits(paths []string) []string {
	var out []string
	for _, p := range paths {
		u := ""
		if name, ok := strings.CutPrefix(p, wpaConf); ok {
			u = "wpa_supplicant@" + strings.TrimSuffix(name, ".conf") + ".service"
		} else if strings.HasSuffix(filepath.Dir(p), ".wants") && strings.HasPrefix(filepath.Base(p), "wpa_supplicant@") {
			u = filepath.Base(p)
		}
		if u != "" && !slices.Contains(out, u) {
			out = append(out, u)
		}
	}
	return out
}

// WPAVerb returns the verb that makes a running wpa_supplicant unit use its current settings file.
// If the file is gone, the unit must stop, because it would keep the settings that it has loaded.
func WPAVerb(e *machine.Env, unit string) string {
	card := strings.TrimSuffix(strings.TrimPrefix(unit, "wpa_supplicant@"), ".service")
	if e.Exists(wpaConf + card + ".conf") {
		return "try-restart"
	}
	return "stop"
}

// unloadedNetwork exists if networkd has not loaded the current network settings. A boot loads them
// and removes the mark.
const unloadedNetwork = ondisk.RunMark + "unloaded-network"

// Reload makes networkd load its settings. networkctl needs D-Bus, which may start later than first
// boot.
func Reload(ctx context.Context, e *machine.Env) error {
	err := e.BoundedUnit(ctx, machine.JobTimeout, "start", "dbus.service")
	if err == nil {
		err = e.Run(ctx, machine.Cmd{Args: []string{"networkctl", "reload"}})
	}
	if err != nil {
		return errors.Join(err, e.WriteFile(unloadedNetwork, nil, machine.Mode(0o600)))
	}
	if e.Exists(unloadedNetwork) {
		return e.Remove(unloadedNetwork)
	}
	return nil
}

// DeleteDevices removes the bonds, bridges and VLANs whose files, listed in paths, are gone:
// networkd creates these devices, but a reload does not remove them.
func DeleteDevices(ctx context.Context, e *machine.Env, paths []string) {
	for _, p := range paths {
		name, ok := siteconf.MadeDevice(p)
		if !ok || e.Exists(p) {
			continue
		}
		if err := e.Run(ctx, machine.Cmd{Args: []string{"networkctl", "delete", name}}); err != nil {
			e.Log.Warn("removing an interface of the previous network settings", "interface", name, "error", err)
		}
	}
}

// LateReload makes networkd load settings that it could not load when they were put in place. It is
// made for one pass. If it fails, the pass continues.
type LateReload struct{ failed bool }

func (l *LateReload) Due(e *machine.Env) bool { return !l.failed && e.Exists(unloadedNetwork) }

func (l *LateReload) Run(ctx context.Context, e *machine.Env) error {
	if !l.Due(e) {
		return nil
	}
	err := Reload(ctx, e)
	if err == nil || ctx.Err() != nil {
		return err
	}
	l.failed = true
	e.Log.Warn("networkd has not reloaded the network settings", "error", err)
	e.Note("the network settings of the Site are not in effect yet; the next boot loads them at the latest: %s", machine.OneLine(err))
	return nil
}
