package firstboot

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// hubLeavings is all that yurthub and we for it leave on the disk.
var hubLeavings = []string{openyurt.Manifest, hubUnitFile, hubEnv, hubNFT, portsUnitFile, portsTimerFile, portsKubelet, hubDropin, openyurt.Dropin, hubSysctl, openyurt.KubeletConf, openyurt.Cache, openyurt.Root + "/pki"}

func removeHub(ctx context.Context, e *Env, image ondisk.ImageInfo) error {
	if err := e.Unit(ctx, "stop", openyurt.Unit); err != nil {
		return fmt.Errorf("stopping yurthub: %w", err)
	}
	if err := openPorts(ctx, e); err != nil {
		return err
	}
	if err := removeDummy(ctx, e, image); err != nil {
		return err
	}
	for _, p := range []string{hubEnv, hubKept, hubDropin, openyurt.Dropin, filepath.Dir(hubDropin), hubSysctl, hubRestart} {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	return forgetHub(e)
}

// removeDummy removes yurthub's interface, with the address at which pods look
// for it: yurthub leaves it behind when it is killed.
func removeDummy(ctx context.Context, e *Env, image ondisk.ImageInfo) error {
	args := string(e.contents(hubEnv))
	if y := image.Yurthub; y != nil { // a pod has its arguments in a manifest that kubeadm took away
		args += " " + strings.Join(y.ExtraArgs, " ")
	}
	for _, n := range openyurt.DummyNames(args) {
		if !e.exists("/sys/class/net/" + n) {
			continue
		}
		if err := e.Run(ctx, Cmd{Args: []string{"ip", "link", "delete", n}}); err != nil {
			return fmt.Errorf("removing yurthub's interface %s: %w", n, err)
		}
	}
	return nil
}

// forgetHub removes yurthub's identity, its cache, and the ways to it.
func forgetHub(e *Env) error {
	for _, p := range []string{openyurt.Manifest, hubBootstrap, openyurt.KubeletConf} {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	// The directory itself may be baked; what is in it is yurthub's.
	for _, p := range openyurt.Identities() {
		if err := e.RemoveAll(p); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	return nil
}

// removeUnit removes the unit if it is the one we wrote; a baked one stays,
// held by its condition.
func removeUnit(ctx context.Context, e *Env) error {
	if !e.exists(hubUnitFile) {
		return nil
	}
	if err := e.Unit(ctx, "disable", openyurt.Unit); err != nil {
		return fmt.Errorf("disabling yurthub: %w", err)
	}
	if err := e.Remove(hubUnitFile); err != nil {
		return fmt.Errorf("removing the unit of yurthub: %w", err)
	}
	return e.Unit(ctx, "daemon-reload", "")
}
