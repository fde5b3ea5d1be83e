package hub

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// plainLists returns the flag that makes kubelet list objects with plain requests, if kubelet needs
// it (see openyurt.PlainLists). version is that of the image's kubelet.
func plainLists(ctx context.Context, e *machine.Env, version string) (string, error) {
	if version == "" { // a node that edgebake did not build
		var out strings.Builder
		if err := e.Run(ctx, machine.Cmd{Args: []string{"kubelet", "--version"}, Output: &out}); err != nil {
			return "", fmt.Errorf("asking kubelet for its version: %w", err)
		}
		version = out.String()
	}
	gate, err := openyurt.PlainLists(version)
	if err != nil {
		return "", fmt.Errorf("asking kubelet for its version: %w", err)
	}
	return gate, nil
}

// redirectFlags adds to kubeadm-flags.env the arguments that redirect kubelet to yurthub.
func redirectFlags(env []byte, gate string, labels map[string]string) ([]byte, error) {
	env = directFlags(env)
	if !member.KubeadmArgs.Match(env) {
		return nil, fmt.Errorf("redirecting kubelet to yurthub: %s has no line KUBELET_KUBEADM_ARGS=\"…\"", member.KubeadmFlags)
	}
	return kubeadm.EachArgs(env, func(args string) string { return openyurt.Redirect(registerFlags(args, labels), gate) }), nil
}

// directFlags removes from kubeadm-flags.env the arguments that redirect kubelet to yurthub.
func directFlags(env []byte) []byte {
	return kubeadm.EachArgs(env, func(args string) string {
		for {
			rest, turned := openyurt.Unredirect(args)
			if turned == "" {
				return rest
			}
			args = rest
		}
	})
}

// givenLabels returns all labels in the --node-labels of args, as key=value.
func givenLabels(args string) []string {
	var out []string
	for _, m := range kubeadm.NodeLabels.FindAllStringSubmatch(args, -1) {
		out = append(out, strings.Split(strings.TrimSuffix(m[2], `"`), ",")...)
	}
	return out
}

// registerFlags replaces the OpenYurt labels in --node-labels with labels, which may be empty.
// kubelet uses them if it registers its Node again. kubeadm wrote the previous ones at the join.
func registerFlags(args string, labels map[string]string) string {
	var kept []string
	right, seen := map[string]bool{}, 0
	for _, l := range givenLabels(args) {
		k, v, _ := strings.Cut(l, "=")
		if openyurt.IsLabel(k) {
			seen++
			if want, ok := labels[k]; ok && want == v {
				right[k] = true
			}
		} else if l != "" {
			kept = append(kept, l)
		}
	}
	if len(right) == len(labels) && seen == len(labels) {
		return args // the labels are right; their order does not matter
	}
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		kept = append(kept, k+"="+labels[k])
	}
	flag := ""
	if len(kept) > 0 {
		flag = "--node-labels=" + strings.Join(kept, ",")
	}
	placed := false
	out := kubeadm.NodeLabels.ReplaceAllStringFunc(args, func(old string) string {
		if placed || flag == "" {
			return ""
		}
		placed = true
		return old[:strings.Index(old, "--")] + flag
	})
	if !placed && flag != "" {
		out = strings.TrimRight(out, " ") + " " + flag
	}
	return out
}

// withRegistration returns kubeadm-flags.env with these OpenYurt labels.
func withRegistration(env []byte, labels map[string]string) []byte {
	return kubeadm.EachArgs(env, func(args string) string { return registerFlags(args, labels) })
}

// register restarts kubelet with these OpenYurt labels.
func register(ctx context.Context, e *machine.Env, labels map[string]string) error {
	flags, err := e.Read(member.KubeadmFlags)
	if err != nil {
		return fmt.Errorf("setting the labels that kubelet registers with: %w", err)
	}
	return kubeadm.RestartFor(ctx, e, "setting the labels that kubelet registers with", kubeadm.Writing(member.KubeadmFlags, withRegistration(flags, labels), 0o644))
}

// RedirectPhase redirects kubelet to yurthub. labels are the labels with which kubelet registers
// its Node.
func RedirectPhase(kubernetes string, labels map[string]string) run.Phase {
	return run.Phase{
		Name: "kubelet-redirect", Doc: "kubelet talks to yurthub", Timeout: 2 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			flags := e.Contents(member.KubeadmFlags)
			if e.Exists(kubeadm.KubeletRestart) || string(e.Contents(openyurt.KubeletConf)) != openyurt.Kubeconfig {
				return run.Todo, nil
			}
			gate, err := plainLists(ctx, e, kubernetes)
			if err != nil {
				return run.Todo, err
			}
			if want, err := redirectFlags(flags, gate, labels); err != nil || string(want) != string(flags) {
				return run.Todo, nil // Run reports the error in these flags
			}
			if state, err := e.UnitState(ctx, ondisk.UnitKubelet); err != nil || state != "active" {
				return run.Todo, err
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error { return redirectToHub(ctx, e, kubernetes, labels) },
		// If yurthub serves, keep the redirection: while the API servers are unreachable, kubelet
		// can connect to yurthub only.
		Undo: func(ctx context.Context, e *machine.Env) error {
			if hubReady(ctx, e) == nil {
				return nil
			}
			return redirectToServer(ctx, e, labels)
		},
	}
}

func redirectToHub(ctx context.Context, e *machine.Env, kubernetes string, labels map[string]string) error {
	flags, err := e.Read(member.KubeadmFlags)
	if err != nil {
		return fmt.Errorf("redirecting kubelet to yurthub: %w", err)
	}
	gate, err := plainLists(ctx, e, kubernetes)
	if err != nil {
		return err
	}
	flags, err = redirectFlags(flags, gate, labels)
	if err != nil {
		return err
	}
	return kubeadm.RestartFor(ctx, e, "redirecting kubelet to yurthub",
		kubeadm.Writing(openyurt.KubeletConf, []byte(openyurt.Kubeconfig), 0o600), kubeadm.Writing(member.KubeadmFlags, flags, 0o644))
}

// redirectToServer redirects kubelet from yurthub to the API server. labels, which may be empty,
// are the OpenYurt labels with which kubelet registers its Node.
func redirectToServer(ctx context.Context, e *machine.Env, labels map[string]string) error {
	flags, err := e.Read(member.KubeadmFlags)
	if err != nil {
		return fmt.Errorf("redirecting kubelet to the API server: %w", err)
	}
	flags = withRegistration(directFlags(flags), labels)
	return kubeadm.RestartFor(ctx, e, "redirecting kubelet to the API server",
		kubeadm.Writing(member.KubeadmFlags, flags, 0o644), func(e *machine.Env) error { return e.Remove(openyurt.KubeletConf) })
}

// registeredAs returns the OpenYurt labels that kubelet registers with.
func registeredAs(env []byte) map[string]string {
	out := map[string]string{}
	for _, l := range givenLabels(string(env)) {
		if k, v, _ := strings.Cut(l, "="); openyurt.IsLabel(k) {
			out[k] = v
		}
	}
	return out
}
