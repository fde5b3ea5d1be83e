package join

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// If kubeletExtraArgs changes in the Site, first boot writes it to kubeadm-flags.env and restarts
// kubelet. If kubelet then does not start, first boot restores the former arguments.

// RefusedArgs is the file that records arguments with which kubelet did not start. A reboot removes
// it.
const RefusedArgs = ondisk.RunMark + "refused-kubelet-args"

// argsTimeout is how long kubelet may take to become healthy.
const argsTimeout = 2 * time.Minute

// ArgsPhase makes kubelet run with the Site's arguments.
func ArgsPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "kubelet-args", Doc: "kubelet has the Site's arguments", Timeout: 3*argsTimeout + 3*time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			j, ok := member.ReadJoinedAs(e)
			if !ok {
				return run.Done, nil // the node joined before arguments were recorded
			}
			member.NoteSocketKept(e, j, active.Site)
			want := wantedArgs(ctx, e, active, j)
			switch {
			case j.TryingArgs != nil: // a trial was interrupted
				return run.Todo, nil
			case kubeadm.LacksConfDir(e, want):
				return run.Todo, nil
			case maps.Equal(want, j.KubeletExtraArgs):
				return run.Done, nil
			case argsRefused(e, want):
				noteRefusedArgs(e, j.KubeletExtraArgs, want)
				return run.Done, nil
			}
			return run.Todo, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			j, _ := member.ReadJoinedAs(e)
			return changeArgs(ctx, e, j, wantedArgs(ctx, e, active, j))
		},
	}
}

// wantedArgs returns the Site's arguments, plus node-ip if both node and cluster are dual-stack.
func wantedArgs(ctx context.Context, e *machine.Env, active *site.Active, j member.JoinedAs) map[string]string {
	want := kubeadm.SiteArgs(active)
	if ip := twoAddresses(ctx, e, active.Site, j); ip != "" {
		want["node-ip"] = ip
	}
	return want
}

// twoAddresses returns --node-ip for a dual-stack node in a dual-stack cluster. It returns "" for
// any other node, or if the Site sets node-ip or cloud-provider.
func twoAddresses(ctx context.Context, e *machine.Env, site *configs.Site, j member.JoinedAs) string {
	if _, given := site.KubeletExtraArgs["node-ip"]; given || site.KubeletExtraArgs["cloud-provider"] != "" {
		return ""
	}
	both, err := network.BothAddresses(e, site)
	if err != nil {
		// The second address may appear later. Until then, keep kubelet's arguments.
		e.Log.Info("the node's second address is unknown", "error", err)
		both = ""
		if last := j.KubeletExtraArgs["node-ip"]; strings.HasPrefix(last, network.NodeAddress(e)+",") {
			both = last
		}
	}
	if both == "" {
		return ""
	}
	dual, err := dualStack(ctx, e)
	if err != nil {
		e.Log.Info("cannot find out whether the cluster is dual-stack", "error", err)
		dual = strings.Contains(j.KubeletExtraArgs["node-ip"], ",") // assume what kubelet's current arguments show
	}
	if !dual {
		return ""
	}
	return both
}

// dualStack reports whether the cluster's Services have IPv4 and IPv6 addresses.
func dualStack(ctx context.Context, e *machine.Env) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c, err := member.NodeClient(e)
	if err != nil {
		return false, err
	}
	ranges, err := serviceRanges(ctx, c)
	if err != nil {
		return false, err
	}
	is4 := func(p netip.Prefix) bool { return p.Addr().Is4() }
	is6 := func(p netip.Prefix) bool { return p.Addr().Is6() }
	return slices.ContainsFunc(ranges, is4) && slices.ContainsFunc(ranges, is6), nil
}

// changeArgs restarts kubelet with the wanted arguments. If kubelet does not start, it restores the
// former ones.
func changeArgs(ctx context.Context, e *machine.Env, j member.JoinedAs, want map[string]string) error {
	flags, err := e.Read(member.KubeadmFlags)
	if err != nil {
		return fmt.Errorf("giving kubelet the Site's arguments: %w", err)
	}
	former, cutOff := j.KubeletExtraArgs, j.TryingArgs != nil
	conf := kubeadm.LacksConfDir(e, want)
	if maps.Equal(want, former) && !conf && !cutOff {
		return nil // want has changed since Check ran
	}
	if err := kubeadm.WriteConfDir(e, want); err != nil {
		return err
	}
	// The file may contain arguments of an interrupted trial.
	ours := member.Union(former, j.TryingArgs)
	next := withArgs(flags, ours, want)
	changed := changedArgs(ours, want)
	if changed == "" {
		changed = "config-dir" // only the files in that directory have changed
	}
	e.Waiting("kubelet to start with other arguments (%s)", changed)
	// After an interrupted trial, kubelet may already run with the new arguments. Then its health
	// does not show whether the former ones work.
	wasWell := cutOff || awaitKubelet(ctx, e) == nil
	if ctx.Err() != nil {
		return ctx.Err()
	}
	j.TryingArgs = member.Union(want, nil)
	if err := j.Write(e); err != nil {
		return err
	}
	if err := restartWith(ctx, e, next); err != nil {
		return err
	}
	bad := awaitKubelet(ctx, e)
	if ctx.Err() != nil {
		return ctx.Err() // the next run continues
	}
	if bad == nil || !wasWell { // if kubelet was not healthy before, keep the new arguments
		j.KubeletExtraArgs, j.TryingArgs = want, nil
		if err := j.Write(e); err != nil {
			return err
		}
		e.Console(fmt.Sprintf("kubelet was restarted with the Site's arguments: %s changed", changed))
		return bad
	}
	e.Log.Warn("kubelet does not start with the Site's arguments: restoring the previous ones", "changed", changed, "error", bad)
	if err := restartWith(ctx, e, withArgs(next, member.Union(ours, want), former)); err != nil {
		return err
	}
	// RefusedArgs exists until the next boot, so that kubelet is not restarted repeatedly.
	b, err := json.Marshal(want)
	if err != nil {
		return fmt.Errorf("recording the arguments that kubelet rejects: %w", err)
	}
	if err := e.WriteFile(RefusedArgs, b, machine.Mode(0o600)); err != nil {
		return fmt.Errorf("recording the arguments that kubelet rejects: %w", err)
	}
	j.TryingArgs = nil
	if err := j.Write(e); err != nil {
		return err
	}
	return awaitKubelet(ctx, e)
}

func restartWith(ctx context.Context, e *machine.Env, flags []byte) error {
	return kubeadm.RestartFor(ctx, e, "giving kubelet the Site's arguments", kubeadm.Writing(member.KubeadmFlags, flags, 0o644))
}

// withArgs returns kubeadm-flags.env with the arguments in before replaced by those in after. The
// arguments that redirect kubelet to yurthub stay at the end.
func withArgs(env []byte, before, after map[string]string) []byte {
	return kubeadm.EachArgs(env, func(args string) string {
		args, tail := openyurt.Unredirect(args)
		var kept []string
		for _, f := range strings.Fields(args) {
			name, _, _ := strings.Cut(strings.TrimPrefix(f, "--"), "=")
			_, was := before[name]
			_, is := after[name]
			if !was && !is {
				kept = append(kept, f)
			}
		}
		for _, k := range slices.Sorted(maps.Keys(after)) {
			kept = append(kept, "--"+k+"="+after[k])
		}
		return strings.Join(kept, " ") + tail
	})
}

// changedArgs names the arguments that differ between two sets.
func changedArgs(before, after map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(member.Union(before, after))) {
		was, had := before[k]
		if is, has := after[k]; is != was || has != had {
			out = append(out, k)
		}
	}
	return strings.Join(out, ", ")
}

func argsRefused(e *machine.Env, want map[string]string) bool {
	var refused map[string]string
	b := e.Contents(RefusedArgs)
	return b != nil && json.Unmarshal(b, &refused) == nil && maps.Equal(refused, want)
}

func noteRefusedArgs(e *machine.Env, have, want map[string]string) {
	e.Note("kubeletExtraArgs of the Site are not in effect (%s): kubelet did not start with them, and runs with the previous ones. To fix: correct them in site.yaml; `journalctl -u kubelet` on the machine shows why",
		changedArgs(have, want))
}

// awaitKubelet waits until kubelet's unit is steady (machine.SteadyUnit) and /healthz returns 200.
func awaitKubelet(ctx context.Context, e *machine.Env) error {
	err := e.Retry(ctx, machine.Wait{Every: 2 * time.Second, For: argsTimeout}, func() error { return kubeletHealthy(ctx, e) })
	if err != nil {
		return run.Advise(fmt.Errorf("kubelet does not start: %w", err), "see `journalctl -u kubelet` on the machine")
	}
	return nil
}

// kubeletHealthy checks kubelet's unit, how long it has been active and, as kubeadm does, /healthz.
func kubeletHealthy(ctx context.Context, e *machine.Env) error {
	if err := e.SteadyUnit(ctx, ondisk.UnitKubelet); err != nil {
		return err
	}
	var conf struct {
		Address string `yaml:"healthzBindAddress"`
		Port    *int   `yaml:"healthzPort"`
	}
	if err := yamltree.Unmarshal(e.Contents(ondisk.KubeletConfig), &conf); err != nil {
		return fmt.Errorf("reading %s: %w", ondisk.KubeletConfig, err)
	}
	port := 10248
	if conf.Port != nil {
		port = *conf.Port
	}
	if port == 0 { // kubelet has no /healthz
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	host := cmp.Or(conf.Address, "127.0.0.1")
	if a, err := netip.ParseAddr(host); err == nil && a.IsUnspecified() {
		host = "127.0.0.1"
	}
	body, code, err := machine.LocalGet(ctx, e, net.JoinHostPort(host, strconv.Itoa(port)), "/healthz")
	if err == nil && code != 200 {
		err = fmt.Errorf("/healthz answers %d: %s", code, body)
	}
	return err
}
