package kernel

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// settingsDir makes a /proc/sys/net with these files in ipv4/.
func settingsDir(t *testing.T, files map[string]string) (dir string, read func(string) string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range files {
		p := filepath.Join(dir, "ipv4", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir, func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, "ipv4", name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
}

func TestSysctls(t *testing.T) {
	dir, read := settingsDir(t, map[string]string{"vs/expire_nodest_conn": "0\n", "vs/conntrack": "0\n",
		"conf/all/arp_ignore": "2\n", "conf/all/arp_announce": "0\n"})
	k := newSysctls(dir)
	changed, err := k.ensure()
	if err != nil || len(changed) != 3 || !slices.ContainsFunc(changed, func(p string) bool { return strings.HasSuffix(p, "vs/conntrack") }) {
		t.Errorf("%v %v", changed, err)
	}
	if c, e, i := read("vs/conntrack"), read("vs/expire_nodest_conn"), read("conf/all/arp_ignore"); c != "1" || e != "1" || i != "2" {
		t.Errorf("conntrack %s, expire_nodest_conn %s, arp_ignore %s", c, e, i)
	}
}

// TestSysctlsUntracked checks that a kernel without connection tracking for IPVS is reported, and
// the other settings are applied.
func TestSysctlsUntracked(t *testing.T) {
	dir, read := settingsDir(t, map[string]string{"vs/expire_nodest_conn": "0\n", "conf/all/arp_ignore": "1\n", "conf/all/arp_announce": "2\n"})
	k := newSysctls(dir)
	if _, err := k.ensure(); !errors.Is(err, errUntracked) {
		t.Errorf("got %v", err)
	}
	if read("vs/expire_nodest_conn") != "1" {
		t.Error("the other settings were not made")
	}
	// Without the module, no setting is reported as missing.
	if err := os.RemoveAll(filepath.Join(dir, "ipv4/vs")); err != nil {
		t.Fatal(err)
	}
	if _, err := newSysctls(dir).ensure(); err != nil {
		t.Errorf("without IP_VS: %v", err)
	}
}
