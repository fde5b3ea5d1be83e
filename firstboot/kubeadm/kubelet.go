package kubeadm

import (
	"context"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
)

// DropLabels removes labels from --node-labels in env, so that kubelet does not set them if it
// registers its Node again.
func DropLabels(env []byte, labels map[string]string) []byte {
	return EachArgs(env, func(args string) string {
		return NodeLabels.ReplaceAllStringFunc(args, func(flag string) string {
			m := NodeLabels.FindStringSubmatch(flag)
			kept := slices.DeleteFunc(strings.Split(m[2], ","), func(l string) bool {
				k, v, _ := strings.Cut(l, "=")
				gone, ok := labels[k]
				return ok && gone == v
			})
			if len(kept) == 0 {
				return ""
			}
			return m[1] + "--node-labels=" + strings.Join(kept, ",")
		})
	})
}

// EachArgs applies change to kubelet's arguments in env, the contents of kubeadm-flags.env.
func EachArgs(env []byte, change func(args string) string) []byte {
	return member.KubeadmArgs.ReplaceAllFunc(env, func(line []byte) []byte {
		m := member.KubeadmArgs.FindSubmatch(line)
		return []byte(string(m[1]) + change(string(m[2])) + string(m[3]))
	})
}

// NodeLabels matches the flag --node-labels in kubelet's arguments, with the blanks before it.
var NodeLabels = regexp.MustCompile(`(\s*)--node-labels=(\S*)`)

// KubeletRestart exists if kubelet must be restarted after a change.
const KubeletRestart = ondisk.RunDir + "/restart-kubelet"

// ClusterFiles lists the files that depend on the machine's cluster. A reset also removes
// ResetFiles.
var (
	ClusterFiles = []string{KubeletRestart}
	ResetFiles   = []string{MeteredConfFile, KubeletConfDir}
)

// Writing returns a change that writes a file.
func Writing(path string, b []byte, mode fs.FileMode) func(*machine.Env) error {
	return func(e *machine.Env) error {
		_, err := e.Write(path, b, machine.Mode(mode))
		return err
	}
}

// RestartFor applies changes to files that kubelet reads when it starts, and restarts kubelet. If
// it fails or is killed, KubeletRestart stays, and kubelet is restarted later.
func RestartFor(ctx context.Context, e *machine.Env, doing string, changes ...func(*machine.Env) error) error {
	mark := func(e *machine.Env) error { return e.WriteFile(KubeletRestart, nil, machine.Mode(0o600)) }
	for _, change := range append([]func(*machine.Env) error{mark}, changes...) {
		if err := change(e); err != nil {
			return fmt.Errorf("%s: %w", doing, err)
		}
	}
	if err := e.Unit(ctx, "restart", ondisk.UnitKubelet); err != nil {
		return fmt.Errorf("restarting kubelet: %w", err)
	}
	if err := e.Remove(KubeletRestart); err != nil {
		return fmt.Errorf("restarting kubelet: %w", err)
	}
	return nil
}
