package siteconf

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coreos/ignition/v2/config/v3_6/types"
	"github.com/vincent-petithory/dataurl"
	"golang.org/x/tools/txtar"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/test/desk"
)

// need skips the test if something that it needs is missing. In CI, it fails the test instead.
func need(t *testing.T, ok bool, what string) {
	t.Helper()
	if !ok {
		desk.Lacks(t, "this test needs %s", what)
	}
}

// TestNetworkdReadsIt runs systemd-networkd in its own namespaces on the files of all golden sites.
// It fails on any warning.
func TestNetworkdReadsIt(t *testing.T) {
	const networkd = "/usr/lib/systemd/systemd-networkd"
	_, err := os.Stat(networkd)
	need(t, err == nil, networkd)
	unshare, err := exec.LookPath("unshare")
	need(t, err == nil, "unshare (util-linux)")
	need(t, exec.Command(unshare, "--net", "--mount", "true").Run() == nil, "the right to make namespaces (root)")

	dir := t.TempDir()
	n := 0
	cases, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range cases {
		for name, text := range networkFiles(t, file) {
			n++
			name = strings.TrimSuffix(filepath.Base(file), ".txtar") + "-" + name
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n < 10 {
		t.Fatalf("only %d files to read", n)
	}
	// This file is invalid: networkd must print a warning about it.
	if err := os.WriteFile(filepath.Join(dir, "99-bad.network"), []byte("[Match]\nName=x\n[Network]\nNoSuchKey=1\n"), 0o644); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// networkd runs as another user and must be able to read the files.
	script := `umask 022 && mount --make-rprivate / && mount -t tmpfs none /run && mkdir -p /run/systemd/network &&
		install -m 644 "$1"/* /run/systemd/network/ && exec ` + networkd
	cmd := exec.CommandContext(ctx, unshare, "--net", "--mount", "sh", "-c", script, "sh", dir)
	cmd.Env = append(os.Environ(), "SYSTEMD_LOG_LEVEL=debug", "SYSTEMD_LOG_TARGET=console")
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = cmd.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var log []string
	complained, done := false, false
	for lines := bufio.NewScanner(out); !done && lines.Scan(); {
		line := lines.Text()
		log = append(log, line)
		complaint := strings.Contains(line, "ignoring") || strings.Contains(line, "Failed") || strings.Contains(line, "nvalid")
		switch {
		case complaint && strings.Contains(line, "99-bad.network"):
			complained = true
		case complaint && strings.Contains(line, "/run/systemd/network/"):
			t.Error(line)
		case strings.Contains(line, "Enumeration completed"):
			done = true
		}
	}
	cancel()
	_ = cmd.Wait() // killed above
	if !done || !complained {
		t.Errorf("networkd did not get that far:\n%s", strings.Join(log, "\n"))
	}
}

// networkFiles renders a golden case and returns the files for networkd.
func networkFiles(t *testing.T, file string) map[string]string {
	t.Helper()
	ar, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	var site *configs.Site
	for _, f := range ar.Files {
		if f.Name == "site.yaml" {
			if site, err = configs.ParseSite(f.Name, f.Data); err != nil {
				t.Fatal(err)
			}
		}
	}
	raw, err := Render(site, Machine{MACs: []string{"52:54:00:12:34:56"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var cfg types.Config
	if err := json.Unmarshal(raw, &cfg); err != nil {
		t.Fatal(err)
	}
	for _, f := range cfg.Storage.Files {
		if rest, ok := strings.CutPrefix(f.Path, networkDir); ok {
			u, err := dataurl.DecodeString(*f.Contents.Source)
			if err != nil {
				t.Fatal(err)
			}
			out[rest] = string(u.Data)
		}
	}
	return out
}

// TestZeroMachine checks that a host name that depends on the machine is omitted for the zero
// Machine, and that it is an error if a machine lacks the required value.
func TestZeroMachine(t *testing.T) {
	site := &configs.Site{NodeName: "n-{{.Serial}}"}
	raw, err := Render(site, Machine{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(raw), "/etc/hostname") {
		t.Errorf("a host name out of nothing:\n%s", raw)
	}
	if _, err := Render(site, Machine{Serial: "Default string"}, nil); err == nil || !strings.Contains(err.Error(), "serial number") {
		t.Errorf("a placeholder serial number was accepted: %v", err)
	}
	if raw, err = Render(&configs.Site{NodeName: "n1"}, Machine{}, nil); err != nil || !strings.Contains(string(raw), "/etc/hostname") {
		t.Errorf("%v\n%s", err, raw)
	}
}

// FuzzRender checks that every accepted Site can be rendered, with the same result each time.
// Render validates its result with Ignition's library.
func FuzzRender(f *testing.F) {
	cases, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range cases {
		ar, err := txtar.ParseFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(ar.Files[0].Data)
	}
	f.Add(exampleSite(f))
	f.Fuzz(func(t *testing.T, doc []byte) {
		site, err := configs.ParseSite("site.yaml", doc)
		if err != nil {
			return
		}
		m := Machine{Hostname: "h", Serial: "sn12345678", UUID: "6ba7b810-9dad-41d1-80b4-00c04fd430c8", MACs: []string{"52:54:00:12:34:56"}}
		raw, err := Render(site, m, nil)
		if err != nil {
			if !site.Ignition.IsZero() { // the config may conflict with the Site
				return
			}
			t.Fatalf("%v\n%s", err, doc)
		}
		again, err := Render(site, m, nil)
		if err != nil || string(again) != string(raw) {
			t.Fatalf("differs the second time: %v", err)
		}
		if _, err := JoinConfiguration(site, Join{NodeName: "n"}); err != nil {
			t.Fatal(err)
		}
		IPVS(site)
	})
}

// FuzzEditHosts checks that other lines keep their order, and that a second edit changes nothing.
func FuzzEditHosts(f *testing.F) {
	f.Add([]byte("127.0.0.1 localhost\n# BEGIN a\nx\n# END a\ny"))
	f.Add([]byte("# BEGIN a\n# BEGIN a\nx\n# END a\n"))
	f.Fuzz(func(t *testing.T, hosts []byte) {
		e := []HostsEntry{{"10.0.0.1", []string{"n"}}}
		once := EditHosts(hosts, "a", e)
		if twice := EditHosts(once, "a", e); string(twice) != string(once) {
			t.Fatalf("a second edit changes it:\n%q\n%q\n%q", hosts, once, twice)
		}
		if !strings.Contains(string(hosts), "# BEGIN a") && !strings.Contains(string(hosts), "# END a") {
			if got := EditHosts(once, "a", nil); string(got) != string(hosts) {
				t.Fatalf("foreign lines changed:\n%q\n%q", hosts, got)
			}
		}
	})
}
