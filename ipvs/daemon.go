package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"
)

// Options are what a Daemon needs to know besides the virtual servers.
type Options struct {
	// ConfigFile is ipvs.json; it is followed. Servers is used instead if set.
	ConfigFile string
	Servers    []Server
	HostsFile  string // empty: none is kept
	Kernel     Kernel
	// Log takes one line.
	Log func(string)
	// Ready is called once, when the rules stand on first verdicts.
	Ready func()
	// Alive is called at least every two seconds while all is well.
	Alive func()
	// Reload, when it delivers, has all files read anew.
	Reload <-chan os.Signal
}

// settleTime bounds the wait for first verdicts before Ready.
const settleTime = 2 * time.Second

// Daemon keeps virtual servers until it is told to stop.
type Daemon struct {
	opt    Options
	keeper *keeper
	stats  stats

	mu     sync.Mutex
	groups map[netip.AddrPort]*running
	said   map[string]string
}

type running struct {
	*group
	cancel context.CancelFunc
	done   chan struct{}
}

// NewDaemon returns a daemon that has not done anything yet.
func NewDaemon(opt Options) *Daemon {
	return &Daemon{opt: opt, groups: make(map[netip.AddrPort]*running), said: make(map[string]string)}
}

func (d *Daemon) logf(format string, args ...any) { d.opt.Log(fmt.Sprintf(format, args...)) }

// say logs an error of a subject once, until it changes or is over.
func (d *Daemon) say(subject string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	msg := ""
	if err != nil {
		msg = err.Error()
	}
	if d.said[subject] == msg {
		return
	}
	if msg == "" {
		delete(d.said, subject)
		d.logf("%s: all right again", subject)
		return
	}
	d.said[subject] = msg
	d.logf("%s: %s", subject, msg)
}

var errNoFile = fs.ErrNotExist

func readRoots(file string) (*roots, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return parseRoots(file, data)
}

// Run keeps the virtual servers until the context ends. The rules stay.
func (d *Daemon) Run(ctx context.Context) error {
	servers := d.opt.Servers
	if servers == nil {
		data, err := os.ReadFile(d.opt.ConfigFile)
		if err != nil {
			return fmt.Errorf("reading the configuration: %w", err)
		}
		if servers, err = ParseConfig(d.opt.ConfigFile, data); err != nil {
			return err
		}
	}
	if err := d.opt.Kernel.Ready(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	d.keeper = newKeeper(d.opt.Kernel, d.logf, &d.stats, func(err error) { cancel(err) })
	var wg sync.WaitGroup
	wg.Go(func() { d.keeper.run(ctx) })
	d.apply(ctx, servers)
	wg.Go(func() { d.settle(ctx) })
	beat := time.NewTicker(time.Second)
	defer beat.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-d.opt.Reload:
		case <-beat.C:
			if d.opt.Alive != nil {
				d.opt.Alive()
			}
		}
	}
	d.mu.Lock()
	for _, r := range d.groups {
		r.cancel()
	}
	d.mu.Unlock()
	for _, r := range d.groups {
		<-r.done
	}
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// apply starts, changes and stops groups so that servers are kept.
func (d *Daemon) apply(ctx context.Context, servers []Server) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range servers {
		if r := d.groups[s.VIP]; r != nil {
			r.update(s)
			continue
		}
		gctx, cancel := context.WithCancel(ctx)
		r := &running{group: newGroup(d, s), cancel: cancel, done: make(chan struct{})}
		d.groups[s.VIP] = r
		go func() {
			defer close(r.done)
			r.run(gctx)
		}()
	}
}

// settle calls Ready when every group has first verdicts, or had its time.
func (d *Daemon) settle(ctx context.Context) {
	limit := time.NewTimer(settleTime)
	defer limit.Stop()
	d.mu.Lock()
	groups := slices.Collect(maps.Values(d.groups))
	d.mu.Unlock()
	for _, r := range groups {
		select {
		case <-r.settled:
			continue
		case <-ctx.Done():
			return
		case <-limit.C:
		}
		break
	}
	if d.opt.Ready != nil {
		d.opt.Ready()
	}
}
