package member

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// errUnread means that the Node could not be read.
var errUnread = errors.New("reading this machine's Node")

// ReadNode reads a Node directly from an API server, not through yurthub.
func ReadNode(ctx context.Context, e *machine.Env, name string) (*kubeapi.Node, error) {
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

// ReadyNow returns an error unless the running kubelet has reported the Node as Ready.
func ReadyNow(ctx context.Context, e *machine.Env, n *kubeapi.Node) error {
	if ready, why := n.Ready(); !ready {
		return fmt.Errorf("node %s is not Ready: %s", n.Metadata.Name, why)
	}
	return Reported(ctx, e, n)
}

// OwnNode reads this machine's Node. It also returns the client that it used.
func OwnNode(ctx context.Context, e *machine.Env, name string) (*kubeapi.Client, *kubeapi.Node, error) {
	c, err := NodeClient(e)
	if err != nil {
		return nil, nil, err
	}
	n, err := c.GetNode(ctx, name)
	if kubeapi.Code(err) == 404 {
		err = run.Advise(fmt.Errorf("%w %s yet", ErrNoNode, name), "see `journalctl -u kubelet` on the machine")
	}
	return c, n, err
}

// ErrNoNode means that the API server has no Node of that name.
var ErrNoNode = errors.New("the cluster has no Node")

// Reported returns an error unless kubelet is running and has reported to the cluster since its
// start. Until it reports, for up to a minute, the Node shows its former status.
func Reported(ctx context.Context, e *machine.Env, n *kubeapi.Node) error {
	if state, err := e.UnitState(ctx, ondisk.UnitKubelet); err != nil || state != "active" {
		return run.Advise(errors.Join(fmt.Errorf("kubelet is %s", state), err), "see `journalctl -u kubelet` on the machine")
	}
	since, err := e.UnitSince(ctx, ondisk.UnitKubelet)
	if err != nil {
		return err
	}
	// The time of a report does not show in which boot it was made, because the clock may have been
	// set since.
	otherBoot := n.Status.NodeInfo.BootID != machine.BootID(e)
	if otherBoot || n.Heartbeat().Before(since.Earlier().Truncate(time.Second)) {
		return run.Advise(fmt.Errorf("kubelet has not reported to the cluster since it was started at %s", since.Now.UTC().Format(time.TimeOnly)),
			"wait a minute; then see `journalctl -u kubelet` on the machine")
	}
	return nil
}

// kubelet registers its Node once after its start. If the Node is deleted later, it stays missing
// until kubelet starts again.
const (
	// registerTime is the time in which kubelet registers with an API server that answers: its
	// pauses between attempts grow to 7 s.
	registerTime = 20 * time.Second
	// registerAgain is the minimum time between two restarts of kubelet for its registration. A
	// webhook, for example, may prevent the registration.
	registerAgain = 10 * time.Minute
)

// Absence measures how long this machine's Node has been missing in the cluster.
type Absence struct{ since time.Time }

// End restarts kubelet once the Node has been missing for registerTime, unless the API servers may
// belong to another cluster, in which kubelet would register and stop its pods.
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
	if again, unclear := CheckRecreated(ctx, e, site); again || unclear != nil {
		return unclear
	}
	e.Log.Info("the cluster has no Node of this machine, and kubelet registers it only when it starts: restarting kubelet")
	e.Console("the cluster has no Node of this machine: restarting kubelet, which registers it")
	if err := e.Unit(ctx, "restart", ondisk.UnitKubelet); err != nil {
		return fmt.Errorf("restarting kubelet: %w", err)
	}
	return nil
}
