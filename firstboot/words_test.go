package firstboot

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// resetConn is a connection that is reset immediately.
type resetConn struct {
	net.Conn
	err error
}

func (c resetConn) Read([]byte) (int, error) { return 0, c.err }

func (c resetConn) Write(b []byte) (int, error) { return len(b), nil }

// TestALongWaitIsSaidOnce checks that a wait is reported once, although connections to the API
// server are accepted and then reset, each from another port, and some fail differently.
func TestALongWaitIsSaidOnce(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.Env()
	dial, n := e.Dial, 0
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil || w.Joins == 0 || addr != worldtest.Endpoint {
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
	w.Patience = time.Hour
	if err := w.Run(New(e)); err == nil {
		t.Fatal("the node was Ready")
	}
	writes, lines := 0, 0
	for _, name := range w.EffectNames {
		if name == "write "+ondisk.StateFile {
			writes++
		}
	}
	for _, l := range w.Console {
		if strings.Contains(l, hub.ReadyStep) {
			lines++
		}
	}
	// An attempt lasts three minutes, usually followed by a pause of half a minute.
	if writes > 140 || lines > 60 {
		t.Errorf("in an hour the state was written %d times, and the console had %d lines\n%s", writes, lines, strings.Join(w.Console[max(0, len(w.Console)-9):], "\n"))
	}
	for _, p := range w.State().Phases {
		if p.Name == hub.ReadyStep && !strings.Contains(p.Waiting+p.Error, "read tcp 10.103.97.2:6443: ") {
			t.Errorf("the phase's state is %+v", p)
		}
	}
}

// TestWhatAPhaseWaitsForIsSaved checks that the reason for a wait is saved at once when the wait
// begins; a changed reason is saved a minute later at most.
func TestWhatAPhaseWaitsForIsSaved(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.Env()
	saved := func() string { return w.State().Phases[0].Waiting }
	ran := false
	check := func(context.Context, *machine.Env) (run.Verdict, error) {
		if ran {
			return run.Done, nil
		}
		return run.Todo, nil
	}
	p := run.Phase{Name: "wait", Doc: "it waits", Timeout: time.Hour, Check: check, Run: func(ctx context.Context, e *machine.Env) error {
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
		for range 61 { // until a minute has passed since the last write
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
	r := &run.Runner{
		Env: e, Sources: func(*machine.Env) string { return "" },
		First: func() []run.Phase { return []run.Phase{p} }, Rest: func() (run.Node, []run.Phase) { return run.Node{}, nil },
	}
	w.Patience = time.Hour
	if err := w.Run(r); err != nil {
		t.Error(err)
	}
	writes := 0
	for _, name := range w.EffectNames {
		if name == "write "+ondisk.StateFile {
			writes++
		}
	}
	if writes > 9 {
		t.Errorf("the state was written %d times: %s", writes, fmt.Sprint(w.EffectNames))
	}
}
