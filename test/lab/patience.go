package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A machine that gets too little processor time from this host is not broken. So time limits count
// only the time in which the guest had the processors that it needed.

// starvedCap limits the time of a starved guest, as a multiple of its limit.
const starvedCap = 4

// effort is the time that a process's threads ran, and the time that they waited for a processor
// (stood).
type effort struct{ ran, stood time.Duration }

// share returns the share of the requested processor time that the process got.
func (e effort) share() float64 {
	if e.ran+e.stood <= 0 {
		return 1 // it did not want any
	}
	return float64(e.ran) / float64(e.ran+e.stood)
}

// effortOf returns the sum over all threads of a process (proc_pid_schedstat).
func effortOf(pid int) effort {
	var sum effort
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // the pattern is valid
	for _, t := range tasks {
		b, err := os.ReadFile(t)
		if err != nil {
			continue // the thread has ended
		}
		f := strings.Fields(string(b))
		if len(f) < 2 {
			continue
		}
		ran, _ := strconv.ParseInt(f[0], 10, 64)
		stood, _ := strconv.ParseInt(f[1], 10, 64)
		sum.ran += time.Duration(ran)
		sum.stood += time.Duration(stood)
	}
	return sum
}

// Ran returns the processor time of the machine since it was switched on.
func (vm *VM) Ran() time.Duration { return effortOf(vm.proc.Pid()).ran }

// Patience returns a context that ends after limit, without the time in which this host kept the
// guest waiting for a processor. The cause of the context reports whether the guest got too little
// processor time.
func (vm *VM) Patience(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if vm.cfg.Lockstep != nil {
		return vm.cfg.Lockstep.patience(ctx, limit)
	}
	pid := vm.proc.Pid()
	return patience(ctx, limit, func() effort { return effortOf(pid) })
}

func patience(ctx context.Context, limit time.Duration, measure func() effort) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		const step = 5 * time.Second
		var whole effort
		var used, passed time.Duration
		before := measure()
		every(ctx, step, func() bool {
			now := measure()
			// The sums may decrease, because threads that have ended are missing in them.
			did := effort{max(0, now.ran-before.ran), max(0, now.stood-before.stood)}
			before = now
			whole.ran += did.ran
			whole.stood += did.stood
			passed += step
			used += time.Duration(float64(step) * did.share())
			over := used >= limit || passed >= starvedCap*limit
			if over {
				cancel(verdict(passed, whole))
			}
			return !over
		})
	}()
	return ctx, func() { cancel(context.Canceled) }
}

// every calls do at each interval until do returns false or ctx is done.
func every(ctx context.Context, interval time.Duration, do func() bool) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !do() {
			return
		}
	}
}

// verdict returns the error of a time limit. It distinguishes a machine that got too little
// processor time from a broken one.
func verdict(passed time.Duration, e effort) error {
	percent := int(100 * e.share())
	if percent < 50 {
		return fmt.Errorf("STARVED, perhaps not broken: %v have passed, and the guest had a processor for %d %% of the time that it wanted one; run this on a quieter machine", passed, percent)
	}
	return fmt.Errorf("%v have passed, and the guest was not starved: it had a processor for %d %% of the time that it wanted one", passed, percent)
}
