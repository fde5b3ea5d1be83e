package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
)

// maintenanceTime limits the maintenance of etcd. Defragmentation rewrites a database of up to 8
// GiB.
const maintenanceTime = 20 * time.Minute

// MaintenancePhase maintains etcd's databases, and removes data that was set aside. If that fails,
// it adds a note, and the later phases run anyway.
func MaintenancePhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "etcd", Doc: "etcd's databases have free space, and no alarm is active", Timeout: maintenanceTime + time.Minute,
		Run: func(ctx context.Context, e *machine.Env) error {
			found, err := maintainEtcd(ctx, e, active.Site)
			if err != nil {
				e.Note("checking and maintaining etcd failed: %s", machine.OneLine(err))
			}
			for _, what := range found.Done {
				e.Log.Info("maintained etcd", "done", what)
			}
			for _, what := range found.Notes {
				e.Note("%s", what)
			}
			if err := ageSetAside(e, err == nil && found.Healthy); err != nil {
				e.Note("%s", machine.OneLine(err))
			}
			return nil
		},
	}
}

func maintainEtcd(ctx context.Context, e *machine.Env, site *configs.Site) (etcdmember.Maintained, error) {
	client, err := etcdClient(e)
	if err != nil {
		return etcdmember.Maintained{}, err
	}
	defer client.CloseIdleConnections()
	client.Timeout = 0 // ctx limits the time instead
	ctx, cancel := context.WithTimeout(ctx, maintenanceTime)
	defer cancel()
	u := maintenanceBy(client, site)
	u.Space = func(ctx context.Context, member string, bytes int64) error {
		return SpaceOn(ctx, e, site, member, bytes)
	}
	return u.Run(ctx)
}

func maintenanceBy(client *http.Client, site *configs.Site) etcdmember.Maintenance {
	u := etcdmember.Maintenance{Own: memberEtcd(client, site.Self()), Name: site.Self().Name, Others: map[string]etcdmember.Client{}}
	for _, m := range site.ControlPlane.Members {
		if m.Name != u.Name {
			u.Others[m.Name] = memberEtcd(client, m)
		}
	}
	return u
}

// SpaceOn returns an error if writing this many bytes to /var of a control-plane node would leave
// less than SnapshotLeaves percent free.
func SpaceOn(ctx context.Context, e *machine.Env, site *configs.Site, member string, bytes int64) error {
	space := spaceOn
	if member == site.Self().Name {
		space = ownSpace
	}
	total, free, err := space(ctx, e, site, member)
	if err != nil {
		return err
	}
	if least := total / 100 * SnapshotLeaves; free-bytes < least {
		return fmt.Errorf("it needs %s for a copy, but of the %s that are free on /var, %s must stay free", bytesize.Human(bytes), bytesize.Human(free), bytesize.Human(least))
	}
	return nil
}

func ownSpace(_ context.Context, e *machine.Env, _ *configs.Site, _ string) (total, free int64, err error) {
	if total, err = e.FSSize("/var"); err == nil {
		free, err = e.FSFree("/var")
	}
	return total, free, err
}

// spaceOn gets the size and the free bytes of the file system with another machine's etcd data,
// from that machine's kubelet through the API server.
func spaceOn(ctx context.Context, e *machine.Env, site *configs.Site, member string) (total, free int64, err error) {
	c, err := adminClient(e, site)
	if err != nil {
		return 0, 0, err
	}
	var summary struct {
		Node struct {
			FS struct{ AvailableBytes, CapacityBytes int64 } `json:"fs"`
		} `json:"node"`
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := c.Get(ctx, "/api/v1/nodes/"+member+"/proxy/stats/summary", &summary); err != nil {
		return 0, 0, fmt.Errorf("asking the kubelet of %s for the free space on its disk: %w", member, err)
	}
	fs := summary.Node.FS
	if fs.CapacityBytes <= 0 {
		return 0, 0, errors.New("the kubelet of " + member + " does not report the free space on its disk")
	}
	return fs.CapacityBytes, fs.AvailableBytes, nil
}
