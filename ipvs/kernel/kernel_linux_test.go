package kernel

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/test/desk"
)

// inNamespace runs the rest of the test in a new network namespace. Its thread ends with the test.
func inNamespace(t *testing.T) {
	desk.NeedRoot(t, "it makes a network namespace")
	for {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			break
		}
		// The first thread of a process never ends, and all tests would see its namespace in
		// /proc/net. So another goroutine occupies that thread meanwhile.
		runtime.UnlockOSThread()
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if unix.Gettid() == unix.Getpid() {
				<-t.Context().Done()
			}
		}()
		time.Sleep(time.Millisecond)
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		desk.Lacks(t, "making a network namespace: %v", err)
	}
}

// track adds entries to connection tracking.
func track(t *testing.T, flows ...[2]tuple) {
	t.Helper()
	c, err := dialNetlink(unix.NETLINK_NETFILTER)
	if err != nil {
		desk.Lacks(t, "opening netfilter: %v", err)
	}
	defer c.close()
	for _, f := range flows {
		request := netfilterHeader(f[0].dest.Addr())
		for i, kind := range []uint16{attrOrigin, attrReply} {
			nest, _ := f[i].encode(kind)
			request = append(request, nest...)
		}
		const timeout = 7
		request = appendAttr(request, timeout, binary.BigEndian.AppendUint32(nil, 600))
		if err := c.ask(trackNew, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL, request, nil); err != nil {
			desk.Lacks(t, "this kernel cannot make entries in connection tracking: %v", err)
		}
	}
}

// trackedClients returns the clients of all tracked connections.
func trackedClients(t *testing.T, vip netip.Addr) []netip.AddrPort {
	t.Helper()
	c, err := dialNetlink(unix.NETLINK_NETFILTER)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	var all []netip.AddrPort
	err = c.ask(trackGet, unix.NLM_F_DUMP, netfilterHeader(vip), func(entry []byte) error {
		if there, ok := decodeTuple(attr(entry[4:], attrOrigin)); ok {
			all = append(all, there.source)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return all
}

// TestUntrack checks that untrack deletes only the connections to the virtual address that are
// forwarded to one real server, with and without the kernel's filter.
func TestUntrack(t *testing.T) {
	for _, family := range []struct{ name, client, vip, dest, other string }{
		{"IPv4", "192.0.2.50", "10.103.97.2", "192.0.2.11", "192.0.2.12"},
		{"IPv6", "2001:db8::50", "fd00:97::2", "2001:db8::11", "2001:db8::12"},
	} {
		for _, filter := range []bool{true, false} {
			t.Run(family.name+", filtered by the kernel: "+strconv.FormatBool(filter), func(t *testing.T) {
				inNamespace(t)
				at := func(addr string, port uint16) netip.AddrPort {
					return netip.AddrPortFrom(netip.MustParseAddr(addr), port)
				}
				vip, dest, other := at(family.vip, 6443), at(family.dest, 6443), at(family.other, 6443)
				flow := func(port uint16, vip, dest netip.AddrPort) [2]tuple {
					client := at(family.client, port)
					return [2]tuple{{client, vip}, {dest, client}}
				}
				track(t, flow(1, vip, dest), flow(2, vip, other), flow(3, at(family.vip, 7443), dest), flow(4, dest, dest),
					flow(5, vip, at(family.dest, 7443)), flow(6, vip, dest))
				if err := untrack(vip, dest, filter); err != nil {
					t.Fatal(err)
				}
				var left []uint16
				for _, c := range trackedClients(t, vip.Addr()) {
					left = append(left, c.Port())
				}
				if want := []uint16{2, 3, 4, 5}; !slices.Equal(left, want) {
					t.Errorf("left: %v, want %v", left, want)
				}
			})
		}
	}
}

// TestUntrackInALargeTable checks that untrack needs no more memory if other programs have many
// connections.
func TestUntrackInALargeTable(t *testing.T) {
	inNamespace(t)
	const entries = 20000
	vip, dest := netip.MustParseAddrPort("10.103.97.2:6443"), netip.MustParseAddrPort("192.0.2.11:6443")
	var flows [][2]tuple
	for i := range entries {
		client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 40000)
		there := netip.MustParseAddrPort("10.244.0.1:53")
		flows = append(flows, [2]tuple{{client, there}, {there, client}})
	}
	track(t, flows...)
	k := &linux{settings: newSysctls(ProcSysNet)}
	for name, forget := range map[string]func() error{
		"as it is done":            func() error { return k.Untrack(vip, dest) },
		"by a kernel before 5.8":   func() error { return untrack(vip, dest, false) },
		"a kernel that can filter": func() error { return untrack(vip, dest, true) },
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		var err error
		took := desk.Processor(t, func() { err = forget() })
		runtime.ReadMemStats(&after)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d bytes, %s", name, after.TotalAlloc-before.TotalAlloc, took)
		if n := after.TotalAlloc - before.TotalAlloc; n > 256<<10 {
			t.Errorf("%s it allocates %d bytes", name, n)
		}
	}
	if n := len(trackedClients(t, vip.Addr())); n != entries {
		t.Errorf("%d entries are left of %d", n, entries)
	}
}

// TestSocketsTo checks that socketsTo finds the sockets of this machine that are connected to an
// address.
func TestSocketsTo(t *testing.T) {
	// An address of this process, because other programs connect to 127.0.0.1, even to ports whose
	// servers have ended.
	own := netip.AddrFrom4([4]byte{127, 71, byte(os.Getpid() >> 8), byte(os.Getpid())})
	for _, listen := range []string{netip.AddrPortFrom(own, 0).String(), "[::1]:0"} {
		ln, err := net.Listen("tcp", listen)
		if err != nil {
			t.Logf("SKIPPED: %v", err)
			continue
		}
		defer ln.Close()
		addr := ln.Addr().(*net.TCPAddr).AddrPort()
		var want []Conn
		for range 3 {
			c, err := net.Dial("tcp", addr.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			want = append(want, Conn{Client: c.LocalAddr().(*net.TCPAddr).AddrPort(), Virtual: addr})
		}
		got, err := socketsTo(addr)
		if err != nil {
			desk.Lacks(t, "this kernel has no socket diagnosis: %v", err)
		}
		order := func(a, b Conn) int { return a.Client.Compare(b.Client) }
		slices.SortFunc(got, order)
		slices.SortFunc(want, order)
		if !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", listen, got, want)
		}
		// The same port with another address does not match.
		elsewhere := netip.AddrPortFrom(addr.Addr().Next(), addr.Port())
		if got, err := socketsTo(elsewhere); err != nil || len(got) > 0 {
			t.Errorf("%s: %v, %v", elsewhere, got, err)
		}
	}
}
