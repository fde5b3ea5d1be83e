package ipvs

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// ca is a CA of the tests.
type ca struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newCA(t testing.TB, from, to time.Time) *ca {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"},
		NotBefore: from, NotAfter: to, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tpl, tpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &ca{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func (c *ca) issue(t testing.TB, from, to time.Time, names ...string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tpl := &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: from, NotAfter: to, DNSNames: names,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, tpl, c.cert, &key.PublicKey, c.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (c *ca) roots(t testing.TB) *probe.Roots {
	t.Helper()
	r, err := probe.ParseRoots("ca.crt", c.pem)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// fakeMaster is net/http's HTTP/2 server behind pipes. It can be killed,
// stopped like a process, or cut off by a network that drops packets.
type fakeMaster struct {
	t    testing.TB
	mu   sync.Mutex
	cert tls.Certificate
	http http.Server
	ln   pipeListener
	date string // sent instead of the true date

	status atomic.Int64
	body   atomic.Pointer[string]
	dead   atomic.Bool // rejects connections
	hung   atomic.Bool // accepts connections, but does not answer
	gone   atomic.Bool // drops all packets
	slams  atomic.Bool // closes each connection after the TLS handshake
	plain  bool        // HTTP/1.1 only
	// lag is the delay of everything that the master writes.
	lag  atomic.Int64
	slow bool
	// closesEach makes the API server close the connection after each answer, as kube-apiserver does
	// with HTTP/2 clients that have no certificate.
	closesEach bool
	client     *tls.Certificate // certificate of the node; nil: none

	conns   []*switchable
	dials   atomic.Int64
	asked   atomic.Int64
	written atomic.Int64 // bytes in both directions
	// sent and received count the writes at both ends; each write is one packet.
	sent, received atomic.Int64
}

type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
}

func (l pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l pipeListener) Close() error   { return nil }
func (l pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

// switchable is the server's end of a pipe. While the master hangs, its writes are not delivered.
type switchable struct {
	net.Conn
	m *fakeMaster
}

func (c *switchable) Write(b []byte) (int, error) {
	for c.m.hung.Load() || c.m.gone.Load() {
		time.Sleep(10 * time.Millisecond)
	}
	c.m.written.Add(int64(len(b)))
	c.m.sent.Add(1)
	return c.Conn.Write(b)
}

// lagging delays writes and keeps their order.
type lagging struct {
	net.Conn
	lag  *atomic.Int64
	out  chan delayed
	done chan struct{}
	once sync.Once
}

type delayed struct {
	at time.Time
	b  []byte
}

func newLagging(c net.Conn, lag *atomic.Int64) *lagging {
	l := &lagging{Conn: c, lag: lag, out: make(chan delayed, 1000), done: make(chan struct{})}
	go func() {
		for {
			select {
			case d := <-l.out:
				if wait := time.Until(d.at); wait > 0 { // with a timer that has expired, the race detector of Go 1.26 crashes
					select {
					case <-time.After(wait):
					case <-l.done:
						return
					}
				}
				c.Write(d.b)
			case <-l.done:
				return
			}
		}
	}()
	return l
}

func (l *lagging) Write(b []byte) (int, error) {
	select {
	case l.out <- delayed{time.Now().Add(time.Duration(l.lag.Load())), slices.Clone(b)}:
		return len(b), nil
	case <-l.done:
		return 0, net.ErrClosed
	}
}

func (l *lagging) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Conn.Close()
}

func (c *switchable) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.m.written.Add(int64(n))
	c.m.received.Add(1)
	return n, err
}

func newFakeMaster(t testing.TB, cert tls.Certificate) *fakeMaster {
	m := &fakeMaster{t: t, cert: cert, ln: pipeListener{make(chan net.Conn), make(chan struct{})}}
	m.status.Store(200)
	m.http.ErrorLog = log.New(io.Discard, "", 0)
	m.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.asked.Add(1)
		if m.closesEach {
			w.Header().Set("Connection", "close")
		}
		if m.date != "" {
			w.Header().Set("Date", m.date)
		}
		w.WriteHeader(int(m.status.Load()))
		if b := m.body.Load(); b != nil {
			io.WriteString(w, *b)
		}
	})
	return m
}

func (m *fakeMaster) start() {
	m.http.IdleTimeout = 90 * time.Second // the same as kube-apiserver's
	m.http.TLSConfig = &tls.Config{NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &m.cert, nil }}
	if m.plain {
		m.http.TLSConfig.NextProtos = []string{"http/1.1"}
		m.http.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){}
	}
	go m.http.ServeTLS(m.ln, "", "")
}

func (m *fakeMaster) stop() {
	m.hung.Store(false)
	m.gone.Store(false)
	close(m.ln.done)
	m.kill()
	m.http.Close()
}

// kill closes every connection and rejects new ones.
func (m *fakeMaster) kill() {
	m.dead.Store(true)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		c.Close()
	}
	m.conns = nil
}

func (m *fakeMaster) dial(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	m.dials.Add(1)
	switch {
	case m.gone.Load():
		<-ctx.Done()
		return nil, context.DeadlineExceeded
	case m.dead.Load():
		return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	client, server := net.Pipe()
	if m.slams.Load() {
		go func() {
			defer server.Close()
			conn := tls.Server(server, &tls.Config{Certificates: []tls.Certificate{m.cert}, NextProtos: []string{"h2"}})
			if conn.Handshake() == nil {
				go io.Copy(io.Discard, conn)
				time.Sleep(time.Millisecond)
			}
		}()
		return client, nil
	}
	s := &switchable{Conn: server, m: m}
	if m.slow {
		s.Conn = newLagging(server, &m.lag)
	}
	m.mu.Lock()
	m.conns = append(m.conns, s)
	m.mu.Unlock()
	select {
	case m.ln.conns <- s:
		return client, nil
	case <-m.ln.done: // stopped meanwhile
		return nil, net.ErrClosed
	}
}

// testWatcher is a watcher of a fakeMaster, with the state that follows from its outcomes.
type testWatcher struct {
	mu     sync.Mutex
	health health
	events []string
	pings  atomic.Int64
	asks   atomic.Int64
	at     time.Time // time of the last change
	cancel context.CancelFunc
	done   chan struct{}
	needed chan struct{}
	others atomic.Bool // other API servers are up
	idle   atomic.Bool // no program of the node uses this one
}

func startWatcher(t testing.TB, m *fakeMaster, p Profile, r *probe.Roots) *testWatcher {
	t.Helper()
	return startWatcherWith(t, m, p, r, probe.Spec{Method: "GET", Path: "/readyz"})
}

func startWatcherWith(t testing.TB, m *fakeMaster, p Profile, r *probe.Roots, asked probe.Spec) *testWatcher {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &testWatcher{health: health{Rise: 2, Fall: 2}, cancel: cancel, done: make(chan struct{}), needed: make(chan struct{}, 1)}
	w := &watcher{profile: p, fall: 2, renew: make(chan struct{}, 1), probeNow: s.needed, slots: make(chan struct{}, maxHandshakes), ticks: tickTimes{time.Now()},
		alone: func() bool { return !s.others.Load() },
		target: func() probe.Target {
			return probe.Target{Addr: addrAt(1), Name: "10.0.0.1", SNI: "apiserver.cluster.local",
				Probe: asked, Roots: r, Dial: m.dial, Client: m.client}
		},
		observe: func(c probe.Outcome, err error) (State, bool) {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.health.observe(c, time.Now()) {
				s.at = time.Now()
				s.events = append(s.events, fmt.Sprintf("%s (%s)", s.health.State, c))
			}
			return s.health.State, s.health.probeSoon()
		},
		count: func(c counter) {
			switch c {
			case countPing:
				s.pings.Add(1)
			case countRequest:
				s.asks.Add(1)
			}
		},
	}
	go func() { w.run(ctx); close(s.done) }()
	return s
}

// use simulates programs of the node that send a packet to
// the API server every interval while idle is false.
func (s *testWatcher) use(every time.Duration) {
	tick := time.NewTicker(every)
	go func() {
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if !s.idle.Load() {
					wake(s.needed)
				}
			case <-s.done:
				return
			}
		}
	}()
}

func (s *testWatcher) stop(m *fakeMaster) {
	s.cancel()
	m.stop()
	<-s.done
	// net/http closes its pipes after a while.
	time.Sleep(time.Minute)
}

func (s *testWatcher) state() (State, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.health.State, s.at
}

// changes returns the changes of the state so far, each as "state (outcome)".
func (s *testWatcher) changes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.events)
}

// bubbleCerts makes a CA and a server certificate that are valid in the year 2000, in which the
// clock of synctest starts.
func bubbleCerts(t testing.TB) (*ca, tls.Certificate) {
	from, to := time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
	c := newCA(t, from, to)
	return c, c.issue(t, from, to, "kubernetes", "apiserver.cluster.local")
}

// TestFailureDetection measures the time to detect a fault at each phase of the probe,
// for an API server that programs of the node use and for an unused one.
func TestFailureDetection(t *testing.T) {
	c, cert := bubbleCerts(t)
	for _, f := range []struct {
		name    string
		break_  func(*fakeMaster)
		fix     func(*fakeMaster)
		used    bool
		within  time.Duration
		outcome string
	}{
		{"kill", (*fakeMaster).kill, func(m *fakeMaster) { m.dead.Store(false) }, false, 0, "connection refused"},
		{"hang", func(m *fakeMaster) { m.hung.Store(true) }, func(m *fakeMaster) { m.hung.Store(false) }, true, 2200 * time.Millisecond, "no answer"},
		{"drop", func(m *fakeMaster) { m.gone.Store(true) }, func(m *fakeMaster) { m.gone.Store(false) }, true, 2200 * time.Millisecond, "no answer"},
		{"hang unused", func(m *fakeMaster) { m.hung.Store(true) }, func(m *fakeMaster) { m.hung.Store(false) }, false, 6200 * time.Millisecond, "no answer"},
		{"drop unused", func(m *fakeMaster) { m.gone.Store(true) }, func(m *fakeMaster) { m.gone.Store(false) }, false, 6200 * time.Millisecond, "no answer"},
	} {
		t.Run(f.name, func(t *testing.T) {
			var worst, worstAgain time.Duration
			for range 25 {
				synctest.Test(t, func(t *testing.T) {
					m := newFakeMaster(t, cert)
					m.start()
					s := startWatcher(t, m, LAN(), c.roots(t))
					defer s.stop(m)
					if f.used {
						s.use(keepTick)
					}
					time.Sleep(40*time.Second + time.Duration(mrand.Int64N(int64(20*time.Second))))
					if st, _ := s.state(); st != Up {
						t.Fatalf("the master is %s", st)
					}
					broke := time.Now()
					f.break_(m)
					time.Sleep(10 * time.Second)
					st, at := s.state()
					if st != Down {
						t.Fatalf("the API server is %s after 10 s: %v", st, s.changes())
					}
					worst = max(worst, at.Sub(broke))
					f.fix(m)
					s.idle.Store(true)
					time.Sleep(5 * time.Second)
					if st, _ = s.state(); st != Up {
						t.Fatalf("the API server is %s 5 s after it recovered: %v", st, s.changes())
					}
					if want := []string{"up (ready)", "down (" + f.outcome + ")", "up (ready)"}; fmt.Sprint(s.changes()) != fmt.Sprint(want) {
						t.Errorf("got %q, want %q", s.changes(), want)
					}
					// It fails again a few seconds after it returned.
					time.Sleep(time.Duration(mrand.Int64N(int64(6 * time.Second))))
					s.idle.Store(false)
					broke = time.Now()
					f.break_(m)
					time.Sleep(10 * time.Second)
					if st, at = s.state(); st != Down {
						t.Fatalf("the API server is %s 10 s after it failed again: %v", st, s.changes())
					}
					worstAgain = max(worstAgain, at.Sub(broke))
				})
			}
			t.Logf("worst of 25: %s, and soon after it came back: %s", worst, worstAgain)
			worst = max(worst, worstAgain)
			if worst > f.within {
				t.Errorf("the failure was noticed after %s, more than %s", worst, f.within)
			}
		})
	}
}

// TestAnonymousProbes checks a node that has not joined. For its requests kube-apiserver closes the
// connection after every answer. These closes are no faults. There are few requests, each on its
// own connection. A kill between requests is detected at once.
func TestAnonymousProbes(t *testing.T) {
	c, cert := bubbleCerts(t)
	synctest.Test(t, func(t *testing.T) {
		m := newFakeMaster(t, cert)
		m.closesEach = true
		m.start()
		s := startWatcher(t, m, LAN(), c.roots(t))
		defer s.stop(m)
		time.Sleep(10*time.Minute + 3*time.Second)
		if got := fmt.Sprint(s.changes()); got != "[up (ready)]" {
			t.Errorf("the states are %s, want only up", got)
		}
		if dials, asks := m.dials.Load(), s.asks.Load(); asks < 7 || asks > 11 || dials > asks+2 {
			t.Errorf("%d requests over %d connections in ten minutes", asks, dials)
		}
		broke := time.Now()
		m.kill()
		time.Sleep(5 * time.Second)
		if st, at := s.state(); st != Down || at.Sub(broke) > 300*time.Millisecond {
			t.Errorf("the API server is %s, %s after it was killed", st, at.Sub(broke))
		}
		m.dead.Store(false)
		time.Sleep(10 * time.Second)
		if st, _ := s.state(); st != Up {
			t.Errorf("the API server is %s after it recovered: %v", st, s.changes())
		}
	})
}

// TestTrafficWithoutFaults checks the traffic of an hour without faults: one connection, a PING
// every five seconds, a request every ten, and no inquiry. Each renewal of kubelet's lease adds a
// PING.
func TestTrafficWithoutFaults(t *testing.T) {
	c, cert := bubbleCerts(t)
	for _, tt := range []struct {
		profile Profile
		lease   time.Duration // 0: no lease renewals go to this API server
		most    float64       // MB of IP packets a day
	}{{LAN(), 0, 11}, {LAN(), 10 * time.Second, 13}, {Metered(), 0, 0.7}} {
		p := tt.profile
		t.Run(fmt.Sprint(p.Name, " lease ", tt.lease), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFakeMaster(t, cert)
				plain := m.http.Handler
				m.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					// Headers that kube-apiserver sends.
					for k, v := range map[string]string{"Audit-Id": "0b7e2c1a-94a3-4d2c-8f5e-6a1d3c9b7e42", "Cache-Control": "no-cache, private", "Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff",
						"X-Kubernetes-Pf-Flowschema-Uid": "5c0e8a64-1f0b-4d55-9a53-2b8c4f1e7d90", "X-Kubernetes-Pf-Prioritylevel-Uid": "e2b4c6d8-7a91-4c3f-b5d7-90a1b2c3d4e5"} {
						w.Header().Set(k, v)
					}
					plain.ServeHTTP(w, r)
				})
				text := "ok"
				m.body.Store(&text)
				m.start()
				s := startWatcher(t, m, p, c.roots(t))
				defer s.stop(m)
				if tt.lease > 0 {
					s.use(tt.lease)
				}
				time.Sleep(time.Minute)
				p0, r0, b0, out0, in0 := s.pings.Load(), s.asks.Load(), m.written.Load(), m.sent.Load(), m.received.Load()
				time.Sleep(time.Hour)
				pings, asks, bytes := s.pings.Load()-p0, s.asks.Load()-r0, m.written.Load()-b0
				const header = 52 // size of the headers of IP and of TCP with timestamps
				answers := m.sent.Load() - out0
				packets := answers + (m.received.Load() - in0) + answers // each answer is acknowledged
				day := float64(24*(bytes+header*packets)) / 1e6
				t.Logf("%s: %d pings, %d requests, %d bytes of TLS records an hour; %.2f MB of IP a day", p.Name, pings, asks, bytes, day)
				if day > tt.most {
					t.Errorf("%.2f MB a day, want at most %.1f", day, tt.most)
				}
				if m.dials.Load() != 1 {
					t.Errorf("%d connections, want 1", m.dials.Load())
				}
				if p.Ping == 0 && pings != 0 {
					t.Errorf("%d pings, want none", pings)
				} else if p.Ping > 0 && tt.lease == 0 {
					if most := int64(time.Hour / (p.Ping - maxJitter(p.Ping))); pings > most || pings < most/2 {
						t.Errorf("%d pings, want at most %d", pings, most)
					}
				}
				if most := int64(time.Hour/(p.Ready-maxJitter(p.Ready))) + 1; asks > most || asks < most/2 {
					t.Errorf("%d requests, want at most %d", asks, most)
				}
				if len(s.changes()) != 1 {
					t.Errorf("%q", s.changes())
				}
			})
		})
	}
}

// TestAnswersOfMasters checks the states that follow from the answers to the probe.
func TestAnswersOfMasters(t *testing.T) {
	from, to := time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
	c, good := bubbleCerts(t)
	other := newCA(t, from, to)
	early := c.issue(t, from.AddDate(10, 0, 0), to, "kubernetes")
	expired := c.issue(t, from, from.AddDate(0, 6, 0), "kubernetes")
	client := c.issue(t, from, to, "kubernetes")
	drain := "[+]ping ok\n[-]shutdown failed: reason withheld\n"
	for _, tt := range []struct {
		name    string
		status  int64
		body    string
		cert    tls.Certificate
		date    string
		noCA    bool
		plain   bool
		extra   int // --health-status
		want    State
		outcome probe.Outcome
	}{
		{name: "ready", want: Up, outcome: probe.OK},
		{name: "ready over HTTP/1.1", plain: true, want: Up, outcome: probe.OK},
		{name: "unauthorized", status: 401, want: Up, outcome: probe.Guarded},
		{name: "forbidden", status: 403, want: Up, outcome: probe.Guarded},
		{name: "too many", status: 429, want: Up, outcome: probe.Guarded},
		{name: "unavailable", status: 503, want: Down, outcome: probe.ServerError},
		{name: "not found", status: 404, want: Down, outcome: probe.ServerError},
		{name: "unavailable, which is healthy here", status: 503, extra: 503, want: Up, outcome: probe.OK},
		{name: "ready, with 503 also accepted", extra: 503, want: Up, outcome: probe.OK},
		{name: "draining", status: 500, body: drain, want: Draining, outcome: probe.Draining},
		{name: "wrong CA", cert: other.issue(t, from, to, "kubernetes"), want: Alien, outcome: probe.Identity},
		{name: "wrong name", cert: c.issue(t, from, to, "etcd"), want: Alien, outcome: probe.Identity},
		{name: "wrong CA, no CA yet", cert: other.issue(t, from, to, "kubernetes"), noCA: true, want: Up, outcome: probe.OK},
		{name: "not valid yet", cert: early, want: Up, outcome: probe.SkewedOK},
		{name: "expired by our clock only", cert: expired, date: "Tue, 02 Mar 1999 10:00:00 GMT", want: Up, outcome: probe.SkewedOK},
		{name: "expired by both clocks", cert: expired, date: "Sat, 01 Jan 2000 00:00:05 GMT", want: Down, outcome: probe.Expired},
		{name: "expired, and forbidden", cert: expired, status: 403, date: "Tue, 02 Mar 1999 10:00:00 GMT", want: Up, outcome: probe.Guarded},
		{name: "another certificate of ours", cert: client, want: Up, outcome: probe.OK},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if tt.cert.Certificate == nil {
					tt.cert = good
				}
				m := newFakeMaster(t, tt.cert)
				m.plain, m.date = tt.plain, tt.date
				if tt.status != 0 {
					m.status.Store(tt.status)
				}
				m.body.Store(&tt.body)
				m.start()
				r := c.roots(t)
				if tt.noCA {
					r = nil
				}
				probe := probe.Spec{Method: "GET", Path: "/readyz"}
				if tt.extra != 0 {
					probe.Status = []int{tt.extra}
				}
				s := startWatcherWith(t, m, LAN(), r, probe)
				defer s.stop(m)
				time.Sleep(10 * time.Second)
				s.mu.Lock()
				defer s.mu.Unlock()
				if s.health.State != tt.want || s.health.Outcome != tt.outcome {
					t.Errorf("got %s (%s), want %s (%s)", s.health.State, s.health.Outcome, tt.want, tt.outcome)
				}
			})
		})
	}
}
