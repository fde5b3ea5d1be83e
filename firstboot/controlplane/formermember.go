package controlplane

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// Two machines with the Site of the same control-plane node cannot reach each other. The other
// machine counts as running if etcd's members are connected to its member, or if its Node's lease
// is renewed.

// leaseWatchTime is how long the lease must stay unchanged until the former machine counts as gone.
// kubelet renews a lease every 10 s. Its timestamp is not compared with this machine's clock.
const leaseWatchTime = time.Minute

// leaseWatch records the Node's lease as first seen.
type leaseWatch struct {
	since time.Time
	lease string
}

// formerMembership reports whether another machine is running as this machine's member. etcds are
// the members through which a quorum responds.
func (t *etcdStarter) formerMembership(ctx context.Context, v etcdmember.View, etcds []etcdmember.Client) (etcdmember.Former, string, error) {
	for _, m := range v.Members {
		if !v.Own(m) {
			continue
		}
		for _, etcd := range etcds {
			active, err := etcd.Active(ctx, m.ID)
			if err != nil {
				return etcdmember.Watched, machine.OneLine(err), nil
			}
			if active {
				return etcdmember.Alive, fmt.Sprintf("etcd at %s is connected to the member %s (%s)", etcd.URL, m.ID, v.Self), nil
			}
		}
	}
	holder, lease := t.leaseOfNode(ctx)
	if holder == "" || holder == machine.ID(t.e) {
		return etcdmember.Gone, "", nil
	}
	if t.watch.since.IsZero() {
		t.watch = leaseWatch{t.e.Now(), lease}
	}
	switch {
	case lease != t.watch.lease:
		return etcdmember.Alive, fmt.Sprintf("the lease of the Node %s is renewed by the machine with the machine ID %s", t.site.NodeName, holder), nil
	case t.e.Now().Sub(t.watch.since) < leaseWatchTime:
		return etcdmember.Watched, fmt.Sprintf("watching for %s whether another machine renews the lease of the Node %s", leaseWatchTime, t.site.NodeName), nil
	}
	return etcdmember.Gone, "", nil
}

// learnerWatch watches another machine's learner, because no other machine can join meanwhile.
type learnerWatch struct {
	id    string
	since time.Time // since when the learner was not seen running
}

// deadLearner returns the ID of another machine's learner that has never started, and that was not
// seen running for etcdmember.LearnerTimeout; "" if there is none.
func (t *etcdStarter) deadLearner(ctx context.Context, v etcdmember.View, etcds []etcdmember.Client) string {
	i := slices.IndexFunc(v.Members, func(m etcdmember.Member) bool { return m.Learner && m.NeverStarted() && !v.Own(m) })
	if i < 0 {
		t.learner = learnerWatch{}
		return ""
	}
	id := v.Members[i].ID
	for _, etcd := range etcds {
		if active, err := etcd.Active(ctx, id); err != nil || active {
			t.learner = learnerWatch{}
			return ""
		}
	}
	if t.learner.id != id {
		t.learner = learnerWatch{id, t.e.Now()}
	}
	if t.e.Now().Sub(t.learner.since) < etcdmember.LearnerTimeout {
		return ""
	}
	return id
}

// leaseOfNode asks the other nodes' API servers for the machine ID in this machine's Node, and for
// the time of the Node's lease. Both are "" if none responds.
func (t *etcdStarter) leaseOfNode(ctx context.Context) (machine, renewed string) {
	c, err := adminClient(t.e, t.site)
	if err != nil {
		return "", ""
	}
	self := t.site.Self()
	for i, m := range t.site.ControlPlane.Members {
		if m.Name == self.Name {
			continue
		}
		c.Server, c.ServerName = "https://"+t.site.Masters[i], kubeapi.SharedName
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		n, err := c.GetNode(ctx, t.site.NodeName)
		var lease struct {
			Spec struct {
				RenewTime string `json:"renewTime"`
			} `json:"spec"`
		}
		if err == nil {
			err = c.Get(ctx, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"+t.site.NodeName, &lease)
		}
		cancel()
		if err == nil {
			return n.Status.NodeInfo.MachineID, lease.Spec.RenewTime
		}
		t.e.Log.Debug("the Node could not be read through "+m.Name, "error", err)
	}
	return "", ""
}
