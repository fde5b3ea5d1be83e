package lab

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Lockstep makes machines share one clock that does not depend on this host's load. An emulated API
// server needs ten times the work of a real one. If several start on few processors, their own
// timeouts end them, and etcd's members consider each other dead.
//
// In a Lockstep, a machine's time is the number of its executed instructions
// (qemu.Machine.Counted), and a machine that is ahead waits for the others. So the machines run as
// if each had its own processor. One hour of their time may take three hours of this host's.
//
// Timeouts of programs on this host must be longer (VM.Patience). A Site must be stamped before the
// first machine is on; otherwise its machine would set its clock forward to the time of stamping.
type Lockstep struct {
	mu  sync.Mutex
	vms map[clocked]*stepped
	now time.Time // highest time that all machines have reached
}

// clocked is the part of VM that Lockstep needs.
type clocked interface {
	Running() bool
	now(context.Context) (time.Time, error)
	command(ctx context.Context, name string) error
}

// stepped is the state of a machine that is switched on.
type stepped struct {
	now     time.Time
	stopped bool
}

// lead is the maximum time by which one machine may be ahead of another. The clocks count whole
// seconds, so it cannot be shorter.
const lead = 2 * time.Second

// NewLockstep returns a Lockstep whose time starts with this host's. It ends when the lab is
// closed.
func (l *Lab) NewLockstep() *Lockstep {
	s, end := newLockstep()
	l.onClose(func() error {
		end()
		return nil
	})
	return s
}

func newLockstep() (s *Lockstep, end func()) {
	s = &Lockstep{vms: map[clocked]*stepped{}, now: time.Now().UTC().Truncate(time.Second)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		every(ctx, 200*time.Millisecond, func() bool { s.look(ctx); return true })
	}()
	return s, func() {
		cancel()
		<-done
	}
}

// Now returns the highest time that all machines have reached.
func (s *Lockstep) Now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// add adds a machine that has been switched on.
func (s *Lockstep) add(vm clocked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.vms[vm] = &stepped{now: s.now}
}

// look reads the clocks of the machines, stops those that are ahead, and lets the others continue.
func (s *Lockstep) look(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A machine that was just started, or that gets no processor, may not answer. Then its time
	// counts as unchanged.
	limited, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var looks sync.WaitGroup
	for vm, m := range s.vms {
		if !vm.Running() {
			delete(s.vms, vm)
			continue
		}
		looks.Go(func() {
			if now, err := vm.now(limited); err == nil {
				m.now = now
			}
		})
	}
	looks.Wait()
	var last time.Time
	for _, m := range s.vms {
		if last.IsZero() || m.now.Before(last) {
			last = m.now
		}
	}
	if last.After(s.now) {
		s.now = last
	}
	for vm, m := range s.vms {
		command := "cont"
		stop := m.now.Sub(s.now) >= lead
		if stop {
			command = "stop"
		}
		if stop != m.stopped && vm.command(ctx, command) == nil {
			m.stopped = stop
		}
	}
}

// now reads the machine's hardware clock.
func (vm *VM) now(ctx context.Context) (time.Time, error) {
	var tm struct {
		Year  int `json:"tm_year"` // since 1900
		Month int `json:"tm_mon"`  // from 0
		Day   int `json:"tm_mday"`
		Hour  int `json:"tm_hour"`
		Min   int `json:"tm_min"`
		Sec   int `json:"tm_sec"`
	}
	if err := vm.ask(ctx, "qom-get", map[string]any{"path": "/machine", "property": "rtc-time"}, &tm); err != nil {
		return time.Time{}, err
	}
	return time.Date(1900+tm.Year, time.Month(1+tm.Month), tm.Day, tm.Hour, tm.Min, tm.Sec, 0, time.UTC), nil
}

// patience is like VM.Patience, but its limit counts the machines' time.
func (s *Lockstep) patience(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	start, began := time.Now(), s.Now()
	go every(ctx, 5*time.Second, func() bool {
		passed, used := time.Since(start), s.Now().Sub(began)
		if used >= limit {
			cancel(fmt.Errorf("%v have passed on the machines' own clock, %v on this host's", used, passed.Round(time.Second)))
		} else if passed >= starvedCap*limit {
			cancel(fmt.Errorf("STARVED, perhaps not broken: %v have passed, and %v on the machines' own clock; run this on a quieter machine", passed.Round(time.Second), used))
		}
		return ctx.Err() == nil
	})
	return ctx, func() { cancel(context.Canceled) }
}
