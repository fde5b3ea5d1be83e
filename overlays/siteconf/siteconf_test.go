package siteconf

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coreos/ignition/v2/config/v3_6/types"
	"github.com/vincent-petithory/dataurl"
	"golang.org/x/tools/txtar"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/templates"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestGolden renders each site in testdata (site.yaml, machine.json and config.ign) and compares
// every file of the output.
func TestGolden(t *testing.T) {
	cases, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(cases) == 0 {
		t.Fatalf("no cases in testdata: %v", err)
	}
	for _, file := range cases {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			ar, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var in, want []txtar.File
			var m Machine
			var site *configs.Site
			var ign []byte
			for _, f := range ar.Files {
				switch f.Name {
				case "site.yaml":
					if site, err = configs.ParseSite(f.Name, f.Data); err != nil {
						t.Fatal(err)
					}
				case "machine.json":
					if err := json.Unmarshal(f.Data, &m); err != nil {
						t.Fatal(err)
					}
				case "config.ign":
					ign = f.Data
				default:
					want = append(want, f)
					continue
				}
				in = append(in, f)
			}
			got := renderAll(t, site, m, ign)
			if *update {
				ar.Files = append(in, got...)
				if err := os.WriteFile(file, txtar.Format(ar), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			g, w := string(txtar.Format(&txtar.Archive{Files: got})), string(txtar.Format(&txtar.Archive{Files: want}))
			if g != w {
				t.Errorf("rendered:\n%s\nwant (go test -update rewrites it):\n%s", g, w)
			}
		})
	}
}

// renderAll returns every output for a site as files. Files in the Ignition config are separate
// files.
func renderAll(t *testing.T, site *configs.Site, m Machine, ign []byte) []txtar.File {
	t.Helper()
	var out []txtar.File
	add := func(name string, data []byte) { out = append(out, txtar.File{Name: name, Data: data}) }
	raw, err := Render(site, m, ign)
	if err != nil {
		add("error", []byte(err.Error()+"\n"))
		return out
	}
	var cfg types.Config
	if err := json.Unmarshal(raw, &cfg); err != nil {
		t.Fatal(err)
	}
	for _, f := range cfg.Storage.Files {
		u, err := dataurl.DecodeString(*f.Contents.Source)
		if err != nil {
			t.Fatal(err)
		}
		mode := 0o644
		if f.Mode != nil {
			mode = *f.Mode
		}
		add(fmt.Sprintf("%s %04o", f.Path, mode), u.Data)
	}
	for _, u := range cfg.Systemd.Units {
		state := ""
		if u.Enabled != nil {
			state = fmt.Sprintf(" enabled=%t", *u.Enabled)
		}
		if u.Contents != nil || state != "" {
			c := ""
			if u.Contents != nil {
				c = *u.Contents
			}
			add("unit "+u.Name+state, []byte(c))
		}
		for _, d := range u.Dropins {
			add("unit "+u.Name+".d/"+d.Name, []byte(*d.Contents))
		}
	}
	if len(cfg.Passwd.Users) > 0 {
		users, err := json.MarshalIndent(cfg.Passwd.Users, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		add("users", append(users, '\n'))
	}
	name, err := NodeName(site, m)
	if err != nil {
		add("node name error", []byte(err.Error()+"\n"))
	}
	join, err := JoinConfiguration(site, Join{NodeName: name, NodeIP: "192.168.7.20", Discovery: "/run/edgebake/discovery.conf", Timeout: 90 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	add("kubeadm.yaml", join)
	ipvs, err := json.MarshalIndent(IPVS(site), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	add("ipvs.json", append(ipvs, '\n'))
	return out
}

func TestNodeName(t *testing.T) {
	full := Machine{Hostname: "Box7.lan", Serial: "PF 3X/99", UUID: "6BA7B810-9DAD-41D1-80B4-00C04FD430C8", MACs: []string{"52:54:00:AA:BB:01", "52:54:00:aa:bb:02"}}
	junk := Machine{Hostname: "localhost", Serial: "To be filled by O.E.M.", UUID: "03000200-0400-0500-0006-000700080009", MACs: []string{"00:00:00:00:00:00", "junk"}}
	for _, tc := range []struct {
		tmpl    string
		m       Machine
		mac     string // MAC address of an interface in the Site
		want    string
		missing string
	}{
		{"shop-17", junk, "", "shop-17", ""},
		{"Shop-17", junk, "", "shop-17", ""},
		{"n-{{.Serial}}", full, "", "n-pf-3x-99", ""},
		{"n-{{.MAC}}", full, "", "n-525400aabb01", ""},
		{"n-{{.MAC}}", full, "52-54-00-AA-BB-02", "n-525400aabb02", ""},
		{"n-{{slice .MAC 6}}", full, "", "n-aabb01", ""},
		{"n-{{.UUID}}", full, "", "n-6ba7b810-9dad-41d1-80b4-00c04fd430c8", ""},
		{"{{.Hostname}}", full, "", "box7.lan", ""},
		{"n-{{or .Serial .MAC}}", full, "", "n-pf-3x-99", ""},
		{"n-{{or .Serial .MAC}}", Machine{Serial: "Default string", MACs: full.MACs}, "", "n-525400aabb01", ""},
		{"n-{{.Serial}}", junk, "", "", "serial number"},
		{"n-{{.MAC}}", junk, "", "", "MAC address"},
		{"n-{{.UUID}}", junk, "", "", "UUID"},
		{"{{.Hostname}}", junk, "", "", "host name"},
		{"n-{{or .Serial .MAC}}", junk, "", "", "MAC address"},
	} {
		site := &configs.Site{NodeName: tc.tmpl, Network: configs.Network{Interfaces: []configs.Interface{{MAC: tc.mac}}}}
		got, err := NodeName(site, tc.m)
		var missing *templates.MissingFactError
		switch {
		case tc.missing != "":
			if !errors.As(err, &missing) || missing.What != tc.missing {
				t.Errorf("%s: got %q, %v, want an error that misses the %s", tc.tmpl, got, err, tc.missing)
			}
		case err != nil || got != tc.want:
			t.Errorf("%s: got %q, %v, want %q", tc.tmpl, got, err, tc.want)
		}
	}
	long := &configs.Site{NodeName: strings.Repeat("a", 60) + "-{{.MAC}}"}
	if name, err := NodeName(long, full); err == nil {
		t.Errorf("a name of %d letters was accepted", len(name))
	}
}

func TestEditHosts(t *testing.T) {
	e := []HostsEntry{{"192.168.7.20", []string{"shop-17"}}, {"10.103.97.2", []string{"apiserver.cluster.local"}}}
	block := "# BEGIN edgebake\n192.168.7.20\tshop-17\n10.103.97.2\tapiserver.cluster.local\n# END edgebake\n"
	for name, tc := range map[string]struct {
		in      string
		entries []HostsEntry
		want    string
	}{
		"empty":             {"", e, block},
		"foreign lines":     {"127.0.0.1 localhost\n# mine\n10.0.0.1 a", e, block + "127.0.0.1 localhost\n# mine\n10.0.0.1 a"},
		"again":             {block + "127.0.0.1 localhost\n", e, block + "127.0.0.1 localhost\n"},
		"moved by a person": {"127.0.0.1 localhost\n" + block + "::1 ip6\n", e, block + "127.0.0.1 localhost\n::1 ip6\n"},
		"changed":           {"# BEGIN edgebake\n1.1.1.1 old\n# END edgebake\nx y\n", e, block + "x y\n"},
		"gone":              {block + "x y\n", nil, "x y\n"},
		"another's block":   {"# BEGIN ipvscare\n1.1.1.1 z\n# END ipvscare\n", e, block + "# BEGIN ipvscare\n1.1.1.1 z\n# END ipvscare\n"},
		"begin without end": {"# BEGIN edgebake\n10.0.0.9 keep\n", e, block + "10.0.0.9 keep\n"},
		"end without begin": {"10.0.0.9 keep\n# END edgebake\n", nil, "10.0.0.9 keep\n"},
		"twice":             {block + block + "x y\n", e, block + "x y\n"},
		"carriage returns":  {"1.2.3.4 w\r\n", e, block + "1.2.3.4 w\r\n"},
	} {
		got := string(EditHosts([]byte(tc.in), "edgebake", tc.entries))
		if got != tc.want {
			t.Errorf("%s:\ngot\n%q\nwant\n%q", name, got, tc.want)
		}
		if again := string(EditHosts([]byte(got), "edgebake", tc.entries)); again != got {
			t.Errorf("%s: a second edit changes it:\n%q\n%q", name, got, again)
		}
	}
}

// exampleSite is the Site that edgebake init starts from.
func exampleSite(t testing.TB) []byte {
	t.Helper()
	doc, err := os.ReadFile("../../configs/examples/site.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

// TestJoinOfOlderKubeadm checks that the flags are a map in v1beta3, which kubeadm before 1.31
// reads.
func TestJoinOfOlderKubeadm(t *testing.T) {
	site, err := configs.ParseSite("site.yaml", exampleSite(t))
	if err != nil {
		t.Fatal(err)
	}
	site.KubeletExtraArgs = map[string]string{"max-pods": "50"}
	site.Labels, site.Taints, site.SkipPhases = map[string]string{"zone": "north"}, nil, nil
	for version, want := range map[string]string{
		"v1.30.3": `apiVersion: kubeadm.k8s.io/v1beta3
kind: JoinConfiguration
discovery:
  file:
    kubeConfigPath: /run/d
  tlsBootstrapToken: ` + site.Credentials.Token.Reveal() + `
  timeout: 1m30s
nodeRegistration:
  name: n1
  criSocket: unix:///run/containerd/containerd.sock
  taints: []
  kubeletExtraArgs:
    max-pods: "50"
    node-labels: zone=north
`,
		"v1.31.0": `apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
discovery:
  file:
    kubeConfigPath: /run/d
  tlsBootstrapToken: ` + site.Credentials.Token.Reveal() + `
nodeRegistration:
  name: n1
  criSocket: unix:///run/containerd/containerd.sock
  taints: []
  kubeletExtraArgs:
    - name: max-pods
      value: "50"
    - name: node-labels
      value: zone=north
timeouts:
  tlsBootstrap: 6m0s
  kubeletHealthCheck: 1m30s
`,
	} {
		got, err := JoinConfiguration(site, Join{NodeName: "n1", Discovery: "/run/d", Timeout: 90 * time.Second, Kubernetes: version})
		if err != nil || string(got) != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", version, err, got, want)
		}
	}
}
