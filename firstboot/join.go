package firstboot

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/overlays/node"
)

// Files that hold the token, all on /run: it is gone with the power.
const (
	discoveryFile = ondisk.RunDir + "/discovery.conf"
	joinFile      = ondisk.RunDir + "/join.yaml"
	bootstrapRun  = ondisk.RunDir + "/bootstrap-kubelet.conf"
	// bootstrapConf is where kubeadm writes the token for kubelet. It is made
	// a link to /run beforehand: what is deleted from a disk stays in its
	// free blocks.
	bootstrapConf = "/etc/kubernetes/bootstrap-kubelet.conf"
	kubeadmFlags  = "/var/lib/kubelet/kubeadm-flags.env"
	kubeletPKI    = "/var/lib/kubelet/pki"
	clientCert    = kubeletPKI + "/kubelet-client-current.pem"
)

// sharedName is in the certificate of every API server that kubeadm made,
// whatever its address.
const sharedName = "kubernetes"

func (s discoverySite) discovery(e *Env) api.Discovery {
	return api.Discovery{
		Masters: mastersOf(e, s.Site), Token: s.Credentials.Token.Reveal(),
		Pins: s.CACertHashes, SkipPins: s.UnsafeSkipCAVerification, CA: []byte(s.CACert),
		Names: []string{sharedName, s.Endpoint}, Dial: e.Dial, Timeout: 10 * time.Second,
	}
}

type discoverySite struct{ *configs.Site }

// discoveryPhase finds the cluster and makes sure that it is the right one.
func discoveryPhase(active *Active) Phase {
	site := active.Site
	return Phase{
		Name: "discovery", Doc: "the cluster is found, and is the pinned one", Timeout: time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			err := enrolled(e)
			if err == nil || discovered(e, site) {
				return Done, nil
			}
			if site.Credentials.Token.IsZero() {
				if errors.Is(err, errExpired) {
					if err = trulyExpired(ctx, e); err == nil {
						return Done, nil
					}
					return Todo, err
				}
				return Todo, Permanent(fmt.Errorf("%w, and the site has no bootstrap token", err),
					"put a token into site.yaml (`kubeadm token create`), in the slot or on a stick")
			}
			return Todo, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			e.Waiting("a master to show its cluster-info (%s)", strings.Join(site.Masters, ", "))
			d := discoverySite{site}.discovery(e)
			found, err := api.Discover(ctx, d)
			if err != nil {
				return judgeDiscovery(ctx, e, site, err)
			}
			if err := nameIsFree(ctx, e, found.Client(d), active.Node); err != nil {
				return err
			}
			if _, err := e.write(ondisk.KubeCA, found.CA, Mode(0o644)); err != nil {
				return fmt.Errorf("writing the cluster's CA: %w", err)
			}
			if slices.Contains(site.Masters, found.Master) {
				if err := keepMasters(e, site, found.CA); err != nil {
					return err
				}
			}
			if err := setEndpointHosts(ctx, e, site, found.Master); err != nil {
				return err
			}
			server, name := "https://"+found.Master, found.ServerName
			if everyMasterIsNamed(ctx, e, site, found.CA) && endpointAnswers(ctx, e, site) == nil {
				// The join itself survives a dead master then, and kubelet
				// need not be turned and restarted afterwards.
				server, name = site.EndpointURL(), ""
			}
			conf, err := api.NewKubeconfig(api.Cluster{
				Server: server, TLSServerName: name,
				CAData: base64.StdEncoding.EncodeToString(found.CA),
			}, api.User{Token: site.Credentials.Token.Reveal()})
			if err != nil {
				return err
			}
			if err := e.WriteFile(discoveryFile, conf, Mode(0o600)); err != nil {
				return fmt.Errorf("writing the discovery file: %w", err)
			}
			return nil
		},
	}
}

// everyMasterIsNamed reports whether the certificate of every master has the
// endpoint's name. kubelet drops tls-server-name when it writes its kubeconfig,
// so only then may it begin with the endpoint. A master that does not answer
// may come back with a certificate that has not.
func everyMasterIsNamed(ctx context.Context, e *Env, site *configs.Site, ca []byte) bool {
	errs := askNames(ctx, e, site.Masters, ca, site.Endpoint)
	return !slices.ContainsFunc(errs, func(err error) bool { return err != nil })
}

// askNames asks all masters at once whether their certificate has one of names.
func askNames(ctx context.Context, e *Env, masters []string, ca []byte, names ...string) []error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	errs := make([]error, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		wg.Go(func() { _, errs[i] = api.ServerName(ctx, e.Dial, m, ca, names) })
	}
	wg.Wait()
	return errs
}

// judgeDiscovery tells what time can heal from what a person must. One
// address that belongs to another cluster may be a slip of the pen while the
// right masters are out of reach for now: it stops the run only when all do.
func judgeDiscovery(ctx context.Context, e *Env, site *configs.Site, err error) error {
	var expired x509.CertificateInvalidError
	switch {
	case errors.Is(err, api.ErrPin) && !every(err, api.ErrPin):
		return Advise(err, "an address in masters belongs to another cluster: correct it; the others do not answer")
	case errors.Is(err, api.ErrPin):
		return Permanent(err, "compare caCertHashes in site.yaml with the cluster's (`kubeadm token create --print-join-command` shows it), and the masters' addresses")
	case errors.Is(err, api.ErrCA) && !every(err, api.ErrCA):
		return Advise(err, "an address in masters belongs to another cluster: correct it; the others do not answer")
	case errors.Is(err, api.ErrCA):
		return Permanent(err, "compare caCert in site.yaml with /etc/kubernetes/pki/ca.crt of a control-plane node, and check the masters' addresses")
	case errors.Is(err, api.ErrToken), errors.Is(err, api.ErrSignature):
		return Permanent(err, "make a new token (`kubeadm token create`) and put it into site.yaml")
	case errors.Is(err, api.ErrServerName):
		return Permanent(err, "add the endpoint or the masters' addresses to the API servers' certSANs, or correct endpoint and masters in site.yaml")
	case errors.As(err, &expired) && expired.Reason == x509.Expired:
		waitForNTP(ctx, e)
		return Advise(fmt.Errorf("%w (this machine's clock says %s)", err, e.Now().UTC().Format(time.RFC3339)),
			"if the clock is wrong, name a reachable time server in the site (network.ntp); if it is right, renew the masters' certificates")
	case errors.Is(err, api.ErrUnsigned):
		return Advise(err, "the controller manager's bootstrapsigner signs it within seconds; the token must be allowed to sign (usage \"signing\")")
	case errors.Is(err, api.ErrAnonymous):
		// --anonymous-auth=false, or an AuthenticationConfiguration that allows
		// anonymous requests to the health paths only.
		return Advise(err, "give the site the cluster's CA (caFile: ca.crt when stamping, or caCert in site.yaml; it is /etc/kubernetes/pki/ca.crt of a control-plane node): then nothing is asked anonymously; or allow anonymous requests of /api/v1/namespaces/kube-public/configmaps/cluster-info in the API servers' AuthenticationConfiguration")
	case errors.Is(err, api.ErrNoClusterInfo):
		return Advise(err, "let the cluster publish it: kubeadm init phase bootstrap-token")
	}
	return Advise(err, "check that these masters are the cluster's API servers ("+strings.Join(site.Masters, ", ")+") and that port and firewall let this node through")
}

// every reports whether all the errors joined in err are target.
func every(err, target error) bool {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return errors.Is(err, target)
	}
	for _, e := range joined.Unwrap() {
		if !errors.Is(e, target) {
			return false
		}
	}
	return true
}

// nameIsFree looks, where the token's rights allow, whether the cluster has a
// Node of our name already.
func nameIsFree(ctx context.Context, e *Env, c *api.Client, name string) error {
	n, err := c.GetNode(ctx, name)
	if err != nil {
		return nil // there is none, or the token may not read nodes; kubeadm looks again
	}
	ready, _ := n.Ready()
	ours := n.Status.NodeInfo.MachineID != "" && n.Status.NodeInfo.MachineID == machineID(e)
	if uuid := e.facts().UUID; uuid != "" && strings.EqualFold(uuid, n.Status.NodeInfo.SystemUUID) {
		ours = true
	}
	fix := otherName(name)
	switch {
	case ready && ours:
		return Advise(fmt.Errorf("the cluster still shows this machine's own Node %s as Ready; it turns NotReady within a minute", name), fix)
	case ready:
		return Permanent(fmt.Errorf("the node name %s is taken: the cluster has a Node of that name, and it is Ready", name), fix)
	}
	e.Log.Warn("the cluster has a stale Node of this name, which keeps its old labels and taints", "node", name, "fix", fix)
	e.Console(fmt.Sprintf("the cluster has a stale Node %s, which keeps its old labels and taints: %s", name, fix))
	return nil
}

// otherName is the fix of a name that the cluster knows already.
func otherName(name string) string {
	return fmt.Sprintf("if the old machine is gone: kubectl delete node %s; else give this one another nodeName in site.yaml", name)
}

// joinPatience is how long kubeadm waits for kubelet to enrol.
const joinPatience = 2 * time.Minute

// joinPhase has unmodified kubeadm join, then turns kubelet to the endpoint.
func joinPhase(active *Active) Phase {
	site := active.Site
	return Phase{
		Name: "join", Doc: "kubeadm joins, kubelet talks to the endpoint", Timeout: 5 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			if err := enrolled(e); err != nil {
				return Todo, nil
			}
			if err := errors.Join(otherForm(e, false), sameName(e, active.Node)); err != nil {
				return Todo, err
			}
			server, name, err := kubeletServer(e)
			if err != nil {
				return Todo, err
			}
			if server != site.EndpointURL() || e.exists(kubeletRestart) || !nameFits(ctx, e, site, name) {
				return Todo, nil
			}
			if later, running := lookLater(ctx, e, site); later != running {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			if err := enrolled(e); err != nil {
				if err := join(ctx, e, active); err != nil {
					return err
				}
			}
			if err := toEndpoint(ctx, e, site); err != nil {
				return err
			}
			later, running := lookLater(ctx, e, site)
			switch {
			case later && !running:
				return e.Unit(ctx, "start", ondisk.UnitAgain)
			case running && !later:
				return e.Unit(ctx, "stop", ondisk.UnitAgain)
			}
			return nil
		},
		Undo: func(ctx context.Context, e *Env) error {
			if enrolled(e) == nil {
				return nil // it did join; only the rest is left to do
			}
			// What was discovered may be what misled the join.
			return errors.Join(undoJoin(ctx, e), e.Remove(discoveryFile))
		},
	}
}

// sameName makes sure that the site means the node that this machine is.
func sameName(e *Env, name string) error {
	cert, err := kubeletCert(e)
	if err != nil {
		return err
	}
	if cert.Subject.CommonName != "system:node:"+name {
		return Permanent(fmt.Errorf("this machine is enrolled as %s, the site calls it %s",
			strings.TrimPrefix(cert.Subject.CommonName, "system:node:"), name),
			"run `firstboot reset` on the machine to join under the new name, or give nodeName back its value")
	}
	return nil
}

func join(ctx context.Context, e *Env, active *Active) error {
	if err := noteJoin(e, active); err != nil {
		return err
	}
	if err := undoJoin(ctx, e); err != nil { // of a try that was cut off
		return err
	}
	return kubeadmJoin(ctx, e, active, *active.Site)
}

// kubeadmJoin runs `kubeadm join` with the discovery file, as s says, which is
// the active site with more arguments for kubelet; ignore are checks of its
// that fail since firstboot was there before.
func kubeadmJoin(ctx context.Context, e *Env, active *Active, s configs.Site, ignore ...string) error {
	// The discovery file carries the token itself: only so kubeadm keeps the
	// file's tls-server-name. We have written the CA that kubeadm would.
	s.Credentials = configs.Credentials{}
	if !slices.ContainsFunc(s.IgnorePreflightErrors, func(c string) bool { return strings.EqualFold(c, "all") }) { // which kubeadm wants alone
		s.IgnorePreflightErrors = slices.Concat(s.IgnorePreflightErrors, ignore, []string{"FileAvailable--etc-kubernetes-pki-ca.crt"})
	}
	conf, err := node.JoinConfiguration(&s, node.Join{NodeName: active.Node, Discovery: discoveryFile, Timeout: joinPatience, Kubernetes: active.Image.Kubernetes})
	if err != nil {
		return err
	}
	if err := e.WriteFile(joinFile, conf, Mode(0o600)); err != nil {
		return fmt.Errorf("writing kubeadm's configuration: %w", err)
	}
	if err := e.Symlink(bootstrapRun, bootstrapConf); err != nil {
		return fmt.Errorf("keeping the token off the disk: %w", err)
	}
	e.Waiting("kubeadm join")
	out := &tail{log: func(line string) { e.Log.Info("kubeadm: " + line) }}
	cmd := Cmd{Args: []string{"kubeadm", "join", "--config", joinFile}, Env: node.ProxyEnv(&s), Output: out}
	if err := e.Run(ctx, cmd); err != nil {
		return judgeJoin(active.Node, fmt.Errorf("%w: %s", err, out.last()))
	}
	return nil
}

// judgeJoin names the fix of what kubeadm says often.
func judgeJoin(name string, err error) error {
	msg := err.Error()
	switch {
	case strings.Contains(msg, "already exists in the cluster"):
		return Advise(err, otherName(name))
	case strings.Contains(msg, "Unauthorized"):
		return Advise(err, "the token may just have expired; a new one goes into site.yaml (`kubeadm token create`)")
	case strings.Contains(msg, "TLS bootstrap"), strings.Contains(msg, "kubelet-check"):
		return Advise(err, "see `journalctl -u kubelet -u containerd` on the machine; in the cluster, see whether its CSR is approved (`kubectl get csr`)")
	}
	return err
}

// tail hands lines to the log and keeps the last of them for the error.
type tail struct {
	mu    sync.Mutex
	log   func(string)
	part  []byte
	lines []string
}

var _ io.Writer = (*tail)(nil)

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.part = append(t.part, p...)
	for {
		line, rest, ok := bytes.Cut(t.part, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		t.part = rest
		if s := strings.TrimSpace(string(line)); s != "" {
			t.log(s)
			t.lines = append(t.lines, s)
			if len(t.lines) > 40 {
				t.lines = t.lines[1:]
			}
		}
	}
}

// last is what matters of the output: the lines that say error, or the last.
func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := t.lines
	if s := strings.TrimSpace(string(t.part)); s != "" {
		lines = append(lines, s)
	}
	var out []string
	for _, l := range lines {
		low := strings.ToLower(l)
		if strings.HasPrefix(low, "error") || strings.Contains(low, "[error") || strings.HasPrefix(low, "fatal") {
			out = append(out, l)
		}
	}
	if len(out) == 0 && len(lines) > 0 {
		out = lines[max(0, len(lines)-3):]
	}
	return strings.Join(out, "; ")
}

// undoJoin takes back exactly what kubeadm join and kubelet wrote, so that
// the next try finds what the first one found. (kubeadm reset would do more:
// it empties /etc/kubernetes/manifests, where an image may have put pods.)
func undoJoin(ctx context.Context, e *Env) error {
	left := false
	for _, f := range joinFiles {
		left = left || e.exists(f)
	}
	if left {
		if err := e.Unit(ctx, "stop", ondisk.UnitKubelet); err != nil {
			return fmt.Errorf("stopping kubelet: %w", err)
		}
	}
	for _, f := range slices.Concat(joinFiles, kubeletKeys(e), []string{readyMark}) {
		if err := e.Remove(f); err != nil {
			return fmt.Errorf("undoing the join: %w", err)
		}
	}
	return nil
}

// joinFiles is what a join writes; config.yaml, which lets kubelet start,
// goes first.
var joinFiles = []string{
	ondisk.KubeletConfig, ondisk.KubeletConf, bootstrapConf, bootstrapRun, joinFile, kubeadmFlags,
	"/var/lib/kubelet/instance-config.yaml",
}

// toEndpoint turns kubelet.conf from the one master it joined through to the
// endpoint, which outlives any of them.
func toEndpoint(ctx context.Context, e *Env, site *configs.Site) error {
	server, name, err := kubeletServer(e)
	if err == nil && server == site.EndpointURL() && !e.exists(kubeletRestart) && nameFits(ctx, e, site, name) {
		return nil // it joined through the endpoint
	}
	conf, err := e.read(ondisk.KubeletConf)
	if err != nil {
		return fmt.Errorf("reading kubelet's credentials: %w", err)
	}
	ca, err := e.read(ondisk.KubeCA)
	if err != nil {
		return fmt.Errorf("reading the cluster's CA: %w", err)
	}
	if name, err = sharedServerName(ctx, e, site, ca); err != nil {
		return err
	}
	next, err := api.SetServer(conf, site.EndpointURL(), name)
	if err != nil {
		return err
	}
	return restartFor(ctx, e, "turning kubelet to the endpoint", writing(ondisk.KubeletConf, next, 0o600))
}

// sharedServerName is the name that the certificates of the masters that answer
// have: the one that kubeadm puts there, or the endpoint (then nothing needs to
// be said). Where no name is in all of them it is the one that most have.
func sharedServerName(ctx context.Context, e *Env, site *configs.Site, ca []byte) (string, error) {
	masters := mastersOf(e, site)
	shared, sharedErr := named(ctx, e, masters, ca, sharedName)
	endpoint, endpointErr := named(ctx, e, masters, ca, site.Endpoint)
	switch {
	case shared > 0 && shared >= endpoint:
		return sharedName, nil
	case endpoint > 0:
		return "", nil
	}
	err := errors.Join(sharedErr, endpointErr)
	if errors.Is(err, api.ErrServerName) {
		return "", Permanent(err, "add "+site.Endpoint+" to the API servers' certSANs")
	}
	return "", fmt.Errorf("asking the masters for their certificates' names: %w", sharedErr)
}

// named counts the masters whose certificate has name; the error is what the
// others said.
func named(ctx context.Context, e *Env, masters []string, ca []byte, name string) (int, error) {
	errs := askNames(ctx, e, masters, ca, name)
	n := 0
	for _, err := range errs {
		if err == nil {
			n++
		}
	}
	return n, errors.Join(errs...)
}

// nameFits reports whether kubelet's tls-server-name, or the endpoint where it
// has none, is in the certificate of every master that answers, or no other
// name is in more of them. ipvscare takes a master whose certificate is of the
// CA for healthy, whatever its names.
func nameFits(ctx context.Context, e *Env, site *configs.Site, name string) bool {
	masters, ca := mastersOf(e, site), e.contents(ondisk.KubeCA)
	have, err := named(ctx, e, masters, ca, cmp.Or(name, site.Endpoint))
	if !errors.Is(err, api.ErrServerName) {
		return true
	}
	for _, other := range []string{sharedName, site.Endpoint} {
		if n, _ := named(ctx, e, masters, ca, other); n > have {
			return false
		}
	}
	return true
}

// lookLater reports whether first boot is to run once more while this machine
// is on, and whether its timer runs: a master that is away now may come back
// with a certificate that lacks kubelet's name for it, and new masters that are
// still to come prove themselves only then.
func lookLater(ctx context.Context, e *Env, site *configs.Site) (later, running bool) {
	state, err := e.UnitState(ctx, ondisk.UnitAgain)
	if err != nil {
		e.Log.Warn("asking for the state of "+ondisk.UnitAgain, "error", err)
		return false, false
	}
	running = state == "active"
	answer, away := 0, 0
	for _, err := range askNames(ctx, e, mastersOf(e, site), e.contents(ondisk.KubeCA), sharedName, site.Endpoint) {
		if err == nil || errors.Is(err, api.ErrServerName) {
			answer++
		} else {
			away++
		}
	}
	if answer == 0 {
		return running, running // offline: first boot itself stays and looks
	}
	return away > 0 || len(formerMasters(e, site)) > 0, running
}

// kubeletServer is where kubelet.conf points.
func kubeletServer(e *Env) (server, tlsServerName string, err error) {
	conf, err := e.read(ondisk.KubeletConf)
	if err != nil {
		return "", "", fmt.Errorf("reading kubelet's credentials: %w", err)
	}
	k, err := api.ParseKubeconfig(conf)
	if err != nil {
		return "", "", err
	}
	c, err := k.Cluster()
	if err != nil {
		return "", "", err
	}
	return c.Server, c.TLSServerName, nil
}
