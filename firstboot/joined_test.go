package firstboot

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/cluster/api"
)

// TestSettingsChangedAfterTheJoin: what kubeadm and kubelet take from a site
// once is applied later, or said.
func TestSettingsChangedAfterTheJoin(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, before, after string
		taints              []api.Taint
		note                string
	}{
		{"an argument", "kubeletExtraArgs: {v: '2', max-pods: '50'}", "kubeletExtraArgs: {v: '4'}", nil,
			"kubeletExtraArgs of the site are not in place (max-pods, v)"},
		{"the socket", "taints: []", "criSocket: unix:///run/other.sock", nil, "criSocket of the site is not in place"},
		{"a taint more", "taints: []", "taints: [{key: shop, value: a, effect: NoExecute}]", nil,
			"kubectl taint node edge-sn0042 --overwrite shop=a:NoExecute"},
		{"a taint that is there", "taints: []", "taints: [{key: shop, effect: NoExecute}]", []api.Taint{{Key: "shop", Effect: "NoExecute"}}, ""},
		{"a taint less", "taints: [{key: shop, effect: NoExecute}]", "taints: []", []api.Taint{{Key: "shop", Effect: "NoExecute"}},
			"kubectl taint node edge-sn0042 --overwrite shop:NoExecute-"},
		{"a taint that somebody took away", "taints: [{key: shop, effect: NoExecute}]", "taints: [{key: shop, effect: NoExecute}]", nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t, tc.before)
			w.mustBoot()
			w.cluster.nodes["edge-sn0042"].Spec.Taints = tc.taints
			w.stamp(ownDev, w.site(tc.after))
			w.powerOn()
			w.mustBoot()
			notes := strings.Join(w.state().Notes, "\n")
			if tc.note == "" && notes != "" || !strings.Contains(notes, tc.note) {
				t.Errorf("notes: %q", notes)
			}
			if tc.note != "" && !w.said(tc.note) {
				t.Error("it is not on the console")
			}
		})
	}
}

// TestLabelRemoved: the Node loses what the site lost, and nothing else.
func TestLabelRemoved(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "labels: {zone: north, shop: '12'}")
	w.mustBoot()
	n := w.cluster.nodes["edge-sn0042"]
	n.Metadata.Labels["mine"] = "yes"
	w.put(kubeadmFlags, "KUBELET_KUBEADM_ARGS=\"--a=b --node-labels=shop=12,zone=north --c=d\"\n")
	w.stamp(ownDev, w.site("labels: {zone: north}"))
	w.powerOn()
	w.mustBoot()
	if l := n.Metadata.Labels; l["zone"] != "north" || l["mine"] != "yes" || len(l) != 2 {
		t.Errorf("labels: %v", l)
	}
	if flags := w.get(kubeadmFlags); flags != "KUBELET_KUBEADM_ARGS=\"--a=b --node-labels=zone=north --c=d\"\n" {
		t.Errorf("kubelet registers with %s", flags)
	}
	// Somebody else's label of the same name is his.
	n.Metadata.Labels["shop"] = "12"
	w.powerOn()
	w.mustBoot()
	if n.Metadata.Labels["shop"] != "12" || w.said("that the site has no more") {
		t.Errorf("labels: %v", n.Metadata.Labels)
	}
	w.cluster.labelsKept = true
	w.stamp(ownDev, w.site())
	w.powerOn()
	if err := w.boot(); err == nil || !w.said("has labels that the site has no more: zone=north") || !w.said("kubectl label node edge-sn0042 zone-") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}
