package network

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/node"
)

const wpaConf = "/etc/wpa_supplicant/wpa_supplicant-"

// WPAUnits are the units that read the Wi-Fi settings among paths, or that a link
// among them enables.
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

// WPAVerb is the verb after which a running unit of wpa_supplicant uses what its file
// says. Without a file it must end: it would continue with what it has loaded.
func WPAVerb(e *machine.Env, unit string) string {
	card := strings.TrimSuffix(strings.TrimPrefix(unit, "wpa_supplicant@"), ".service")
	if e.Exists(wpaConf + card + ".conf") {
		return "try-restart"
	}
	return "stop"
}

// unloadedNetwork says that networkd has not read the network settings that are in
// place. A boot loads all.
const unloadedNetwork = ondisk.RunMark + "unloaded-network"

// Reload has networkd read its settings. networkctl asks it over D-Bus,
// which may come up later than first boot does.
func Reload(ctx context.Context, e *machine.Env) error {
	err := e.BoundedUnit(ctx, machine.JobPatience, "start", "dbus.service")
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

// DeleteDevices removes the bonds, bridges and VLANs whose files are gone from these
// paths: networkd makes such devices, but leaves them, with their addresses, when a
// reload does not find them any more.
func DeleteDevices(ctx context.Context, e *machine.Env, paths []string) {
	for _, p := range paths {
		name, ok := node.MadeDevice(p)
		if !ok || e.Exists(p) {
			continue
		}
		if err := e.Run(ctx, machine.Cmd{Args: []string{"networkctl", "delete", name}}); err != nil {
			e.Log.Warn("removing an interface of the former network settings", "interface", name, "error", err)
		}
	}
}

// LateReload has networkd read the settings that it could not be told of when they were
// put in place. It is made for one pass, which continues where networkd cannot be asked.
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
	e.Note("the network settings of the Site are not in use yet, the next boot loads them at the latest: %s", machine.OneLine(err))
	return nil
}
