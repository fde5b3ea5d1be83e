package firstboot

import (
	"context"
	"slices"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/update"
	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// firstPhases returns the phases that need no Site. The last one reads the Site.
func firstPhases(reader *site.Reader) []run.Phase {
	return []run.Phase{
		site.IdentityPhase(),                        // first: later phases log, and the log contains the machine ID
		site.DiskPhase(),                            // before anything fills DATA
		site.Phase(reader, hub.InstallPodPortRules), // all later phases need the Site
	}
}

// Phases returns the phases after firstPhases, for an active Site.
func Phases(active *site.Active) []run.Phase {
	image := active.Image
	var joining []run.Phase
	switch {
	case active.Site.NodeType == configs.NodeControlPlane:
		return controlPlanePhases(active)
	case active.Site.NodeType == configs.NodeNative:
		joining = []run.Phase{kubeadm.WithSettings(join.Phase(active), active)}
	case site.HubForm(image) == openyurt.FormStaticPod:
		joining = []run.Phase{
			kubeadm.WithSettings(hub.PodJoinPhase(active), active), // kubelet runs yurthub, and reaches the API servers only through yurthub
			hub.Phase(active), // gets yurthub's two certificates: the first with the token, the second with the first certificate
		}
	default:
		joining = []run.Phase{
			kubeadm.WithSettings(join.Phase(active), active), // joins through the API servers directly: yurthub uses the certificate that kubelet gets here
			hub.Phase(active), // yurthub must serve before kubelet is redirected to it
			hub.RedirectPhase(image.Kubernetes, openyurt.Labels(active.Site.NodePool, active.Site.NodeType == configs.NodeCloud)), // from here on kubelet uses yurthub's cache
		}
	}
	before := []run.Phase{
		network.Phase(active.Site),                                // the other phases need an API server
		network.ClockPhase(active.Site, image, stampedAt(active)), // before the first certificate is judged
		clusterPhase(active),                                      // before API servers are verified with the CA on the disk
		join.IPVSPhase(active.Site),                               // so that even the first request works if an API server is dead
		join.DiscoveryPhase(active),                               // gets the CA before anything trusts an API server
		join.ImagesPhase(),                                        // takes long, so phases that fail early come first; kubelet needs the images
	}
	after := []run.Phase{
		join.VIPPhase(active.Site),               // only a member may query the cluster
		join.ArgsPhase(active),                   // only on a member; the next phase checks the result
		join.ReadyPhase(active, hubNode(active)), // queries the cluster; on an OpenYurt node, through yurthub
		join.ForgetPhase(active),                 // last: until the node is Ready, the join may have to be repeated
	}
	return slices.Concat(before, joining, after)
}

// damagedPhase always fails with err: the description of the image on this disk cannot be read, so
// no Site can be checked against it.
func damagedPhase(err error) run.Phase {
	return run.Phase{
		Name: "image", Doc: "the description of the image can be read",
		Check: func(context.Context, *machine.Env) (run.Verdict, error) { return run.Todo, err },
		Run:   func(context.Context, *machine.Env) error { return nil },
	}
}

// New returns the Runner of first boot for this machine.
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

// controlPlanePhases returns the phases after firstPhases on a control-plane node.
func controlPlanePhases(active *site.Active) []run.Phase {
	s, image := active.Site, active.Image
	return []run.Phase{
		controlplane.AddressPhase(s),                    // etcd and the API server listen at this address
		network.ClockPhase(s, image, stampedAt(active)), // before the first certificate is judged
		controlplane.KeysPhase(active),                  // before anything is signed
		controlplane.EndpointPhase(s),                   // before the first client of this node's API server
		join.ImagesPhase(),                              // before kubelet needs them
		controlplane.CertificatesPhase(active),          // EtcdStartPhase authenticates with these certificates
		controlplane.EtcdStartPhase(active),             // at each boot, before etcd can start
		controlplane.Phase(active),                      // starts kubelet, and with it the control plane
		controlplane.ContinuedPhase(active),             // removes etcd's force-new-cluster, which is only for one start
		controlplane.PublishPhase(active),               // publishes the data that nodes need to join; once per cluster
		controlplane.SnapshotPhase(active),              // before phases that may wait for a person
		controlplane.MaintenancePhase(active),           // etcd maintenance, after a snapshot
		controlplane.RegisterPhase(active),              // marks the Node as a control-plane node
		controlplane.UpdateLeasePhase(active),           // releases the Lease if the disk was rewritten during an update
		join.ForgetPhase(active),                        // no later phase needs the Site's keys; ReadyPhase may wait for a network add-on
		againPhase(),                                    // renews certificates and makes snapshots while the machine is on
		controlplane.DocumentsPhase(active),             // the Site's documents may have changed since the bootstrap uploaded them
		controlplane.ManifestsPhase(active),             // once; the Node may need one of them to become Ready
		join.ReadyPhase(active, join.HubNode{}),
	}
}

// nodeOf returns the parts of a Site that the Runner uses.
func nodeOf(active *site.Active) run.Node {
	s := active.Site
	return run.Node{
		Name: active.Node, Type: s.NodeType, MAC: active.MAC, Rejected: active.Rejected,
		Secrets: site.SecretsOf(s), Report: s.Report, Proxy: siteconf.ProxyEnv(s), Spread: s.Spread(),
		OfflineHealthy: func(ctx context.Context, e *machine.Env) error {
			if err := network.OfflineHealthy(ctx, e, s); err != nil {
				return err
			}
			return update.ProvenOffline(e)
		},
	}
}

// hubNode returns the checks that an OpenYurt node adds to ReadyPhase.
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

// stampedAt returns site.ClockDate of active, as a function for ClockPhase.
func stampedAt(active *site.Active) func(*machine.Env) int64 {
	return func(e *machine.Env) int64 { return site.ClockDate(e, active) }
}
