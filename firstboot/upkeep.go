package firstboot

import (
	"context"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/seat"
)

// upkeepTime bounds one look after etcd. A database has 8 GiB at most, and is written
// anew while it is defragmented.
const upkeepTime = 20 * time.Minute

// upkeepPhase looks after etcd's databases, and after data that was set aside. Trouble is
// said, and holds nothing up.
func upkeepPhase(active *Active) Phase {
	looked := false
	return Phase{
		Name: "etcd", Doc: "etcd's databases have room, and no alarm stands", Timeout: upkeepTime + time.Minute,
		Check: func(context.Context, *Env) (Verdict, error) {
			if looked {
				return Done, nil
			}
			return Todo, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			looked = true
			found, err := lookAfterEtcd(ctx, e, active.Site)
			if err != nil {
				e.Note("etcd could not be looked after: %s", oneLine(err))
			}
			for _, what := range found.Done {
				e.Log.Info("looked after etcd", "done", what)
			}
			for _, what := range found.Notes {
				e.Note("%s", what)
			}
			if err := ageSetAside(e, err == nil && found.Well); err != nil {
				e.Note("%s", oneLine(err))
			}
			return nil
		},
	}
}

func lookAfterEtcd(ctx context.Context, e *Env, site *configs.Site) (seat.Found, error) {
	client, err := etcdClient(e)
	if err != nil {
		return seat.Found{}, err
	}
	defer client.CloseIdleConnections()
	client.Timeout = 0 // ctx has the end
	ctx, cancel := context.WithTimeout(ctx, upkeepTime)
	defer cancel()
	u := seat.Upkeep{Own: memberEtcd(client, site.Self()), Name: site.Self().Name, Others: map[string]seat.Etcd{}, Room: func(bytes int64) error { return roomFor(e, bytes) }}
	for _, m := range site.ControlPlane.Members {
		if m.Name != u.Name {
			u.Others[m.Name] = memberEtcd(client, m)
		}
	}
	return u.Keep(ctx)
}

// roomFor reports why /var has no room for so many bytes beside what kubelet and etcd
// need.
func roomFor(e *Env, bytes int64) error {
	total, err := e.FSSize("/var")
	if err != nil {
		return err
	}
	free, err := e.FSFree("/var")
	if err != nil {
		return err
	}
	if least := total / 100 * snapshotLeaves; free-bytes < least {
		return fmt.Errorf("it needs %s meanwhile, and of the %s that are free on /var, %s must stay", configs.HumanSize(bytes), configs.HumanSize(free), configs.HumanSize(least))
	}
	return nil
}
