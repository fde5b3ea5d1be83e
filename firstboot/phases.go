package firstboot

import (
	"context"
	"fmt"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/overlays/node"
)

// Phases is the way from a booted machine to a node. Of a nil site it is the
// part that needs none. hubForm is how yurthub runs on this image.
func Phases(site *configs.Site, hubForm string) []Phase {
	before := []Phase{
		identityPhase(), // first: everything later may log, and logs carry the machine id
		diskPhase(),     // before anything fills DATA
		sitePhase(),     // all that follows comes from the site
	}
	if site == nil {
		return before
	}
	switch site.NodeType {
	case configs.NodeNative:
		return append(before,
			networkPhase(site),   // a master must be in reach for the rest
			clockPhase(),         // before the first certificate is judged
			ipvsPhase(site),      // the first request already survives a dead master
			discoveryPhase(site), // the CA, before anything trusts a master
			imagesPhase(),        // long, so after all that may fail early; before kubelet wants them
			joinPhase(site),
			readyPhase(site),  // the cluster's own word, not ours
			forgetPhase(site), // last: until Ready, the join may have to begin again
		)
	case configs.NodeEdge, configs.NodeCloud:
		all := append(before,
			networkPhase(site),
			clockPhase(),
			ipvsPhase(site),
			discoveryPhase(site),
			imagesPhase(),
		)
		if hubForm == formStaticPod {
			all = append(all,
				podJoinPhase(site), // kubelet runs yurthub, and has no other way
				yurthubPhase(site), // its two certificates, with the token and then with the first
			)
		} else {
			all = append(all,
				joinPhase(site),    // straight to the masters: yurthub borrows the certificate that kubelet gets here
				yurthubPhase(site), // serves before anybody is sent to it
				redirectPhase(node.OpenYurtLabels(site.NodePool, site.NodeType == configs.NodeCloud)), // from here on kubelet lives with yurthub's cache
			)
		}
		return append(all,
			readyPhase(site), // Ready through yurthub
			forgetPhase(site),
		)
	}
	return append(before, unservedPhase(site))
}

// unservedPhase stops at a node type that this program does not make.
func unservedPhase(site *configs.Site) Phase {
	return Phase{
		Name: "node-type", Doc: "a node type that first boot can make",
		Check: func(context.Context, *Env) (Verdict, error) {
			return Todo, Permanent(fmt.Errorf("first boot does not make nodes of type %s", site.NodeType), "choose another nodeType in site.yaml")
		},
		Run: func(context.Context, *Env) error { return nil },
	}
}

// New returns the Runner that a node has.
func New(e *Env) *Runner {
	phases := func(site *configs.Site) []Phase { return Phases(site, hubForm(e)) }
	return &Runner{Env: e, Phases: phases, Site: currentSite, Brought: brought}
}

const formStaticPod = "staticPod"

func hubForm(e *Env) string {
	if y := imageInfo(e).Yurthub; y != nil {
		return y.Form
	}
	return ""
}
