package reports

import (
	"net"
	"testing"
	"time"
)

// TestShare checks that each address has its own limit of connections. After closing one
// connection, an address may open another.
func TestShare(t *testing.T) {
	in, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := LimitPerSender(in, 3)
	t.Cleanup(func() { l.Close() })
	taken := make(chan net.Conn, 10)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			taken <- c
		}
	}()
	// dial returns the server's side of a connection, or nil if the server closed it.
	dial := func(from string) net.Conn {
		t.Helper()
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", in.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		closed := make(chan struct{})
		go func() {
			_, _ = c.Read(make([]byte, 1))
			close(closed)
		}()
		select {
		case s := <-taken:
			return s
		case <-closed:
			return nil
		case <-time.After(time.Minute):
			t.Fatal("the connection was neither accepted nor rejected within a minute")
			return nil
		}
	}
	var open []net.Conn
	for i := range 5 {
		c := dial("127.0.0.1")
		if (c != nil) != (i < 3) {
			t.Fatalf("connection %d: accepted: %v", i+1, c != nil)
		}
		open = append(open, c)
	}
	if dial("127.0.0.2") == nil {
		t.Error("a connection from another address was rejected")
	}
	open[1].Close()
	open[1].Close() // a second Close has no effect
	if dial("127.0.0.1") == nil || dial("127.0.0.1") != nil {
		t.Error("after one connection was closed, not exactly one more was accepted")
	}
	for text, want := range map[string]string{"[2001:db8::1:2]:9": "2001:db8::/64", "[2001:db8::3:4]:9": "2001:db8::/64", "[::ffff:192.0.2.1]:9": "192.0.2.1/32"} {
		addr, err := net.ResolveTCPAddr("tcp", text)
		if err != nil {
			t.Fatal(err)
		}
		if got := sender(addr).String(); got != want {
			t.Errorf("%s counts as %s, want %s", text, got, want)
		}
	}
}

// TestCrowd checks that at the limit, a new connection closes the one that has been silent for
// longest.
func TestCrowd(t *testing.T) {
	in, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := LimitTotal(in, 2)
	t.Cleanup(func() { l.Close() })
	dial := func() (client, server net.Conn) {
		t.Helper()
		client, err := net.Dial("tcp", in.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		if server, err = l.Accept(); err != nil {
			t.Fatal(err)
		}
		return client, server
	}
	closed := func(c net.Conn) bool {
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		_, err := c.Read(make([]byte, 1))
		timeout, ok := err.(net.Error)
		return err != nil && !(ok && timeout.Timeout())
	}
	first, heard := dial()
	second, _ := dial()
	if _, err := first.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := heard.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	third, server := dial()
	if !closed(second) || closed(first) || closed(third) {
		t.Error("not exactly the connection that was silent for longest was closed")
	}
	server.Close()
	dial()
	if closed(first) {
		t.Error("a connection was closed although the limit was not reached")
	}
}
