package firstboot

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
)

// TestVIPInTheCluster: a VIP inside the cluster's service ranges is said, one
// that a Service has is rejected, and what cannot be asked stops nobody.
func TestVIPInTheCluster(t *testing.T) {
	t.Parallel()
	const inRange, taken = "the VIP 10.103.97.2 lies in the cluster's service range", "is the address of the cluster's Service shop/till"
	for _, c := range []struct {
		name  string
		setup func(*fakeCluster)
		want  string // what is said; empty: nothing of the VIP
		fails bool
	}{
		{"the cluster tells nothing", func(*fakeCluster) {}, "", false},
		{"kubeadm's range", func(c *fakeCluster) { c.serviceSubnet = "10.96.0.0/12" }, inRange + " 10.96.0.0/12", false},
		{"another range", func(c *fakeCluster) { c.serviceSubnet = "10.32.0.0/16,fd00:10::/108" }, "", false},
		{"a ServiceCIDR", func(c *fakeCluster) { c.serviceCIDRs = []string{"10.103.0.0/16"} }, inRange + " 10.103.0.0/16", false},
		{"another Service", func(c *fakeCluster) {
			c.serviceSubnet, c.services = "10.96.0.0/12", map[string]string{"10.103.97.3": "till", "None": "headless"}
		}, inRange, false},
		{"the very address", func(c *fakeCluster) {
			c.serviceSubnet, c.services = "10.96.0.0/12", map[string]string{"10.103.97.2": "till"}
		}, taken, true},
		{"without the selector", func(c *fakeCluster) {
			c.serviceSubnet, c.services, c.noSelector = "10.96.0.0/12", map[string]string{"10.103.97.2": "till"}, true
		}, taken, true},
		{"as the second address", func(c *fakeCluster) {
			c.serviceSubnet, c.services = "fd00:10::/108,10.96.0.0/12", map[string]string{"fd00:10::7,10.103.97.2": "till"}
		}, taken, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := nativeWorld(t)
			c.setup(w.cluster)
			err := w.boot()
			said := strings.Join(w.console, "\n")
			if (err != nil) != c.fails || strings.Contains(said, "VIP 10.103.97.2") != (c.want != "") || !strings.Contains(said, c.want) {
				t.Fatalf("%v\n%s", err, said)
			}
			if c.fails && w.state().Result != ondisk.ResultFailed {
				t.Errorf("result %s", w.state().Result)
			}
			if n := strings.Count(said, inRange); n > 1 {
				t.Errorf("it was said %d times", n)
			}
		})
	}
}

// TestVIPInTheNextCluster: what was said of one cluster holds for no other.
func TestVIPInTheNextCluster(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.cluster.serviceSubnet = "10.96.0.0/12"
	w.mustBoot()
	w.rebuild()
	w.cluster.serviceSubnet, w.cluster.services = "10.96.0.0/12", map[string]string{"10.103.97.2": "till"}
	w.stamp(ownDev, w.site(withToken))
	// First boot once more, while the machine is on.
	if err := w.boot(); err == nil || !w.said("is the address of the cluster's Service shop/till") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

// TestServiceTakesTheVIPLater: whoever may make a Service must not be able to
// stop nodes that were Ready.
func TestServiceTakesTheVIPLater(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.mustBoot()
	w.cluster.serviceSubnet, w.cluster.services = "10.96.0.0/12", map[string]string{"10.103.97.2": "till"}
	w.mustBoot()
	if !w.said("the VIP 10.103.97.2 is the address of the cluster's Service shop/till") {
		t.Errorf("it is not said:\n%s", strings.Join(w.console, "\n"))
	}
	if s := w.state(); s.Result != ondisk.ResultDone {
		t.Errorf("result %s", s.Result)
	}
}
