package member

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// errUnread says that nothing is known about the Node.
var errUnread = errors.New("its Node cannot be read")

// ReadNode asks the API server as kubelet.conf says, past yurthub.
func ReadNode(ctx context.Context, e *machine.Env, name string) (*api.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	c, err := NodeClient(e)
	if err != nil {
		return nil, err
	}
	n, err := c.GetNode(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnread, err)
	}
	return n, nil
}

// ReadyNow looks whether the cluster sees the node Ready, by the word of the
// kubelet that runs.
func ReadyNow(ctx context.Context, e *machine.Env, n *api.Node) error {
	if ready, why := n.Ready(); !ready {
		return fmt.Errorf("node %s is not Ready: %s", n.Metadata.Name, why)
	}
	return Reported(ctx, e, n)
}

// OwnNode is this machine's Node as the cluster has it, and the client that
// asked for it.
func OwnNode(ctx context.Context, e *machine.Env, name string) (*api.Client, *api.Node, error) {
	c, err := NodeClient(e)
	if err != nil {
		return nil, nil, err
	}
	n, err := c.GetNode(ctx, name)
	if api.Code(err) == 404 {
		err = run.Advise(fmt.Errorf("%w %s yet", ErrNoNode, name), "see `journalctl -u kubelet` on the machine")
	}
	return c, n, err
}

// ErrNoNode means that the API server has no Node of that name.
var ErrNoNode = errors.New("the cluster has no Node")

// Reported makes sure that kubelet runs, and that what the cluster shows is
// what kubelet has said since it was started: for the better part of a minute
// a Node looks as Ready as it was before.
func Reported(ctx context.Context, e *machine.Env, n *api.Node) error {
	if state, err := e.UnitState(ctx, ondisk.UnitKubelet); err != nil || state != "active" {
		return run.Advise(errors.Join(fmt.Errorf("kubelet is %s", state), err), "see `journalctl -u kubelet` on the machine")
	}
	since, err := e.UnitSince(ctx, ondisk.UnitKubelet)
	if err != nil {
		return err
	}
	// A report of this boot may be dated by a clock that was set since.
	earliest := since.Now
	if id := machine.BootID(e); id != "" && n.Status.NodeInfo.BootID == id {
		earliest = since.Earlier()
	}
	if n.Heartbeat().Before(earliest.Truncate(time.Second)) {
		return run.Advise(fmt.Errorf("kubelet has not reported to the cluster since it was started at %s", since.Now.UTC().Format(time.TimeOnly)),
			"it does within a minute; else see `journalctl -u kubelet` on the machine")
	}
	return nil
}

// Kubelet registers its Node once after it starts. A Node that somebody deletes later
// stays away until kubelet starts again.
const (
	// registerTime bounds the time that kubelet needs to register while the API server
	// answers: its pauses between two tries grow to 7 s.
	registerTime = 20 * time.Second
	// registerAgain is the least time between two starts of kubelet that have it
	// register: something else may keep the Node away, for example a webhook.
	registerAgain = 10 * time.Minute
)

// Absence is how long the cluster has answered that it has no Node of this machine.
type Absence struct{ since time.Time }

// End restarts kubelet once the Node has been missing for registerTime. A machine whose
// API servers may be of another cluster than it joined leaves kubelet alone: registered
// there, kubelet would stop the pods that it runs.
func (a *Absence) End(ctx context.Context, e *machine.Env, site *configs.Site) error {
	now := e.Now()
	if a.since.IsZero() {
		a.since = now
	}
	if now.Sub(a.since) < registerTime {
		return nil
	}
	if state, err := e.UnitState(ctx, ondisk.UnitKubelet); err != nil || state != "active" {
		return err
	}
	start, err := e.UnitSince(ctx, ondisk.UnitKubelet)
	if err != nil || now.Sub(start.Now) < registerAgain {
		return err
	}
	if again, unclear := CheckBornAgain(ctx, e, site); again || unclear != nil {
		return unclear
	}
	e.Log.Info("the cluster has no Node of this machine, and kubelet registers it only when it starts: restarting kubelet")
	e.Console("the cluster has no Node of this machine: restarting kubelet, which registers it")
	if err := e.Unit(ctx, "restart", ondisk.UnitKubelet); err != nil {
		return fmt.Errorf("restarting kubelet: %w", err)
	}
	return nil
}
