package join_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// TestSettingsChangedAfterTheJoin checks that settings that kubeadm and kubelet use only at the
// join are applied later, or reported.
func TestSettingsChangedAfterTheJoin(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, before, after string
		taints              []kubeapi.Taint
		note                string
	}{
		{"the socket", "taints: []", "criSocket: unix:///run/other.sock", nil, "criSocket of the Site is not in effect"},
		{"a taint more", "taints: []", "taints: [{key: shop, value: a, effect: NoExecute}]", nil,
			"kubectl taint node edge-sn0042 --overwrite shop=a:NoExecute"},
		{"a taint that is there", "taints: []", "taints: [{key: shop, effect: NoExecute}]", []kubeapi.Taint{{Key: "shop", Effect: "NoExecute"}}, ""},
		{"a taint less", "taints: [{key: shop, effect: NoExecute}]", "taints: []", []kubeapi.Taint{{Key: "shop", Effect: "NoExecute"}},
			"kubectl taint node edge-sn0042 --overwrite shop:NoExecute-"},
		{"a taint that somebody took away", "taints: [{key: shop, effect: NoExecute}]", "taints: [{key: shop, effect: NoExecute}]", nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t, tc.before)
			w.MustBoot()
			w.Cluster.Nodes["edge-sn0042"].Spec.Taints = tc.taints
			w.Stamp(worldtest.SlotDevice, w.Site(tc.after))
			w.PowerOn()
			w.MustBoot()
			notes := strings.Join(w.State().Notes, "\n")
			if tc.note == "" && notes != "" || !strings.Contains(notes, tc.note) {
				t.Errorf("notes: %q", notes)
			}
			if tc.note != "" && !w.ConsoleHas(tc.note) {
				t.Error("the note is not on the console")
			}
		})
	}
}

// TestArgumentsChangedAfterTheJoin checks that kubelet is restarted with the Site's new arguments,
// on each kind of node and after a power cut at any point.
func TestArgumentsChangedAfterTheJoin(t *testing.T) {
	const before, after = "kubeletExtraArgs: {v: '2', max-pods: '50'}", "kubeletExtraArgs: {v: '4', system-reserved: 'cpu=100m,memory=50Mi'}"
	for form, c := range map[string]struct {
		world func(*testing.T) *worldtest.World
		more  []string
	}{
		"native":    {func(t *testing.T) *worldtest.World { return nativeWorld(t) }, nil},
		"unit":      {func(t *testing.T) *worldtest.World { return edgeWorld(t) }, []string{"nodeType: edge", "nodePool: shanghai"}},
		"staticPod": {podWorld, []string{"nodeType: edge", "nodePool: shanghai"}},
	} {
		for _, bad := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, bad %v", form, bad), func(t *testing.T) {
				t.Parallel()
				w := c.world(t)
				w.UseSingleMaster()
				w.Stamp(worldtest.SlotDevice, w.Site(append(slices.Clone(c.more), worldtest.WithToken, before)...))
				w.MustBoot()
				was := w.Get(member.KubeadmFlags)
				if strings.Count(was, "--max-pods=50") != 1 || strings.Count(was, "--v=2") != 1 {
					t.Fatalf("kubeadm wrote %s", was)
				}
				w.Stamp(worldtest.SlotDevice, w.Site(append(slices.Clone(c.more), after)...))
				w.PowerOn()
				if bad {
					w.RejectedKubeletArg = "system-reserved"
				}
				judge := func(w *worldtest.World, cut string) {
					t.Helper()
					flags := w.Get(member.KubeadmFlags)
					note := strings.Contains(strings.Join(w.State().Notes, "\n"), "kubeletExtraArgs of the Site are not in effect (max-pods, system-reserved, v)")
					has := strings.Contains(flags, "--v=4") && strings.Contains(flags, "--system-reserved=cpu=100m,memory=50Mi") && !strings.Contains(flags, "max-pods")
					had := argsOf(flags) == argsOf(was)
					if w.Units[ondisk.UnitKubelet] != "active" || note != bad || has == bad || had != bad ||
						strings.Contains(flags, openyurt.RedirectFlags) != strings.Contains(was, openyurt.RedirectFlags) || strings.Count(flags, "--v=") > 1 {
						t.Errorf("%s: notes %q, kubelet has\n%swas\n%s%s", cut, w.State().Notes, flags, was, strings.Join(w.Console, "\n"))
					}
				}
				whole := w.Clone(t)
				whole.RejectedKubeletArg = w.RejectedKubeletArg
				whole.MustBoot()
				judge(whole, "not cut")
				restarts := 0
				for _, n := range whole.EffectNames {
					if n == "restart "+ondisk.UnitKubelet {
						restarts++
					}
				}
				if want := map[bool]int{false: 1, true: 2}[bad]; restarts != want {
					t.Errorf("kubelet was restarted %d times, want %d", restarts, want)
				}
				whole.EffectNames = nil
				if err := os.RemoveAll(filepath.Join(whole.Root, ondisk.RunDir)); err != nil { // like systemd
					t.Fatal(err)
				}
				whole.MustBoot() // first boot runs again, started by its timer
				if slices.Contains(whole.EffectNames, "restart "+ondisk.UnitKubelet) {
					t.Error("kubelet was restarted once more")
				}
				followed := map[[32]byte]bool{}
				for n := 1; form == "unit"; n += worldtest.EveryCut() { // the most complex form
					cut := w.Clone(t)
					cut.RejectedKubeletArg, cut.PowerCutAt = w.RejectedKubeletArg, n
					if cut.Boot() == nil {
						break
					}
					cut.PowerOn()
					left := cut.Files()
					state := cut.Fingerprint(t, left)
					if followed[state] {
						continue // the state after another cut is the same
					}
					followed[state] = true
					corrected := cut.CloneWith(t, left)
					corrected.RejectedKubeletArg = w.RejectedKubeletArg
					cut.MustBoot()
					judge(cut, fmt.Sprintf("cut at effect %d", n))

					corrected.Stamp(worldtest.SlotDevice, corrected.Site(append(slices.Clone(c.more), before)...))
					corrected.MustBoot()
					if flags := corrected.Get(member.KubeadmFlags); argsOf(flags) != argsOf(was) || corrected.ConsoleHas("not in effect") {
						t.Errorf("cut at effect %d, and corrected: notes %q, kubelet has\n%swas\n%s", n, corrected.State().Notes, flags, was)
					}
				}
			})
		}
	}
}

// argsOf returns kubelet's arguments, sorted.
func argsOf(env string) string {
	_, args, _ := strings.Cut(strings.ReplaceAll(env, `"`, " "), "=")
	all := strings.Fields(args)
	slices.Sort(all)
	return strings.Join(all, " ")
}

// TestArgumentsWhileKubeletStarts checks that a kubelet that is still starting, as at each boot,
// counts as healthy before the change. A kubelet that ends soon after it was healthy does not.
func TestArgumentsWhileKubeletStarts(t *testing.T) {
	for _, loops := range []bool{false, true} {
		w := nativeWorld(t, "kubeletExtraArgs: {v: '2'}")
		w.MustBoot()
		was := w.Get(member.KubeadmFlags)
		w.Stamp(worldtest.SlotDevice, w.Site("kubeletExtraArgs: {v: '2', system-reserved: cpux}"))
		w.PowerOn()
		w.RejectedKubeletArg, w.HealthRefusals, w.CrashLoop = "system-reserved", 3, loops
		w.MustBoot()
		if flags := w.Get(member.KubeadmFlags); strings.Contains(flags, "system-reserved") || !w.ConsoleHas("not in effect") {
			t.Errorf("loops %v: notes %q, kubelet has\n%swas\n%s", loops, w.State().Notes, flags, was)
		}
	}
}

// TestArgumentsThatFixKubelet checks that a kubelet that was not running before keeps the Site's
// arguments, whether they help or not.
func TestArgumentsThatFixKubelet(t *testing.T) {
	for _, helps := range []bool{true, false} {
		w := nativeWorld(t, "kubeletExtraArgs: {v: '2'}")
		w.MustBoot()
		w.Put(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\"--v=2\"\n")
		w.Stamp(worldtest.SlotDevice, w.Site())
		w.PowerOn()
		w.RejectedKubeletArg = "--v=2"
		if !helps {
			w.RejectedKubeletArg = "KUBELET"
		}
		if err := w.Boot(); err != nil || w.ConsoleHas("kubelet does not start: connection refused") == helps {
			t.Errorf("helps %v: %v\n%s", helps, err, strings.Join(w.Console, "\n"))
		}
		if got := w.Get(member.KubeadmFlags); got != "KUBELET_KUBEADM_ARGS=\"\"\n" {
			t.Errorf("helps %v: kubelet has %s", helps, got)
		}
	}
}

// TestMeteredKubelet checks that kubelet reports less often on a metered link, and normally again
// afterwards. The configuration file exists before kubelet reads it.
func TestMeteredKubelet(t *testing.T) {
	const flag = "--config-dir=" + kubeadm.KubeletConfDir
	w := newWorld(t, "apiserver.cluster.local")
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, "ipvs: {profile: metered}"))
	w.MustBoot()
	if got := w.Get(member.KubeadmFlags); !strings.Contains(got, flag) || !strings.Contains(w.Get(kubeadm.MeteredConfFile), "nodeStatusReportFrequency: 1h") {
		t.Errorf("kubelet has %s and %s", got, w.Get(kubeadm.MeteredConfFile))
	}
	file, flags := slices.Index(w.EffectNames, "write "+kubeadm.MeteredConfFile), slices.Index(w.EffectNames, "kubeadm writes "+member.KubeadmFlags)
	if file < 0 || flags < file {
		t.Errorf("kubelet's flags name the directory before it exists: %d, %d", file, flags)
	}
	if slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) {
		t.Error("kubelet was restarted for settings that it could have had at the join")
	}
	w.PowerOn()
	w.MustBoot()
	if slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) {
		t.Error("kubelet is restarted at each boot")
	}
	w.Put(kubeadm.MeteredConfFile, "")
	w.PowerOn()
	w.MustBoot()
	if w.Get(kubeadm.MeteredConfFile) != kubeadm.MeteredConf || !slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) {
		t.Error("a damaged file was not written again")
	}
	w.Stamp(worldtest.SlotDevice, w.Site())
	w.PowerOn()
	w.MustBoot()
	if got := w.Get(member.KubeadmFlags); strings.Contains(got, "config-dir") {
		t.Errorf("kubelet has %s", got)
	}

	older := podWorld(t)
	older.Put(ondisk.ImageInfoFile, strings.Replace(older.Get(ondisk.ImageInfoFile), "v1.30.3", "v1.29.9", 1))
	older.Stamp(worldtest.SlotDevice, older.Site(worldtest.WithToken, "nodeType: edge", "nodePool: shanghai", "ipvs: {profile: metered}"))
	older.MustBoot()
	if got := older.Get(member.KubeadmFlags); strings.Contains(got, "config-dir") {
		t.Errorf("a kubelet that does not know the directory has %s", got)
	}
}

// TestNodeOfTwoFamilies checks that if the cluster's Services and the Site's fixed addresses have
// both families, the Node has both too.
func TestNodeOfTwoFamilies(t *testing.T) {
	const fixed = "network: {interfaces: [{name: e*, addresses: [192.0.2.50/24, 'fd00:2::50/64'], gateway: 192.0.2.1}]}"
	for _, c := range []struct {
		name  string
		lines []string
		cidrs []string
		want  string
	}{
		{"both", []string{fixed}, []string{"10.96.0.0/16", "fd00:96::/112"}, "--node-ip=192.0.2.50,fd00:2::50"},
		{"the cluster has one", []string{fixed}, []string{"10.96.0.0/16"}, ""},
		{"by DHCP", []string{"network: {interfaces: [{name: e*, dhcp: true}]}"}, []string{"10.96.0.0/16", "fd00:96::/112"}, ""},
		{"one family", []string{"network: {interfaces: [{name: e*, addresses: [192.0.2.50/24], gateway: 192.0.2.1}]}"}, []string{"10.96.0.0/16", "fd00:96::/112"}, ""},
		{"the Site names one", []string{fixed, "kubeletExtraArgs: {node-ip: 192.0.2.50}"}, []string{"10.96.0.0/16", "fd00:96::/112"}, "--node-ip=192.0.2.50"},
		{"a cloud's", []string{fixed, "kubeletExtraArgs: {cloud-provider: external}"}, []string{"10.96.0.0/16", "fd00:96::/112"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t, c.lines...)
			w.Cluster.ServiceCIDRs = c.cidrs
			w.MustBoot()
			if got := w.Get(member.KubeadmFlags); strings.Contains(got, "--node-ip") != (c.want != "") || !strings.Contains(got, c.want) {
				t.Errorf("kubelet has %s, want %q", got, c.want)
			}
			was := w.Get(member.KubeadmFlags)
			w.PowerOn()
			w.Offline = true
			w.Boot()
			if got := w.Get(member.KubeadmFlags); got != was || slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) {
				t.Errorf("without an API server the flags changed: %s, were %s", got, was)
			}
		})
	}
}

// TestLabelRemoved checks that the Node loses only the labels that the Site no longer has.
func TestLabelRemoved(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "labels: {zone: north, shop: '12'}")
	w.MustBoot()
	n := w.Cluster.Nodes["edge-sn0042"]
	n.Metadata.Labels["mine"] = "yes"
	w.Put(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\"--a=b --node-labels=shop=12,zone=north --c=d\"\n")
	w.Stamp(worldtest.SlotDevice, w.Site("labels: {zone: north}"))
	w.PowerOn()
	w.MustBoot()
	if l := n.Metadata.Labels; l["zone"] != "north" || l["mine"] != "yes" || len(l) != 2 {
		t.Errorf("labels: %v", l)
	}
	if flags := w.Get(member.KubeadmFlags); flags != "KUBELET_KUBEADM_ARGS=\"--a=b --node-labels=zone=north --c=d\"\n" {
		t.Errorf("kubelet registers with %s", flags)
	}
	// A label that somebody sets after its removal stays, even with the former value.
	n.Metadata.Labels["shop"] = "12"
	w.PowerOn()
	w.MustBoot()
	if n.Metadata.Labels["shop"] != "12" || w.ConsoleHas("that the Site no longer has") {
		t.Errorf("labels: %v", n.Metadata.Labels)
	}
	w.Cluster.LabelChangeDenied = true
	w.Stamp(worldtest.SlotDevice, w.Site())
	w.PowerOn()
	if err := w.Boot(); err == nil || !w.ConsoleHas("has labels that the Site no longer has: zone=north") || !w.ConsoleHas("kubectl label node edge-sn0042 zone-") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}
