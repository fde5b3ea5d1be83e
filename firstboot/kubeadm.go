package firstboot

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/overlays/node"
)

// joinPatience is how long kubeadm waits for kubelet to enrol.
const joinPatience = 2 * time.Minute

// kubeadmPath is where kubeadm looks for programs: systemd's own PATH, behind the
// image's systemctl for it.
const kubeadmPath = "PATH=" + ondisk.KubeadmPath + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// shortLived turns off garbage collection in programs in Go that end before their
// garbage counts. These are kubeadm and the kubelet that kubeadm asks for its
// version. A third of kubeadm's work before its first line was collecting.
var shortLived = []string{"GOGC=off", "GOMEMLIMIT=128MiB"}

// kubeadmJoin runs `kubeadm join` with the discovery file, as s says, which is
// the active site with more arguments for kubelet; ignore are checks of its
// that fail since firstboot was there before.
func kubeadmJoin(ctx context.Context, e *Env, active *Active, s configs.Site, ignore ...string) error {
	// The discovery file carries the token itself: only so kubeadm keeps the
	// file's tls-server-name. We have written the CA that kubeadm would.
	s.Credentials = configs.Credentials{}
	if !slices.ContainsFunc(s.IgnorePreflightErrors, func(c string) bool { return strings.EqualFold(c, "all") }) { // which kubeadm wants alone
		s.IgnorePreflightErrors = slices.Concat(s.IgnorePreflightErrors, ignore, []string{"FileAvailable--etc-kubernetes-pki-ca.crt"})
	}
	conf, err := node.JoinConfiguration(&s, node.Join{NodeName: active.Node, Discovery: discoveryFile, Timeout: joinPatience, Kubernetes: active.Image.Kubernetes})
	if err != nil {
		return err
	}
	if err := e.WriteFile(joinFile, conf, Mode(0o600)); err != nil {
		return fmt.Errorf("writing kubeadm's configuration: %w", err)
	}
	if err := e.Symlink(bootstrapRun, bootstrapConf); err != nil {
		return fmt.Errorf("keeping the token off the disk: %w", err)
	}
	if err := makeServingCert(e, active.Node); err != nil {
		return err
	}
	e.Waiting("kubeadm join")
	out := &tail{log: func(line string) { e.Log.Info("kubeadm: " + line) }}
	cmd := Cmd{Args: []string{"kubeadm", "join", "--config", joinFile}, Env: slices.Concat(node.ProxyEnv(&s), shortLived, []string{kubeadmPath}), Output: out}
	if err := e.Run(ctx, cmd); err != nil {
		return judgeJoin(active.Node, fmt.Errorf("%w: %s", err, out.last()))
	}
	return nil
}

// judgeJoin names the fix of what kubeadm says often.
func judgeJoin(name string, err error) error {
	msg := err.Error()
	switch {
	case strings.Contains(msg, "already exists in the cluster"):
		return Advise(err, otherName(name))
	case strings.Contains(msg, "Unauthorized"):
		return Advise(err, "the token may just have expired; a new one goes into site.yaml (`kubeadm token create`)")
	case strings.Contains(msg, "TLS bootstrap"), strings.Contains(msg, "kubelet-check"):
		return Advise(err, "see `journalctl -u kubelet -u containerd` on the machine; in the cluster, see whether its CSR is approved (`kubectl get csr`)")
	}
	return err
}

// tail hands lines to the log and keeps the last of them for the error.
type tail struct {
	mu    sync.Mutex
	log   func(string)
	part  []byte
	lines []string
}

var _ io.Writer = (*tail)(nil)

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.part = append(t.part, p...)
	for {
		line, rest, ok := bytes.Cut(t.part, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		t.part = rest
		if s := strings.TrimSpace(string(line)); s != "" {
			t.log(s)
			t.lines = append(t.lines, s)
			if len(t.lines) > 40 {
				t.lines = t.lines[1:]
			}
		}
	}
}

// last is what matters of the output: the lines that say error, or the last.
func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := t.lines
	if s := strings.TrimSpace(string(t.part)); s != "" {
		lines = append(lines, s)
	}
	var out []string
	for _, l := range lines {
		low := strings.ToLower(l)
		if strings.HasPrefix(low, "error") || strings.Contains(low, "[error") || strings.HasPrefix(low, "fatal") {
			out = append(out, l)
		}
	}
	if len(out) == 0 && len(lines) > 0 {
		out = lines[max(0, len(lines)-3):]
	}
	return strings.Join(out, "; ")
}

// undoJoin takes back exactly what kubeadm join and kubelet wrote, so that
// the next try finds what the first one found. (kubeadm reset would do more:
// it empties /etc/kubernetes/manifests, where an image may have put pods.)
func undoJoin(ctx context.Context, e *Env) error {
	left := false
	for _, f := range joinFiles {
		left = left || e.exists(f)
	}
	if left {
		if err := e.Unit(ctx, "stop", ondisk.UnitKubelet); err != nil {
			return fmt.Errorf("stopping kubelet: %w", err)
		}
	}
	for _, f := range slices.Concat(joinFiles, kubeletKeys(e), []string{readyMark}) {
		if err := e.Remove(f); err != nil {
			return fmt.Errorf("undoing the join: %w", err)
		}
	}
	return nil
}

// joinFiles is what a join writes; config.yaml, which lets kubelet start,
// goes first.
var joinFiles = []string{
	ondisk.KubeletConfig, ondisk.KubeletConf, bootstrapConf, bootstrapRun, joinFile, kubeadmFlags,
	"/var/lib/kubelet/instance-config.yaml",
}
