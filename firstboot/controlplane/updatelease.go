package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// Control-plane nodes are updated one at a time. The node being updated holds a Lease from before
// its boot entry is written until the update is kept or rolled back. The Lease does not expire;
// another node may take it over only if its holder has left etcd.

const (
	leasesPath = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/"
	// LeaseName is the name of the Lease, in kube-system.
	LeaseName = "edgebake-update"
	// UpdateLeaseFile exists while this machine may hold the Lease. It is in the directory of
	// updates.
	UpdateLeaseFile = ondisk.StateDir + "/update/turn"
	// microTime is the format of times in a Lease.
	microTime = "2006-01-02T15:04:05.000000Z07:00"
	// leaseTimeout limits all requests of one operation on the Lease together.
	leaseTimeout = 30 * time.Second
)

const emptyLease = `apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: ` + LeaseName + `, namespace: kube-system}
`

// lease contains the fields of a Lease that are used here.
type lease struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Spec struct {
		HolderIdentity string `json:"holderIdentity"`
		AcquireTime    string `json:"acquireTime"`
	} `json:"spec"`
}

// UpdateLease gives one control-plane node at a time the right to be updated.
type UpdateLease struct {
	e    *machine.Env
	site *configs.Site
}

// NewUpdateLease returns the UpdateLease of this machine. site must be that of a control-plane
// node.
func NewUpdateLease(e *machine.Env, site *configs.Site) UpdateLease { return UpdateLease{e, site} }

func (t UpdateLease) self() string { return t.site.Self().Name }

// clients returns clients of this machine's API server and of etcd.
func (t UpdateLease) clients() (c *kubeapi.Client, etcd *http.Client, err error) {
	if c, err = adminClient(t.e, t.site); err == nil {
		etcd, err = etcdClient(t.e)
	}
	return c, etcd, err
}

// CheckFree returns an error if this machine may not be updated now, because another one is being
// updated or an etcd member is not healthy.
func (t UpdateLease) CheckFree(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaseTimeout)
	defer cancel()
	c, etcd, err := t.clients()
	if err != nil {
		return err
	}
	defer etcd.CloseIdleConnections()
	l, err := readLease(ctx, c)
	if err != nil && kubeapi.Code(err) != 404 {
		return run.Advise(err, "try again when this machine's API server is ready")
	}
	return errors.Join(t.checkEtcd(ctx, etcd), t.checkHolder(ctx, etcd, l))
}

// CheckEtcd returns all problems of etcd as one error, or nil if it is healthy.
func (t UpdateLease) CheckEtcd(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaseTimeout)
	defer cancel()
	etcd, err := etcdClient(t.e)
	if err != nil {
		return err
	}
	defer etcd.CloseIdleConnections()
	return t.checkEtcd(ctx, etcd)
}

func (t UpdateLease) checkEtcd(ctx context.Context, etcd *http.Client) error {
	var named []string
	for _, m := range t.site.ControlPlane.Members {
		if !slices.Contains(t.site.ControlPlane.Absent, m.Name) {
			named = append(named, m.Name)
		}
	}
	if err := maintenanceBy(etcd, t.site).Healthy(ctx, named); err != nil {
		return run.Advise(fmt.Errorf("control-plane nodes are updated only while all members of etcd are healthy: %w", err),
			"try again when all are healthy; see `firstboot status` on the control-plane nodes")
	}
	return nil
}

// checkHolder returns the reason why the Lease cannot be taken, or nil if it can.
func (t UpdateLease) checkHolder(ctx context.Context, etcd *http.Client, l lease) error {
	holder := l.Spec.HolderIdentity
	if holder == "" || holder == t.self() {
		return nil
	}
	members, err := memberEtcd(etcd, t.site.Self()).Members(ctx)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(members, func(m etcdmember.Member) bool { return m.Name == holder || m.Name == "" }) {
		t.e.Log.Warn("taking over the Lease of updates, whose holder is not a member of etcd", "holder", holder)
		return nil
	}
	return run.Advise(fmt.Errorf("the control-plane node %s has been updating since %s, and control-plane nodes are updated one at a time", holder, l.Spec.AcquireTime),
		fmt.Sprintf("wait until its update has ended (see `firstboot status` on %s); if no update is under way there: kubectl -n kube-system delete lease %s", holder, LeaseName))
}

// Acquire takes the Lease for this machine.
func (t UpdateLease) Acquire(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaseTimeout)
	defer cancel()
	c, etcd, err := t.clients()
	if err != nil {
		return err
	}
	defer etcd.CloseIdleConnections()
	if err := t.e.WriteFile(UpdateLeaseFile, nil, machine.Mode(0o600)); err != nil {
		return fmt.Errorf("recording that this machine acquires the Lease of updates: %w", err)
	}
	for {
		err := changeLease(ctx, c, t.e.Now(), func(l lease) (holder any, err error) {
			if l.Spec.HolderIdentity == t.self() {
				return nil, errUnchanged
			}
			return t.self(), t.checkHolder(ctx, etcd, l)
		})
		if kubeapi.Code(err) != 404 {
			return err
		}
		if err := makeLease(ctx, c); err != nil {
			return err
		}
	}
}

// makeLease creates the Lease without a holder, unless it exists.
func makeLease(ctx context.Context, c *kubeapi.Client) error {
	objects, err := kubeapi.Objects("the Lease of updates", []byte(emptyLease))
	if err != nil {
		return err
	}
	return c.CreateAll(ctx, objects)
}

// Release gives up the Lease, if this machine may hold it.
func (t UpdateLease) Release(ctx context.Context) error {
	if !t.e.Exists(UpdateLeaseFile) {
		return nil
	}
	if err := t.clearHolder(ctx); err != nil {
		return err
	}
	return t.e.Remove(UpdateLeaseFile)
}

func (t UpdateLease) clearHolder(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaseTimeout)
	defer cancel()
	c, err := adminClient(t.e, t.site)
	if err == nil {
		err = changeLease(ctx, c, t.e.Now(), func(l lease) (any, error) {
			if l.Spec.HolderIdentity != t.self() {
				return nil, errUnchanged
			}
			return nil, nil
		})
	}
	if err != nil && kubeapi.Code(err) != 404 {
		return fmt.Errorf("releasing the Lease of updates: %w", err)
	}
	return nil
}

// errUnchanged is returned by the argument of changeLease if the Lease needs no change.
var errUnchanged = errors.New("the Lease needs no change")

// changeLease sets the holder that next returns; nil means no holder. It reads the Lease
// again if another client has changed it meanwhile.
func changeLease(ctx context.Context, c *kubeapi.Client, now time.Time, next func(lease) (holder any, err error)) error {
	for {
		l, err := readLease(ctx, c)
		if err != nil {
			return err
		}
		holder, err := next(l)
		if errors.Is(err, errUnchanged) {
			return nil
		}
		if err != nil {
			return err
		}
		acquired := any(nil)
		if holder != nil {
			acquired = now.UTC().Format(microTime)
		}
		err = c.MergePatch(ctx, leasesPath+LeaseName, map[string]any{
			"metadata": map[string]any{"resourceVersion": l.Metadata.ResourceVersion},
			"spec":     map[string]any{"holderIdentity": holder, "acquireTime": acquired},
		})
		if kubeapi.Code(err) != 409 {
			return err
		}
	}
}

func readLease(ctx context.Context, c *kubeapi.Client) (l lease, err error) {
	if err := c.Get(ctx, leasesPath+LeaseName, &l); err != nil {
		return l, fmt.Errorf("reading the Lease %s, with which control-plane nodes are updated one at a time: %w", LeaseName, err)
	}
	return l, nil
}

// UpdateLeasePhase releases the Lease if this machine holds it without an update, because the disk
// was rewritten during one.
func UpdateLeasePhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "update-lease", Doc: "this machine holds the Lease of updates only during an update", Timeout: time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			if e.Exists(UpdateLeaseFile) {
				return run.Done, nil // the end of the update releases it
			}
			c, err := adminClient(e, active.Site)
			if err != nil {
				return run.Todo, err
			}
			l, err := readLease(ctx, c)
			switch {
			case kubeapi.Code(err) == 404:
				return run.Done, nil
			case err != nil:
				return run.Todo, err
			case l.Spec.HolderIdentity == active.Site.Self().Name:
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			return NewUpdateLease(e, active.Site).clearHolder(ctx)
		},
	}
}
