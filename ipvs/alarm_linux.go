package ipvs

import (
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// clock wakes many goroutines by one timer of the kernel. A process that
// mostly waits wakes up three times for each of the runtime's timers: a moment
// too early, since it waits in whole milliseconds, when the time has come, and
// once more in its monitor thread; and it still does so for those that were put
// off meanwhile, as each PING's is by its answer.
type clock struct {
	file *os.File // a timerfd; the runtime's poller waits for it
	raw  syscall.RawConn

	mu    sync.Mutex
	set   []*kernelAlarm
	armed time.Time // zero: it is not
}

type kernelAlarm struct {
	c  chan time.Time
	at time.Time
}

// newClock starts a clock. close ends it.
func newClock() (*clock, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	c := &clock{file: os.NewFile(uintptr(fd), "timerfd")}
	if c.raw, err = c.file.SyscallConn(); err != nil {
		c.file.Close()
		return nil, err
	}
	go c.run()
	return c, nil
}

func (c *clock) close() { c.file.Close() }

// run delivers until the clock is closed.
func (c *clock) run() {
	x := exchange{b: make([]byte, 8)}
	for {
		err := c.raw.Read(func(fd uintptr) bool {
			x.do(unix.SYS_READ, fd)
			return x.errno != unix.EAGAIN
		})
		if err != nil || x.errno != 0 {
			return
		}
		c.deliver(time.Now())
	}
}

func (c *clock) deliver(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed = time.Time{}
	c.set = slices.DeleteFunc(c.set, func(a *kernelAlarm) bool {
		if a.at.After(now) {
			return false
		}
		select {
		case a.c <- now:
		default:
		}
		return true
	})
	c.arm()
}

// arm sets the kernel's timer to the first alarm.
func (c *clock) arm() {
	var first time.Time
	for _, a := range c.set {
		if first.IsZero() || a.at.Before(first) {
			first = a.at
		}
	}
	if first.Equal(c.armed) {
		return
	}
	c.armed = first
	var spec unix.ItimerSpec // all zero: never
	if !first.IsZero() {
		spec.Value = unix.NsecToTimespec(max(int64(time.Until(first)), 1))
	}
	c.raw.Control(func(fd uintptr) { setTimer(fd, &spec) })
}

// alarm makes one that this clock wakes.
func (c *clock) alarm() alarm {
	a := &kernelAlarm{c: make(chan time.Time, 1)}
	index := func() int { return slices.Index(c.set, a) }
	return alarm{
		C: a.c,
		set: func(d time.Duration) {
			c.mu.Lock()
			defer c.mu.Unlock()
			a.at = time.Now().Add(d)
			if index() < 0 {
				c.set = append(c.set, a)
			}
			c.arm()
		},
		stop: func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if i := index(); i >= 0 {
				c.set = slices.Delete(c.set, i, i+1)
				c.arm()
			}
		},
	}
}

// quietAlarms makes alarms by a clock of the kernel's, by Go's timers where
// there is none. Closing ends them all.
func quietAlarms() (newAlarm alarms, stop func()) {
	c, err := newClock()
	if err != nil {
		return runtimeAlarm, func() {}
	}
	return c.alarm, c.close
}
