package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/ipvs/kernel"
)

// errPresent means that IP_VS has been loaded since the start.
var errPresent = errors.New("the kernel has IP_VS now")

// ErrRestart means that the daemon must be restarted in a new process, because IP_VS was loaded or
// unloaded: moby/ipvs keeps the number of the kernel's netlink family for the life of a process.
var ErrRestart = errors.New("restarting: IP_VS was loaded or unloaded")

// Intervals of the reconciler.
const (
	// keepTick is the interval between checks of the kernel's table. It is shorter than one second,
	// the limit for reverting changes by other programs. PINGs, due 0.8 s to 1 s after the last
	// answer, are sent at the same times.
	keepTick = 920 * time.Millisecond
	// keepFull is the interval between checks of the routes.
	keepFull = time.Minute
	// keepGather is the delay between a change of routes and their check,
	// because changes come in bursts.
	keepGather = 100 * time.Millisecond
)

// routeSource determines the source address of a local route: source if it is valid, otherwise the
// address from which this node reaches the API servers.
type routeSource struct {
	masters []netip.Addr
	source  netip.Addr
}

// reconciler makes the kernel match the desired virtual servers. All of its work is done in one
// goroutine.
type reconciler struct {
	kernel        kernel.Kernel
	log           func(format string, args ...any)
	calls         chan func()
	wake          chan struct{}
	moduleChanged func(error) // called when IP_VS was loaded or unloaded
	stats         *stats
	ticks         tickTimes

	want []kernel.Service
	via  map[netip.AddrPort]routeSource
	// made has the virtual servers that the kernel had after the last comparison. If one is missing
	// in the next comparison, another program has removed it.
	made map[netip.AddrPort]bool
	// sent is the number of packets sent through IPVS until the last tick. conns has the
	// connections of each virtual server as of the last increase of sent.
	sent  uint64
	conns map[netip.AddrPort]map[netip.AddrPort]kernel.Conns
	// used is called on a tick if packets were sent since the previous one, with the real servers
	// that may have received them.
	used func(vip netip.AddrPort, dests []netip.AddrPort)
	// absent is set if the kernel has no IP_VS. Then the reconciler can only close sockets.
	absent bool
	waited time.Duration // time since the last check whether IP_VS is loaded
	// logged is the last error that was logged.
	logged string
}

func newReconciler(k kernel.Kernel, log func(string, ...any), st *stats, moduleChanged func(error)) *reconciler {
	return &reconciler{kernel: k, log: log, stats: st, moduleChanged: moduleChanged,
		calls: make(chan func()), wake: make(chan struct{}, 1), via: make(map[netip.AddrPort]routeSource), made: make(map[netip.AddrPort]bool),
		conns: make(map[netip.AddrPort]map[netip.AddrPort]kernel.Conns), used: func(netip.AddrPort, []netip.AddrPort) {}}
}

// run maintains the virtual servers until the context ends, and then leaves them in place.
func (k *reconciler) run(ctx context.Context) {
	err := k.kernel.Watch(ctx, func() { wake(k.wake) })
	if err != nil {
		k.log("cannot watch routes, checking every %s instead: %v", keepFull, err)
	}
	tick := time.NewTimer(k.ticks.after(0))
	defer tick.Stop()
	gather := time.NewTimer(time.Hour)
	gather.Stop()
	gathering := false
	defer gather.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case f := <-k.calls:
			f()
		case <-k.wake:
			if !gathering {
				gathering = true
				gather.Reset(keepGather)
			}
		case <-gather.C:
			gathering = false
			if !k.absent {
				k.logChange(k.routes())
			}
		case <-tick.C:
			tick.Reset(k.ticks.after(0))
			full := time.Since(last) >= keepFull
			if full {
				last = time.Now()
			}
			k.tick(full)
		}
	}
}

// call runs f in the reconciler's goroutine and returns its error.
func (k *reconciler) call(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	select {
	case k.calls <- func() { done <- f() }:
	case <-ctx.Done():
		return ctx.Err()
	}
	return <-done
}

// tick reverts changes by other programs. full includes the routes, which are otherwise checked
// only when the kernel announces a change.
func (k *reconciler) tick(full bool) {
	if k.absent {
		if k.waited += keepTick; k.waited >= absentEvery {
			k.waited = 0
			if k.kernel.Ready() == nil {
				k.moduleChanged(errPresent)
			}
		}
		return
	}
	if len(k.want) == 0 {
		return
	}
	err := k.reconcile(true)
	if full {
		err = errors.Join(err, k.routes())
	}
	k.logChange(err)
}

// logChange logs an error if it differs from the last one, and logs when the error is gone.
func (k *reconciler) logChange(err error) {
	if err == nil {
		if k.logged != "" {
			k.logged = ""
			k.log("the kernel's tables are correct again")
		}
		return
	}
	if msg := printable.WithoutLocalAddr(err.Error()); msg != k.logged {
		k.logged = msg
		k.log("%s", msg)
	}
}

// set sets the desired state of a virtual server.
func (k *reconciler) set(ctx context.Context, want kernel.Service, via routeSource) error {
	return k.call(ctx, func() error {
		if k.absent {
			return nil
		}
		i := slices.IndexFunc(k.want, func(s kernel.Service) bool { return s.VIP == want.VIP })
		if i < 0 {
			k.want = append(k.want, want)
		} else {
			k.want[i] = want
		}
		k.via[want.VIP] = via
		return errors.Join(k.reconcile(false), k.routes())
	})
}

// current returns the virtual server in the kernel, or nil.
func (k *reconciler) current(ctx context.Context, vip netip.AddrPort) (s *kernel.Service, err error) {
	err = k.call(ctx, func() error {
		if k.absent {
			return nil
		}
		s, err = k.kernel.Service(vip)
		return err
	})
	return s, err
}

// sever closes the sockets connected directly to an API server.
func (k *reconciler) sever(ctx context.Context, addr netip.AddrPort) error {
	return k.call(ctx, func() error {
		n, err := k.kernel.SeverRemote(addr)
		k.stats.severed.Add(int64(n))
		return err
	})
}

// drop removes a virtual server, its connections and its route.
func (k *reconciler) drop(ctx context.Context, vip netip.AddrPort) error {
	return k.call(ctx, func() error {
		k.want = slices.DeleteFunc(k.want, func(s kernel.Service) bool { return s.VIP == vip })
		delete(k.via, vip)
		delete(k.made, vip)
		delete(k.conns, vip)
		return removeService(k.kernel, vip, slices.ContainsFunc(k.want, func(s kernel.Service) bool { return s.VIP.Addr() == vip.Addr() }))
	})
}

// removeService removes one virtual server. keepRoute keeps the route, for
// another virtual server with the same address.
func removeService(machine kernel.Kernel, vip netip.AddrPort, keepRoute bool) error {
	have, err := machine.Service(vip)
	if err != nil && !errors.Is(err, kernel.ErrNoIPVS) {
		return err
	}
	var errs []error
	for _, op := range kernel.Diff(nil, have) {
		if err := apply(machine, op, nil); err != nil {
			errs = append(errs, err)
		}
	}
	if !keepRoute {
		errs = append(errs, machine.DelRoute(vip.Addr()))
	}
	return errors.Join(errs...)
}

// absentEvery is the interval between checks whether IP_VS has been loaded.
const absentEvery = 5 * time.Second

// reconcile compares the desired virtual servers with the kernel's and repairs differences. repair
// means that edgebake requested no change, so another program caused the differences.
func (k *reconciler) reconcile(repair bool) error {
	settings, err := k.kernel.Settings()
	var errs []error
	if err != nil {
		errs = append(errs, err)
	}
	if len(settings) > 0 && repair {
		k.stats.repairs.Add(1)
		k.log("restored kernel settings: %v", settings)
	}
	sending := false
	if repair {
		if sending, err = k.sending(); err != nil {
			errs = append(errs, err)
		}
	}
	for i := range k.want {
		have, err := k.kernel.Service(k.want[i].VIP)
		if err != nil {
			if errors.Is(err, kernel.ErrNoIPVS) {
				k.moduleChanged(err)
				return errors.Join(append(errs, err)...)
			}
			errs = append(errs, err)
			continue
		}
		if sending && have != nil {
			k.used(k.want[i].VIP, k.receivers(k.want[i].VIP, have))
		}
		vip := k.want[i].VIP
		removed := have == nil && k.made[vip]
		k.made[vip] = have != nil
		ops := kernel.Diff(&k.want[i], have)
		if len(ops) == 0 {
			continue
		}
		if repair || removed {
			k.stats.repairs.Add(1)
			k.log("%s was changed by another program, restoring it: %s", vip, brief(ops))
		}
		for _, op := range ops {
			if err := apply(k.kernel, op, k.stats); err != nil {
				errs = append(errs, err)
			} else if op.Kind == kernel.AddService {
				k.made[vip] = true
			}
		}
		if removed {
			// The connections of the removed virtual server are gone. A client that only receives,
			// for example from a watch, would not notice that.
			n, err := k.kernel.SeverRemote(vip)
			k.stats.severed.Add(int64(n))
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// sending reports whether packets were sent through IPVS since the last tick.
func (k *reconciler) sending() (bool, error) {
	n, err := k.kernel.Sent()
	changed := err == nil && n != k.sent
	if changed {
		k.sent = n
	}
	return changed, err
}

// receivers returns the real servers that may have received packets: those with
// established connections, or with more that are being opened than before.
func (k *reconciler) receivers(vip netip.AddrPort, have *kernel.Service) (dests []netip.AddrPort) {
	for dest, n := range have.Conns {
		if n.Active > 0 || n.Inactive > k.conns[vip][dest].Inactive {
			dests = append(dests, dest)
		}
	}
	k.conns[vip] = have.Conns
	return dests
}

// brief lists the first steps, for a message.
func brief(ops []kernel.Op) string {
	const most = 4
	s := ""
	for i, op := range ops {
		if i == most {
			return fmt.Sprintf("%s and %d more", s, len(ops)-most)
		}
		if i > 0 {
			s += ", "
		}
		s += op.Kind.String()
		if op.Kind > kernel.DelService {
			s += " " + op.Dest.Addr.String()
		}
	}
	return s
}

func apply(machine kernel.Kernel, op kernel.Op, st *stats) error {
	if op.Kind != kernel.Sever {
		if err := machine.Apply(op); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		return nil
	}
	conns, err := machine.Conns(op.Service.VIP, op.Dest.Addr)
	if err == nil && len(conns) > 0 {
		var n int
		n, err = machine.Sever(conns)
		if st != nil {
			st.severed.Add(int64(n))
		}
	}
	// Connection tracking may still assign a connection to the removed real server. IPVS drops its
	// first packet, and without Untrack a client would wait until it sends the next SYN.
	if err = errors.Join(err, machine.Untrack(op.Service.VIP, op.Dest.Addr)); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// routes repairs the local route to each virtual address, including its source address.
func (k *reconciler) routes() error {
	var errs []error
	for i := range k.want {
		vip := k.want[i].VIP
		if err := k.route(vip.Addr(), k.via[vip]); err != nil {
			errs = append(errs, fmt.Errorf("maintaining the route to %s: %w", vip.Addr(), err))
		}
	}
	return errors.Join(errs...)
}

func (k *reconciler) route(vip netip.Addr, via routeSource) error {
	src, err := via.source, error(nil)
	for _, m := range via.masters {
		if src.IsValid() {
			break
		}
		src, err = k.kernel.Source(m)
	}
	if !src.IsValid() {
		if err == nil {
			return nil // no API server is known yet
		}
		return fmt.Errorf("no route to any API server yet: %w", err)
	}
	have, ok, err := k.kernel.Route(vip)
	if err != nil {
		return err
	}
	if ok && have == src {
		return nil
	}
	if err := k.kernel.SetRoute(vip, src); err != nil {
		return err
	}
	if ok {
		k.log("the local route to %s now has the source %s, it had %s", vip, src, have)
	} else {
		k.log("made the local route to %s with the source %s", vip, src)
	}
	k.stats.routes.Add(1)
	return nil
}
