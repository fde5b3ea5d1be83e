package firstboot

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// What an OpenYurt node has beside a native one. openyurt's own paths are
// kept, so that its tools find what they know.
const (
	yurthubEnv    = ondisk.EtcDir + "/yurthub.env"
	yurthubNFT    = ondisk.EtcDir + "/yurthub.nft"
	yurthubDropin = "/etc/systemd/system/yurthub.service.d/10-edgebake-port.conf"
	yurthubSysctl = "/etc/sysctl.d/80-edgebake-yurthub.conf"
	yurthubHealth = "127.0.0.1:10267"
	yurthubProxy  = "http://127.0.0.1:10261"
)

// hub is what first boot decides of a yurthub.
type hub struct {
	node, pool, nodeIP string
	cloud, dummy       bool
	servers            []string
	namespace, lbMode  string
	pins               []string
	openPort           bool
	extra, orgs        []string
	// image is set where yurthub runs as a static pod.
	image string
}

// args is yurthub's command line. The rules behind it are in the contract:
// node-ip and nodepool-name always, https always, the server that never
// changes first.
func (h hub) args() []string {
	mode := configs.NodeEdge
	if h.cloud {
		mode = configs.NodeCloud
	}
	out := []string{
		"--v=2",
		"--bind-address=127.0.0.1",
		"--working-mode=" + mode,
		"--namespace=" + h.namespace,
		"--node-name=" + h.node,
		"--nodepool-name=" + h.pool,
		"--server-addr=" + strings.Join(h.servers, ","),
		"--lb-mode=" + h.lbMode,
	}
	if h.image == "" {
		out = append(out, "--bootstrap-mode=kubeletcertificate", "--node-ip="+h.nodeIP)
	} else { // before 1.7, which knows no --node-ip
		out = append(out, "--bootstrap-file="+hubBootstrap)
		if len(h.orgs) > 0 {
			out = append(out, "--hub-cert-organizations="+strings.Join(h.orgs, ","))
		}
	}
	for _, p := range h.pins {
		out = append(out, "--discovery-token-ca-cert-hash="+p)
	}
	if len(h.pins) > 0 {
		out = append(out, "--discovery-token-unsafe-skip-ca-verification=false")
	}
	if !h.dummy {
		out = append(out, "--enable-dummy-if=false")
	}
	return append(out, h.extra...)
}

func (h hub) env() []byte {
	return []byte("# Written by firstboot from the site.\nYURTHUB_ARGS=" + strings.Join(h.args(), " ") + "\n")
}

// port closes yurthub's port for other nodes of the pool: it asks nobody who
// he is and lends everybody the node's rights.
const closedPort = `# Written by firstboot: yurthub lends this node's rights to whoever reaches :10269.
table inet edgebake_yurthub
delete table inet edgebake_yurthub
table inet edgebake_yurthub {
	chain input {
		type filter hook input priority filter - 10; policy accept;
		iifname "lo" accept
		tcp dport 10269 drop
	}
}
`

const closePortDropin = `# Written by firstboot.
[Service]
ExecStartPre=-/usr/sbin/nft -f ` + yurthubNFT + `
`

// nonlocal lets yurthub listen on the node's address while the cable is out
// and DHCP has taken the address away.
const nonlocal = "# Written by firstboot for yurthub.\nnet.ipv4.ip_nonlocal_bind = 1\nnet.ipv6.ip_nonlocal_bind = 1\n"

// hubOf puts together the hub of a site. withEndpoint says that the masters'
// certificate has the endpoint's name.
func hubOf(ctx context.Context, e *Env, site *configs.Site, withEndpoint bool) (hub, error) {
	t, err := currentSite(ctx, e)
	if err != nil {
		return hub{}, err
	}
	info := imageInfo(e).Yurthub
	if info == nil {
		return hub{}, Permanent(errors.New("this image carries no yurthub"), "build the Image with yurthub, or choose nodeType native")
	}
	ip := nodeAddress(e)
	if ip == "" {
		return hub{}, errors.New("this node's address is not known yet")
	}
	h := hub{
		node: t.Node, pool: site.NodePool, nodeIP: ip, cloud: site.NodeType == configs.NodeCloud,
		dummy: e.exists("/sys/module/dummy"), namespace: site.Yurthub.Namespace, lbMode: info.LBMode,
		pins: site.CACertHashes, openPort: site.Yurthub.OpenPort,
		extra: slices.Concat(info.ExtraArgs, site.Yurthub.ExtraArgs), orgs: site.Organizations,
	}
	if info.Form == formStaticPod {
		if h.image = info.Image; h.image == "" {
			return hub{}, Permanent(errors.New("this image names no container image of yurthub"), "build the Image anew, with yurthub.image")
		}
	}
	if h.lbMode == "" {
		h.lbMode = "priority"
	}
	if withEndpoint {
		h.servers = append(h.servers, site.EndpointURL())
	}
	for _, m := range site.Masters {
		h.servers = append(h.servers, "https://"+m)
	}
	if h.image != "" {
		h.keepServer(e)
	}
	return h, nil
}

// keepServer leaves the server of yurthub.conf in the list: without it
// yurthub would wipe its identity, and the token is long gone.
func (h *hub) keepServer(e *Env) {
	k, err := api.ParseKubeconfig(first(e.read(hubIdentity)))
	if err != nil {
		return // it has none yet
	}
	if c, err := k.Cluster(); err == nil && !slices.Contains(h.servers, c.Server) {
		h.servers = append(h.servers, c.Server)
	}
}

// nodeAddress is what the network phase wrote: it holds offline too.
func nodeAddress(e *Env) string {
	inside := false
	for line := range strings.Lines(string(first(e.read("/etc/hosts")))) {
		line = strings.TrimSpace(line)
		switch {
		case line == "# BEGIN "+nodeOwner:
			inside = true
		case line == "# END "+nodeOwner:
			inside = false
		case inside:
			if f := strings.Fields(line); len(f) > 1 {
				return f[0]
			}
		}
	}
	return ""
}

// hubFiles is what lies on the disk for yurthub.
func hubFiles(h hub) map[string][]byte {
	if h.image != "" {
		// Without port 10269, which came with 1.7.
		return map[string][]byte{hubManifest: h.pod()}
	}
	files := map[string][]byte{yurthubEnv: h.env(), yurthubSysctl: []byte(nonlocal)}
	if !h.openPort {
		files[yurthubNFT] = []byte(closedPort)
		files[yurthubDropin] = []byte(closePortDropin)
	}
	return files
}

func hubInPlace(e *Env, h hub) bool {
	for p, b := range hubFiles(h) {
		if string(first(e.read(p))) != string(b) {
			return false
		}
	}
	return h.image != "" || !h.openPort || !e.exists(yurthubDropin)
}

// yurthubPhase has yurthub run with its identity and its first lists synced.
func yurthubPhase(site *configs.Site) Phase {
	return Phase{
		Name: "yurthub", Doc: "yurthub has its certificates and serves", Timeout: 6 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			if e.exists(hubRestart) {
				return Todo, nil
			}
			_, settled, err := settledHub(ctx, e, site)
			if err != nil || !settled || enrolled(e) != nil || hubReady(ctx, e) != nil {
				return Todo, err
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			h, settled, err := settledHub(ctx, e, site)
			if err != nil {
				return err
			}
			if withEndpoint, err := endpointInCert(ctx, e, site); err == nil {
				if h, err = hubOf(ctx, e, site, withEndpoint); err != nil {
					return err
				}
			} else if !settled {
				return err
			}
			if len(site.Organizations) > 0 && h.image == "" {
				e.Log.Warn("organizations have no effect: yurthub borrows kubelet's certificate", "organizations", strings.Join(site.Organizations, ","))
			}
			if err := startHub(ctx, e, h); err != nil {
				return err
			}
			return waitForHub(ctx, e, h)
		},
	}
}

// settledHub is the hub that the disk holds. Whether the endpoint is in its
// list was settled by a look at the masters when it was written; offline, what
// was written holds.
func settledHub(ctx context.Context, e *Env, site *configs.Site) (h hub, settled bool, err error) {
	for _, withEndpoint := range []bool{true, false} {
		if h, err = hubOf(ctx, e, site, withEndpoint); err != nil {
			return hub{}, false, err
		}
		if hubInPlace(e, h) {
			return h, true, nil
		}
	}
	return hub{}, false, nil
}

// hubRestart says that yurthub has to be restarted for what was written. It
// is on /run: a boot is a restart.
const hubRestart = ondisk.RunDir + "/restart-yurthub"

func startHub(ctx context.Context, e *Env, h hub) error {
	if !h.dummy {
		e.Log.Warn("this kernel has no dummy interface: pods do not find yurthub at 169.254.2.1")
	}
	if h.image != "" {
		// kubelet watches the folder, and makes the pod anew when it changes.
		if _, err := e.write(hubManifest, h.pod(), Mode(0o600)); err != nil {
			return fmt.Errorf("writing yurthub's pod: %w", err)
		}
		return nil
	}
	state, err := e.UnitState(ctx, ondisk.UnitYurthub)
	if err != nil {
		return err
	}
	if hubInPlace(e, h) && state == "active" && !e.exists(hubRestart) {
		return nil // it runs as it should, and is waited for
	}
	if err := e.WriteFile(hubRestart, nil, Mode(0o600)); err != nil {
		return fmt.Errorf("preparing yurthub: %w", err)
	}
	files := hubFiles(h)
	for _, p := range []string{yurthubSysctl, yurthubNFT, yurthubDropin, yurthubEnv} {
		b, ok := files[p]
		if !ok {
			if err := e.Remove(p); err != nil {
				return fmt.Errorf("preparing yurthub: %w", err)
			}
			continue
		}
		if _, err := e.write(p, b, Mode(0o644)); err != nil {
			return fmt.Errorf("preparing yurthub: %w", err)
		}
	}
	if err := e.Run(ctx, Cmd{Args: []string{"sysctl", "-q", "-e", "-p", yurthubSysctl}}); err != nil {
		e.Log.Warn("yurthub may not start without a network", "error", err)
	}
	if !h.openPort {
		if err := e.Run(ctx, Cmd{Args: []string{"nft", "-f", yurthubNFT}}); err != nil {
			e.Log.Error("port 10269 is open to the network, and lends this node's rights", "error", err)
			e.Console("port 10269 of yurthub cannot be closed: " + oneLine(err))
		}
	}
	for _, step := range [][2]string{{"daemon-reload", ""}, {"enable", ondisk.UnitYurthub}, {"restart", ondisk.UnitYurthub}} {
		if err := e.Unit(ctx, step[0], step[1]); err != nil {
			return fmt.Errorf("starting yurthub: %w", err)
		}
	}
	return e.Remove(hubRestart)
}

// endpointInCert reports whether yurthub may verify the masters by the
// endpoint's name. It takes no tls-server-name.
func endpointInCert(ctx context.Context, e *Env, site *configs.Site) (bool, error) {
	ca, err := e.read(ondisk.KubeCA)
	if err != nil {
		return false, fmt.Errorf("reading the cluster's CA: %w", err)
	}
	var errs []error
	for _, m := range site.Masters {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		_, err := api.ServerName(ctx, e.Dial, m, ca, []string{site.Endpoint})
		cancel()
		if err == nil {
			return true, nil
		}
		if errors.Is(err, api.ErrServerName) {
			e.Log.Warn("the masters' certificate lacks the endpoint: yurthub gets the masters alone", "endpoint", site.Endpoint)
			return false, nil
		}
		errs = append(errs, err)
	}
	return false, fmt.Errorf("asking the masters for their certificates' names: %w", errors.Join(errs...))
}

// hubReady asks yurthub itself.
func hubReady(ctx context.Context, e *Env) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	body, code, err := localGet(ctx, e, yurthubHealth, "/v1/readyz")
	if err != nil {
		return fmt.Errorf("it does not answer: %w", err)
	}
	if code != http.StatusOK {
		return fmt.Errorf("it says: %s", body)
	}
	return nil
}

// localGet asks a server on this node, without TLS.
func localGet(ctx context.Context, e *Env, addr, path string) (body string, code int, err error) {
	conn, err := e.Dial(ctx, "tcp", addr)
	if err != nil {
		return "", 0, err
	}
	defer conn.Close()
	if end, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(end); err != nil {
			return "", 0, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return "", 0, err
	}
	req.Close = true
	if err := req.Write(conn); err != nil {
		return "", 0, err
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		return "", 0, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 4096))
	return strings.TrimSpace(string(b)), res.StatusCode, err
}

// waitForHub waits for readyz, and tells meanwhile what is missing in the
// cluster: yurthub itself only ever says that it waits.
func waitForHub(ctx context.Context, e *Env, h hub) error {
	var last error
	tries := 0
	err := e.poll(ctx, 2*time.Second, func() (bool, error) {
		if last = hubReady(ctx, e); last == nil {
			return true, nil
		}
		// The first look after 20 s, then once in half a minute: thousands
		// of nodes may be waiting for the same thing.
		if tries++; tries%15 == 10 {
			if missing := missingForHub(ctx, e, h); missing != nil {
				e.Waiting("%s", withAdvice(missing))
			} else {
				e.Waiting("yurthub to be ready: %s", oneLine(last))
			}
		} else if tries == 1 {
			e.Waiting("yurthub to get its certificates and to sync")
		}
		return false, nil
	})
	if err == nil {
		return nil
	}
	if missing := missingForHub(context.WithoutCancel(ctx), e, h); missing != nil {
		return missing
	}
	return Advise(fmt.Errorf("yurthub does not become ready: %w", last), hubLogs(h))
}

// poolKind is what yurthub lists to know its pool before it is ready, in the
// version it asks for; no kind: nothing.
func (h hub) poolKind() (kind, version string) {
	on := func(name string, is bool) bool {
		for _, a := range h.extra {
			if flag, value, given := strings.Cut(a, "="); flag == "--"+name {
				is = !given || value != "false"
			}
		}
		return is
	}
	switch {
	case !on("enable-resource-filter", true):
		return "", ""
	case on("enable-pool-service-topology", false):
		return "NodeBucket", "v1alpha1"
	case !on("enable-node-pool", true):
		return "", ""
	case h.image != "": // before 1.7
		return "NodePool", "v1beta1"
	}
	return "NodePool", "v1beta2"
}

// csrList is what we read of certificate requests.
type csrList struct {
	Items []csr `json:"items"`
}

type csr struct {
	Metadata struct {
		Name              string `json:"name"`
		CreationTimestamp string `json:"creationTimestamp"`
	} `json:"metadata"`
	Spec struct {
		Username   string `json:"username"`
		SignerName string `json:"signerName"`
		Request    []byte `json:"request"`
	} `json:"spec"`
	Status struct {
		Conditions []struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"status"`
}

// csrsOf is where the requests to a signer are read.
func csrsOf(signer string) string {
	return "/apis/certificates.k8s.io/v1/certificatesigningrequests?limit=500&fieldSelector=" + url.QueryEscape("spec.signerName="+signer)
}

// missingForHub looks, with the node's own rights, at what yurthub needs of
// the cluster, and returns what is not there; nil: nothing was found missing.
func missingForHub(ctx context.Context, e *Env, h hub) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	if h.image != "" && enrolled(e) != nil {
		return missingIdentity(ctx, e, h) // nobody to ask the rest as
	}
	c, err := nodeClient(e)
	if err != nil {
		return err
	}
	var errs []error
	const signer = "kubernetes.io/kubelet-serving"
	var csrs csrList
	if err := c.Get(ctx, csrsOf(signer), &csrs); err == nil {
		err := judgeCSRs(csrs, "server", signer, func(r csr) bool { return r.Spec.Username == "system:node:"+h.node })
		if err != nil {
			errs = append(errs, err)
		}
	} else if api.Code(err) == 0 {
		return Advise(fmt.Errorf("no master answers the node: %w", err), "check the way from the node to the masters")
	}
	const rbac = "install OpenYurt's yurthub chart: it grants system:nodes the ClusterRole yurt-hub"
	switch err := c.Get(ctx, "/api/v1/namespaces/"+h.namespace+"/configmaps?limit=1", nil); api.Code(err) {
	case 403:
		errs = append(errs, Advise(fmt.Errorf("nodes may not list ConfigMaps in %s, which yurthub needs", h.namespace), rbac))
	}
	if kind, version := h.poolKind(); kind != "" {
		resource := strings.ToLower(kind) + "s"
		switch err := c.Get(ctx, "/apis/apps.openyurt.io/"+version+"/"+resource+"?limit=1", nil); {
		case api.Code(err) == 403 && kind == "NodePool":
			errs = append(errs, Advise(errors.New("nodes may not list NodePools, which yurthub needs"), rbac))
		case api.Code(err) == 403:
			errs = append(errs, Advise(errors.New("nodes may not list NodeBuckets, which yurthub needs with --enable-pool-service-topology"),
				"OpenYurt's charts do not grant it: give system:nodes list and watch of nodebuckets.apps.openyurt.io, or take the flag out"))
		case api.Code(err) == 404:
			errs = append(errs, Advise(fmt.Errorf("the cluster has no %s CRD (%s.apps.openyurt.io/%s)", kind, resource, version),
				"install OpenYurt's yurt-manager chart, of the release that yurthub is of: another may lack "+version))
		case api.Code(err) >= 500:
			errs = append(errs, Advise(fmt.Errorf("the API server fails to list %ss (%s.apps.openyurt.io/%s), which yurthub needs: %w", kind, resource, version, err),
				"look whether yurt-manager runs: its webhook turns one version of a NodePool into another"))
		}
	}
	return errors.Join(errs...)
}

// judgeCSRs says what became of yurthub's requests for a certificate of this
// kind. Denied, yurthub soon makes another.
func judgeCSRs(csrs csrList, kind, signer string, mine func(csr) bool) error {
	var newest, denied csr
	for _, r := range csrs.Items {
		if r.Spec.SignerName != signer || !mine(r) {
			continue
		}
		if !r.before(newest) {
			newest = r
		}
		if state, _ := r.state(); (state == "Denied" || state == "Failed") && !r.before(denied) {
			denied = r
		}
	}
	what := func(r csr) string {
		return fmt.Sprintf("yurthub's request for its %s certificate (CSR %s, signer %s)", kind, r.Metadata.Name, signer)
	}
	state, _ := newest.state()
	switch {
	case newest.Metadata.Name == "", state == "Approved":
		return nil
	case denied.Metadata.Name == "":
		return Advise(errors.New(what(newest)+" is not approved yet"),
			"let OpenYurt's csrapprover run, or: kubectl certificate approve "+newest.Metadata.Name)
	}
	state, why := denied.state()
	if why != "" {
		why = ": " + oneLine(errors.New(why))
	}
	err := fmt.Errorf("%s was %s%s", what(denied), strings.ToLower(state), why)
	if newest.Metadata.Name == denied.Metadata.Name {
		return Advise(err, "find out who denies it; yurthub asks again by itself, and that request must be approved")
	}
	return Advise(fmt.Errorf("%w; the one after it (CSR %s) is not approved yet", err, newest.Metadata.Name),
		"find out who denied it, or: kubectl certificate approve "+newest.Metadata.Name)
}

// state is "pending", or the last that was decided, with the words of who did.
func (r csr) state() (state, why string) {
	state = "pending"
	for _, cond := range r.Status.Conditions {
		state, why = cond.Type, cond.Message
	}
	return state, why
}

func (r csr) before(o csr) bool {
	return r.Metadata.CreationTimestamp < o.Metadata.CreationTimestamp
}

// hubWords turn kubelet to yurthub, in the words that OpenYurt's own tools use
// and look for.
const hubWords = " --kubeconfig=" + ondisk.YurthubConf + " --bootstrap-kubeconfig= "

// listPlainly has kubelet list in a way that yurthub can serve offline.
// Kubelet 1.35 and later asks for lists as watches; of these yurthub 1.7
// without a server sends nothing at all, so that kubelet would not even find
// its Node and run no pod.
const listPlainly = " --feature-gates=WatchListClient=false"

// plainLists is listPlainly where this node's kubelet needs it. Before 1.30 it
// would not start with a gate it does not know, and until 1.35 it lists
// plainly by itself.
func plainLists(ctx context.Context, e *Env) (string, error) {
	version := imageInfo(e).Kubernetes
	if version == "" { // a node that edgebake did not build
		var out strings.Builder
		if err := e.Run(ctx, Cmd{Args: []string{"kubelet", "--version"}, Output: &out}); err != nil {
			return "", fmt.Errorf("asking kubelet for its version: %w", err)
		}
		version = out.String()
	}
	m := kubeletVersion.FindStringSubmatch(version)
	if m == nil {
		return "", fmt.Errorf("asking kubelet for its version: it says %q", strings.TrimSpace(version))
	}
	if minor, err := strconv.Atoi(m[1]); err != nil || minor < 35 {
		return "", err
	}
	return listPlainly, nil
}

var kubeletVersion = regexp.MustCompile(`(?m)(?:^|\s)v1\.(\d{1,3})\.\d`)

const hubKubeconfig = `apiVersion: v1
kind: Config
clusters:
- cluster:
    server: ` + yurthubProxy + `
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
preferences: {}
`

var kubeadmArgs = regexp.MustCompile(`(?m)^(KUBELET_KUBEADM_ARGS=")(.*)(")[ \t]*$`)

// redirectFlags adds to kubeadm-flags.env what turns kubelet to yurthub.
func redirectFlags(env []byte, gate string) ([]byte, error) {
	env = directFlags(env)
	if !kubeadmArgs.Match(env) {
		return nil, fmt.Errorf("turning kubelet to yurthub: %s has no line KUBELET_KUBEADM_ARGS=\"…\"", kubeadmFlags)
	}
	return kubeadmArgs.ReplaceAll(env, []byte("${1}${2}"+gate+hubWords+"${3}")), nil
}

// directFlags takes it out again.
func directFlags(env []byte) []byte {
	// Openyurt's own tools may have written their part alone.
	return []byte(strings.NewReplacer(listPlainly+hubWords, "", hubWords, "", listPlainly, "").Replace(string(env)))
}

// redirectPhase turns kubelet to yurthub.
func redirectPhase() Phase {
	return Phase{
		Name: "kubelet-redirect", Doc: "kubelet talks to yurthub", Timeout: 2 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			flags := string(first(e.read(kubeadmFlags)))
			if e.exists(kubeletRestart) || string(first(e.read(ondisk.YurthubConf))) != hubKubeconfig || !strings.Contains(flags, hubWords) {
				return Todo, nil
			}
			gate, err := plainLists(ctx, e)
			if err != nil || !strings.Contains(flags, gate) {
				return Todo, err
			}
			if state, err := e.UnitState(ctx, ondisk.UnitKubelet); err != nil || state != "active" {
				return Todo, err
			}
			return Done, nil
		},
		Run: redirect,
		// Kubelet through a yurthub that does not serve would be cut off.
		Undo: direct,
	}
}

// kubeletRestart says that kubelet has to be restarted for what was written.
const kubeletRestart = ondisk.RunDir + "/restart-kubelet"

func redirect(ctx context.Context, e *Env) error {
	flags, err := e.read(kubeadmFlags)
	if err != nil {
		return fmt.Errorf("turning kubelet to yurthub: %w", err)
	}
	gate, err := plainLists(ctx, e)
	if err != nil {
		return err
	}
	flags, err = redirectFlags(flags, gate)
	if err != nil {
		return err
	}
	if err := e.WriteFile(kubeletRestart, nil, Mode(0o600)); err != nil {
		return fmt.Errorf("turning kubelet to yurthub: %w", err)
	}
	if _, err := e.write(ondisk.YurthubConf, []byte(hubKubeconfig), Mode(0o600)); err != nil {
		return fmt.Errorf("turning kubelet to yurthub: %w", err)
	}
	if _, err := e.write(kubeadmFlags, flags, Mode(0o644)); err != nil {
		return fmt.Errorf("turning kubelet to yurthub: %w", err)
	}
	return restartKubelet(ctx, e)
}

func direct(ctx context.Context, e *Env) error {
	flags, err := e.read(kubeadmFlags)
	if err != nil {
		return fmt.Errorf("turning kubelet from yurthub: %w", err)
	}
	if err := e.WriteFile(kubeletRestart, nil, Mode(0o600)); err != nil {
		return fmt.Errorf("turning kubelet from yurthub: %w", err)
	}
	if _, err := e.write(kubeadmFlags, directFlags(flags), Mode(0o644)); err != nil {
		return fmt.Errorf("turning kubelet from yurthub: %w", err)
	}
	if err := e.Remove(ondisk.YurthubConf); err != nil {
		return fmt.Errorf("turning kubelet from yurthub: %w", err)
	}
	return restartKubelet(ctx, e)
}

func restartKubelet(ctx context.Context, e *Env) error {
	if err := e.Unit(ctx, "restart", ondisk.UnitKubelet); err != nil {
		return fmt.Errorf("restarting kubelet: %w", err)
	}
	if err := e.Remove(kubeletRestart); err != nil {
		return fmt.Errorf("restarting kubelet: %w", err)
	}
	return nil
}
