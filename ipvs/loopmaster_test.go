package ipvs

import (
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/edgebake/edgebake/test/desk"
)

// loopNumber gives each master an address of its own on loopback.
var loopNumber atomic.Int32

// loopMaster is a master on loopback: net/http's own TLS server.
type loopMaster struct {
	t    *testing.T
	addr netip.AddrPort
	srv  *httptest.Server
}

// newLoopMaster listens on 127.x.y.z, all of them on one port if they can.
func newLoopMaster(t *testing.T) *loopMaster {
	n := loopNumber.Add(1)
	m := &loopMaster{t: t, addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 103, byte(n >> 8), byte(n)}), 16443)}
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
	m.srv = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") }))
	m.srv.Listener.Close()
	m.srv.Listener = ln
	m.srv.EnableHTTP2 = true
	m.srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	m.srv.StartTLS()
}

func (m *loopMaster) stop() {
	if m.srv != nil {
		m.srv.Listener.Close() // first, or the watcher is back at once
		m.srv.CloseClientConnections()
		m.srv = nil
	}
}
