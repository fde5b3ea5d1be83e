package ipvs

import (
	"net/netip"
	"os"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
)

// FuzzLearned parses the cluster's answers and the file with the learned list.
func FuzzLearned(f *testing.F) {
	f.Add([]byte(`{"kind":"ConfigMap","data":{"masters":"192.0.2.1:6443\n192.0.2.2:6443"}}`))
	f.Add([]byte(`{"version":1,"servers":[{"vip":"192.0.2.9:6443","masters":["192.0.2.1:6443"]}]}`))
	vip := netip.MustParseAddrPort("192.0.2.9:6443")
	f.Fuzz(func(t *testing.T, raw []byte) {
		if masters, err := parseConfigMap(vip, raw); err == nil && len(masters) > maxLearned {
			t.Errorf("%d masters", len(masters))
		}
		d := NewDaemon(Options{StateDir: t.TempDir()})
		if err := os.WriteFile(d.learnedPath(), raw, 0o600); err != nil {
			t.Fatal(err)
		}
		// An unreadable file is replaced, a readable one is kept.
		if err := d.storeLearned(vip, func(s *ondisk.IPVSLearnedVirtual) { s.Masters = []string{"192.0.2.1:6443"} }); err != nil {
			t.Fatal(err)
		}
		if _, err := d.readLearned(); err != nil {
			t.Errorf("reading the stored list: %v", err)
		}
	})
}
