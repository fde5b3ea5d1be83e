package firstboot

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestDamagedFilesOfANode checks that a node without a token, of which a power cut has damaged one
// file, keeps its credentials: it could not join again. A damaged or missing CA is restored, and the
// node is Ready.
func TestDamagedFilesOfANode(t *testing.T) {
	t.Parallel()
	for _, unpinned := range []bool{false, true} {
		for _, c := range []struct {
			file   string
			damage func(path string, b []byte) error
		}{
			{ondisk.KubeCA, func(p string, b []byte) error { return os.WriteFile(p, b[:len(b)/2], 0o644) }},
			{ondisk.KubeCA, func(p string, _ []byte) error { return os.Remove(p) }},
			{member.KubeadmFlags, func(p string, _ []byte) error { return os.WriteFile(p, nil, 0o644) }},
			{ondisk.KubeletConfig, func(p string, _ []byte) error { return os.WriteFile(p, nil, 0o644) }},
		} {
			w := nativeWorld(t)
			if unpinned {
				w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(worldtest.WithToken), "caCertHashes: ['"+w.Cluster.Pin+"']", "unsafeSkipCAVerification: true", 1))
			}
			w.MustBoot()
			path := filepath.Join(w.Root, c.file)
			was, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.damage(path, was); err != nil {
				t.Fatal(err)
			}
			w.PowerOn()
			err = w.Boot()
			is, _ := os.ReadFile(path)
			if c.file == ondisk.KubeCA && (err != nil || !bytes.Equal(is, was)) {
				t.Errorf("%s, unpinned %v: %v, the CA is\n%s", c.file, unpinned, err, is)
			}
			if !w.Has(ondisk.KubeletConf) || len(member.KubeletKeys(w.Env())) == 0 {
				t.Errorf("%s, unpinned %v: the credentials are removed\n%s", c.file, unpinned, strings.Join(w.Console, "\n"))
			}
		}
	}
}
