package ipvs

import (
	"context"
	"net/netip"
	"time"
)

// Metered links use no PINGs. There the node's own traffic reveals a dead API server: kubelet
// renews its lease every few seconds, and packets that are not acknowledged are retransmitted.
// Retransmissions only trigger a probe; they are no verdict.

// stuckEvery is the interval between checks of the node's sockets, at a tick.
const stuckEvery = 5 * keepTick

// socketWatcher triggers a probe of API servers that do not acknowledge packets
// of the node's connections, if the profile has no PINGs.
func (g *group) socketWatcher(ctx context.Context) {
	k := g.d.reconciler
	look := time.NewTimer(0)
	defer look.Stop()
	for {
		look.Reset(k.ticks.after(stuckEvery - keepTick))
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		if g.config().Profile.Ping > 0 {
			continue
		}
		var dests []netip.AddrPort
		err := k.call(ctx, func() (err error) {
			if !k.absent {
				dests, err = k.kernel.Stuck(g.vip)
			}
			return err
		})
		if ctx.Err() != nil {
			return
		}
		g.d.logChange(g.vip.String()+": checking the node's connections", err)
		g.suspect(dests, time.Now())
	}
}

// used triggers a probe of API servers to which the node's programs have sent packets, because
// those programs may be waiting for an answer.
func (g *group) used(dests []netip.AddrPort) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.server.Profile.Ping == 0 {
		return
	}
	for _, a := range dests {
		if srv := g.apiServers[a]; srv != nil {
			wake(srv.probeNow)
		}
	}
}

// suspectPause is the minimum time between two probes that suspect triggers for one API server,
// because a poor link loses packets all the time.
const suspectPause = 15 * time.Second

func (g *group) suspect(dests []netip.AddrPort, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, a := range dests {
		srv := g.apiServers[a]
		if srv != nil && srv.health.State == Up && now.Sub(srv.suspectedAt) >= suspectPause {
			srv.suspectedAt = now
			wake(srv.probeNow)
		}
	}
}
