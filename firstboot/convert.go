package firstboot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/overlays/node"
)

const (
	yurthubProgram = "/usr/local/bin/yurthub"
	yurthubUnit    = "/etc/systemd/system/" + ondisk.UnitYurthub
	bakedHubUnit   = "/usr/lib/systemd/system/" + ondisk.UnitYurthub
	hubCache       = "/etc/kubernetes/cache"
	manifests      = "/etc/kubernetes/manifests"
)

// hubUnit is the unit that images carry, for nodes that edgebake did not
// build. A test holds the two against each other.
const hubUnit = `# OpenYurt's node proxy. Held until first boot wrote its arguments; from then
# on up before kubelet at every boot, with or without a network, and restarted
# for ever: yurthub itself gives up after four minutes without its identity.
[Unit]
Description=OpenYurt yurthub
After=network.target ipvscare.service systemd-modules-load.service
Before=kubelet.service
RequiresMountsFor=/etc/kubernetes /var/lib/yurthub
ConditionPathExists=/etc/edgebake/yurthub.env
StartLimitIntervalSec=0

[Service]
Type=simple
EnvironmentFile=/etc/edgebake/yurthub.env
ExecStart=/usr/local/bin/yurthub $YURTHUB_ARGS
Restart=always
RestartSec=3
OOMScoreAdjust=-900
# yurthub ignores SIGTERM while it waits for its identity.
TimeoutStopSec=10

[Install]
WantedBy=multi-user.target
`

// ConvertOptions say what kind of OpenYurt node a native one becomes.
type ConvertOptions struct {
	NodePool string
	Cloud    bool
	// Servers are the API servers for yurthub, URLs, the one that never
	// changes first; empty: where kubelet goes now, and the site's masters.
	Servers   []string
	Namespace string // kube-system
	LBMode    string // priority
	OpenPort  bool
	Extra     []string
}

// Step tells how a step of convert, revert or reset went.
type Step struct {
	Name, Status string // waiting, done, as it should be, failed, undone
	Detail       string
}

// ErrAlready says that a node is what it was to become.
var ErrAlready = errors.New("there is nothing to do")

// Convert makes a running native node an OpenYurt node, pods kept. Every step
// is checked; when one fails, those before it are undone. After a kill, run
// again, it goes on; Revert takes it back.
func Convert(ctx context.Context, e *Env, o ConvertOptions, tell func(Step)) error {
	image, err := imageInfo(e)
	if err != nil {
		return err
	}
	active := siteIfAny(e, image)
	name, err := nativeNode(ctx, e)
	if err != nil {
		return err
	}
	if now, err := hubNode(ctx, e, name); err != nil {
		return unread(err)
	} else if now != nil {
		return alreadyHub(ctx, e, name, active, now, o)
	}
	// Once kubelet is turned, by a convert that was killed, it may not have
	// reported yet; the steps left wait for that.
	if err := readyNow(ctx, e, name); err != nil && !e.exists(ondisk.YurthubConf) {
		if errors.Is(err, errUnread) {
			return unread(err)
		}
		return Advise(fmt.Errorf("a node that is not Ready is not converted, since nothing could tell whether it went well: %w", err),
			"see `journalctl -u kubelet -u containerd` on the machine, and convert it once it is Ready")
	}
	h, err := hubForConvert(ctx, e, name, active, o)
	if err != nil {
		return err
	}
	if err := poolFits(ctx, e, h); err != nil {
		return err
	}
	if n, err := readNode(ctx, e, name); err == nil {
		if now := n.Metadata.Labels[configs.LabelNodePool]; now != "" && now != h.pool {
			return Advise(fmt.Errorf("the Node %s is in node pool %s already, and OpenYurt changes a pool only by taking the label away first", name, now),
				"convert it with --nodepool-name "+now+", or: kubectl label node "+name+" "+configs.LabelNodePool+"-")
		}
	}
	rec := newRecord(e, "convert")
	rec.whole = true
	return rec.carryOut(ctx, convertSteps(h, image), tell)
}

// siteIfAny is the site to go by; nil on a node that edgebake did not build,
// or whose site is beyond reading.
func siteIfAny(e *Env, image ondisk.ImageInfo) *Active {
	active, err := activeSite(e, image)
	if err != nil {
		e.Log.Info("going on without a site", "reason", err)
		return nil
	}
	return active
}

func unread(err error) error {
	return fmt.Errorf("convert needs the cluster, to label the Node and to see whether all goes well: %w", err)
}

// hubNode returns the Node's labels where this is an OpenYurt node, whole:
// kubelet goes through yurthub and both labels are there. A convert that was
// killed, and goes on when it is run again, has left less; then it is nil.
func hubNode(ctx context.Context, e *Env, name string) (map[string]string, error) {
	if !behindYurthub(e) {
		return nil, nil
	}
	n, err := readNode(ctx, e, name)
	if err != nil {
		return nil, err
	}
	if l := n.Metadata.Labels; l[configs.LabelEdgeWorker] != "" && l[configs.LabelNodePool] != "" {
		return l, nil
	}
	return nil, nil
}

// behindYurthub reports whether kubelet is told to go through yurthub.
func behindYurthub(e *Env) bool {
	return strings.Contains(string(e.contents(kubeadmFlags)), ondisk.YurthubConf)
}

// alreadyHub says what an OpenYurt node is that was to be converted. Nothing
// of it is touched: a change that failed on the way could only be undone by
// making the node native, which nobody asked for.
func alreadyHub(ctx context.Context, e *Env, name string, active *Active, labels map[string]string, o ConvertOptions) error {
	kind := configs.NodeEdge
	if labels[configs.LabelEdgeWorker] != "true" {
		kind = configs.NodeCloud
	}
	is := fmt.Sprintf("%s is an OpenYurt node already, of type %s in node pool %s", name, kind, labels[configs.LabelNodePool])
	fix := "`firstboot revert` makes it native; convert can then give it other settings"
	bySite := active != nil && active.Site.OpenYurt()
	if bySite {
		fix = "its site made it one: say the other nodeType, nodePool or arguments there, kubectl delete node " + name + " where the pool changes, and restart the machine"
	}
	if labels[configs.LabelNodePool] != o.NodePool || (kind == configs.NodeCloud) != o.Cloud {
		return Advise(errors.New(is), fix)
	}
	if !bySite {
		h, err := hubForConvert(ctx, e, name, active, o)
		if err != nil {
			return err
		}
		if !hubInPlace(e, h) {
			return Advise(fmt.Errorf("%s, and its yurthub has other arguments (%s)", is, yurthubEnv), fix)
		}
	}
	if err := hubReady(ctx, e); err != nil {
		return Advise(fmt.Errorf("%s, but yurthub is not ready: %w", is, err), "see `journalctl -u yurthub` on the machine")
	}
	return fmt.Errorf("%s: %w", is, ErrAlready)
}

// Revert makes an OpenYurt node native again, pods kept.
func Revert(ctx context.Context, e *Env, tell func(Step)) error {
	image, err := imageInfo(e)
	if err != nil {
		return err
	}
	active := siteIfAny(e, image)
	name, err := nativeNode(ctx, e)
	if err != nil {
		return err
	}
	steps := revertSteps(name, image)
	if all, err := allDone(ctx, e, steps); err != nil {
		return err
	} else if all {
		return fmt.Errorf("%s is a native node already: %w", name, ErrAlready)
	}
	if active != nil && active.Site.OpenYurt() {
		return Advise(fmt.Errorf("this machine's site says nodeType: %s, which first boot would make it again at the next boot", active.Site.NodeType),
			"say nodeType: native, without a nodePool, in site.yaml, in the slot or on a stick; then revert")
	}
	rec := newRecord(e, "revert")
	rec.turnedAt = readyStep
	return rec.carryOut(ctx, steps, tell)
}

// firstbootIdle is an error while first boot is on its way to what the site says: the
// two would undo each other's work.
func firstbootIdle(ctx context.Context, e *Env) error {
	s, err := LoadState(e.Root)
	if err != nil || s.Result == ondisk.ResultDone {
		return nil // not here, or it only sends its report
	}
	switch state, err := e.UnitState(ctx, ondisk.UnitFirstboot); {
	case err != nil:
		return err
	case state == "active", state == "activating", state == "reloading":
		return Advise(fmt.Errorf("first boot is at work on this machine, and not done (%s)", s.Result),
			"`firstboot status` says what it waits for; wait until it is done, or stop it: systemctl stop firstboot")
	}
	return nil
}

// nativeNode is the name of this worker node; a control plane is refused, and
// one that first boot is still making.
func nativeNode(ctx context.Context, e *Env) (string, error) {
	if e.exists(manifests + "/kube-apiserver.yaml") {
		return "", errors.New("this machine runs a control plane: yurthub must not stand between an API server and its own kubelet")
	}
	if conf, err := e.read(ondisk.KubeletConf); err == nil && behindHub(conf) {
		return "", errors.New("this is an OpenYurt node whose kubelet has no certificate of its own (yurthub before 1.7, a static pod), so that it cannot be turned in place: `firstboot reset`, then join it again as what it shall be")
	}
	if err := enrolled(e); err != nil {
		return "", fmt.Errorf("only a node that kubeadm joined can be turned, and %w", err)
	}
	if err := firstbootIdle(ctx, e); err != nil {
		return "", err
	}
	cert, err := kubeletCert(e)
	if err != nil {
		return "", err
	}
	name, ok := strings.CutPrefix(cert.Subject.CommonName, "system:node:")
	if !ok {
		return "", fmt.Errorf("kubelet's certificate is for %q, which is no node", cert.Subject.CommonName)
	}
	return name, nil
}

// errUnread says that nothing could be told about the Node.
var errUnread = errors.New("its Node cannot be read")

// readNode asks the API server as kubelet.conf says, past yurthub.
func readNode(ctx context.Context, e *Env, name string) (*api.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	c, err := nodeClient(e)
	if err != nil {
		return nil, err
	}
	n, err := c.GetNode(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnread, err)
	}
	return n, nil
}

func readyNow(ctx context.Context, e *Env, name string) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	n, err := readNode(ctx, e, name)
	if err != nil {
		return err
	}
	if ready, why := n.Ready(); !ready {
		return fmt.Errorf("node %s is not Ready: %s", name, why)
	}
	return reported(ctx, e, n)
}

func hubForConvert(ctx context.Context, e *Env, name string, active *Active, o ConvertOptions) (hub, error) {
	if o.NodePool == "" {
		return hub{}, errors.New("no node pool is given: yurthub starts only with the name of one")
	}
	if !e.exists(yurthubProgram) {
		return hub{}, fmt.Errorf("there is no %s: put yurthub's program there, of the release the cluster runs", yurthubProgram)
	}
	if err := hubFits(ctx, e); err != nil {
		return hub{}, err
	}
	if !e.exists(clientCert) {
		return hub{}, fmt.Errorf("there is no %s, the certificate that yurthub borrows: kubelet must run with rotateCertificates: true, as kubeadm has it", clientCert)
	}
	if err := portsClosable(ctx, e); err != nil {
		return hub{}, err
	}
	server, _, err := kubeletServer(e)
	if err != nil {
		return hub{}, err
	}
	servers := o.Servers
	if len(servers) == 0 {
		servers = append(servers, server)
		if active != nil {
			for _, m := range mastersOf(e, active.Site) {
				servers = append(servers, "https://"+m)
			}
		}
	}
	ca, err := e.read(ondisk.KubeCA)
	if err != nil {
		return hub{}, fmt.Errorf("reading the cluster's CA: %w", err)
	}
	servers, err = usableServers(ctx, e, servers, ca)
	if err != nil {
		return hub{}, err
	}
	u, err := url.Parse(servers[0])
	if err != nil {
		return hub{}, fmt.Errorf("reading server %s: %w", servers[0], err)
	}
	// On the way to a VIP of its own a machine may have any source address.
	address := nodeAddress(e)
	if address == "" {
		address, err = internalIP(ctx, e, name)
		if err != nil {
			return hub{}, err
		}
	}
	if address == "" {
		ip, err := e.Source(ctx, u.Host)
		if err != nil {
			return hub{}, fmt.Errorf("looking for this node's address on the way to %s: %w", u.Host, err)
		}
		address = ip.String()
	}
	var pins []string
	certs, err := api.ParseCerts(ca)
	if err != nil {
		return hub{}, err
	}
	for _, c := range certs {
		pins = append(pins, api.Pin(c))
	}
	if !e.exists("/sys/module/dummy") {
		// On a node that edgebake did not build nobody may have loaded it yet.
		if err := e.Run(ctx, Cmd{Args: []string{"modprobe", "dummy"}}); err != nil {
			e.Log.Info("this kernel has no dummy interface", "error", err)
		}
	}
	h := hub{
		node: name, pool: o.NodePool, nodeIP: address, cloud: o.Cloud, dummy: e.exists("/sys/module/dummy"),
		servers: servers, namespace: o.Namespace, lbMode: o.LBMode, pins: pins, openPort: o.OpenPort, extra: o.Extra,
	}
	if h.namespace == "" {
		h.namespace = "kube-system"
	}
	if h.lbMode == "" {
		h.lbMode = "priority"
	}
	return h, nil
}

// internalIP is the address that the cluster knows the node by. Towards a
// balancer on the node itself the way has another.
func internalIP(ctx context.Context, e *Env, name string) (string, error) {
	n, err := readNode(ctx, e, name)
	if err != nil {
		return "", err
	}
	for _, a := range n.Status.Addresses {
		if a.Type == "InternalIP" {
			return a.Address, nil
		}
	}
	return "", nil
}

// hubFits sees that yurthub's program can run here, and as a unit.
func hubFits(ctx context.Context, e *Env) error {
	version, err := hubProgram(ctx, e)
	if err != nil || version == "" {
		return err
	}
	if minor, err := strconv.Atoi(strings.TrimPrefix(version, "v1.")); err != nil || minor < 7 {
		return fmt.Errorf("%s is %s: only v1.7 and later can use kubelet's certificate, which a node that has joined goes on with", yurthubProgram, version)
	}
	return nil
}

// hubProgram asks yurthub's program for its version, as v1.7; "": it was built
// by hand, without one.
func hubProgram(ctx context.Context, e *Env) (version string, err error) {
	var out strings.Builder
	if err := e.Run(ctx, Cmd{Args: []string{yurthubProgram, "--version"}, Output: &out}); err != nil {
		var start *fs.PathError
		if errors.As(err, &start) {
			err = start.Err // the rest names the program once more
		}
		return "", fmt.Errorf("trying %s: %w: it must be the program itself, for this machine's processor", yurthubProgram, err)
	}
	if m := hubVersion.FindStringSubmatch(out.String()); m != nil {
		version = m[1]
	}
	return version, nil
}

var hubVersion = regexp.MustCompile(`\b(v1\.\d{1,3})\.\d`)

// CheckServers reports all that are not URLs of API servers as yurthub takes
// them.
func CheckServers(servers []string) error {
	var errs []error
	for _, s := range servers {
		if u, err := url.Parse(s); err != nil || u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" {
			errs = append(errs, fmt.Errorf("server %q is not of the form https://host:port", s))
		}
	}
	return errors.Join(errs...)
}

// usableServers are the servers whose certificate has their own name: yurthub
// takes no tls-server-name. One that does not answer now stays in the list, if
// another does.
func usableServers(ctx context.Context, e *Env, servers []string, ca []byte) ([]string, error) {
	var out []string
	var errs []error
	answers := false
	if err := CheckServers(servers); err != nil {
		return nil, err
	}
	for _, s := range servers {
		u, err := url.Parse(s)
		if err != nil {
			return nil, fmt.Errorf("reading server %s: %w", s, err)
		}
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		_, err = api.ServerName(ctx, e.Dial, u.Host, ca, []string{u.Hostname()})
		cancel()
		if err == nil {
			answers = true
		} else {
			errs = append(errs, err)
		}
		if errors.Is(err, api.ErrServerName) {
			e.Log.Warn("yurthub does not get this server", "server", s, "error", err)
			continue
		}
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	if !answers {
		return nil, fmt.Errorf("yurthub can use none of the servers: %w", errors.Join(errs...))
	}
	return out, nil
}

func allDone(ctx context.Context, e *Env, steps []Phase) (bool, error) {
	for _, s := range steps {
		if s.Name == readyStep {
			continue // says how a change went, not whether there is one to make
		}
		v, err := s.Check(ctx, e)
		if err != nil {
			return false, fmt.Errorf("looking whether the step %s is done: %w", s.Name, err)
		}
		if v != Done {
			return false, nil
		}
	}
	return true, nil
}

// convertSteps in their order: nothing kubelet depends on is touched before
// yurthub serves, and the labels come last, since the cluster acts on them.
func convertSteps(h hub, image ondisk.ImageInfo) []Phase {
	labels := node.OpenYurtLabels(h.pool, h.cloud)
	turn := redirectPhase(image.Kubernetes, labels)
	turn.Undo = func(ctx context.Context, e *Env) error { return direct(ctx, e, nil) }
	var were map[string]any // the Node's labels of OpenYurt's, before
	return []Phase{
		{
			Name: "unit", Doc: "the unit of yurthub is there", Timeout: time.Minute,
			Check: func(_ context.Context, e *Env) (Verdict, error) {
				if !e.exists(openYurtDropin) && (e.exists(bakedHubUnit) || string(e.contents(yurthubUnit)) == hubUnit) {
					return Done, nil
				}
				return Todo, nil
			},
			Run: func(ctx context.Context, e *Env) error {
				if err := e.Remove(openYurtDropin); err != nil {
					return fmt.Errorf("writing the unit of yurthub: %w", err)
				}
				if !e.exists(bakedHubUnit) {
					if err := e.WriteFile(yurthubUnit, []byte(hubUnit), Mode(0o644)); err != nil {
						return fmt.Errorf("writing the unit of yurthub: %w", err)
					}
				}
				if err := e.Mkdir(ondisk.YurthubRoot, Mode(0o755)); err != nil {
					return fmt.Errorf("making %s: %w", ondisk.YurthubRoot, err)
				}
				return e.Unit(ctx, "daemon-reload", "")
			},
			Undo: removeUnit,
		},
		{
			Name: "yurthub", Doc: "yurthub has its certificates and serves", Timeout: 6 * time.Minute,
			Check: func(ctx context.Context, e *Env) (Verdict, error) {
				if e.exists(hubRestart) || !hubInPlace(e, h) || !portsClosed(ctx, e) || hubReady(ctx, e) != nil {
					return Todo, nil
				}
				return Done, nil
			},
			Run: func(ctx context.Context, e *Env) error {
				if err := closePorts(ctx, e, h.ports()); err != nil {
					return err
				}
				if err := startHub(ctx, e, h); err != nil {
					return err
				}
				return waitForHub(ctx, e, h)
			},
			// A convert that was killed may have turned kubelet before this one
			// began, and no yurthub means no cluster for it then.
			Undo: func(ctx context.Context, e *Env) error {
				if behindYurthub(e) || e.exists(kubeletRestart) {
					if err := direct(ctx, e, nil); err != nil {
						return err
					}
				}
				return removeHub(ctx, e, image)
			},
		},
		turn,
		stillReady(h.node, true),
		{
			Name: "labels", Doc: "the Node carries OpenYurt's labels", Timeout: time.Minute,
			Check: func(ctx context.Context, e *Env) (Verdict, error) { return checkLabels(ctx, e, h.node, labels) },
			Run: func(ctx context.Context, e *Env) (err error) {
				if were, err = hubLabels(ctx, e, h.node); err != nil {
					return err
				}
				return patchLabels(ctx, e, h.node, anyOf(labels))
			},
			Undo: func(ctx context.Context, e *Env) error {
				if were == nil {
					return nil // they were not read, and so not changed
				}
				return patchLabels(ctx, e, h.node, were)
			},
		},
	}
}

func revertSteps(name string, image ondisk.ImageInfo) []Phase {
	var were map[string]any  // the Node's labels of OpenYurt's, before
	var as map[string]string // what kubelet registers as, before
	return []Phase{
		{
			// First: with a pool and without the other label the cluster
			// would convert the node again.
			Name: "labels", Doc: "the Node carries no label of OpenYurt's", Timeout: time.Minute,
			Check: func(ctx context.Context, e *Env) (Verdict, error) {
				return checkLabels(ctx, e, name, map[string]string{configs.LabelEdgeWorker: "", configs.LabelNodePool: ""})
			},
			Run: func(ctx context.Context, e *Env) (err error) {
				if were, err = hubLabels(ctx, e, name); err != nil {
					return err
				}
				return patchLabels(ctx, e, name, noLabels())
			},
			Undo: func(ctx context.Context, e *Env) error {
				if were == nil || !behindYurthub(e) {
					return nil // a native node it stays, and carries none
				}
				return patchLabels(ctx, e, name, were)
			},
		},
		{
			Name: "kubelet-direct", Doc: "kubelet talks to the API server", Timeout: 2 * time.Minute,
			Check: func(_ context.Context, e *Env) (Verdict, error) {
				flags := e.contents(kubeadmFlags)
				if e.exists(kubeletRestart) || e.exists(ondisk.YurthubConf) || behindYurthub(e) || string(registering(flags, nil)) != string(flags) {
					return Todo, nil
				}
				return Done, nil
			},
			Run: func(ctx context.Context, e *Env) error {
				as = registeredAs(e.contents(kubeadmFlags))
				return direct(ctx, e, nil)
			},
			Undo: func(ctx context.Context, e *Env) error {
				if err := hubReady(ctx, e); err != nil {
					e.Log.Warn("kubelet stays where it is, since yurthub does not serve", "error", err)
					return nil
				}
				return redirect(ctx, e, image.Kubernetes, as)
			},
		},
		stillReady(name, false),
		{
			Name: "yurthub", Doc: "yurthub is gone", Timeout: 2 * time.Minute,
			Check: func(ctx context.Context, e *Env) (Verdict, error) {
				state, err := e.UnitState(ctx, ondisk.UnitYurthub)
				if err != nil {
					return Todo, err
				}
				for _, p := range hubLeavings {
					if e.exists(p) {
						return Todo, nil
					}
				}
				if state == "active" {
					return Todo, nil
				}
				return Done, nil
			},
			Run: func(ctx context.Context, e *Env) error {
				if err := removeHub(ctx, e, image); err != nil {
					return err
				}
				return removeUnit(ctx, e)
			},
		},
	}
}

// hubLabels is a change that makes the Node's labels of OpenYurt's what they
// are now.
func hubLabels(ctx context.Context, e *Env, name string) (map[string]any, error) {
	n, err := readNode(ctx, e, name)
	if err != nil {
		return nil, err
	}
	out := noLabels()
	for k := range out {
		if v, ok := n.Metadata.Labels[k]; ok {
			out[k] = v
		}
	}
	return out, nil
}

func anyOf(labels map[string]string) map[string]any {
	out := map[string]any{}
	for k, v := range labels {
		out[k] = v
	}
	return out
}

func noLabels() map[string]any {
	return map[string]any{configs.LabelEdgeWorker: nil, configs.LabelNodePool: nil}
}

func checkLabels(ctx context.Context, e *Env, name string, want map[string]string) (Verdict, error) {
	n, err := readNode(ctx, e, name)
	if err != nil {
		return Todo, err
	}
	for k, v := range want {
		if n.Metadata.Labels[k] != v {
			return Todo, nil
		}
	}
	return Done, nil
}

func patchLabels(ctx context.Context, e *Env, name string, labels map[string]any) error {
	c, err := nodeClient(e)
	if err != nil {
		return err
	}
	patch := map[string]any{"metadata": map[string]any{"labels": labels}}
	if err := c.MergePatch(ctx, "/api/v1/nodes/"+name, patch); err != nil {
		return fmt.Errorf("labelling Node %s: %w", name, err)
	}
	return nil
}

const readyStep = "node-ready"

// stillReady waits for the node to be Ready by the word of the kubelet that
// runs now.
func stillReady(name string, through bool) Phase {
	seen := false // by this run
	return Phase{
		Name: readyStep, Doc: "the cluster sees the node Ready", Timeout: 3 * time.Minute,
		Check: func(context.Context, *Env) (Verdict, error) {
			if !seen {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			var last error
			err := e.poll(ctx, 2*time.Second, func() (bool, error) {
				last = readyNow(ctx, e, name)
				return last == nil, nil
			})
			if err != nil && last != nil {
				return last
			}
			if err == nil {
				err = kubeletGoes(ctx, e, through)
			}
			seen = err == nil
			return err
		},
	}
}

// kubeletGoes makes sure that kubelet runs with what was written for it: on a
// node that edgebake did not build its unit may read its flags elsewhere.
func kubeletGoes(ctx context.Context, e *Env, through bool) error {
	var out strings.Builder
	if err := e.Run(ctx, Cmd{Args: []string{"systemctl", "show", "--property", "MainPID", "--value", ondisk.UnitKubelet}, Output: &out}); err != nil {
		return fmt.Errorf("looking for kubelet: %w", err)
	}
	args, err := e.read("/proc/" + strings.TrimSpace(out.String()) + "/cmdline")
	if err != nil {
		return fmt.Errorf("looking how kubelet was started: %w", err)
	}
	conf := "" // of several the last holds
	words := strings.Split(string(args), "\x00")
	for i, arg := range words {
		if v, ok := strings.CutPrefix(arg, "--kubeconfig="); ok {
			conf = v
		} else if arg == "--kubeconfig" && i+1 < len(words) {
			conf = words[i+1]
		}
	}
	if (conf == ondisk.YurthubConf) == through {
		return nil
	}
	return Advise(fmt.Errorf("kubelet runs with --kubeconfig=%s, whatever %s says", conf, kubeadmFlags),
		"see `systemctl cat kubelet`: its unit must pass $KUBELET_KUBEADM_ARGS on, and KUBELET_EXTRA_ARGS (/etc/default/kubelet, /etc/sysconfig/kubelet) must not set --kubeconfig")
}

// hubLeavings is all that yurthub and we for it leave on the disk.
var hubLeavings = []string{hubManifest, yurthubUnit, yurthubEnv, yurthubNFT, portsUnitFile, portsTimerFile, portsKubelet, yurthubDropin, openYurtDropin, yurthubSysctl, ondisk.YurthubConf, hubCache, ondisk.YurthubRoot + "/pki"}

func removeHub(ctx context.Context, e *Env, image ondisk.ImageInfo) error {
	if err := e.Unit(ctx, "stop", ondisk.UnitYurthub); err != nil {
		return fmt.Errorf("stopping yurthub: %w", err)
	}
	if err := openPorts(ctx, e); err != nil {
		return err
	}
	if err := removeDummy(ctx, e, image); err != nil {
		return err
	}
	for _, p := range []string{yurthubEnv, yurthubKept, yurthubDropin, openYurtDropin, filepath.Dir(yurthubDropin), yurthubSysctl, hubRestart} {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	return forgetHub(e)
}

// dummyName finds the interface that yurthub's arguments name.
var dummyName = regexp.MustCompile(`--dummy-if-name=([\w.-]+)`)

// removeDummy removes yurthub's interface, with the address at which pods look
// for it: yurthub leaves it behind when it is killed.
func removeDummy(ctx context.Context, e *Env, image ondisk.ImageInfo) error {
	names := []string{"hub-dummy0", "yurthub-dummy0"} // from 1.7, and before
	args := string(e.contents(yurthubEnv))
	if y := image.Yurthub; y != nil { // a pod has its arguments in a manifest that kubeadm took away
		args += " " + strings.Join(y.ExtraArgs, " ")
	}
	for _, m := range dummyName.FindAllStringSubmatch(args, -1) {
		names = append(names, m[1])
	}
	for _, n := range names {
		if !e.exists("/sys/class/net/" + n) {
			continue
		}
		if err := e.Run(ctx, Cmd{Args: []string{"ip", "link", "delete", n}}); err != nil {
			return fmt.Errorf("removing yurthub's interface %s: %w", n, err)
		}
	}
	return nil
}

// forgetHub removes yurthub's identity, its cache, and the ways to it.
func forgetHub(e *Env) error {
	for _, p := range []string{hubManifest, hubBootstrap, ondisk.YurthubConf} {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	// The folder itself may be baked; what is in it is yurthub's.
	for _, p := range []string{hubCache, ondisk.YurthubRoot + "/pki", ondisk.YurthubRoot + "/autonomy", hubIdentity, ondisk.YurthubRoot + "/bootstrap-hub.conf"} {
		if err := e.RemoveAll(p); err != nil {
			return fmt.Errorf("removing what yurthub had: %w", err)
		}
	}
	return nil
}

// removeUnit removes the unit if it is the one we wrote; a baked one stays,
// held by its condition.
func removeUnit(ctx context.Context, e *Env) error {
	if !e.exists(yurthubUnit) {
		return nil
	}
	if err := e.Unit(ctx, "disable", ondisk.UnitYurthub); err != nil {
		return fmt.Errorf("disabling yurthub: %w", err)
	}
	if err := e.Remove(yurthubUnit); err != nil {
		return fmt.Errorf("removing the unit of yurthub: %w", err)
	}
	return e.Unit(ctx, "daemon-reload", "")
}

// record is the evidence that is kept of a convert, revert or reset: how each step went,
// and what the files were before.
type record struct {
	e     *Env
	dir   string
	steps []Step
	whole bool // undo the steps of an earlier run as well, which was killed
	// turnedAt is the step after which nothing is undone any more: the node is
	// what it was to become, and what is left to do is tidying up.
	turnedAt string
}

func newRecord(e *Env, what string) *record {
	own := *e // whose waiting is told here
	return &record{e: &own, dir: ondisk.LogDir + "/" + what + "-" + e.Now().UTC().Format("20060102T150405Z")}
}

// carryOut runs steps in order. When one fails, it and those before it are
// undone, the last first.
func (rec *record) carryOut(ctx context.Context, steps []Phase, tell func(Step)) error {
	rec.copyFiles("before")
	var did []Phase
	turned := false
	for _, s := range steps {
		err := rec.step(ctx, s, &did, tell)
		if err == nil {
			if s.Name == rec.turnedAt {
				did = nil
				turned = true
			}
			continue
		}
		if turned {
			rec.note(tell, Step{s.Name, "failed", oneLine(err)})
			rec.finish(context.WithoutCancel(ctx))
			return Advise(fmt.Errorf("%s: %w (the node is turned; evidence is in %s)", s.Name, err, rec.dir),
				"the node is what it was to become; run the same command again, and it does the rest")
		}
		rec.note(tell, Step{s.Name, "failed", oneLine(err)})
		// Undone even when we are told to stop: half a node is worse.
		undo := context.WithoutCancel(ctx)
		for _, d := range slices.Backward(did) {
			if d.Undo == nil {
				continue
			}
			uctx, cancel := context.WithTimeout(undo, undoTimeout)
			uerr := d.Undo(uctx, rec.e)
			cancel()
			if uerr != nil {
				rec.note(tell, Step{d.Name, "failed", "undoing it: " + oneLine(uerr)})
				err = errors.Join(err, fmt.Errorf("undoing %s: %w", d.Name, uerr))
				continue
			}
			rec.note(tell, Step{d.Name, "undone", ""})
		}
		rec.finish(undo)
		return fmt.Errorf("%s: %w (undone; evidence is in %s)", s.Name, err, rec.dir)
	}
	rec.finish(ctx)
	return nil
}

func (rec *record) step(ctx context.Context, s Phase, did *[]Phase, tell func(Step)) error {
	v, err := s.Check(ctx, rec.e)
	if err != nil {
		return err
	}
	if v == Done {
		rec.note(tell, Step{s.Name, "as it should be", s.Doc})
		if rec.whole {
			*did = append(*did, s)
		}
		return nil
	}
	*did = append(*did, s)
	run, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	last := ""
	rec.e.waiting = func(what string) {
		if what != last {
			last = what
			tell(Step{s.Name, "waiting", what})
		}
	}
	defer func() { rec.e.waiting = nil }()
	if err := s.Run(run, rec.e); err != nil {
		return err
	}
	if v, err = s.Check(ctx, rec.e); err != nil {
		return err
	}
	if v != Done {
		return errors.New("it came to its end, and its result does not show on the machine")
	}
	rec.note(tell, Step{s.Name, "done", s.Doc})
	return nil
}

func (rec *record) note(tell func(Step), s Step) {
	rec.steps = append(rec.steps, s)
	tell(s)
	b, err := json.MarshalIndent(rec.steps, "", "  ")
	if err == nil {
		err = rec.e.WriteFile(rec.dir+"/steps.json", append(b, '\n'), Mode(0o600))
	}
	if err != nil {
		rec.e.Log.Warn("keeping evidence", "error", err)
	}
}

// keptFiles are the files worth comparing; none of them holds a secret.
var keptFiles = []string{kubeadmFlags, yurthubEnv, ondisk.YurthubConf, yurthubUnit, openYurtDropin, ondisk.KubeletConfig, ondisk.IPVSConfig, "/etc/hosts"}

func (rec *record) copyFiles(when string) {
	for _, p := range keptFiles {
		b, err := rec.e.read(p)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = rec.e.WriteFile(rec.dir+"/"+when+p, b, Mode(0o600))
		}
		if err != nil {
			rec.e.Log.Warn("keeping evidence", "file", p, "error", err)
		}
	}
}

func (rec *record) finish(ctx context.Context) {
	rec.copyFiles("after")
	var out strings.Builder
	err := rec.e.Run(ctx, Cmd{Args: []string{"journalctl", "--no-pager", "-n", "400", "-u", ondisk.UnitYurthub, "-u", ondisk.UnitKubelet}, Output: &out})
	if err == nil {
		err = rec.e.WriteFile(rec.dir+"/journal.txt", []byte(out.String()), Mode(0o600))
	}
	if err != nil {
		rec.e.Log.Warn("keeping evidence", "error", err)
	}
}
