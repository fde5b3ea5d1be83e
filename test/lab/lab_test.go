package lab

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/configs"
)

func TestExpect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSerial(io.Discard, nil)
		go func() {
			time.Sleep(3 * time.Second)
			s.Write([]byte("\x1b[2J\x1b[01;01HBdsDxe: star"))
			time.Sleep(time.Second)
			s.Write([]byte("ting Boot0001\r\nlogin: "))
			time.Sleep(time.Second)
			s.Write([]byte("\x1b[0;32mroot\x1b[0m\n"))
		}()
		l, mark, err := s.Expect(t.Context(), 0, regexp.MustCompile(`^BdsDxe: starting Boot0001$`))
		if err != nil {
			t.Fatal(err)
		}
		if l.At != 4*time.Second || mark != 1 {
			t.Errorf("came at %v, mark %d", l.At, mark)
		}
		if l, _, err = s.Expect(t.Context(), mark, regexp.MustCompile("^login: root$")); err != nil || l.At != 5*time.Second {
			t.Errorf("%v, %v", l, err)
		}
		// Text before the mark is ignored.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, _, err = s.Expect(ctx, 2, regexp.MustCompile("login")); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "root") {
			t.Errorf("error %v; want the deadline and the last lines", err)
		}
	})
}

func TestExpectFailsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSerial(io.Discard, nil)
		go s.Write([]byte("[    1.0] Kernel panic - not syncing: Attempted to kill init!\n"))
		_, _, err := s.Expect(t.Context(), 0, regexp.MustCompile("Ready"))
		var fatal *FatalError
		if !errors.As(err, &fatal) {
			t.Errorf("panic: %v", err)
		}
		if err := s.Broken(); !errors.As(err, &fatal) {
			t.Errorf("Broken: %v", err)
		}

		s = newSerial(io.Discard, nil)
		if err := s.Broken(); err != nil {
			t.Errorf("Broken before anything came: %v", err)
		}
		go s.end(errPoweredOff)
		if _, _, err := s.Expect(t.Context(), 0, regexp.MustCompile("Ready")); !errors.Is(err, errPoweredOff) {
			t.Errorf("power off: %v", err)
		}
	})
}

func TestEvents(t *testing.T) {
	s := newSerial(io.Discard, nil)
	io.WriteString(s, `BdsDxe: starting Boot0001 "UEFI Misc Device"
edgebake: up for 24.1 s (kernel 4.0, initrd 2.1, system 18.0)
edgebake: [1] identity: who this machine is
edgebake: [1] identity: done in 0.1 s
edgebake: [8/10] join: waiting for a master
edgebake: [8/10] join: done in 7.3 s
edgebake: [9/10] node-ready: as it should be
edgebake: node edge1 is Ready
`)
	var got []string
	for _, e := range s.Events() {
		got = append(got, e.What)
	}
	want := "firmware starts the loader|since the kernel started: kernel 4.0, initrd 2.1, system 18.0|first boot starts|identity: done in 0.1 s|join: done in 7.3 s|node-ready: as it should be|first boot is done"
	if strings.Join(got, "|") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, "|"), want)
	}
}

func TestFindInFile(t *testing.T) {
	// The matches: one at the start, one across two reads, two overlapping ones, and one at the
	// end, after a hole.
	path := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := []int64{0, 1<<20 - 3, 2 << 20, 2<<20 + 2, 9 << 20}
	for _, off := range []int64{0, 1<<20 - 3, 9 << 20} {
		if _, err := f.WriteAt([]byte("abab"), off); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.WriteAt([]byte("ababab"), 2<<20); err != nil {
		t.Fatal(err)
	}
	got, err := FindInFile(path, []byte("abab"))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	if hits, err := FindInFile(path, []byte("abac")); err != nil || len(hits) != 0 {
		t.Errorf("hits %v, %v for what is not there", hits, err)
	}
}

// TestSiteIsValid checks that the Sites that the lab writes are valid.
func TestSiteIsValid(t *testing.T) {
	token, err := newToken()
	if err != nil {
		t.Fatal(err)
	}
	c := &Cluster{Masters: []string{"10.103.0.11:6443"}, Token: token, CAHash: "sha256:" + strings.Repeat("0a", 32)}
	c6 := &Cluster{Masters: []string{"[fd00:103::11]:6443"}, Token: token, CAHash: c.CAHash}
	for _, s := range []Site{
		{Cluster: c, NodeName: "edge1"},
		{Cluster: c, NodeName: "edge1", Address: "10.103.0.101/24", Gateway: Gateway},
		{Cluster: c, NodeName: "edge1", Address: "10.103.0.101/24", Gateway: Gateway, Address2: "fd00:103::65/64"},
		{Cluster: c6, NodeName: "edge1", Address: "fd00:103::65/64", Gateway: Gateway6},
	} {
		text, err := s.YAML()
		if err != nil {
			t.Fatal(err)
		}
		site, err := configs.ParseSite("site.yaml", []byte(text))
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if site.Credentials.Token.Reveal() != token || len(site.Masters) != 1 || len(site.Network.Interfaces) == 0 != (s.Address == "") {
			t.Errorf("%+v", site)
		}
	}
}

func TestProcessesEndWithTheLab(t *testing.T) {
	l, err := New(t.TempDir(), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	p, err := l.start("sleep", []string{"sleep", "1000"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.ended(); err != nil {
		t.Error(err)
	}
	q, err := l.start("fails", []string{"sh", "-c", "echo for a reason >&2; exit 3"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = l.poll(t.Context(), "nothing", []*Process{q}, func(context.Context) (bool, error) { return false, nil })
	if err == nil || !strings.Contains(err.Error(), "for a reason") {
		t.Errorf("waiting on a process that ended: %v", err)
	}
	if e := l.Evidence(); !strings.Contains(e, "for a reason") {
		t.Errorf("evidence: %s", e)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	select {
	case <-p.Done():
	default:
		t.Error("a process still runs")
	}
}

func TestProgramName(t *testing.T) {
	for pkg, want := range map[string]string{
		"k8s.io/kubernetes/cmd/kubelet":               "kubelet",
		"go.etcd.io/etcd/server/v3":                   "server",
		"github.com/containerd/containerd/v2/cmd/ctr": "ctr",
	} {
		if got := ProgramName(pkg); got != want {
			t.Errorf("ProgramName(%s) = %s, want %s", pkg, got, want)
		}
	}
}
