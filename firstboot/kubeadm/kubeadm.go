package kubeadm

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	kubeadmdocs "github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// joinTimeout is how long kubeadm waits until kubelet is healthy. It waits four times as long for
// kubelet's certificate: a new attempt would only queue a second request.
const joinTimeout = 2 * time.Minute

// shortLived turns off garbage collection in Go programs that run only briefly: kubeadm, and
// the kubelet that kubeadm runs to get its version.
var shortLived = []string{"GOGC=off", "GOMEMLIMIT=128MiB"}

// kubeadm runs kubeadm with args and the proxy of site; site may be nil. It logs the output at
// level. An error contains the last lines of the output.
func kubeadm(ctx context.Context, e *machine.Env, site *configs.Site, level slog.Level, args ...string) error {
	env := slices.Clone(shortLived)
	switch {
	case site == nil:
	case site.ControlPlane != nil: // kubeadm copies the proxy into the control plane's pods
		env = append(env, siteconf.ControlPlaneProxyEnv(site)...)
	default:
		env = append(env, siteconf.ProxyEnv(site)...)
	}
	out := &machine.Tail{Log: func(line string) { e.Log.Log(ctx, level, "kubeadm: "+line) }}
	if err := e.Run(ctx, machine.Cmd{Args: append([]string{"kubeadm"}, args...), Env: env, Output: out}); err != nil {
		if said := out.Last(); said != "" {
			err = fmt.Errorf("%w: %s", err, said)
		}
		return err
	}
	return nil
}

// Join runs `kubeadm join` with the discovery file. s is the active Site, perhaps with more
// arguments for kubelet. ignore lists preflight checks that fail because of first boot's own files.
func Join(ctx context.Context, e *machine.Env, active *site.Active, s configs.Site, ignore ...string) error {
	// The token is in the discovery file, because otherwise kubeadm ignores that file's
	// tls-server-name. First boot has written the CA file that kubeadm would write.
	s.Credentials = configs.Credentials{}
	if !slices.ContainsFunc(s.IgnorePreflightErrors, func(c string) bool { return strings.EqualFold(c, "all") }) { // kubeadm accepts "all" only on its own
		s.IgnorePreflightErrors = slices.Concat(s.IgnorePreflightErrors, ignore, []string{"FileAvailable--etc-kubernetes-pki-ca.crt"})
	}
	conf, err := siteconf.JoinConfiguration(&s, siteconf.Join{NodeName: active.Node, Discovery: member.DiscoveryFile, Timeout: joinTimeout, Kubernetes: active.Image.Kubernetes})
	if err != nil {
		return err
	}
	if err := e.WriteFile(member.JoinFile, conf, machine.Mode(0o600)); err != nil {
		return fmt.Errorf("writing kubeadm's configuration: %w", err)
	}
	if err := e.Symlink(member.BootstrapRun, member.BootstrapConf); err != nil {
		return fmt.Errorf("linking %s to %s: %w", member.BootstrapConf, member.BootstrapRun, err)
	}
	e.Waiting("kubeadm join")
	if err := kubeadm(ctx, e, &s, slog.LevelInfo, "join", "--config", member.JoinFile); err != nil {
		return judgeJoin(active.Node, err)
	}
	return nil
}

// Local and Arg are settings of one machine for kubeadm, in addition to the Site's documents.
type (
	Local = kubeadmdocs.Local
	Arg   = kubeadmdocs.Arg
)

// initFile is the configuration file for kubeadm init on this machine.
const initFile = ondisk.RunDir + "/kubeadm-init.yaml"

// Init runs phases of `kubeadm init` with the Site's documents and l; both apply to all phases.
func Init(ctx context.Context, e *machine.Env, active *site.Active, l Local, phases ...[]string) error {
	board := siteconf.LocalKubeadm(active.Image, active.Site)
	l.Kubernetes, l.EtcdTag, l.DNSTag = board.Kubernetes, board.EtcdTag, board.DNSTag
	docs, err := active.Site.ControlPlane.Documents().EncodeFor(l)
	if err != nil {
		return err
	}
	if err := e.WriteFile(initFile, docs, machine.Mode(0o600)); err != nil {
		return fmt.Errorf("writing kubeadm's configuration: %w", err)
	}
	for _, phase := range phases {
		args := slices.Concat([]string{"init", "phase"}, phase, []string{"--config", initFile})
		if err := kubeadm(ctx, e, active.Site, slog.LevelInfo, args...); err != nil {
			return err
		}
	}
	// The file may contain a token.
	return e.Remove(initFile)
}

// Reset runs `kubeadm reset`; active may be nil. It logs the output only at debug level, because
// first boot does the cleanup that kubeadm recommends there.
func Reset(ctx context.Context, e *machine.Env, active *site.Active) error {
	args := []string{"reset", "--force", "--cri-socket"}
	if active == nil {
		return kubeadm(ctx, e, nil, slog.LevelDebug, append(args, ondisk.CRISocket)...)
	}
	args = append(args, active.Site.CRISocket)
	if ignore := active.Site.IgnorePreflightErrors; len(ignore) > 0 {
		args = append(args, "--ignore-preflight-errors", strings.Join(ignore, ","))
	}
	return kubeadm(ctx, e, active.Site, slog.LevelDebug, args...)
}

// judgeJoin adds advice to common errors of kubeadm join.
func judgeJoin(name string, err error) error {
	msg := err.Error()
	switch {
	case strings.Contains(msg, "already exists in the cluster"):
		return run.Advise(err, OtherName(name))
	case strings.Contains(msg, "Unauthorized"):
		return run.Advise(err, "the token may have expired: put a new one into site.yaml (`kubeadm token create`)")
	case strings.Contains(msg, "TLS bootstrap"), strings.Contains(msg, "kubelet-check"):
		return run.Advise(err, "see `journalctl -u kubelet -u containerd` on the machine; check the machine's CSR (`kubectl get csr`): approve it if it is pending, or delete it if it was denied, and the machine sends another")
	}
	return err
}

// UndoJoin removes the files that kubeadm join and kubelet wrote, except keep. kubeadm reset would
// also remove the image's pods in /etc/kubernetes/manifests.
func UndoJoin(ctx context.Context, e *machine.Env, keep ...string) error {
	left := false
	for _, f := range joinFiles {
		left = left || e.Exists(f)
	}
	if left {
		if err := e.Unit(ctx, "stop", ondisk.UnitKubelet); err != nil {
			return fmt.Errorf("stopping kubelet: %w", err)
		}
	}
	for _, f := range slices.Concat(joinFiles, member.KubeletKeys(e), []string{member.ReadyMark}) {
		if slices.Contains(keep, f) {
			continue
		}
		if err := e.Remove(f); err != nil {
			return fmt.Errorf("undoing the join: %w", err)
		}
	}
	return nil
}

// joinFiles lists the files that a join writes. config.yaml is removed first, because kubelet does
// not start without it.
var joinFiles = []string{
	ondisk.KubeletConfig, ondisk.KubeletConf, member.BootstrapConf, member.BootstrapRun, member.JoinFile, member.KubeadmFlags,
	member.KubeletInstanceConfig, member.KubeletRecord,
}

// OtherName returns the fix for a node name that the cluster already has.
func OtherName(name string) string {
	return fmt.Sprintf("if the old machine is gone: kubectl delete node %s; otherwise give this machine another nodeName in site.yaml", name)
}
