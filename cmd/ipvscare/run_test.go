package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/ipvs"
	"github.com/edgebake/edgebake/ipvs/probe"
	"github.com/edgebake/edgebake/ondisk"
)

// TestSpread checks that a node delays its first request only at the first start after power-on,
// whatever the clock shows.
func TestSpread(t *testing.T) {
	const half = 1500 * time.Millisecond
	for _, c := range []struct {
		name    string
		age     time.Duration // of the configuration, according to the clock
		up      time.Duration
		marked  bool // ipvscare has started before, or first boot has written the configuration
		spread  int
		want    time.Duration
		invalid bool
	}{
		{name: "a reboot", age: 30 * 24 * time.Hour, up: 20 * time.Second, want: half},
		{name: "a reboot with the clock set back", age: -time.Hour, up: 20 * time.Second, want: half},
		{name: "a reboot in a large cluster", age: time.Hour, up: 20 * time.Second, spread: 60, want: 30 * time.Second},
		{name: "a fresh join", age: time.Second, up: 20 * time.Second, marked: true},
		{name: "a fresh join before the clock was set forward", age: 24 * time.Hour, up: 20 * time.Second, marked: true},
		{name: "the first start, long after the boot", age: 24 * time.Hour, up: time.Hour},
		{name: "without a configuration", up: 20 * time.Second, invalid: true},
	} {
		dir := t.TempDir()
		config, run := filepath.Join(dir, "ipvs.json"), filepath.Join(dir, "run")
		if !c.invalid {
			doc := fmt.Sprintf(`{"version":%d,"servers":[{"masters":["192.0.2.1:6443"],"spreadSeconds":%d}]}`, ondisk.IPVSVersion, c.spread)
			written := time.Now().Add(-c.age)
			if err := errors.Join(os.WriteFile(config, []byte(doc), 0o600), os.Chtimes(config, written, written)); err != nil {
				t.Fatal(err)
			}
		}
		if c.marked {
			mark := filepath.Join(run, filepath.Base(ondisk.IPVSStarted))
			if err := errors.Join(os.Mkdir(run, 0o700), os.WriteFile(mark, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if got := bootSpread(config, run, c.up, 0.5); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
		if got := bootSpread(config, run, c.up+time.Second, 0.5); got != 0 {
			t.Errorf("%s, then a restart: %v", c.name, got)
		}
	}
}

// TestLvscareFlags checks that every flag and every environment variable of lvscare is accepted.
func TestLvscareFlags(t *testing.T) {
	line := `--vs 10.103.97.2:6443 --rs 10.0.0.1:6443 --rs 10.0.0.2:6443 --scheduler wlc -i lvscare --logger INFO --mode link
		--interval 7s --ip 10.0.0.9 --masqueradebit 14 --health-path /healthz --health-schem https --health-req-method HEAD
		--health-req-headers a=b --health-req-body x --health-status 200,204 --health-insecure-skip-verify --health-timeout 3s`
	c := &careFlags{}
	f := pflag.NewFlagSet("care", pflag.ContinueOnError)
	c.register(f)
	if err := f.Parse(strings.Fields(line)); err != nil {
		t.Fatal(err)
	}
	s, err := c.server(f.Changed)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, got, want any) {
		t.Helper()
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s is %v, want %v", what, got, want)
		}
	}
	check("VIP", s.VIP, "10.103.97.2:6443")
	check("masters", s.Masters, "[10.0.0.1:6443 10.0.0.2:6443]")
	check("scheduler", s.Scheduler, "wlc")
	check("source", s.Source, "10.0.0.9")
	check("interval", s.Profile.Ready, 7*time.Second)
	check("timeout", s.Profile.ReadyTimeout, 3*time.Second)
	check("probe", s.Probe, probe.Spec{CAFile: "/etc/kubernetes/pki/ca.crt", Unsafe: true, Method: "HEAD", Path: "/healthz",
		Headers: map[string]string{"a": "b"}, Body: "x", Status: []int{200, 204}})

	env := map[string]string{"CARE_VS": "10.1.1.1:1", "CARE_RS": "10.0.0.1:1,10.0.0.2:1", "CARE_HEALTH_PATH": "/livez",
		"CARE_RUN_ONCE": "true", "CARE_SCHEDULER": "lc"}
	c = &careFlags{}
	f = pflag.NewFlagSet("care", pflag.ContinueOnError)
	c.register(f)
	if err := f.Parse([]string{"--scheduler", "sh"}); err != nil {
		t.Fatal(err)
	}
	if err := fromEnvironment(f, func(k string) (string, bool) { v, ok := env[k]; return v, ok }); err != nil {
		t.Fatal(err)
	}
	if s, err = c.server(f.Changed); err != nil {
		t.Fatal(err)
	}
	check("masters", s.Masters, "[10.0.0.1:1 10.0.0.2:1]")
	check("path", s.Probe.Path, "/livez")
	check("run once", c.runOnce, true)
	check("scheduler", s.Scheduler, "sh") // flags take precedence
	check("verified", s.Probe.Unsafe, false)
	env = map[string]string{"CARE_INTERVAL": "7"} // lvscare also accepts a bare number
	if err := fromEnvironment(f, func(k string) (string, bool) { v, ok := env[k]; return v, ok }); err != nil || c.interval != 7*time.Second {
		t.Errorf("interval %s, %v", c.interval, err)
	}
	f.Lookup("interval").Changed = false
	env = map[string]string{"CARE_INTERVAL": "soon"}
	if err := fromEnvironment(f, func(k string) (string, bool) { v, ok := env[k]; return v, ok }); err == nil || !strings.Contains(err.Error(), "CARE_INTERVAL=soon") {
		t.Errorf("got %v", err)
	}
}

func TestStaticPod(t *testing.T) {
	var out bytes.Buffer
	err := run(t.Context(), []string{"static-pod", "--image", "a/b:1", "--vs", "10.103.97.2:6443", "--rs", "10.0.0.1:6443,10.0.0.2:6443",
		"--host", "apiserver.cluster.local", "--interval", "5s", "--health-req-headers", `x="y"`, "--metrics", "[::1]:10271", "--health-status", "503,404"}, &out, &out)
	if err != nil {
		t.Fatal(err)
	}
	var pod struct {
		Kind string
		Spec struct {
			HostNetwork bool   `yaml:"hostNetwork"`
			Priority    string `yaml:"priorityClassName"`
			Containers  []struct {
				Image    string
				Args     []string
				Security struct {
					Privileged, AllowPrivilegeEscalation, ReadOnlyRootFilesystem *bool
					Capabilities                                                 struct{ Drop, Add []string }
				} `yaml:"securityContext"`
				Mounts []struct {
					Name     string
					Path     string `yaml:"mountPath"`
					ReadOnly bool   `yaml:"readOnly"`
				} `yaml:"volumeMounts"`
			}
			Volumes []struct {
				Name     string
				HostPath struct{ Path, Type string } `yaml:"hostPath"`
			}
		}
	}
	if err := yaml.Unmarshal(out.Bytes(), &pod); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	if pod.Kind != "Pod" || !pod.Spec.HostNetwork || pod.Spec.Priority != "system-node-critical" || len(pod.Spec.Containers) != 1 {
		t.Fatalf("%+v", pod)
	}
	c := pod.Spec.Containers[0]
	if c.Image != "a/b:1" || len(c.Mounts) != len(pod.Spec.Volumes) || len(c.Mounts) != 5 {
		t.Errorf("%+v", c)
	}
	// The pod has no right but the required one: it is not privileged, and its only capability is
	// NET_ADMIN.
	if p := c.Security.Privileged; p == nil || *p {
		t.Error("the pod is privileged")
	}
	if caps := c.Security.Capabilities; !slices.Equal(caps.Drop, []string{"ALL"}) || !slices.Equal(caps.Add, []string{"NET_ADMIN"}) {
		t.Errorf("its capabilities: %+v", caps)
	}
	// The directory of the hosts file is mounted: after a replacement of the file, a mounted file
	// would still be the old one.
	if !slices.Contains(c.Args, "--hosts=/host/etc/hosts") || !slices.Contains(c.Args, "--sysctls=/host/proc/sys/net") {
		t.Errorf("arguments: %q", c.Args)
	}
	for _, m := range c.Mounts {
		if m.Name == "hosts" && m.Path != "/host/etc" || m.Name == "sysctls" && m.Path != "/host/proc/sys/net" {
			t.Errorf("mounted: %+v", m)
		}
	}
	for _, v := range pod.Spec.Volumes {
		if v.HostPath.Type == "File" {
			t.Errorf("a file is mounted: %+v", v)
		}
	}
	// care accepts the printed arguments.
	flags := &careFlags{}
	f := pflag.NewFlagSet("care", pflag.ContinueOnError)
	flags.register(f)
	if err := f.Parse(c.Args[1:]); err != nil {
		t.Fatal(err)
	}
	s, err := flags.server(f.Changed)
	if flags.metrics != "[::1]:10271" || !slices.Equal(s.Probe.Status, []int{503, 404}) {
		t.Errorf("metrics at %s, healthy: %v", flags.metrics, s.Probe.Status)
	}
	if err != nil || len(s.Masters) != 2 || s.Host != "apiserver.cluster.local" || s.Profile.Ready != 5*time.Second {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestPrintStatus(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	all := []ipvs.Status{{IPVS: true, Problems: []string{"x: y"}, Servers: []ipvs.ServerStatus{{VIP: "10.1.1.1:1", Host: "a.b", Scheduler: "rr", Profile: "lan", Verified: true,
		Masters: []ipvs.MasterStatus{
			{Addr: "10.0.0.1:1", State: "up", Serving: true, Since: now.Add(-90 * time.Second), Last: "ready"},
			{Addr: "10.0.0.2:1", Name: "m2", State: "down", Since: now.Add(-2 * time.Second), Last: "connection refused", Error: "dial"}}}}}}
	var b bytes.Buffer
	if err := printStatus(&b, all, now); err != nil {
		t.Fatal(err)
	}
	want := `10.1.1.1:1 a.b (rr, lan)
  API SERVER     STATE  SINCE  SERVES  LAST PROBE
  10.0.0.1:1     up     1m30s  yes     ready
  10.0.0.2:1 m2  down   2s     no      connection refused: dial
problem: x: y
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", &b, want)
	}
	if err := verdict(all); err != nil {
		t.Error(err)
	}
	all[0].Servers[0].Masters[0].State = "down"
	if err := verdict(all); err == nil {
		t.Error("no API server is up, but the exit code is 0")
	}
	if _, err := json.Marshal(all); err != nil {
		t.Error(err)
	}
}

// TestCleanWithoutAConfiguration checks that recorded virtual servers are removed even if the
// configuration is missing or invalid.
func TestCleanWithoutAConfiguration(t *testing.T) {
	for text, said := range map[string]string{
		"": "EOF", "{}": "unsupported version 0",
		`{"version":1,"servers":[{"vip":"10.103.97.2:6443","masters":["192.0.2.11:6443","192.0.2.11:6443"]}]}`: "is already listed, as 192.0.2.11:6443",
		"-": "", // no configuration file
		`{"version":1,"servers":[{"vip":"10.103.97.2:6443","masters":["192.0.2.11:6443"]}]}`: "",
	} {
		file := filepath.Join(t.TempDir(), "ipvs.json")
		if text != "-" {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		var lines []string
		l := leftovers(file, "/etc/hosts", "/run/x", func(line string) { lines = append(lines, line) })
		if !l.Noted || l.RunDir != "/run/x" || (said == "") != (len(lines) == 0) || !strings.Contains(strings.Join(lines, "\n"), said) {
			t.Errorf("%q: %+v, said %q", text, l, lines)
		}
	}
}

// TestWrongConfigurationIsSaidOnce checks that ipvscare logs an invalid configuration once, and
// waits for a valid one.
func TestWrongConfigurationIsSaidOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ipvs.json")
	write := func(text string) {
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		write("{")
		lines := 0
		done := make(chan bool)
		go func() { done <- awaitConfig(t.Context(), file, func(string) { lines++ }) }()
		time.Sleep(time.Hour)
		synctest.Wait()
		if lines != 1 {
			t.Errorf("the message was logged %d times in an hour", lines)
		}
		write(`{"version":1,"servers":[{"vip":"10.103.97.2:6443","masters":["192.0.2.11:6443"]}]}`)
		start := time.Now()
		if ok := <-done; !ok || time.Since(start) > configLook {
			t.Errorf("%v after %s", ok, time.Since(start))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		write("{")
		if awaitConfig(ctx, file, func(string) {}) {
			t.Error("ipvscare runs with an invalid configuration")
		}
	})
}

// TestStatusOfUntrustedServer checks that an API server's hostile text, of any length, is shortened
// and printed without control characters.
func TestStatusOfUntrustedServer(t *testing.T) {
	evil := "it is for \x1b]0;owned\a\x1b[2J\u009b2J\r\n10.0.0.1:6443 up" + strings.Repeat("x", 100_000)
	var b bytes.Buffer
	all := []ipvs.Status{{Problems: []string{evil}, Servers: []ipvs.ServerStatus{{Masters: []ipvs.MasterStatus{{Addr: "10.0.0.1:1", Last: "down", Error: evil}}}}}}
	if err := printStatus(&b, all, time.Now()); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(b.String(), "\x1b\a\r\u009b") || b.Len() > 3000 || strings.Count(b.String(), "\n") != 4 {
		t.Errorf("%d bytes: %.500q", b.Len(), b.String())
	}
	err := run(t.Context(), []string{"\x1b[2J"}, &b, &b)
	if err == nil || len(shown(evil)) > 2*maxShown || strings.ContainsAny(shown(evil), "\x1b\n") {
		t.Errorf("%v", err)
	}
}
