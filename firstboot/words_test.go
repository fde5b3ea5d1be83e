package firstboot

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

func TestWordsAndGist(t *testing.T) {
	t.Parallel()
	r := &Runner{}
	for in, want := range map[string][2]string{
		"read tcp 192.0.2.50:40112->10.103.97.2:6443: read: connection reset by peer":                    {"read tcp 10.103.97.2:6443: read: connection reset by peer", "read tcp 10.103.97.2:6443: read: connection reset by peer"},
		"read tcp [fd00::50]:40112->[fd00:ed6e::2]:6443: read: connection reset by peer":                 {"read tcp [fd00:ed6e::2]:6443: read: connection reset by peer", "read tcp [fd00:ed6e::2]:6443: read: connection reset by peer"},
		"write udp [fe80::1%eth0]:5->[fe80::2%eth0]:53: i/o timeout":                                     {"write udp [fe80::2%eth0]:53: i/o timeout", "write udp [fe80::2%eth0]:53: i/o timeout"},
		"lookup m1: read udp 127.0.0.1:51234->127.0.0.53:53: i/o timeout":                                {"lookup m1: read udp 127.0.0.53:53: i/o timeout", "lookup m1: read udp 127.0.0.53:53: i/o timeout"},
		"dial tcp 192.0.2.11:6443: connect: connection refused":                                          {"dial tcp 192.0.2.11:6443: connect: connection refused", "dial tcp 192.0.2.11:6443: connect: connection refused"},
		"current time 2026-11-20T10:00:01Z is after 2026-11-01T00:00:00Z":                                {"current time 2026-11-20T10:00:01Z is after 2026-11-01T00:00:00Z", "current time … is after …"},
		"PLEG is not healthy: pleg was last seen active 3m5.123456s ago; threshold is 3m0s":              {"PLEG is not healthy: pleg was last seen active 3m5.123456s ago; threshold is 3m0s", "PLEG is not healthy: pleg was last seen active … ago; threshold is …"},
		"E1120 10:00:01.123456    4711 checks.go:1] not healthy after 4m0.000617123s":                    {"E1120 10:00:01.123456    4711 checks.go:1] not healthy after 4m0.000617123s", "…checks.go:1] not healthy after …"},
		"image 3 of 7, registry.k8s.io/pause:3.10, 2 objects of fd00::10, sn0042s, v1.36.3, 10.0.0.1/24": {"", ""},
	} {
		if want[0] == "" {
			want = [2]string{in, in}
		}
		if got := r.words(in); got != want[0] {
			t.Errorf("it is said as %q, want %q", got, want[0])
		}
		if got := gist(r.words(in)); got != want[1] {
			t.Errorf("its gist is %q, want %q", got, want[1])
		}
	}
}

// resetConn is a connection that is reset at once.
type resetConn struct {
	net.Conn
	err error
}

func (c resetConn) Read([]byte) (int, error)    { return 0, c.err }
func (c resetConn) Write(b []byte) (int, error) { return len(b), nil }

// TestALongWaitIsSaidOnce: connections to the API server are accepted and reset, each
// from another port, and some of them break in another way.
func TestALongWaitIsSaidOnce(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.env()
	dial, n := e.Dial, 0
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil || w.joins == 0 || addr != ownEndpoint {
			return conn, err
		}
		n++
		why := errors.New("connection reset by peer")
		if n%3 == 0 {
			why = errors.New("broken pipe")
		}
		return resetConn{conn, &net.OpError{
			Op: "read", Net: "tcp", Source: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 50), Port: 40000 + n},
			Addr: &net.TCPAddr{IP: net.IPv4(10, 103, 97, 2), Port: 6443}, Err: why,
		}}, nil
	}
	w.patience = time.Hour
	if err := w.run(New(e)); err == nil {
		t.Fatal("the node was Ready")
	}
	writes, lines := 0, 0
	for _, name := range w.names {
		if name == "write "+ondisk.StateFile {
			writes++
		}
	}
	for _, l := range w.console {
		if strings.Contains(l, readyStep) {
			lines++
		}
	}
	// An attempt lasts three minutes, and as a rule a pause of half a minute follows.
	if writes > 140 || lines > 60 {
		t.Errorf("in an hour the state was written %d times, and the console had %d lines\n%s", writes, lines, strings.Join(w.console[max(0, len(w.console)-9):], "\n"))
	}
	for _, p := range w.state().Phases {
		if p.Name == readyStep && !strings.Contains(p.Waiting+p.Error, "read tcp 10.103.97.2:6443: ") {
			t.Errorf("the state says of it: %+v", p)
		}
	}
}

// TestWhatAPhaseWaitsForIsSaved: at once when it begins to wait, and a minute late at
// most afterwards.
func TestWhatAPhaseWaitsForIsSaved(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.env()
	saved := func() string { return w.state().Phases[0].Waiting }
	ran := false
	check := func(context.Context, *machine.Env) (Verdict, error) {
		if ran {
			return Done, nil
		}
		return Todo, nil
	}
	p := Phase{Name: "wait", Doc: "it waits", Timeout: time.Hour, Check: check, Run: func(ctx context.Context, e *machine.Env) error {
		ran = true
		e.Waiting("the first thing")
		if got := saved(); got != "the first thing" {
			t.Errorf("saved: %q", got)
		}
		for i := range 120 {
			e.Waiting("thing %d", i)
			if err := e.Sleep(ctx, time.Second); err != nil {
				return err
			}
		}
		if got := saved(); got != "thing 60" && got != "thing 119" {
			t.Errorf("saved: %q", got)
		}
		for range 61 { // the last one goes on
			e.Waiting("the last thing")
			if err := e.Sleep(ctx, time.Second); err != nil {
				return err
			}
		}
		if got := saved(); got != "the last thing" {
			t.Errorf("saved: %q", got)
		}
		return nil
	}}
	r := &Runner{
		Env: e, Sources: func(*machine.Env) string { return "" },
		First: func() []Phase { return []Phase{p} }, Rest: func() (Node, []Phase) { return Node{}, nil },
	}
	w.patience = time.Hour
	if err := w.run(r); err != nil {
		t.Error(err)
	}
	writes := 0
	for _, name := range w.names {
		if name == "write "+ondisk.StateFile {
			writes++
		}
	}
	if writes > 9 {
		t.Errorf("the state was written %d times: %s", writes, fmt.Sprint(w.names))
	}
}
