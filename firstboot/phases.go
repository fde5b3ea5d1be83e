package firstboot

import (
	"context"
	"fmt"
	"slices"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/update"
	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/overlays/node"
)

// firstPhases is the part of the way from a booted machine to a node that needs
// no site, and ends with one.
func firstPhases(reader *site.Reader) []run.Phase {
	return []run.Phase{
		site.IdentityPhase(),                  // first: everything later may log, and logs carry the machine id
		site.DiskPhase(),                      // before anything fills DATA
		site.Phase(reader, hub.ClosePodPorts), // all that follows comes from the site
	}
}

// Phases is the rest of the way, as an active site has it.
func Phases(active *site.Active) []run.Phase {
	spec, image := active.Site, active.Image
	var joining []run.Phase
	switch {
	case spec.NodeType == configs.NodeControlPlane:
		return controlPlanePhases(active)
	case spec.NodeType == configs.NodeNative:
		joining = []run.Phase{join.Phase(active)}
	case !spec.OpenYurt():
		return []run.Phase{unservedPhase(spec)}
	case site.HubForm(image) == openyurt.FormStaticPod:
		joining = []run.Phase{
			hub.PodJoinPhase(active), // kubelet runs yurthub, and has no other way
			hub.Phase(active),        // its two certificates, with the token and then with the first
		}
	default:
		joining = []run.Phase{
			join.Phase(active), // straight to the API servers: yurthub borrows the certificate that kubelet gets here
			hub.Phase(active),  // serves before anybody is sent to it
			hub.RedirectPhase(image.Kubernetes, openyurt.Labels(spec.NodePool, spec.NodeType == configs.NodeCloud)), // from here on kubelet lives with yurthub's cache
		}
	}
	before := []run.Phase{
		network.Phase(spec), // an API server must be in reach for the rest
		network.ClockPhase(spec, image, stampedAt(active)), // before the first certificate is judged
		clusterPhase(active),        // before API servers are verified with the CA that is there
		join.IPVSPhase(spec),        // the first request already survives a dead API server
		join.DiscoveryPhase(active), // the CA, before anything trusts an API server
		join.ImagesPhase(),          // long, so after all that may fail early; before kubelet needs them
	}
	after := []run.Phase{
		join.VIPPhase(spec),                      // only a member may ask
		join.ArgsPhase(active),                   // a member's; the next phase sees whether it went well
		join.ReadyPhase(active, hubNode(active)), // the cluster's own word, not ours; on an OpenYurt node through yurthub
		join.ForgetPhase(active),                 // last: until Ready, the join may have to begin again
	}
	return slices.Concat(before, joining, after)
}

// unservedPhase stops at a node type that this program does not make.
func unservedPhase(site *configs.Site) run.Phase {
	return run.Phase{
		Name: "node-type", Doc: "a node type that first boot can make",
		Check: func(context.Context, *machine.Env) (run.Verdict, error) {
			return run.Todo, run.NeedsPerson(fmt.Errorf("first boot does not make nodes of type %s", site.NodeType), "choose another nodeType in site.yaml")
		},
		Run: func(context.Context, *machine.Env) error { return nil },
	}
}

// damagedPhase stops where the image on this disk cannot be read: no site can
// be held against it.
func damagedPhase(err error) run.Phase {
	return run.Phase{
		Name: "image", Doc: "what the image says of itself can be read",
		Check: func(context.Context, *machine.Env) (run.Verdict, error) { return run.Todo, err },
		Run:   func(context.Context, *machine.Env) error { return nil },
	}
}

// New returns the Runner that a node has.
func New(e *machine.Env) *run.Runner {
	image, err := site.ImageInfo(e)
	if err != nil {
		return &run.Runner{Env: e, Sources: site.Sources, First: func() []run.Phase { return []run.Phase{damagedPhase(err)} }}
	}
	reader := &site.Reader{Image: image}
	return &run.Runner{
		Env: e, Plan: image.Plan, Sources: site.Sources,
		First:  func() []run.Phase { return firstPhases(reader) },
		Update: update.Status,
		Rest:   func() (run.Node, []run.Phase) { return nodeOf(reader.Last), Phases(reader.Last) },
	}
}

// controlPlanePhases are those after the Site's, on a control-plane node.
func controlPlanePhases(active *site.Active) []run.Phase {
	site, image := active.Site, active.Image
	return []run.Phase{
		controlplane.AddressPhase(site),                    // etcd and the API server listen there
		network.ClockPhase(site, image, stampedAt(active)), // before the first certificate is judged
		controlplane.KeysPhase(active),                     // before anything is signed
		controlplane.EndpointPhase(site),                   // before the first client of the own API server
		join.ImagesPhase(),                                 // before kubelet wants them
		controlplane.CertificatesPhase(active),             // the seat decision asks with them
		controlplane.SeatPhase(active),                     // before etcd can start, at each boot
		controlplane.Phase(active),                         // kubelet, and with it the control plane
		controlplane.ContinuedPhase(active),                // etcd's force-new-cluster is for one start
		controlplane.PublishPhase(active),                  // what nodes join with; once in a cluster's life
		controlplane.SnapshotPhase(active),                 // before what may wait for a person
		controlplane.UpkeepPhase(active),                   // after a snapshot
		controlplane.RegisterPhase(active),                 // the Node is a control-plane node's
		join.ForgetPhase(active),                           // all that needs the Site's keys is done; Ready may wait for a network add-on
		againPhase(),                                       // certificates and snapshots are looked after while the machine is on
		controlplane.DocumentsPhase(active),                // another Site may have others than the birth uploaded
		controlplane.ManifestsPhase(active),                // once; one of them may be what Ready waits for
		join.ReadyPhase(active, join.HubNode{}),
	}
}

// nodeOf is what the Runner needs to know of the node that a Site makes.
func nodeOf(active *site.Active) run.Node {
	spec := active.Site
	return run.Node{
		Name: active.Node, Type: spec.NodeType, MAC: active.MAC, NotTaken: active.NotTaken,
		Secrets: site.SecretsOf(spec), Report: spec.Report, Proxy: node.ProxyEnv(spec), Spread: spec.Spread(),
		OfflineHealthy: func(ctx context.Context, e *machine.Env) error {
			if err := network.OfflineHealthy(ctx, e, spec); err != nil {
				return err
			}
			return update.ProvenOffline(e)
		},
	}
}

// hubNode is what yurthub adds to the phase that waits for the Node.
func hubNode(active *site.Active) join.HubNode {
	var h join.HubNode
	if active.Site.OpenYurt() {
		h.Missing = func(ctx context.Context, e *machine.Env) error { return hub.NodeMissing(ctx, e, active) }
	}
	if active.Site.OpenYurt() && site.HubForm(active.Image) == openyurt.FormStaticPod {
		h.Ready = func(ctx context.Context, e *machine.Env) error { return hub.AnnotateSocket(ctx, e, active) }
	}
	return h
}

// stampedAt returns when the Site was stamped, as far as that counts for the clock.
func stampedAt(active *site.Active) func(*machine.Env) int64 {
	return func(e *machine.Env) int64 { return site.ClockDate(e, active) }
}
