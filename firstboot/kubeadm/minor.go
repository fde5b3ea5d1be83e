package kubeadm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/edgebake/edgebake/configs"
	kubeadmdocs "github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// WithSettings extends a phase in which kubeadm joins: if kubelet's settings are from another minor
// version, kubeadm writes them again. Until then, kubelet runs with the old settings.
func WithSettings(join run.Phase, active *site.Active) run.Phase {
	minor := kubeadmdocs.Minor(active.Image.Kubernetes)
	p := join
	p.Check = func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
		v, err := join.Check(ctx, e)
		if err != nil || v != run.Done || !otherSettings(e, minor) {
			return v, err
		}
		if _, err := serverVersion(ctx, e); err != nil && kubeapi.Code(err) == 0 {
			return run.Unknown, nil // no API server answers
		}
		return run.Todo, nil
	}
	p.Run = func(ctx context.Context, e *machine.Env) error {
		if !otherSettings(e, minor) {
			return join.Run(ctx, e)
		}
		if err := member.TakeOverKubelet(e, minor); err != nil { // a killed kubeadm may have left empty files
			return err
		}
		if member.HasCredentials(e) {
			if err := writeSettings(ctx, e, active.Site, minor); err != nil {
				return errors.Join(err, member.TakeOverKubelet(e, minor)) // kubeadm may have left an empty file
			}
			if v, err := join.Check(ctx, e); err == nil && v == run.Done {
				return nil
			}
		}
		return join.Run(ctx, e)
	}
	return p
}

// otherSettings reports whether this node's kubelet settings are from another minor version.
func otherSettings(e *machine.Env, minor int) bool {
	k := member.ReadKubeletFiles(e)
	return k.Minor != 0 && (k.Minor != minor || k.ConfigMinor != minor) && e.Exists(ondisk.KubeletConf)
}

func writeSettings(ctx context.Context, e *machine.Env, site *configs.Site, minor int) error {
	e.Waiting("kubeadm to write kubelet's settings for v1.%d", minor)
	write := func(e *machine.Env) error {
		err := kubeadm(ctx, e, site, slog.LevelInfo, "upgrade", "node", "phase", "kubelet-config")
		return errors.Join(err, removeBackups(e))
	}
	sync := func(e *machine.Env) error { return e.Sync(ondisk.KubeletConfig) }
	if err := RestartFor(ctx, e, "writing kubelet's settings again", write, sync); err != nil {
		return err
	}
	k := member.ReadKubeletFiles(e)
	k.ConfigMinor = minor
	return k.Write(e)
}

// removeBackups removes kubeadm's copies of the files that it has replaced.
func removeBackups(e *machine.Env) error {
	list, err := filepath.Glob(e.Path(ondisk.KubernetesDir + "/tmp/kubeadm-kubelet-*"))
	if err != nil {
		panic("BUG: " + err.Error()) // the pattern is malformed
	}
	for _, dir := range list {
		if err := e.RemoveAll(ondisk.KubernetesDir + "/tmp/" + filepath.Base(dir)); err != nil {
			return fmt.Errorf("removing kubeadm's backup copies: %w", err)
		}
	}
	return nil
}

// serverVersion returns the version of the API server in kubelet.conf.
func serverVersion(ctx context.Context, e *machine.Env) (string, error) {
	ctx, cancel := e.ForProbe(ctx)
	defer cancel()
	c, err := member.NodeClient(e)
	if err != nil {
		return "", err
	}
	return c.Version(ctx)
}
