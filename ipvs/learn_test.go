package ipvs

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// nodeCert writes a certificate of the CA and its key in kubelet's format.
func nodeCert(t *testing.T, c *ca) string {
	t.Helper()
	cert := c.issue(t, time.Now().Add(-time.Hour), time.Now().Add(time.Hour), "shop-1")
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]})
	pem.Encode(&b, &pem.Block{Type: "PRIVATE KEY", Bytes: key})
	file := filepath.Join(t.TempDir(), "node.pem")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestLearningWaitsForAnAPIServer checks that no error is logged while no API server is up, and that
// the list is read as soon as one is up.
func TestLearningWaitsForAnAPIServer(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"the network", "the CA"} {
		t.Run(what+" comes late", func(t *testing.T) {
			from, to := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
			w, c := newWorld(t, 1), newCA(t, from, to)
			m := w.masters[0]
			m.cert = c.issue(t, from, to, "kubernetes")
			m.handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if r.URL.Path == learnPath {
					io.WriteString(rw, `{"kind":"ConfigMap","data":{"masters":"nonsense"}}`)
				}
			})
			m.stop()
			s := testServer(t, 220)
			s.Masters, s.Learn = []Master{m.master()}, true
			s.Profile.Learn = time.Hour
			s.Probe.CAFile = filepath.Join(t.TempDir(), "ca.crt")
			writeCA := func() {
				if err := os.WriteFile(s.Probe.CAFile, c.pem, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if what == "the CA" {
				m.start()
			} else {
				writeCA()
			}
			w.cert = nodeCert(t, c)
			w.start(s)
			g := w.daemon.kept()[s.VIP]
			subject := g.vip.String() + ": the cluster's list of API servers"
			w.daemon.logChange(subject, errors.New("as it was")) // from an earlier read
			time.Sleep(10 * s.Profile.Retry)                     // the learner searches for an API server
			if p := w.daemon.Status().Problems; !slices.Contains(p, subject+": as it was") || w.said(subject+": fixed") > 0 {
				t.Errorf("no API server was asked; problems: %q", p)
			}
			begin := time.Now()
			if what == "the CA" {
				writeCA()
			} else {
				m.start()
			}
			w.eventually("the list is read", func() bool { return w.said(`"nonsense" has no port`) == 1 })
			if took := time.Since(begin); took > 30*time.Second {
				t.Errorf("read after %s", took)
			}
		})
	}
}

// TestChangedMastersDropTheLearnedList checks that a changed configuration replaces the learned
// list. The list must not return with the former configuration, even after a boot or a power cut at
// any point.
func TestChangedMastersDropTheLearnedList(t *testing.T) {
	t.Parallel()
	const stored = `{"version":1,"servers":[{"vip":"10.103.97.9:6443","configured":["127.0.0.1:1"],"masters":["192.0.2.9:1"]}]}`
	former, changed := testServer(t, 9), testServer(t, 9)
	former.Masters, former.Learn = []Master{{"127.0.0.1", 1}}, true
	changed.Masters, changed.Learn = []Master{{"127.0.0.2", 1}}, true
	off := former
	off.Learn = false
	for _, tt := range []struct {
		name   string
		change Server
		boot   bool // the node boots with the change: power failed before the change was noticed
	}{
		{"changed while it runs", changed, false},
		{"changed before a boot", changed, true},
		{"turned off while it runs", off, false},
		{"turned off before a boot", off, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 0)
			file := filepath.Join(w.state, "learned.json")
			if err := errors.Join(os.MkdirAll(w.state, 0o700), os.WriteFile(file, []byte(stored), 0o600)); err != nil {
				t.Fatal(err)
			}
			learned := func() bool { return w.daemon.Status().Servers[0].Learned }
			if tt.boot {
				w.start(tt.change)
			} else {
				w.start(former)
				if !learned() {
					t.Fatal("the stored list is not used")
				}
				if err := w.daemon.replace(w.ctx, []Server{tt.change}); err != nil {
					t.Fatal(err)
				}
			}
			w.eventually("the list is dropped", func() bool {
				doc, err := w.daemon.readLearned()
				return err == nil && len(doc.Servers) == 1 && len(doc.Servers[0].Masters) == 0
			})
			w.stop()
			w.start(former)
			if learned() {
				t.Error("the learned list is used again after a boot")
			}
		})
	}
}

// TestLearningFails checks that a list that cannot be read causes few connections over a metered
// link.
func TestLearningFails(t *testing.T) {
	c, _ := bubbleCerts(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var n atomic.Int64
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			n.Add(1)
			c.Close()
		}
	}()
	cert := nodeCert(t, c)
	synctest.Test(t, func(t *testing.T) {
		g, _ := namesGroup(t, t.TempDir(), deadDNS, "192.0.2.1:6443")
		g.server.Profile, g.server.Learn = Metered(), true
		g.d.opt.ClientCert = cert
		g.roots.Store(c.roots(t))
		g.apiServers[netip.MustParseAddrPort(ln.Addr().String())] = &apiServer{name: "127.0.0.1", health: health{State: Up}}
		ctx, cancel := context.WithCancel(t.Context())
		go g.learner(ctx)
		time.Sleep(24 * time.Hour)
		cancel()
		time.Sleep(time.Minute)
	})
	if n := n.Load(); n < 5 || n > 30 {
		t.Errorf("%d connections a day", n)
	}
}

// TestLearnedAreDown checks that while all learned API servers are down, the configured ones stay
// in use, even if one of them is up.
func TestLearnedAreDown(t *testing.T) {
	g, _ := namesGroup(t, "", nil, "192.0.2.1:6443")
	learned, configured := netip.MustParseAddrPort("192.0.2.9:6443"), netip.MustParseAddrPort("192.0.2.1:6443")
	g.list.learned = []Master{{Host: "192.0.2.9", Port: 6443}}
	g.apiServers[learned] = &apiServer{name: "192.0.2.9", health: health{State: Down}}
	g.apiServers[configured] = &apiServer{name: "192.0.2.1", health: health{State: Down}}
	now := time.Now()
	lastUp := now
	if g.checkLearned(&lastUp, now.Add(allDownAfter/2)) || g.list.allDown {
		t.Error("the learned list is given up too early")
	}
	if !g.checkLearned(&lastUp, now.Add(2*allDownAfter)) || !g.list.allDown {
		t.Error("the learned list is not given up")
	}
	g.apiServers[configured].health.State = Up
	if g.checkLearned(&lastUp, now.Add(3*allDownAfter)) || !g.list.allDown {
		t.Error("a configured API server that is up is dropped again")
	}
	g.apiServers[learned].health.State = Up
	if !g.checkLearned(&lastUp, now.Add(4*allDownAfter)) || g.list.allDown {
		t.Error("a learned API server that is up again does not count")
	}
}
