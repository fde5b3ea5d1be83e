package lab

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Lockstep has machines share one clock that no load of this host disturbs. An
// emulated API server needs ten times the work of a real one; where several of
// them start on few processors, none is up before its own deadlines end it, and
// etcd's members take each other for dead. So these machines count their
// instructions instead of this host's time (qemu.Machine.Counted), and one that
// is ahead of the others waits for them. To all of them together it looks as if
// each had a processor of its own, on which an hour of theirs may take three of
// this host's.
//
// What is outside of them is not slowed down: what the host asks of them needs
// patience (VM.Patience), and a Site must be stamped before the first of them is
// on, or its machine would set its clock to that later time.
type Lockstep struct {
	mu  sync.Mutex
	vms map[clocked]*stepped
	now time.Time // of the machine that is last, or that was when all went off
}

// clocked is what a VM is here.
type clocked interface {
	Running() bool
	now(context.Context) (time.Time, error)
	command(ctx context.Context, name string) error
}

// stepped is a machine that is on.
type stepped struct {
	now     time.Time
	stopped bool
}

// lead is how far a machine may be ahead of another: its clock tells whole seconds.
const lead = 2 * time.Second

// NewLockstep begins at the host's time, and ends with the lab.
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

// Now is the time of the machine that is last.
func (s *Lockstep) Now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// add takes a machine in that has been switched on.
func (s *Lockstep) add(vm clocked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.vms[vm] = &stepped{now: s.now}
}

// look reads the machines' clocks, and lets those run that are not ahead.
func (s *Lockstep) look(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// One that does not answer, since it has just been started or gets nothing of
	// this host, is where it was.
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

// patience is VM.Patience by the machines' clock.
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
