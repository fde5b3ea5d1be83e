//go:build linux

package guest

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// nameServer answers inside the node for one name: with addresses, with an error, or not at all.
type nameServer struct {
	mu    sync.Mutex
	addrs []netip.Addr
	rcode dnsmessage.RCode
	mute  bool
	asked int
	conn  net.PacketConn
}

const masterName = "masters.example."

func (n *machine) nameServer(addrs ...netip.Addr) *nameServer {
	s := &nameServer{addrs: addrs}
	n.in(func() {
		var err error
		s.conn, err = net.ListenPacket("udp", "127.0.0.1:53")
		check(err)
	})
	go s.run()
	check(os.WriteFile("/etc/resolv.conf", []byte("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"), 0o644))
	n.l.t.Cleanup(func() {
		s.conn.Close()
		os.Remove("/etc/resolv.conf")
	})
	return s
}

func (s *nameServer) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *nameServer) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

func (s *nameServer) run() {
	buf := make([]byte, 1500)
	for {
		k, from, err := s.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(buf[:k]) != nil || len(m.Questions) != 1 {
			continue
		}
		q := m.Questions[0]
		s.mu.Lock()
		s.asked++
		reply := dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, RCode: s.rcode}, Questions: m.Questions}
		if q.Type == dnsmessage.TypeA && q.Name.String() == masterName && s.rcode == dnsmessage.RCodeSuccess {
			for _, a := range s.addrs {
				reply.Answers = append(reply.Answers, dnsmessage.Resource{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class},
					Body:   &dnsmessage.AResource{A: a.As4()}})
			}
		}
		mute := s.mute
		s.mu.Unlock()
		if b, err := reply.Pack(); err == nil && !mute {
			s.conn.WriteTo(b, from)
		}
	}
}

// TestNames checks that masters' names are looked up again, and that without an answer the last one
// stays valid.
func TestNames(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.nodes[0]
	m1, m2, m3 := l.masters[0], l.masters[1], l.masters[2]
	dns := n.nameServer(m1.addr)
	v := l.virtual()
	v.Masters = []string{strings.TrimSuffix(masterName, ".") + ":6443", m3.addr.String() + ":6443"}
	n.configure(v)
	n.care()
	n.expect("m1 m3")
	// The address of the name changes, and ipvscare gets no signal.
	dns.set(func() { dns.addrs = []netip.Addr{m2.addr} })
	n.expect("m2 m3")
	// The name gets two addresses, and a signal makes ipvscare look it up again.
	dns.set(func() { dns.addrs = []netip.Addr{m2.addr, m1.addr} })
	n.signal(syscall.SIGHUP)
	n.expect("m1 m2 m3")
	// No kind of missing answer changes anything.
	for _, silence := range []func(){
		func() { dns.rcode = dnsmessage.RCodeServerFailure },
		func() { dns.rcode = dnsmessage.RCodeNameError },
		func() { dns.rcode, dns.addrs = dnsmessage.RCodeSuccess, nil },
		func() { dns.mute = true },
	} {
		dns.set(silence)
		asked := dns.count()
		n.signal(syscall.SIGHUP)
		eventually(t, "it asks", func() bool { return dns.count() > asked })
		n.stays("m1 m2 m3", 1500*time.Millisecond)
	}
	if n.log.count("looking up masters.example") == 0 {
		t.Error("the log does not say that the name cannot be looked up")
	}
	// While look-ups hang, a dead master is still removed.
	m3.kill()
	n.expect("m1 m2")
	// After a boot with dead DNS and live masters, only the saved answers are available.
	n.stopProcess()
	n.must("/bin/ipvsadm", "-C")
	n.care()
	n.expect("m1 m2")
	// When an API server fails, its name is looked up at once, because its address may have
	// changed.
	m3.serve()
	n.expect("m1 m2 m3")
	dns.set(func() { dns.mute, dns.addrs = false, []netip.Addr{m1.addr} })
	m2.kill()
	eventually(t, "the name is looked up and the dead one forgotten", func() bool {
		// The name was looked up once since the restart: the log has no other answer.
		return n.log.count("masters.example is [10.103.0.11]") == 1 && n.serving() == "m1 m3"
	})
}
