package media

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

// TestStampLooksIntoTheImage checks that stamping looks up groups, owners, paths, units and
// programs in raw and compressed images before it writes anything.
func TestStampLooksIntoTheImage(t *testing.T) {
	root := []tree.Node{
		dir("etc"), inline("etc/passwd", []byte("root:x:0:0:root:/root:/bin/bash\n")), inline("etc/group", []byte("root:x:0:\nsudo:x:27:\n")),
		inline("etc/motd", []byte("hello\n")), dir("usr"), dir("usr/lib"), dir("usr/lib/systemd"), dir("usr/lib/systemd/system"), dir("var"),
		{Path: "lib", Inode: &tree.Inode{Mode: tree.ModeSymlink | 0o777, Target: "usr/lib", MTime: built}},
	}
	used := []tree.Node{dir("lib/edgebake"), inline("lib/edgebake/state.json", []byte("{}"))}
	const head = "apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [192.168.7.11:6443]\nunsafeSkipCAVerification: true\ncredentials: {token: abcdef.0123456789abcdef}\n"
	const bad = `users: [{name: admin, groups: [sudo, docker]}]
network: {interfaces: [{name: wlan0, dhcp: true, wifi: {ssid: a}}]}
ignition: '{"ignition":{"version":"3.6.0"},"storage":{"files":[{"path":"/etc/motd","contents":{"source":"data:,x"}},{"path":"/lib/systemd/system/x.service","user":{"name":"www"},"contents":{"source":"data:,x"}}]},"systemd":{"units":[{"name":"docker.service","enabled":true}]}}'
`
	wants := []string{"users[0].groups[1]: the image has no group docker", "network.interfaces[0].wifi: the image has no wpa_supplicant",
		"storage.files.0: /etc/motd already exists in the image", "storage.files.1.user.name: the image has no user www", "systemd.units.0: the image has no unit docker.service"}
	for name, tc := range map[string]struct {
		zstd  bool
		state []tree.Node
		site  string
		want  []string
	}{
		"raw":            {false, nil, bad, wants},
		"compressed":     {true, nil, bad, wants},
		"nothing wanted": {true, nil, "users: [{name: admin, groups: [sudo]}]\n", nil},
		"used already":   {false, used, bad, nil}, // only the machine's first boot can check its files
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "g.raw")
			if tc.zstd {
				path += ".zst"
			}
			goldenWith(t, path, 1<<20, tc.zstd, root, tc.state)
			before := disktest.Sum(t, path)
			doc, err := configs.ParseSite("site.yaml", []byte(head+tc.site))
			if err != nil {
				t.Fatal(err)
			}
			s := site()
			s.Doc = doc
			_, err = Stamp(t.Context(), path, s, StampOptions{Now: now})
			if tc.want == nil {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil {
				t.Fatal("stamped")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q: %v", w, err)
				}
			}
			if disktest.Sum(t, path) != before {
				t.Error("the image changed")
			}
			if _, err := os.Stat(path); err != nil {
				t.Error(err)
			}
		})
	}
}
