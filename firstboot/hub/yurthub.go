package hub

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// Files that first boot writes on an OpenYurt node, in addition to OpenYurt's own.
const (
	EnvFile = ondisk.YurthubEnv
	// hubKept is a copy of EnvFile on DATA, in case an updated system boots while the API servers are
	// unreachable.
	hubKept    = ondisk.StateDir + "/yurthub.env"
	NFTFile    = ondisk.EtcDir + "/yurthub.nft"
	DropinFile = "/etc/systemd/system/" + openyurt.Unit + ".d/10-edgebake-port.conf"
	hubSysctl  = "/etc/sysctl.d/80-edgebake-yurthub.conf"
)

// hub is first boot's configuration of yurthub.
type hub struct {
	openyurt.Hub
	openPort bool  // the pool's port is open to other nodes of the pool
	clients  []int // user IDs that may use yurthub, in addition to root

	// The method withServers makes Hub.Servers from the following fields.
	endpoint string   // the endpoint's URL
	masters  []string // URLs
	keep     string   // the server in a static pod's yurthub.conf; "" if there is none yet
}

// portRulesDropin loads the rules for yurthub's ports before yurthub starts, or before the kubelet
// that runs it. If that fails, systemd retries.
const portRulesDropin = `# Written by firstboot.
[Service]
ExecStartPre=/usr/sbin/nft -f ` + NFTFile + `
`

// hubOf returns the hub for a Site, without its Servers.
func hubOf(e *machine.Env, active *site.Active) (hub, error) {
	s, info := active.Site, active.Image.Yurthub
	if info == nil {
		return hub{}, run.NeedsPerson(errors.New("this image has no yurthub"), "build the Image with yurthub, or choose nodeType native")
	}
	h := hub{openPort: s.Yurthub.OpenPort, clients: s.Yurthub.LocalClients, endpoint: s.EndpointURL(), Hub: openyurt.Hub{
		Version: info.Version, Node: active.Node, Pool: s.NodePool, Cloud: s.NodeType == configs.NodeCloud,
		NodeIP: cmp.Or(network.NodeAddress(e), openyurt.NodeIPIn(string(e.Contents(hubKept)))),
		Dummy:  e.Exists("/sys/module/dummy"), Namespace: s.Yurthub.Namespace, LBMode: info.LBMode,
		Pins: s.CAPins(), Organizations: s.Organizations, Image: info.Image, BootstrapFile: member.HubBootstrap,
		Extra: slices.Concat(info.ExtraArgs, s.Yurthub.ExtraArgs),
	}}
	switch {
	case h.IsPod() && h.Image == "":
		return hub{}, run.NeedsPerson(errors.New("this image names no container image of yurthub"), "build the Image again, with yurthub.image")
	case !h.IsPod() && h.NodeIP == "": // a static pod does not need it
		return hub{}, errors.New("this node's address is not known yet")
	}
	h.LBMode = cmp.Or(h.LBMode, openyurt.LBPriority)
	for _, m := range member.MastersOf(e, s) {
		h.masters = append(h.masters, "https://"+m)
	}
	if h.IsPod() {
		h.keep = hubIdentityServer(e)
	}
	return h, nil
}

// hubIdentityServer returns the server in yurthub.conf, or "" if there is none.
func hubIdentityServer(e *machine.Env) string {
	k, err := e.ParseKubeconfig(e.Contents(openyurt.Identity))
	if err != nil {
		return ""
	}
	c, err := k.Cluster()
	if err != nil {
		return ""
	}
	return c.Server
}

// withServers returns h with its Servers. withEndpoint puts the endpoint first in the list (see
// endpointInCert). The server in yurthub.conf stays in the list: without it, yurthub would delete
// its identity.
func (h hub) withServers(withEndpoint bool) hub {
	h.Servers = nil
	if withEndpoint {
		h.Servers = append(h.Servers, h.endpoint)
	}
	h.Servers = append(h.Servers, h.masters...)
	if h.keep != "" && !slices.Contains(h.Servers, h.keep) {
		h.Servers = append(h.Servers, h.keep)
	}
	return h
}

// hubFiles returns the contents of the files that yurthub needs, by path.
func hubFiles(h hub) map[string][]byte {
	files := portFiles(h.portAccess())
	if h.IsPod() {
		files[openyurt.Manifest] = h.PodManifest()
		return files
	}
	files[EnvFile], files[hubKept], files[hubSysctl] = h.Env(), h.Env(), []byte(openyurt.Sysctl)
	files[DropinFile] = []byte(portRulesDropin)
	return files
}

func hubInPlace(e *machine.Env, h hub) bool {
	for p, b := range hubFiles(h) {
		if string(e.Contents(p)) != string(b) {
			return false
		}
	}
	return true
}

// Phase makes yurthub run with its certificates, and waits until it is ready.
func Phase(active *site.Active) run.Phase {
	return servingPhase(run.Phase{
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			h, err := hubOf(e, active)
			if err != nil {
				return run.Todo, err
			}
			h, onDisk := hubOnDisk(e, h)
			if !onDisk || member.Enrolled(e) != nil || !hubServes(ctx, e) || !endpointHolds(ctx, e, h, active.Site) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			h, err := hubOf(e, active)
			if err == nil {
				err = installPortRules(ctx, e, h.portAccess()) // do this first: yurthub may be running
			}
			if err != nil {
				return err
			}
			if err := checkHubRelease(ctx, e, active.Image); err != nil {
				return err
			}
			h, onDisk := hubOnDisk(e, h)
			if err := poolFits(ctx, e, h); err != nil {
				if _, permanent := run.Fix(err); permanent && !onDisk {
					return err // a configured yurthub keeps running
				}
				// If the cluster lacks OpenYurt's webhooks, the node works anyway. With them, the
				// node is rejected, and the last phase reports the reason.
				e.Log.Warn("checking the node's NodePool", "error", err)
			}
			withEndpoint, err := endpointInCert(ctx, e, active.Site)
			if err != nil && !onDisk && e.Exists(member.ReadyMark) {
				// An updated system has booted: yurthub continues with its former servers.
				withEndpoint, err = keptEndpoint(e, active.Site)
			}
			switch {
			case err == nil:
				h = h.withServers(withEndpoint)
			case !onDisk:
				return err
			}
			if len(active.Site.Organizations) > 0 && !h.IsPod() {
				e.Log.Warn("organizations in the Site have no effect: yurthub uses kubelet's certificate", "organizations", strings.Join(active.Site.Organizations, ","))
			}
			return serveHub(ctx, e, h)
		},
	})
}

// servingPhase completes the phase that makes yurthub serve, both for nodes that join and for nodes
// that are converted.
func servingPhase(p run.Phase) run.Phase {
	p.Name, p.Doc, p.Timeout = "yurthub", "yurthub has its certificates and serves", 6*time.Minute
	return p
}

// hubServes reports whether yurthub is ready with its present configuration, and the rules for its
// ports are loaded.
func hubServes(ctx context.Context, e *machine.Env) bool {
	return !e.Exists(hubRestart) && portRulesLoaded(ctx, e) && hubReady(ctx, e) == nil
}

// serveHub starts yurthub, whose ports must already be closed, and waits until it is ready.
func serveHub(ctx context.Context, e *machine.Env, h hub) error {
	if err := startHub(ctx, e, h); err != nil {
		return err
	}
	return waitForHub(ctx, e, h)
}

// checkHubRelease returns an error if yurthub's program in the image is of another release than the
// Image names, because its flags depend on the release.
func checkHubRelease(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	info := image.Yurthub
	if info == nil || info.Form == openyurt.FormStaticPod {
		return nil
	}
	version, err := hubProgram(ctx, e)
	if errors.Is(err, syscall.ENOEXEC) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return run.NeedsPerson(err, "build the Image with yurthub's program for this machine")
	}
	if err != nil {
		return err
	}
	if version != "" && !strings.HasPrefix(info.Version, version+".") {
		return run.NeedsPerson(fmt.Errorf("yurthub in this image is %s, but the Image names %s, which has other flags", version, info.Version),
			"build the Image with the version of its yurthub.binary")
	}
	return nil
}

// hubOnDisk returns h with its Servers if yurthub's files on the disk match h. Whether the Servers
// include the endpoint was decided when the API servers last answered.
func hubOnDisk(e *machine.Env, h hub) (_ hub, onDisk bool) {
	for _, withEndpoint := range []bool{true, false} {
		if with := h.withServers(withEndpoint); hubInPlace(e, with) {
			return with, true
		}
	}
	return h, false
}

// hubRestart exists if yurthub must be restarted after a change. It is in /run, because a boot
// restarts yurthub anyway.
const hubRestart = ondisk.RunDir + "/restart-yurthub"

func startHub(ctx context.Context, e *machine.Env, h hub) error {
	if !h.Dummy {
		e.Log.Warn("this kernel has no dummy interface: pods do not find yurthub at " + openyurt.PodAddress)
	}
	if h.IsPod() {
		if err := makeManifests(e); err != nil {
			return err
		}
		// kubelet watches the directory, and recreates the pod after a change.
		if _, err := e.Write(openyurt.Manifest, h.PodManifest(), machine.Mode(0o600)); err != nil {
			return fmt.Errorf("writing yurthub's pod: %w", err)
		}
		return nil
	}
	state, err := e.UnitState(ctx, openyurt.Unit)
	if err != nil {
		return err
	}
	if hubInPlace(e, h) && state == "active" && !e.Exists(hubRestart) {
		return nil // it runs with this configuration; the caller waits until it is ready
	}
	if err := e.WriteFile(hubRestart, nil, machine.Mode(0o600)); err != nil {
		return fmt.Errorf("preparing yurthub: %w", err)
	}
	files := hubFiles(h)
	for _, p := range []string{hubSysctl, DropinFile, hubKept, EnvFile} {
		if _, err := e.Write(p, files[p], machine.Mode(0o644)); err != nil {
			return fmt.Errorf("preparing yurthub: %w", err)
		}
	}
	if err := e.Run(ctx, machine.Cmd{Args: []string{"sysctl", "-q", "-e", "-p", hubSysctl}}); err != nil {
		e.Log.Warn("setting the sysctls of yurthub; without them it may be unable to start while there is no network", "error", err)
	}
	for _, step := range [][2]string{{"daemon-reload", ""}, {"enable", openyurt.Unit}, {"restart", openyurt.Unit}} {
		if err := e.Unit(ctx, step[0], step[1]); err != nil {
			return fmt.Errorf("starting yurthub: %w", err)
		}
	}
	return e.Remove(hubRestart)
}

// endpointInCert reports whether all API servers that answer have the endpoint's name in their
// certificates: IPVS may connect to any of them, and yurthub has no setting for another TLS server
// name.
func endpointInCert(ctx context.Context, e *machine.Env, site *configs.Site) (bool, error) {
	ca, err := e.Read(ondisk.KubeCA)
	if err != nil {
		return false, fmt.Errorf("reading the cluster's CA: %w", err)
	}
	masters := member.MastersOf(e, site)
	errs := member.CheckServerNames(ctx, e, masters, ca, site.Endpoint)
	has := false
	for i, err := range errs {
		if errors.Is(err, kubeapi.ErrServerName) {
			e.Log.Warn("the certificate of an API server lacks the endpoint, so yurthub connects to the API servers' own addresses only: add the endpoint to the API servers' certSANs", "server", masters[i], "endpoint", site.Endpoint)
			return false, nil
		}
		has = has || err == nil
	}
	if has {
		return true, nil
	}
	return false, fmt.Errorf("reading the names in the API servers' certificates: %w", errors.Join(errs...))
}

// endpointHolds reports whether the endpoint may stay in yurthub's list. An API server that is new
// or was unreachable may have a certificate without the endpoint's name.
func endpointHolds(ctx context.Context, e *machine.Env, h hub, site *configs.Site) bool {
	if !slices.Contains(h.Servers, site.EndpointURL()) {
		return true
	}
	has, err := endpointInCert(ctx, e, site)
	return err != nil || has
}

// keptEndpoint returns the last result of endpointInCert, from the files on DATA.
func keptEndpoint(e *machine.Env, site *configs.Site) (bool, error) {
	servers := openyurt.ServersIn(string(e.Contents(hubKept)) + string(e.Contents(openyurt.Manifest)))
	if servers == nil {
		return false, errors.New("no API server answers with its certificate, and no earlier result is stored on this machine")
	}
	return servers[0] == site.EndpointURL(), nil
}

// hubReady returns an error unless yurthub reports that it is ready.
func hubReady(ctx context.Context, e *machine.Env) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	body, code, err := machine.LocalGet(ctx, e, openyurt.Health, openyurt.ReadyPath)
	if err != nil {
		return fmt.Errorf("it does not answer: %w", err)
	}
	if code != http.StatusOK {
		return fmt.Errorf("%s answers %d: %s", openyurt.ReadyPath, code, body)
	}
	return nil
}

// waitForHub waits until yurthub is ready. Meanwhile it reports what is missing in the cluster,
// because yurthub does not.
func waitForHub(ctx context.Context, e *machine.Env, h hub) error {
	tries := 0
	err := e.Retry(ctx, machine.Wait{Every: 2 * time.Second}, func() error {
		bad := hubReady(ctx, e)
		if bad == nil {
			return nil
		}
		// First after 20 s, then every 30 s: thousands of nodes may have the same problem.
		if tries++; tries%15 == 10 {
			if missing := missingForHub(ctx, e, h); missing != nil {
				e.Waiting("yurthub to be ready: %s", run.WithAdvice(missing))
			} else {
				e.Waiting("yurthub to be ready: %s", machine.OneLine(bad))
			}
		} else if tries == 1 {
			e.Waiting("yurthub to get its certificates and to sync")
		}
		return bad
	})
	if err == nil {
		return nil
	}
	if missing := missingForHub(context.WithoutCancel(ctx), e, h); missing != nil {
		return missing
	}
	return run.Advise(fmt.Errorf("yurthub does not become ready: %w", err), h.Logs())
}
