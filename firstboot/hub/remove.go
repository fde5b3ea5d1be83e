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

// These lists contain yurthub's files on the disk, and those that first boot writes for yurthub, in
// the order of removal. The check for leftovers uses them too, to detect an interrupted removal.
var (
	portsLeavings = []string{PortsKubelet, portsTimerFile, portsUnitFile, NFTFile} // removed by RemovePortRules
	unitLeavings  = []string{EnvFile, hubKept, DropinFile, openyurt.Dropin, hubSysctl, hubRestart}
	ownLeavings   = append([]string{openyurt.Manifest, member.HubBootstrap, openyurt.KubeletConf}, openyurt.Identities()...)
	hubLeavings   = slices.Concat(portsLeavings, unitLeavings, ownLeavings, []string{UnitFile})
)

// hubLeft reports whether any file of yurthub is left. The unit in an image does not count: it
// stays, and its condition prevents its start.
func hubLeft(e *machine.Env) bool { return slices.ContainsFunc(hubLeavings, e.Exists) }

// Remove removes yurthub with all its files and its unit.
func Remove(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	if err := removeHubFiles(ctx, e, image); err != nil {
		return err
	}
	return removeUnit(ctx, e)
}

// removeHubFiles removes yurthub's files, but not its unit.
func removeHubFiles(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	if err := e.Unit(ctx, "stop", openyurt.Unit); err != nil {
		return fmt.Errorf("stopping yurthub: %w", err)
	}
	// If systemd has loaded one of these files, it must reload. removeUnit does not always do so.
	loaded := slices.ContainsFunc([]string{portsTimerFile, portsUnitFile, DropinFile, openyurt.Dropin}, e.Exists)
	if err := RemovePortRules(ctx, e); err != nil {
		return err
	}
	if err := removeDummy(ctx, e, image); err != nil {
		return err
	}
	for _, p := range append(slices.Clone(unitLeavings), filepath.Dir(DropinFile)) {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing yurthub's files: %w", err)
		}
	}
	if loaded {
		if err := e.Unit(ctx, "daemon-reload", ""); err != nil {
			return fmt.Errorf("removing yurthub's files: %w", err)
		}
	}
	return forgetHub(e)
}

// removeDummy removes the interface with PodAddress, which a killed yurthub leaves behind.
func removeDummy(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	args := string(e.Contents(EnvFile))
	if y := image.Yurthub; y != nil { // kubeadm has removed the pod's manifest, which had the arguments
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

// forgetHub removes yurthub's identity, its cache, and the kubeconfigs in which it is the server.
// The directory openyurt.Root stays, because it may be part of the image.
func forgetHub(e *machine.Env) error {
	for _, p := range ownLeavings {
		if err := e.RemoveAll(p); err != nil {
			return fmt.Errorf("removing yurthub's files: %w", err)
		}
	}
	return nil
}

// removeUnit removes the unit if first boot wrote it. A unit in the image stays, and its condition
// prevents its start.
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
