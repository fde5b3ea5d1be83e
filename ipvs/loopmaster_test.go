package ipvs

import (
	"crypto/tls"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/edgebake/edgebake/test/desk"
)

// loopNumber gives each master its own loopback address. loopRun does the same for each run of
// these tests.
var (
	loopNumber atomic.Uint32
	loopRun    = [2]byte{1 + byte(rand.N(254)), byte(rand.N(256))}
)

// loopMaster is net/http's TLS server on loopback.
type loopMaster struct {
	t    *testing.T
	addr netip.AddrPort
	srv  *httptest.Server
	// handler and cert override the defaults.
	handler http.Handler
	cert    tls.Certificate
}

// newLoopMaster listens on a loopback address of its own; all masters use the same port. No other
// process takes that address and port while the master is down: other runs have other addresses,
// and the kernel does not assign the port automatically.
func newLoopMaster(t *testing.T) *loopMaster {
	n := loopNumber.Add(1)
	m := &loopMaster{t: t, addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, loopRun[0], loopRun[1], byte(n)}), 16443)}
	m.start()
	t.Cleanup(m.stop)
	return m
}

func (m *loopMaster) master() Master {
	return Master{Host: m.addr.Addr().String(), Port: m.addr.Port()}
}

func (m *loopMaster) start() {
	m.t.Helper()
	ln, err := net.Listen("tcp", m.addr.String())
	if err != nil {
		desk.Lacks(m.t, "cannot listen on %s: %v", m.addr, err)
	}
	handler := m.handler
	if handler == nil {
		handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
	}
	m.srv = httptest.NewUnstartedServer(handler)
	if m.cert.PrivateKey != nil {
		m.srv.TLS = &tls.Config{Certificates: []tls.Certificate{m.cert}}
	}
	m.srv.Listener.Close()
	m.srv.Listener = ln
	m.srv.EnableHTTP2 = true
	m.srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	m.srv.StartTLS()
}

func (m *loopMaster) stop() {
	if m.srv != nil {
		m.srv.Listener.Close() // close it first: otherwise the watcher reconnects at once
		m.srv.CloseClientConnections()
		m.srv = nil
	}
}
