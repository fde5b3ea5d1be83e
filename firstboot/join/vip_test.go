package join_test

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestVIPInTheCluster checks that a VIP in the cluster's service ranges is reported, a VIP that is
// a Service's address is rejected, and unreadable ranges do not stop the node.
func TestVIPInTheCluster(t *testing.T) {
	t.Parallel()
	const inRange, taken = "the VIP 10.103.97.2 is in the cluster's service range", "is the address of the cluster's Service shop/till"
	for _, c := range []struct {
		name  string
		setup func(*worldtest.Cluster)
		want  string // of the message; empty: none about the VIP
		fails bool
	}{
		{"the cluster tells nothing", func(*worldtest.Cluster) {}, "", false},
		{"kubeadm's range", func(c *worldtest.Cluster) { c.ServiceSubnet = "10.96.0.0/12" }, inRange + " 10.96.0.0/12", false},
		{"another range", func(c *worldtest.Cluster) { c.ServiceSubnet = "10.32.0.0/16,fd00:10::/108" }, "", false},
		{"a ServiceCIDR", func(c *worldtest.Cluster) { c.ServiceCIDRs = []string{"10.103.0.0/16"} }, inRange + " 10.103.0.0/16", false},
		{"another Service", func(c *worldtest.Cluster) {
			c.ServiceSubnet, c.Services = "10.96.0.0/12", map[string]string{"10.103.97.3": "till", "None": "headless"}
		}, inRange, false},
		{"the very address", func(c *worldtest.Cluster) {
			c.ServiceSubnet, c.Services = "10.96.0.0/12", map[string]string{"10.103.97.2": "till"}
		}, taken, true},
		{"without the selector", func(c *worldtest.Cluster) {
			c.ServiceSubnet, c.Services, c.NoFieldSelector = "10.96.0.0/12", map[string]string{"10.103.97.2": "till"}, true
		}, taken, true},
		{"as the second address", func(c *worldtest.Cluster) {
			c.ServiceSubnet, c.Services = "fd00:10::/108,10.96.0.0/12", map[string]string{"fd00:10::7,10.103.97.2": "till"}
		}, taken, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := nativeWorld(t)
			c.setup(w.Cluster)
			err := w.Boot()
			said := strings.Join(w.Console, "\n")
			if (err != nil) != c.fails || strings.Contains(said, "VIP 10.103.97.2") != (c.want != "") || !strings.Contains(said, c.want) {
				t.Fatalf("%v\n%s", err, said)
			}
			if c.fails && w.State().Result != ondisk.ResultFailed {
				t.Errorf("result %s", w.State().Result)
			}
			if n := strings.Count(said, inRange); n > 1 {
				t.Errorf("the message was printed %d times", n)
			}
		})
	}
}

// TestVIPInTheNextCluster checks that the result of the check in one cluster does not count in
// another cluster.
func TestVIPInTheNextCluster(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Cluster.ServiceSubnet = "10.96.0.0/12"
	w.MustBoot()
	w.Rebuild()
	w.Cluster.ServiceSubnet, w.Cluster.Services = "10.96.0.0/12", map[string]string{"10.103.97.2": "till"}
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	// First boot runs again without a reboot.
	if err := w.Boot(); err == nil || !w.ConsoleHas("is the address of the cluster's Service shop/till") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestServiceTakesTheVIPLater checks that a Service that gets the VIP later does not stop nodes
// that have been Ready.
func TestServiceTakesTheVIPLater(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.Cluster.ServiceSubnet, w.Cluster.Services = "10.96.0.0/12", map[string]string{"10.103.97.2": "till"}
	w.MustBoot()
	if !w.ConsoleHas("the VIP 10.103.97.2 is the address of the cluster's Service shop/till") {
		t.Errorf("the console does not report the VIP:\n%s", strings.Join(w.Console, "\n"))
	}
	if s := w.State(); s.Result != ondisk.ResultDone {
		t.Errorf("result %s", s.Result)
	}
}
