package firstboot

import (
	"context"
	"fmt"
	"slices"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// firstPhases is the part of the way from a booted machine to a node that needs
// no site, and ends with one.
func firstPhases(reader *siteReader) []Phase {
	return []Phase{
		identityPhase(),   // first: everything later may log, and logs carry the machine id
		diskPhase(),       // before anything fills DATA
		sitePhase(reader), // all that follows comes from the site
	}
}

// Phases is the rest of the way, as an active site has it.
func Phases(active *Active) []Phase {
	site, image := active.Site, active.Image
	var joining []Phase
	switch {
	case site.NodeType == configs.NodeControlPlane:
		return controlPlanePhases(active)
	case site.NodeType == configs.NodeNative:
		joining = []Phase{joinPhase(active)}
	case !site.OpenYurt():
		return []Phase{unservedPhase(site)}
	case hubForm(image) == openyurt.FormStaticPod:
		joining = []Phase{
			podJoinPhase(active), // kubelet runs yurthub, and has no other way
			hubPhase(active),     // its two certificates, with the token and then with the first
		}
	default:
		joining = []Phase{
			joinPhase(active), // straight to the API servers: yurthub borrows the certificate that kubelet gets here
			hubPhase(active),  // serves before anybody is sent to it
			redirectPhase(image.Kubernetes, openyurt.Labels(site.NodePool, site.NodeType == configs.NodeCloud)), // from here on kubelet lives with yurthub's cache
		}
	}
	before := []Phase{
		networkPhase(site),     // an API server must be in reach for the rest
		clockPhase(active),     // before the first certificate is judged
		clusterPhase(active),   // before API servers are verified with the CA that is there
		ipvsPhase(site),        // the first request already survives a dead API server
		discoveryPhase(active), // the CA, before anything trusts an API server
		imagesPhase(),          // long, so after all that may fail early; before kubelet needs them
	}
	after := []Phase{
		vipPhase(site),      // only a member may ask
		argsPhase(active),   // a member's; the next phase sees whether it went well
		readyPhase(active),  // the cluster's own word, not ours; on an OpenYurt node through yurthub
		forgetPhase(active), // last: until Ready, the join may have to begin again
	}
	return slices.Concat(before, joining, after)
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

// damagedPhase stops where the image on this disk cannot be read: no site can
// be held against it.
func damagedPhase(err error) Phase {
	return Phase{
		Name: "image", Doc: "what the image says of itself can be read",
		Check: func(context.Context, *Env) (Verdict, error) { return Todo, err },
		Run:   func(context.Context, *Env) error { return nil },
	}
}

// New returns the Runner that a node has.
func New(e *Env) *Runner {
	image, err := imageInfo(e)
	if err != nil {
		return &Runner{Env: e, Sources: siteSources, First: func() []Phase { return []Phase{damagedPhase(err)} }}
	}
	reader := &siteReader{image: image}
	return &Runner{
		Env: e, Plan: image.Plan, Sources: siteSources,
		First: func() []Phase { return firstPhases(reader) }, Active: func() *Active { return reader.last }, Phases: Phases,
	}
}

// hubForm is how yurthub runs on this image.
func hubForm(image ondisk.ImageInfo) string {
	if y := image.Yurthub; y != nil {
		return y.Form
	}
	return ""
}
