package hub

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// UnitFile is the path of yurthub's unit on a converted node; BakedUnit is its path in an image.
const (
	UnitFile  = "/etc/systemd/system/" + openyurt.Unit
	BakedUnit = "/usr/lib/systemd/system/" + openyurt.Unit
)

// Recorded lists the files and units whose state convert, revert and reset record.
var Recorded = run.Recorded{
	Files: []string{member.KubeadmFlags, EnvFile, openyurt.KubeletConf, UnitFile, openyurt.Dropin, ondisk.KubeletConfig, ondisk.IPVSConfig, "/etc/hosts"},
	Units: []string{openyurt.Unit, ondisk.UnitKubelet},
}

// ConvertOptions configure the OpenYurt node that a native node becomes.
type ConvertOptions struct {
	NodePool string
	Cloud    bool
	// Servers are the URLs of the API servers for yurthub. The address of the first one should
	// never change. If empty, they are kubelet's present server and the Site's API servers.
	Servers   []string
	Namespace string // empty: openyurt.DefaultNamespace
	LBMode    string // empty: openyurt.LBPriority
	OpenPort  bool
	// LocalClients are the user IDs that may use yurthub, like yurthub.localClients of a Site.
	LocalClients []int
	Extra        []string
}

// Convert turns a running native node into an OpenYurt node, and keeps its pods. If a step fails,
// all steps are undone. After an interruption, call Convert to continue, or Revert to undo.
func Convert(ctx context.Context, e *machine.Env, o ConvertOptions, tell func(run.Step)) error {
	unlock, err := run.ExclusiveSettled(ctx, e)
	if err != nil {
		return err
	}
	defer unlock()
	this, err := changeableNode(ctx, e)
	if err != nil {
		return err
	}
	n, err := member.ReadNode(ctx, e, this.node)
	if err != nil {
		return fmt.Errorf("convert must reach the cluster, to label the Node and to check the result: %w", err)
	}
	if isHubNode(e, n) {
		return alreadyHub(ctx, e, n, this.active, o)
	}
	if err := convertible(ctx, e, n); err != nil {
		return err
	}
	h, err := hubForConvert(ctx, e, n, this.active, o)
	if err != nil {
		return err
	}
	if err := poolAccepts(ctx, e, n, h); err != nil {
		return err
	}
	c := run.NewChange(e, "convert", Recorded, tell)
	c.Resumed = true
	return c.WithoutTimer(ctx, (&conversion{hub: h, image: this.image, labels: openyurt.Labels(h.Pool, h.Cloud)}).steps())
}

// convertible returns an error if the node is not Ready, because a later step waits until it is. If
// an interrupted convert has redirected kubelet, a node that is not Ready is accepted too.
func convertible(ctx context.Context, e *machine.Env, n *kubeapi.Node) error {
	err := member.ReadyNow(ctx, e, n)
	if err == nil || e.Exists(openyurt.KubeletConf) {
		return nil
	}
	return run.Advise(fmt.Errorf("only a Ready node can be converted, since convert checks the result: %w", err),
		"see `journalctl -u kubelet -u containerd` on the machine, and convert it once it is Ready")
}

// poolAccepts returns an error if the Node cannot be put into the pool.
func poolAccepts(ctx context.Context, e *machine.Env, n *kubeapi.Node, h hub) error {
	if err := poolFits(ctx, e, h); err != nil {
		return err
	}
	if has := openyurt.PoolOf(n.Metadata.Labels); has != "" && has != h.Pool {
		return run.Advise(fmt.Errorf("the Node %s is already in node pool %s, and OpenYurt does not let a node change its pool", n.Metadata.Name, has),
			"use --nodepool-name "+has+", or remove the label first: "+openyurt.Unlabel(n.Metadata.Name))
	}
	return nil
}

// alreadyHub returns the error for a node that is an OpenYurt node already. Its settings are not
// changed: undoing a failed change would make the node native.
func alreadyHub(ctx context.Context, e *machine.Env, n *kubeapi.Node, active *site.Active, o ConvertOptions) error {
	name, labels, kind := n.Metadata.Name, n.Metadata.Labels, configs.NodeEdge
	if openyurt.IsCloud(labels) {
		kind = configs.NodeCloud
	}
	is := fmt.Sprintf("%s is an OpenYurt node already, of type %s in node pool %s", name, kind, openyurt.PoolOf(labels))
	fix := "`firstboot revert` makes it native; convert can then give it other settings"
	bySite := active != nil && active.Site.OpenYurt()
	if bySite {
		fix = "change nodeType, nodePool or yurthub's arguments in its Site; if the pool changes, run kubectl delete node " + name + "; then restart the machine"
	}
	if openyurt.PoolOf(labels) != o.NodePool || openyurt.IsCloud(labels) != o.Cloud {
		return run.Advise(errors.New(is), fix)
	}
	if !bySite {
		h, err := hubForConvert(ctx, e, n, active, o)
		if err != nil {
			return err
		}
		if !hubInPlace(e, h) {
			return run.Advise(fmt.Errorf("%s, but its yurthub has other arguments than convert would set (%s)", is, EnvFile), fix)
		}
	}
	if err := hubReady(ctx, e); err != nil {
		return run.Advise(fmt.Errorf("%s, but yurthub is not ready: %w", is, err), openyurt.Hub{}.Logs())
	}
	return fmt.Errorf("%s: %w", is, run.ErrAlready)
}

// conversion is the state of one convert.
type conversion struct {
	hub          hub
	image        ondisk.ImageInfo
	labels       map[string]string // the Node's new OpenYurt labels
	labelsBefore map[string]any    // the OpenYurt labels that the Node had
}

// steps returns the steps in order: kubelet is redirected only once yurthub serves, and the labels
// come last, because the cluster acts on them.
func (c *conversion) steps() []run.Phase {
	turn := RedirectPhase(c.image.Kubernetes, c.labels)
	turn.Undo = func(ctx context.Context, e *machine.Env) error { return redirectToServer(ctx, e, nil) }
	return []run.Phase{
		hubUnitStep(),
		c.yurthub(),
		turn,
		stillReady(c.hub.Node, true),
		c.label(),
	}
}

// hubUnitStep installs yurthub's unit if the image has none.
func hubUnitStep() run.Phase {
	return run.Phase{
		Name: "unit", Doc: "yurthub's unit is installed", Timeout: time.Minute,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			if !e.Exists(openyurt.Dropin) && (e.Exists(BakedUnit) || string(e.Contents(UnitFile)) == openyurt.UnitFile) {
				return run.Done, nil
			}
			return run.Todo, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			if err := e.Remove(openyurt.Dropin); err != nil {
				return fmt.Errorf("writing the unit of yurthub: %w", err)
			}
			if !e.Exists(BakedUnit) {
				if err := e.WriteFile(UnitFile, []byte(openyurt.UnitFile), machine.Mode(0o644)); err != nil {
					return fmt.Errorf("writing the unit of yurthub: %w", err)
				}
			}
			if err := e.Mkdir(openyurt.Root, machine.Mode(0o755)); err != nil {
				return fmt.Errorf("making %s: %w", openyurt.Root, err)
			}
			return e.Unit(ctx, "daemon-reload", "")
		},
		Undo: removeUnit,
	}
}

func (c *conversion) yurthub() run.Phase {
	return servingPhase(run.Phase{
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			if !hubInPlace(e, c.hub) || !hubServes(ctx, e) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			if err := installPortRules(ctx, e, c.hub.portAccess()); err != nil {
				return err
			}
			return serveHub(ctx, e, c.hub)
		},
		// An interrupted convert may have redirected kubelet, which would lose its connection when
		// yurthub is removed.
		Undo: func(ctx context.Context, e *machine.Env) error {
			if member.Redirected(e) || e.Exists(kubeadm.KubeletRestart) {
				if err := redirectToServer(ctx, e, nil); err != nil {
					return err
				}
			}
			return removeHubFiles(ctx, e, c.image)
		},
	})
}

func (c *conversion) label() run.Phase {
	return run.Phase{
		Name: "labels", Doc: "the Node has OpenYurt's labels", Timeout: time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			return member.CheckLabels(ctx, e, c.hub.Node, c.labels)
		},
		Run: func(ctx context.Context, e *machine.Env) (err error) {
			if c.labelsBefore, err = member.HubLabels(ctx, e, c.hub.Node); err != nil {
				return err
			}
			return member.PatchLabels(ctx, e, c.hub.Node, member.AnyOf(c.labels))
		},
		Undo: func(ctx context.Context, e *machine.Env) error {
			if c.labelsBefore == nil {
				return nil // they were not read, so they were not changed
			}
			return member.PatchLabels(ctx, e, c.hub.Node, c.labelsBefore)
		},
	}
}
