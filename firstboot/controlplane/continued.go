package controlplane

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
)

// If a quorum is lost forever, the operator names one machine to continue from. Its etcd starts
// once with ForceNewCluster, which drops all other members. A second such start would drop new
// members.

// ForceNewCluster is the name of etcd's flag.
const ForceNewCluster = "force-new-cluster"

// forcedArgs returns etcd's arguments for a start with ForceNewCluster. A crash may repeat the
// start, so no member may join yet: etcd accepts only clients on this machine.
func forcedArgs(site *configs.Site) []kubeadm.Arg {
	return []kubeadm.Arg{{Name: ForceNewCluster, Value: "true"}, {Name: "listen-client-urls", Value: ownEtcdURL(site)}}
}

// ownEtcdURL returns the loopback URL of this machine's etcd, which kubeadm sets for the API server.
func ownEtcdURL(site *configs.Site) string {
	loopback := "127.0.0.1"
	if addr, err := netip.ParseAddr(site.Self().Address); err == nil && addr.Is6() {
		loopback = "::1"
	}
	return "https://" + net.JoinHostPort(loopback, configs.EtcdClientPort)
}

// ContinuedPhase removes ForceNewCluster once etcd has started with it.
func ContinuedPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "continue", Doc: "other members can join etcd", Timeout: 10 * time.Minute,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			if bytes.Contains(e.Contents(EtcdRun), []byte("--"+ForceNewCluster)) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			client, err := etcdClient(e)
			if err != nil {
				return err
			}
			defer client.CloseIdleConnections()
			e.Waiting("etcd to serve with this machine's data alone")
			err = e.Retry(ctx, machine.Wait{Every: decideInterval}, func() error {
				_, err := etcdmember.Client{HTTP: client, URL: ownEtcdURL(active.Site)}.Members(ctx)
				return err
			})
			if err != nil {
				return run.Advise(fmt.Errorf("etcd does not serve with this machine's data alone: %w", err), "see `crictl ps -a` and /var/log/pods on the machine")
			}
			if err := saveMembership(e, active.Site); err != nil {
				return err
			}
			if err := startEtcd(ctx, e, active, []kubeadm.Arg{
				{Name: "initial-cluster", Value: everyMember(active.Site)},
				{Name: "initial-cluster-state", Value: "existing"},
			}); err != nil {
				return err
			}
			return waitForAPI(ctx, e, active.Site)
		},
	}
}

// continueRequest returns the Site's request to continue, in the format of the membership record.
func continueRequest(site *configs.Site) string {
	c := site.ControlPlane
	return strings.Join(strings.Fields(c.ContinueFrom+" "+c.Restore+" "+c.RequestedAt), " ")
}

// forgetRequest removes the request from the record once the Site has none, so that the same
// request can be made again later.
func (t *etcdStarter) forgetRequest() error {
	note := ReadMembership(t.e)
	if note.Continued == "" || t.site.ControlPlane.ContinueFrom != "" {
		return nil
	}
	note.Continued = ""
	return note.write(t.e)
}
