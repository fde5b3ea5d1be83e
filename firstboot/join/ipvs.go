package join

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// IPVSPhase keeps the API servers reachable through the endpoint, using ipvscare or /etc/hosts.
func IPVSPhase(site *configs.Site) run.Phase {
	if site.IPVS.Disabled {
		return hostsPhase(site)
	}
	return ipvscarePhase(site)
}

// ipvscarePhase configures and starts ipvscare.
func ipvscarePhase(site *configs.Site) run.Phase {
	return run.Phase{
		Name: "ipvs", Doc: "ipvscare keeps the API servers reachable", Timeout: 90 * time.Second,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			state, err := e.UnitState(ctx, ondisk.UnitIPVSCare)
			if err != nil || !member.MastersSaved(ctx, e, site) {
				return run.Todo, err
			}
			want, err := IPVSConfig(e, site)
			if err != nil || string(e.Contents(ondisk.IPVSConfig)) != string(want) {
				return run.Todo, err
			}
			if endpointAnswers(ctx, e, site) == nil {
				if state != "active" {
					return run.Todo, nil
				}
				return run.Done, nil
			}
			// The unit is activating until ipvscare reaches an API server. If the API servers
			// belong to another cluster, Run would wait in vain.
			if state != "active" && state != "activating" {
				return run.Todo, nil
			}
			again, unclear := member.CheckRecreated(ctx, e, site)
			switch {
			case again:
				e.Note("%s", member.RecreatedNote(e))
				return run.Unknown, nil
			case member.CannotShow(e, unclear):
				return run.Unknown, nil // the next phase reports that the certificate has expired
			}
			return run.Todo, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			if err := member.SaveProvenMasters(ctx, e, site); err != nil {
				return err
			}
			wrote, err := writeIPVSConfig(e, site)
			if err != nil {
				return err
			}
			e.Waiting("ipvscare to serve the endpoint")
			if err := StartIPVSCare(ctx, e, site, wrote); err != nil {
				return err
			}
			if served, err := WaitForEndpoint(ctx, e, site); err != nil || !served {
				return err
			}
			return run.ErrConfirmed
		},
	}
}

// IPVSConfig returns the contents of ipvs.json: the Site's API servers and, for a member, the
// identity of the cluster to which they must belong.
func IPVSConfig(e *machine.Env, site *configs.Site) ([]byte, error) {
	conf := siteconf.IPVS(member.WithFormerMasters(e, site))
	for i := range conf.Servers {
		s := &conf.Servers[i]
		s.Masters = balanced(site, s.Masters)
		if member.HasCredentials(e) {
			s.Joined = member.ReadJoinedCluster(e)
		}
	}
	doc, err := json.MarshalIndent(conf, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("writing the list of API servers: %w", err)
	}
	return append(doc, '\n'), nil
}

// balanced returns the masters that can be behind the Site's VIP, without duplicates. It drops the
// endpoint and the VIP, which ipvscare rejects; former masters may contain them.
func balanced(site *configs.Site, masters []string) []string {
	vip, vipErr := netip.ParseAddr(site.VIP)
	seen := map[string]bool{}
	return slices.DeleteFunc(slices.Clone(masters), func(m string) bool {
		plain := configs.PlainMaster(m)
		host, _, err := net.SplitHostPort(plain)
		addr, addrErr := netip.ParseAddr(host)
		out := err != nil || seen[plain] || strings.EqualFold(host, site.Endpoint) || vipErr == nil && addrErr == nil && addr == vip.Unmap()
		seen[plain] = true
		return out
	})
}

// writeIPVSConfig writes the current configuration. A running ipvscare rereads it. It reports
// whether the configuration has changed.
func writeIPVSConfig(e *machine.Env, site *configs.Site) (wrote bool, err error) {
	doc, err := IPVSConfig(e, site)
	if err == nil {
		// Before the configuration, with which an ipvscare that waits for it starts at once.
		_, err = e.Write(ondisk.IPVSStarted, nil, machine.Mode(0o600))
	}
	if err == nil {
		wrote, err = e.Write(ondisk.IPVSConfig, doc, machine.Mode(0o644))
	}
	if err != nil {
		return false, fmt.Errorf("writing ipvscare's configuration: %w", err)
	}
	return wrote, nil
}

// CleanIPVS makes ipvscare remove the rules that its configuration lists. It first replaces a
// damaged configuration with one made from site, or removes it if site is nil or disables IPVS.
func CleanIPVS(ctx context.Context, e *machine.Env, site *configs.Site) error {
	if !e.Exists(ondisk.IPVSConfig) {
		return nil
	}
	if !ipvsConfigReadable(e) {
		e.Log.Warn(ondisk.IPVSConfig + " is damaged: writing it again, so that ipvscare can remove its rules")
		err := e.Remove(ondisk.IPVSConfig)
		if site != nil && !site.IPVS.Disabled {
			_, err = writeIPVSConfig(e, site)
		}
		if err != nil {
			return fmt.Errorf("replacing the damaged %s: %w", ondisk.IPVSConfig, err)
		}
	}
	return e.Run(ctx, machine.Cmd{Args: []string{"ipvscare", "clean"}})
}

// ipvsConfigReadable reports whether ipvs.json is valid.
func ipvsConfigReadable(e *machine.Env) bool {
	var conf ondisk.IPVS
	err := json.Unmarshal(e.Contents(ondisk.IPVSConfig), &conf)
	return err == nil && conf.Version == ondisk.IPVSVersion && len(conf.Servers) > 0
}

// StartIPVSCare starts ipvscare's unit. It restarts a running ipvscare if the endpoint does not
// answer, unless the configuration was just written (wrote), which ipvscare rereads by itself, or
// ipvscare may still be in its delay after power-on.
func StartIPVSCare(ctx context.Context, e *machine.Env, site *configs.Site, wrote bool) error {
	state, err := e.UnitState(ctx, ondisk.UnitIPVSCare)
	if err != nil {
		return err
	}
	verb := "start"
	if state == "active" && !wrote {
		if endpointAnswers(ctx, e, site) == nil {
			return nil
		}
		// A restart would end the delay.
		if since, err := e.UnitSince(ctx, ondisk.UnitIPVSCare); err == nil && e.Now().Sub(since.Now) < site.Spread() {
			return nil
		}
		verb = "restart" // it runs, but does not serve
	}
	if err := e.Unit(ctx, verb, ondisk.UnitIPVSCare); err != nil {
		return fmt.Errorf("starting %s: %w", ondisk.UnitIPVSCare, err)
	}
	return nil
}

// WaitForEndpoint waits until the endpoint answers. It returns false and no error if the API
// servers belong to another cluster, or cannot show to which one they belong; Check reports both.
func WaitForEndpoint(ctx context.Context, e *machine.Env, site *configs.Site) (served bool, _ error) {
	err := endpointAnswers(ctx, e, site)
	if err != nil {
		// Retry only the endpoint: while nothing serves it, connecting to it does not load the API
		// servers.
		_ = e.Retry(ctx, machine.Wait{Every: time.Second, For: serveTimeout, Gently: true}, func() error { return machine.Answers(ctx, e, site.EndpointHostPort()) })
		err = endpointAnswers(ctx, e, site)
	}
	if err != nil {
		again, unclear := member.CheckRecreated(ctx, e, site)
		if again || member.CannotShow(e, unclear) {
			return false, nil
		}
		if unclear != nil {
			err = fmt.Errorf("%w; their cluster could not be verified: %s", err, printable.Line(strings.ReplaceAll(unclear.Error(), "\n", "; ")))
		}
		return false, run.Advise(err, "see `ipvscare status` and `journalctl -u ipvscare` on the machine; an API server whose certificate is of another CA gets no traffic")
	}
	return true, nil
}

// hostsPhase replaces ipvscare: /etc/hosts maps the endpoint to one API server, and to another one
// if that fails.
func hostsPhase(site *configs.Site) run.Phase {
	return run.Phase{
		Name: "ipvs", Doc: "/etc/hosts maps the endpoint to an API server", Timeout: 90 * time.Second,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			state, err := e.UnitState(ctx, ondisk.UnitIPVSCare)
			if err != nil || !member.MastersSaved(ctx, e, site) || state == "active" || e.Exists(ondisk.IPVSConfig) {
				return run.Todo, err
			}
			if member.Enrolled(e) == nil && endpointAnswers(ctx, e, site) != nil {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			if err := member.SaveProvenMasters(ctx, e, site); err != nil {
				return err
			}
			if err := e.Unit(ctx, "stop", ondisk.UnitIPVSCare); err != nil {
				return fmt.Errorf("stopping %s: %w", ondisk.UnitIPVSCare, err)
			}
			if err := CleanIPVS(ctx, e, site); err != nil {
				e.Log.Warn("removing IPVS rules", "error", err)
			}
			if err := e.Remove(ondisk.IPVSConfig); err != nil {
				return fmt.Errorf("removing %s: %w", ondisk.IPVSConfig, err)
			}
			master, err := network.Reach(ctx, e, member.MastersOf(e, site))
			if err != nil {
				return err
			}
			return setEndpointHosts(ctx, e, site, master)
		},
	}
}

// serveTimeout is how long ipvscare may take until it serves the endpoint.
const serveTimeout = 30 * time.Second

// endpointAnswers returns an error if the endpoint does not answer although an API server does. If
// no API server is reachable, it returns nil.
func endpointAnswers(ctx context.Context, e *machine.Env, site *configs.Site) error {
	err := machine.Answers(ctx, e, site.EndpointHostPort())
	if err == nil {
		return nil
	}
	if _, err := network.Reach(ctx, e, member.MastersOf(e, site)); err != nil {
		return nil // offline: nothing can be concluded
	}
	return fmt.Errorf("the endpoint %s does not answer on this machine, but the API servers do: %w", site.EndpointHostPort(), machine.PlainNet(err))
}

// setEndpointHosts maps the endpoint to one API server in /etc/hosts, unless ipvscare does that.
func setEndpointHosts(ctx context.Context, e *machine.Env, site *configs.Site, master string) error {
	if !site.IPVS.Disabled {
		return e.SetHosts(ctx, network.EndpointOwner) // ipvscare writes the line
	}
	addrs, err := network.APIServerAddrs(ctx, e, site, master)
	if err != nil {
		return err
	}
	addr := addrs[0]
	for _, next := range addrs[1:] {
		if machine.Answers(ctx, e, addr) == nil {
			break
		}
		addr = next
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("reading the API server's address %q: %w", addr, err)
	}
	return e.SetHosts(ctx, network.EndpointOwner, siteconf.HostsEntry{IP: host, Names: []string{site.Endpoint}})
}
