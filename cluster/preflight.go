package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/semver"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/openyurt"
)

// PreflightSite is a Site to check.
type PreflightSite struct {
	Name string
	*configs.Site
}

// PreflightOptions configure Preflight.
type PreflightOptions struct {
	// Client is used for checks that need a kubeconfig; nil: these checks are skipped.
	Client *Client
	Now    time.Time
	// ShipWithin is the time, counted from Now, until the last machine is switched on.
	ShipWithin time.Duration
	// Kubelet is the version of kubelet in the image; empty: unknown.
	Kubelet string
	Dial    kubeapi.DialFunc
	// Timeout limits the request to each API server.
	Timeout time.Duration
}

// preflight collects the checks of one cluster's Sites.
type preflight struct {
	PreflightOptions
	checks []Check
	// found is a client of an API server that was verified for the first Site.
	found *kubeapi.Client
	// silent is set if no API server has answered. Then discovery is not repeated with other
	// tokens.
	silent bool
	// proven has the result of discovery for each token. A token is sent only to an API server that
	// discovery has verified with that token.
	proven   map[configs.Secret]discoveryResult
	sessions kubeapi.Sessions
}

// discoveryResult is the result of discovery with one token: a client, or the error.
type discoveryResult struct {
	client *kubeapi.Client
	err    error
}

// clientFor returns a client that uses the Site's token.
func (p *preflight) clientFor(ctx context.Context, site *configs.Site) (*kubeapi.Client, error) {
	token := site.Credentials.Token
	if known, ok := p.proven[token]; ok {
		return known.client, known.err
	}
	if p.silent {
		return nil, errors.New("no API server was found")
	}
	var of discoveryResult
	d := p.discovery(site, site.Masters...)
	found, err := kubeapi.Discover(ctx, d)
	if err == nil {
		of.client = found.Client(d)
	}
	of.err = err
	p.proven[token] = of
	return of.client, of.err
}

// get makes a request within the timeout for one API server.
func (p *preflight) get(ctx context.Context, client *kubeapi.Client, path string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	return client.Get(ctx, path, out)
}

func (p *preflight) ok(name, site, detail string) {
	p.checks = append(p.checks, Check{Name: name, Site: site, State: CheckOK, Detail: detail})
}

func (p *preflight) fail(name, site, detail, fix string) {
	p.checks = append(p.checks, Check{Name: name, Site: site, State: CheckFailed, Detail: detail, Fix: fix})
}

func (p *preflight) unknown(name, site, detail, fix string) {
	p.checks = append(p.checks, Check{Name: name, Site: site, State: CheckUnknown, Detail: detail, Fix: fix})
}

// Preflight checks, without changing anything, whether the Sites' machines can join. A check that
// is the same for all Sites of a cluster is made once.
func Preflight(ctx context.Context, sites []PreflightSite, o PreflightOptions) []Check {
	var order []string
	groups := map[string][]PreflightSite{}
	for _, s := range sites {
		key := strings.Join(s.Masters, " ") + "|" + strings.Join(s.CACertHashes, " ") + "|" + s.CACert
		if groups[key] == nil {
			order = append(order, key)
		}
		groups[key] = append(groups[key], s)
	}
	var all []Check
	if useless := o.Client.unusable(ctx); useless != "" {
		all = append(all, Check{Name: "kubeconfig", State: CheckFailed, Detail: useless,
			Fix: "name one that works from here (kubectl --kubeconfig FILE get nodes), or leave --kubeconfig out"})
		o.Client = nil
	}
	for _, key := range order {
		p := &preflight{PreflightOptions: o, silent: true, proven: map[configs.Secret]discoveryResult{}}
		p.cluster(ctx, groups[key])
		all = append(all, p.checks...)
	}
	return all
}

// unusable returns the reason why the kubeconfig gives no access to its cluster, or "". Missing
// permissions of the kubeconfig's user are no reason.
func (c *Client) unusable(ctx context.Context) string {
	if c == nil {
		return ""
	}
	_, err := c.get(ctx, configMaps, publicNamespace, "cluster-info")
	var answer apierrors.APIStatus
	if err == nil || errors.As(err, &answer) && !apierrors.IsUnauthorized(err) {
		return ""
	}
	if failed := (*requestError)(nil); errors.As(err, &failed) {
		return failed.text // the check's name says what failed
	}
	return err.Error()
}

func (p *preflight) cluster(ctx context.Context, sites []PreflightSite) {
	first := sites[0]
	for _, m := range first.Masters {
		p.apiServer(ctx, m, first.Site)
	}
	p.ca(ctx, first.Site)
	p.version(ctx)
	seen := map[configs.Secret]bool{}
	for _, s := range sites {
		if token := s.Credentials.Token; !seen[token] {
			seen[token] = true
			p.token(ctx, s)
		}
	}
	for _, s := range sites {
		p.nodeName(ctx, s)
	}
	p.openYurt(ctx, sites)
}

// discovery returns the discovery that a node with this Site performs.
func (p *preflight) discovery(site *configs.Site, masters ...string) kubeapi.Discovery {
	host, _, _ := net.SplitHostPort(site.EndpointHostPort())
	return kubeapi.Discovery{Masters: masters, Token: site.Credentials.Token.Reveal(), Pins: site.CACertHashes, SkipPins: site.UnsafeSkipCAVerification,
		CA: []byte(site.CACert), Names: []string{host, kubeapi.SharedName}, Dialer: kubeapi.Dialer{Dial: p.Dial, Sessions: &p.sessions}, Timeout: p.Timeout}
}

// apiServer checks one API server by the same discovery that a node performs.
func (p *preflight) apiServer(ctx context.Context, master string, site *configs.Site) {
	name := "API server " + master
	d := p.discovery(site, master)
	found, err := kubeapi.Discover(ctx, d)
	if err == nil || kubeapi.Code(err) != 0 || notThisToken(err) {
		p.silent = false
	}
	switch {
	case err == nil:
		p.ok(name, "", "answers, and belongs to the cluster")
		if p.found == nil {
			p.found = found.Client(d)
			p.proven[site.Credentials.Token] = discoveryResult{client: p.found}
		}
	case errors.Is(err, kubeapi.ErrPin), errors.Is(err, kubeapi.ErrCA):
		p.fail(name, "", describeError(err), "write the CA hash of this cluster into caCertHashes (`kubeadm token create --print-join-command` prints it), or the addresses of the cluster's API servers into masters")
	case errors.Is(err, kubeapi.ErrServerName):
		p.fail(name, "", describeError(err), "use a name in the Site that the API server's certificate has, or add this name to the certificate (kubeadm: apiServer.certSANs)")
	case notThisToken(err):
		// The token is wrong. The check of the token reports the details.
		p.fail(name, "", describeError(err), "mint a token and write it into the Site: edgebake cluster token mint --node NAME, or kubeadm token create")
	case kubeapi.Code(err) != 0:
		p.fail(name, "", describeError(err), "let anonymous users read kube-public/cluster-info (kubeadm init phase bootstrap-token), or give the Site the CA itself (caCert)")
	default:
		p.fail(name, "", describeError(err), "correct the address, switch the control-plane node on, or allow connections to it from the machine's network")
	}
}

// notThisToken reports whether the error means that an API server answered but the token is wrong.
func notThisToken(err error) bool {
	return errors.Is(err, kubeapi.ErrToken) || errors.Is(err, kubeapi.ErrSignature) || errors.Is(err, kubeapi.ErrUnsigned)
}

// describeError returns an error of requests to API servers on one line, without repetitions and
// without the servers' names.
func describeError(err error) string {
	if all := joined.Errors(err); len(all) > 1 {
		var texts []string
		for _, e := range all {
			if text := describeError(e); !slices.Contains(texts, text) {
				texts = append(texts, text)
			}
		}
		return strings.Join(texts, "; ")
	}
	var untrusted *tls.CertificateVerificationError
	var timeout net.Error
	var plain tls.RecordHeaderError
	var unknown *net.DNSError
	var op *net.OpError
	wrongCertificate := errors.As(err, &untrusted) || errors.Is(err, kubeapi.ErrServerName)
	switch {
	case wrongCertificate:
	case errors.As(err, &timeout) && timeout.Timeout():
		return "does not answer in time"
	case errors.Is(err, http.ErrSchemeMismatch), errors.As(err, &plain) && string(plain.RecordHeader[:]) == "HTTP/":
		return "speaks plain HTTP, not HTTPS: it is not an API server"
	case errors.As(err, &unknown) && unknown.IsNotFound:
		return "is not found in DNS"
	case errors.As(err, &op) && op.Op == "dial":
		return fmt.Sprintf("cannot be reached: %v", op.Err)
	}
	text := err.Error()
	if of := (*url.Error)(nil); !wrongCertificate && errors.As(err, &of) {
		text = of.Err.Error()
	} else if of := (*kubeapi.ServerError)(nil); errors.As(err, &of) {
		text = of.Err.Error()
	}
	return strings.Join(strings.Fields(text), " ")
}

// ca compares the pins with the CA in cluster-info.
func (p *preflight) ca(ctx context.Context, site *configs.Site) {
	const name = "CA hash"
	pins := site.CAPins()
	switch {
	case p.Client == nil:
		return // apiServer has verified the CA of each API server
	case len(pins) == 0:
		if site.UnsafeSkipCAVerification {
			p.unknown(name, "", "the Site pins no CA", "write caCertHashes in place of unsafeSkipCAVerification")
		}
		return
	}
	info, err := p.Client.clusterInfo(ctx)
	if apierrors.IsForbidden(err) {
		p.unknown(name, "", err.Error(), "name a kubeconfig whose user may "+permission{"get", configMaps, publicNamespace, "cluster-info"}.String())
		return
	}
	if err != nil {
		p.fail(name, "", err.Error(), "run kubeadm init phase bootstrap-token on a control-plane node")
		return
	}
	if slices.ContainsFunc(pins, func(pin string) bool {
		return slices.ContainsFunc(info.pins, func(i string) bool { return strings.EqualFold(i, pin) })
	}) {
		p.ok(name, "", "matches the cluster's CA")
		return
	}
	p.fail(name, "", "does not match the cluster's CA, which has "+strings.Join(info.pins, ", "), "write that hash into caCertHashes (or the CA into caCert), or name the kubeconfig of the Site's own cluster")
}

// version compares kubelet's version with the API server's: kubelet may be up to three minor
// versions older, but not newer.
func (p *preflight) version(ctx context.Context) {
	const name = "version"
	var v struct {
		GitVersion string `json:"gitVersion"`
	}
	switch {
	case p.Kubelet == "":
		p.unknown(name, "", "no image is given", "name the image with --image")
		return
	case p.found == nil:
		p.unknown(name, "", "no API server was found", "")
		return
	}
	if err := p.get(ctx, p.found, "/version", &v); err != nil {
		p.unknown(name, "", "the API server's version could not be read: "+describeError(err), "")
		return
	} else if !semver.IsValid(v.GitVersion) {
		p.unknown(name, "", fmt.Sprintf("the API server reports the invalid version %q", v.GitVersion), "")
		return
	}
	kubelet, server := minor(p.Kubelet), minor(v.GitVersion)
	detail := fmt.Sprintf("kubelet %s, cluster %s", p.Kubelet, v.GitVersion)
	switch {
	case semver.Major(p.Kubelet) != semver.Major(v.GitVersion), kubelet > server:
		p.fail(name, "", detail+": kubelet may not be newer than the cluster", "update the cluster, or build the image with Kubernetes "+semver.MajorMinor(v.GitVersion))
	case server-kubelet > 3:
		p.fail(name, "", detail+": kubelet may be at most three minor versions older", "build the image with Kubernetes "+semver.MajorMinor(v.GitVersion))
	default:
		p.ok(name, "", detail)
	}
}

func minor(v string) (n int) {
	_, m, _ := strings.Cut(semver.MajorMinor(v), ".")
	fmt.Sscan(m, &n)
	return n
}

// token checks whether a token will be valid when the machines are switched on.
func (p *preflight) token(ctx context.Context, s PreflightSite) {
	token := s.Credentials.Token.Reveal()
	id, _, _ := strings.Cut(token, ".")
	name := "token " + id
	const fix = "mint another and write it into the Site: edgebake cluster token mint --node NAME --ttl, or kubeadm token create --ttl"
	if token == "" {
		p.fail("token", s.Name, "the Site has no token", fix)
		return
	}
	if p.Client == nil {
		// Discovery sends the token to an API server, after it has verified the server.
		if _, err := p.clientFor(ctx, s.Site); notThisToken(err) {
			p.fail(name, "", describeError(err), fix)
			return
		} else if err != nil {
			p.unknown(name, "", describeError(err), "")
			return
		}
		p.ok(name, "", "is accepted now")
		p.unknown(name+" expiry", "", "only an administrator can read it", "add --kubeconfig FILE")
		return
	}
	t, err := p.Client.CheckToken(ctx, token, p.Now)
	var missing TokenProblem
	switch {
	case apierrors.IsForbidden(err):
		p.unknown(name, "", err.Error(), "name a kubeconfig whose user may "+permission{"get", secrets, systemNamespace, kubeapi.TokenSecretName(id)}.String())
	case errors.As(err, &missing):
		p.fail(name, "", missing.Reason, fix)
	case err != nil:
		p.fail(name, "", err.Error(), fix)
	case len(t.Problems) > 0:
		var problems []string
		for _, problem := range t.Problems {
			if problem.Fix == mintAnother {
				problem.Fix = "" // the check's fix has it
			}
			problems = append(problems, problem.Error())
		}
		p.fail(name, "", strings.Join(problems, "; "), fix)
	case !t.Expires.IsZero() && t.Expires.Before(p.Now.Add(p.ShipWithin)):
		p.fail(name, "", fmt.Sprintf("expires on %s, and the machines may be switched on until %s (--ship-within)", utcText(t.Expires), utcText(p.Now.Add(p.ShipWithin))), fix)
	case t.Expires.IsZero():
		p.ok(name, "", "never expires")
	default:
		p.ok(name, "", "is valid until "+utcText(t.Expires))
	}
}

func utcText(t time.Time) string { return t.UTC().Format(time.DateTime) + " UTC" }

// nodeName checks whether the cluster already has a Node with the Site's name.
func (p *preflight) nodeName(ctx context.Context, s PreflightSite) {
	const name = "node name"
	node := strings.ToLower(s.NodeName)
	if strings.Contains(node, "{{") {
		p.unknown(name, s.Name, "the machine derives it from "+s.NodeName, "")
		return
	}
	taken, err := p.hasNode(ctx, node, s.Site)
	switch {
	case err != nil:
		p.unknown(name, s.Name, err.Error(), "")
	case taken:
		p.fail(name, s.Name, "the cluster already has a Node "+node, "give the machine another nodeName, or, if the old machine is gone: kubectl delete node "+node)
	default:
		p.ok(name, s.Name, node+" is free")
	}
}

func (p *preflight) hasNode(ctx context.Context, node string, site *configs.Site) (bool, error) {
	if p.Client != nil {
		obj, err := p.Client.get(ctx, nodes, "", node)
		return obj != nil, err
	}
	as, err := p.clientFor(ctx, site)
	if err != nil {
		return false, errors.New(describeError(err))
	}
	err = p.get(ctx, as, "/api/v1/nodes/"+node, nil)
	if kubeapi.Code(err) == 404 {
		return false, nil
	}
	return err == nil, err
}

// nodePools returns the resource of OpenYurt's node pools.
func nodePools(version string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: openyurt.Group, Version: version, Resource: openyurt.Pools}
}

// openYurt checks whether the cluster meets yurthub's requirements, for all Sites together.
func (p *preflight) openYurt(ctx context.Context, sites []PreflightSite) {
	of := slices.DeleteFunc(slices.Clone(sites), func(s PreflightSite) bool { return !s.OpenYurt() })
	if len(of) == 0 {
		return
	}
	if p.Client == nil {
		p.unknown("OpenYurt", "", "only an administrator can read its settings", "add --kubeconfig FILE")
		return
	}
	version, err := p.Client.poolVersion(ctx)
	done := map[string]bool{}
	var rules []openyurt.Rule
	for _, s := range of {
		h := openyurt.Hub{Namespace: s.Yurthub.Namespace, Pool: s.NodePool, Cloud: s.NodeType == configs.NodeCloud, Extra: s.Yurthub.ExtraArgs}
		for _, need := range h.Needs() {
			key := fmt.Sprint(need.Kind, need.Resource.Kind)
			if need.Kind == openyurt.NeedPool {
				key += s.NodePool + " " + s.NodeType
			}
			if done[key] {
				continue
			}
			done[key] = true
			switch need.Kind {
			case openyurt.NeedCRD:
				if err != nil {
					p.unknown("NodePools", "", err.Error(), "")
				} else if version == "" {
					p.fail("NodePools", "", "the cluster has no "+need.Resource.Kind+" CRD ("+openyurt.PoolCRD+")", need.Fix)
				}
			case openyurt.NeedPool:
				if version != "" {
					p.pool(ctx, version, s, need)
				}
			case openyurt.NeedRight:
				if need.Fix == openyurt.GrantHubRole {
					rules = append(rules, need.Rule)
				} else {
					p.unknown("yurthub's rights", s.Name, "OpenYurt's charts do not grant system:nodes "+strings.Join(need.Rule.Verbs, " and ")+" of "+strings.Join(need.Rule.Resources, ", ")+", which the Site's yurthub.extraArgs require", need.Fix)
				}
			case openyurt.NeedApprover:
				p.approver(ctx)
			}
		}
	}
	const rights = "yurthub's rights"
	switch lacks, err := p.Client.missingRights(ctx, rules); {
	case err != nil:
		p.unknown(rights, "", err.Error(), "")
	case len(lacks) > 0:
		p.fail(rights, "", strings.Join(lacks, "; "), openyurt.GrantHubRole+", or: edgebake cluster prepare")
	default:
		p.ok(rights, "", "exist")
	}
}

func (p *preflight) pool(ctx context.Context, version string, s PreflightSite, need openyurt.Need) {
	name := "NodePool " + s.NodePool
	obj, err := p.Client.get(ctx, nodePools(version), "", s.NodePool)
	if err != nil {
		p.unknown(name, "", err.Error(), "")
		return
	}
	if obj == nil {
		p.fail(name, "", "the cluster has no node pool with this name", need.Fix)
		return
	}
	kind, _, _ := unstructured.NestedString(obj.Object, "spec", "type")
	if what, fix := openyurt.PoolProblem(kind, s.NodeType == configs.NodeCloud); what != "" {
		p.fail(name, "", what, fix)
		return
	}
	p.ok(name, "", "is of type "+kind)
}

// approver checks whether yurthub's certificates will be approved.
func (p *preflight) approver(ctx context.Context) {
	const name = "certificate approver"
	m, err := p.Client.manager(ctx)
	if err != nil {
		p.unknown(name, "", err.Error(), "")
		return
	}
	if m.lacks != "" {
		p.fail(name, "", m.lacks, m.fix)
		return
	}
	p.ok(name, "", openyurt.Manager+" runs")
}
