package controlplane_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// TestEveryKubeadm checks that the phases of init and reset use the proxy of their Site, as the
// join does.
func TestEveryKubeadm(t *testing.T) {
	t.Parallel()
	ran := map[string]int{}
	watch := func(w *worldtest.World, e *machine.Env) *machine.Env {
		run := e.Run
		e.Run = func(ctx context.Context, c machine.Cmd) error {
			if c.Args[0] != "kubeadm" {
				return run(ctx, c)
			}
			ran[c.Args[1]]++
			for _, want := range []string{"GOGC=off", "HTTPS_PROXY=http://192.0.2.99:3128"} {
				if !slices.Contains(c.Env, want) {
					t.Errorf("%q runs without %s: %q", c.Args, want, c.Env)
				}
			}
			if c.Output == nil {
				t.Errorf("the output of %q is not read", c.Args)
			}
			return run(ctx, c)
		}
		return e
	}
	w := nativeWorld(t, "network: {proxy: {https: 'http://192.0.2.99:3128'}}")
	if err := w.Run(firstboot.New(watch(w, w.Env()))); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if _, err := firstboot.Reset(t.Context(), watch(w, w.Env()), func(run.Step) {}); err != nil {
		t.Fatal(err)
	}
	m := newControlPlane(t, mintedSites(t, 1))
	m.site.Network.Proxy.HTTPS = configs.NewSecret("http://192.0.2.99:3128")
	m.stampSite(m.site)
	if err := m.Run(firstboot.New(watch(m.World, m.Env()))); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	if ran["join"] != 1 || ran["reset"] != 1 || ran["init"] < 5 {
		t.Errorf("kubeadm ran %v", ran)
	}
}
