package ipvs

import (
	"context"
	"net/netip"
	"time"
)

// Where PINGs cost money, the node's own traffic tells of a dead API server, at
// no cost: kubelet renews its lease every few seconds, and what an API server
// does not acknowledge is sent again and again. That alone decides nothing; it
// has the API server asked at once.

// stuckEvery is the pause between looks at the node's sockets, on the beat.
const stuckEvery = 5 * keepTick

// listener has those API servers asked at once on which the node's own
// connections wait, if the profile sends no PINGs.
func (g *group) listener(ctx context.Context) {
	k := g.d.keeper
	look := time.NewTimer(0)
	defer look.Stop()
	for {
		look.Reset(k.beat.after(stuckEvery - keepTick))
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		if g.profile().Ping > 0 {
			continue
		}
		var dests []netip.AddrPort
		err := k.do(ctx, func() (err error) {
			if !k.absent {
				dests, err = k.kernel.Stuck(g.vip)
			}
			return err
		})
		if ctx.Err() != nil {
			return
		}
		g.d.say(g.vip.String()+": looking at the node's connections", err)
		g.suspect(dests, time.Now())
	}
}

// used has those API servers asked soon that the node's programs have sent something to:
// what they wait for may never come. A profile without PINGs looks for what is not
// acknowledged instead.
func (g *group) used(dests []netip.AddrPort) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.server.Profile.Ping == 0 {
		return
	}
	for _, a := range dests {
		if m := g.members[a]; m != nil {
			poke(m.needed)
		}
	}
}

// suspectPause is how long an API server that answered is not asked again for
// the same reason: a poor link loses packets all the time.
const suspectPause = 15 * time.Second

func (g *group) suspect(dests []netip.AddrPort, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, a := range dests {
		m := g.members[a]
		if m != nil && m.health.State == Up && now.Sub(m.suspected) >= suspectPause {
			m.suspected = now
			poke(m.needed)
		}
	}
}
