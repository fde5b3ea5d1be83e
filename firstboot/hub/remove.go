package hub

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// What yurthub, and first boot for it, leave on the disk, in the order in which
// it is removed. Both removing and looking whether anything is left use these
// lists: what a removal that was cut off has not reached is found.
var (
	portsLeavings = []string{PortsKubelet, portsTimerFile, portsUnitFile, NFTFile} // by OpenPorts
	unitLeavings  = []string{EnvFile, hubKept, DropinFile, openyurt.Dropin, hubSysctl, hubRestart}
	ownLeavings   = append([]string{openyurt.Manifest, member.HubBootstrap, openyurt.KubeletConf}, openyurt.Identities()...)
	hubLeavings   = slices.Concat(portsLeavings, unitLeavings, ownLeavings, []string{UnitFile})
)

// hubLeft reports whether anything is left of yurthub. A baked unit counts as
// nothing: it stays, held by its condition.
func hubLeft(e *machine.Env) bool { return slices.ContainsFunc(hubLeavings, e.Exists) }

// Remove removes yurthub, all that it has, and its unit.
func Remove(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	if err := removeHubFiles(ctx, e, image); err != nil {
		return err
	}
	return removeUnit(ctx, e)
}

// removeHubFiles is Remove but for the unit.
func removeHubFiles(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	if err := e.Unit(ctx, "stop", openyurt.Unit); err != nil {
		return fmt.Errorf("stopping yurthub: %w", err)
	}
	// Its units, which may be baked and stay, are loaded with these.
	loaded := slices.ContainsFunc([]string{portsTimerFile, portsUnitFile, DropinFile, openyurt.Dropin}, e.Exists)
	if err := OpenPorts(ctx, e); err != nil {
		return err
	}
	if err := removeDummy(ctx, e, image); err != nil {
		return err
	}
	for _, p := range append(slices.Clone(unitLeavings), filepath.Dir(DropinFile)) {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	if loaded {
		if err := e.Unit(ctx, "daemon-reload", ""); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	return forgetHub(e)
}

// removeDummy removes yurthub's interface, with the address at which pods look
// for it: yurthub leaves it behind when it is killed.
func removeDummy(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	args := string(e.Contents(EnvFile))
	if y := image.Yurthub; y != nil { // a pod has its arguments in a manifest that kubeadm took away
		args += " " + strings.Join(y.ExtraArgs, " ")
	}
	for _, n := range openyurt.DummyNames(args) {
		if !e.Exists("/sys/class/net/" + n) {
			continue
		}
		if err := e.Run(ctx, machine.Cmd{Args: []string{"ip", "link", "delete", n}}); err != nil {
			return fmt.Errorf("removing yurthub's interface %s: %w", n, err)
		}
	}
	return nil
}

// forgetHub removes yurthub's identity, its cache, and the ways to it. The
// directory that they are in may be baked, and stays.
func forgetHub(e *machine.Env) error {
	for _, p := range ownLeavings {
		if err := e.RemoveAll(p); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	return nil
}

// removeUnit removes the unit if it is the one we wrote; a baked one stays,
// held by its condition.
func removeUnit(ctx context.Context, e *machine.Env) error {
	if !e.Exists(UnitFile) {
		return nil
	}
	if err := e.Unit(ctx, "disable", openyurt.Unit); err != nil {
		return fmt.Errorf("disabling yurthub: %w", err)
	}
	if err := e.Remove(UnitFile); err != nil {
		return fmt.Errorf("removing the unit of yurthub: %w", err)
	}
	return e.Unit(ctx, "daemon-reload", "")
}
