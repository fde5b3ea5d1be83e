package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Each control-plane node has the cluster's keys from its Site. No node is the first one: each runs
// kubeadm's init phases, and package etcdmember decides how its etcd starts.

// AddressPhase waits for the machine's own address, and checks that new network settings reach
// another machine, if one is on. Once this boot has decided how etcd starts, it tries no new
// settings.
func AddressPhase(site *configs.Site) run.Phase {
	up, late := network.ToNeighbours(site), &network.LateReload{}
	return run.Phase{
		Name: "network", Doc: "this machine's own address", Timeout: network.Timeout,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			addr, err := netip.ParseAddr(site.Self().Address)
			if err != nil || network.TrialCutOff(e) || late.Due(e) || network.HasOwnAddress(ctx, e, site) != nil || !e.HasHosts(network.NodeOwner, network.NodeLine(e, addr)) {
				return run.Todo, err
			}
			if network.IsNew(e) && (network.MayTry(e) && !Decided(e) || network.NeighbourAnswers(ctx, e, site) == nil) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			addr, err := netip.ParseAddr(site.Self().Address)
			if err != nil {
				return err
			}
			if err := late.Run(ctx, e); err != nil {
				return err
			}
			if network.TrialCutOff(e) || network.MayTry(e) && !Decided(e) {
				err = tryNetwork(ctx, e, up)
			} else {
				err = waitForAddress(ctx, e, site)
			}
			if err != nil {
				return err
			}
			return e.SetHosts(ctx, network.NodeOwner, network.NodeLine(e, addr))
		},
	}
}

const addressFix = "check the cable, the switch port and the Site's network settings; where DHCP gives addresses, reserve this one for the machine"

// tryNetwork keeps new network settings if they reach another machine. Otherwise it tries the
// former ones, and rolls back if these do.
func tryNetwork(ctx context.Context, e *machine.Env, up network.Uplink) error {
	found, _, err := network.KeepOrRollBack(ctx, e, up)
	if err != nil {
		return err
	}
	if found.Extent == network.Nothing {
		return run.Advise(found.Err, addressFix)
	}
	if found.Extent == network.OwnAddress {
		e.Log.Warn("continuing with only this machine's own address", "error", found.Err)
	}
	return nil
}

// waitForAddress waits for the machine's own address.
func waitForAddress(ctx context.Context, e *machine.Env, site *configs.Site) error {
	e.Waiting("this machine's address %s", site.Self().Address)
	if err := e.Retry(ctx, machine.Wait{Every: 2 * time.Second, For: network.StartTimeout}, func() error { return network.HasOwnAddress(ctx, e, site) }); err != nil {
		return run.Advise(err, addressFix)
	}
	if network.IsNew(e) && network.NeighbourAnswers(ctx, e, site) == nil {
		return network.SaveGood(e)
	}
	return nil
}

// EndpointPhase maps the endpoint's name to this machine's own API server. IPVS is not needed,
// because kubelet and the pods here depend on that API server anyway.
func EndpointPhase(site *configs.Site) run.Phase {
	line := siteconf.HostsEntry{IP: site.Self().Address, Names: []string{site.Endpoint}}
	return run.Phase{
		Name: "endpoint", Doc: "the endpoint leads to this machine's own API server", Timeout: time.Minute,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			if !e.HasHosts(network.EndpointOwner, line) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error { return e.SetHosts(ctx, network.EndpointOwner, line) },
	}
}

// Pods lists the manifests of the control plane's static pods, except etcd's.
var Pods = []string{ondisk.ManifestsDir + "/kube-apiserver.yaml", ondisk.ManifestsDir + "/kube-controller-manager.yaml", ondisk.ManifestsDir + "/kube-scheduler.yaml"}

// Phase makes kubelet run the control plane's static pods.
func Phase(active *site.Active) run.Phase {
	madeFrom := active.Image.Plan + "\x00" + active.Site.ControlPlane.Kubeadm
	if proxy := siteconf.ControlPlaneProxyEnv(active.Site); proxy != nil { // without a proxy, the mark stays the same as in former releases
		madeFrom += "\x00" + strings.Join(proxy, "\x00")
	}
	sum := sha256.Sum256([]byte(madeFrom))
	mark := hex.EncodeToString(sum[:])
	made := func(e *machine.Env) bool {
		return e.Text(member.ControlPlaneMark) == mark && member.Enrolled(e) == nil &&
			!slices.ContainsFunc(Pods, func(p string) bool { return len(e.Contents(p)) == 0 })
	}
	return run.Phase{
		Name: "control-plane", Doc: "this machine's API server is ready", Timeout: 20 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			state, err := e.UnitState(ctx, ondisk.UnitKubelet)
			if err != nil || state != "active" || !made(e) || ReadMembership(e).notServedYet(active.Site) || checkOwnAPI(ctx, e, active.Site) != nil {
				return run.Todo, err
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			if !made(e) {
				// The root partitions have different marks. If this run is interrupted and the
				// other root partition boots next, its system must make the pods again.
				if e.Exists(member.ControlPlaneMark) {
					if err := writeMark(e, "unfinished"); err != nil {
						return err
					}
				}
				if err := kubeadm.Init(ctx, e, active, kubeadm.Local{}, []string{"control-plane", "all"}, []string{"kubelet-start"}); err != nil {
					return err
				}
				if err := member.SyncCredentials(e); err != nil { // kubeadm does not sync
					return err
				}
				if err := writeMark(e, mark); err != nil {
					return err
				}
			}
			if state, err := e.UnitState(ctx, ondisk.UnitKubelet); err != nil {
				return err
			} else if state != "active" {
				if err := e.Unit(ctx, "start", ondisk.UnitKubelet); err != nil {
					return fmt.Errorf("starting kubelet: %w", err)
				}
			}
			return waitForAPI(ctx, e, active.Site)
		},
	}
}

func writeMark(e *machine.Env, mark string) error {
	if _, err := e.Write(member.ControlPlaneMark, []byte(mark+"\n"), machine.Mode(0o600)); err != nil {
		return fmt.Errorf("recording how the control plane was made: %w", err)
	}
	return nil
}

// waitForAPI waits for this machine's own API server, and records that etcd's data is in use. The
// API server does not answer before this machine's etcd member has a vote.
func waitForAPI(ctx context.Context, e *machine.Env, site *configs.Site) error {
	client, err := etcdClient(e)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	usable := true
	err = e.Retry(ctx, machine.Wait{Every: decideInterval}, func() error {
		bad := checkOwnAPI(ctx, e, site)
		if bad == nil {
			return nil
		}
		if usable = areUsable(e, site); !usable { // the clock was set, and a certificate is not valid now
			return nil
		}
		e.Waiting("this machine's API server: %s", machine.OneLine(bad))
		if err := promote(ctx, e, site, client); err != nil {
			e.Waiting("this machine's member of etcd to catch up: %s", machine.OneLine(err))
		}
		return bad
	})
	if !usable {
		return run.ErrRestart
	}
	if err != nil {
		return run.Advise(fmt.Errorf("this machine's API server is not ready: %w", err), "etcd needs more than half of the control-plane nodes: switch the others on; if they are on, see `crictl ps -a` and /var/log/pods on the machine")
	}
	return saveServed(e, site)
}

// checkOwnAPI returns an error unless this machine's own API server is ready.
func checkOwnAPI(ctx context.Context, e *machine.Env, site *configs.Site) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c := kubeapi.Client{Server: "https://" + network.OwnHostPort(site), CA: e.Contents(ondisk.KubeCA), Dial: e.Dial, Now: e.Now, Transports: e.Transports()}
	return c.Get(ctx, "/readyz", nil)
}

// adminClient returns a client of this machine's own API server with all rights in the cluster.
func adminClient(e *machine.Env, site *configs.Site) (*kubeapi.Client, error) {
	c, err := e.ClientAt(SuperAdminConf, "the administrator's kubeconfig")
	if err != nil {
		return nil, err
	}
	c.Server, c.ServerName = "https://"+network.OwnHostPort(site), ""
	return c, nil
}
