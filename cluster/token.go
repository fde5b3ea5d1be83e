package cluster

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

const (
	systemNamespace = kubeapi.TokenNamespace
	publicNamespace = "kube-public"
)

// Token is a bootstrap token of a cluster.
type Token struct {
	ID          string         `json:"id"`
	Description string         `json:"description,omitempty"`
	Expires     time.Time      `json:"expires,omitzero"` // zero: never
	Usages      []string       `json:"usages,omitempty"`
	Groups      []string       `json:"groups,omitempty"`
	Problems    []TokenProblem `json:"problems,omitempty"`

	secret configs.Secret
}

// TokenProblem is a reason why no node can join with a token.
type TokenProblem struct {
	Reason string
	Fix    string // may be empty
}

// Fixes of problems of a token.
const (
	mintAnother   = "mint another"
	revokeAndMint = "revoke it and mint another"
)

// Error returns the reason with its fix.
func (p TokenProblem) Error() string {
	if p.Fix == "" {
		return p.Reason
	}
	return p.Reason + ": " + p.Fix
}

// MarshalText makes a problem one string in JSON.
func (p TokenProblem) MarshalText() ([]byte, error) { return []byte(p.Error()), nil }

func (t *Token) addProblem(fix, format string, args ...any) {
	t.Problems = append(t.Problems, TokenProblem{fmt.Sprintf(format, args...), fix})
}

// tokenOf returns the token in a Secret.
func tokenOf(obj *unstructured.Unstructured, now time.Time) Token {
	data := map[string]string{}
	raw, _, _ := unstructured.NestedStringMap(obj.Object, "data")
	for k, v := range raw {
		if b, err := base64.StdEncoding.DecodeString(v); err == nil {
			data[k] = string(b)
		}
	}
	t := Token{ID: data["token-id"], Description: data["description"], secret: configs.NewSecret(data["token-secret"])}
	switch want := kubeapi.TokenSecretName(t.ID); {
	case t.ID == "":
		t.addProblem(revokeAndMint, "its Secret %s has no token-id", obj.GetName())
		t.ID = kubeapi.TokenID(obj.GetName())
	case obj.GetName() != want:
		t.addProblem(revokeAndMint, "its Secret is named %s, but the API server looks for %s", obj.GetName(), want)
	}
	if _, _, err := kubeapi.SplitToken(t.ID + "." + data["token-secret"]); err != nil {
		t.addProblem(revokeAndMint, "id and secret are not of the form abcdef.0123456789abcdef")
	}
	if e, ok := data["expiration"]; ok {
		at, err := time.Parse(time.RFC3339, e)
		switch {
		case err != nil:
			t.addProblem(revokeAndMint, "its expiration %q is not a time, so the API server treats it as expired", e)
		case !now.Before(at):
			t.addProblem(mintAnother, "it expired at %s", at.UTC().Format(time.RFC3339))
			fallthrough
		default:
			t.Expires = at.UTC()
		}
	}
	for _, usage := range []struct{ name, need string }{
		{"authentication", "the API server does not accept it"},
		{"signing", "cluster-info is not signed with it, so that nodes without caCert cannot verify the cluster"},
	} {
		if data["usage-bootstrap-"+usage.name] == "true" {
			t.Usages = append(t.Usages, usage.name)
		} else {
			t.addProblem(mintAnother, "it lacks the usage %s: %s", usage.name, usage.need)
		}
	}
	for g := range strings.SplitSeq(data["auth-extra-groups"], ",") {
		if g = strings.TrimSpace(g); g != "" {
			t.Groups = append(t.Groups, g)
		}
	}
	if !slices.Contains(t.Groups, kubeapi.NodeGroup) {
		t.addProblem(mintAnother, "it lacks the group %s, which may request a node's certificate", kubeapi.NodeGroup)
	}
	if kind, _, _ := unstructured.NestedString(obj.Object, "type"); kind != kubeapi.TokenType {
		t.addProblem(revokeAndMint, "its Secret is of type %s, not %s", kind, kubeapi.TokenType)
	}
	return t
}

// Tokens lists the bootstrap tokens, sorted by expiry.
func (c *Client) Tokens(ctx context.Context, now time.Time) ([]Token, error) {
	all, err := c.list(ctx, secrets, systemNamespace, metav1.ListOptions{FieldSelector: "type=" + kubeapi.TokenType})
	if err != nil {
		return nil, err
	}
	var out []Token
	for i := range all {
		out = append(out, tokenOf(&all[i], now))
	}
	slices.SortFunc(out, func(a, b Token) int {
		return cmp.Or(a.Expires.Compare(b.Expires), strings.Compare(a.ID, b.ID))
	})
	return out, nil
}

// Minted is a new token, and the fields of a Site with which a node joins.
type Minted struct {
	Token
	Site *configs.Site
}

// MintOptions configure MintToken.
type MintOptions struct {
	// Node is the node for which the token is made; empty: any node.
	Node string
	TTL  time.Duration
	Now  time.Time
	VIP  string
}

func mintRights() []permission {
	return []permission{
		{"create", secrets, systemNamespace, ""},
		{"get", configMaps, publicNamespace, "cluster-info"},
		{"get", configMaps, systemNamespace, "kubeadm-config"},
		{"list", endpointSlices, metav1.NamespaceDefault, ""},
	}
}

// MintToken creates a bootstrap token. It returns the token and the fields of a Site with which a
// node joins.
func (c *Client) MintToken(ctx context.Context, o MintOptions) (*Minted, error) {
	const doing = "minting a token"
	if err := c.requirePermissions(ctx, doing, mintRights()...); err != nil {
		return nil, err
	}
	// Read the Site's fields first: if that fails, no useless token is created.
	site, err := c.siteStub(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	if o.Node != "" {
		site.NodeName = o.Node
	}
	if o.VIP != "" {
		site.VIP = o.VIP
	}
	if err := checkStub(site); err != nil {
		return nil, fmt.Errorf("%s: no Site of this cluster would be valid, so no token was made:\n%w", doing, err)
	}
	for range 3 { // IDs have six characters, so a new one may be taken
		t, obj := newTokenSecret(o)
		_, err = c.resource(secrets, systemNamespace).Create(ctx, obj, metav1.CreateOptions{FieldManager: "edgebake"})
		if apierrors.IsAlreadyExists(err) {
			continue
		}
		if err != nil {
			return nil, c.explain(doing, err)
		}
		site.Credentials.Token = configs.NewSecret(t.ID + "." + t.secret.Reveal())
		return &Minted{t, site}, nil
	}
	return nil, fmt.Errorf("%s: %w", doing, err)
}

// checkStub checks the Site's fields before a token is created. It finds, for example, a VIP whose
// address family differs from the API servers'.
func checkStub(site *configs.Site) error {
	with := *site
	with.Credentials.Token = configs.NewSecret("abcdef.0123456789abcdef")
	with.ApplyDefaults()
	return with.Validate().Err()
}

func newTokenSecret(o MintOptions) (Token, *unstructured.Unstructured) {
	id, secret := kubeapi.NewToken()
	t := Token{ID: id, secret: configs.NewSecret(secret), Description: kubeapi.TokenDescription(o.Node),
		Expires: o.Now.Add(o.TTL).UTC().Truncate(time.Second), Usages: []string{"authentication", "signing"}, Groups: []string{kubeapi.NodeGroup}}
	data := map[string]any{}
	for k, v := range kubeapi.TokenData(id, secret, t.Description, t.Expires) {
		data[k] = v
	}
	return t, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": kubeapi.TokenType,
		"metadata":   map[string]any{"name": kubeapi.TokenSecretName(id), "namespace": systemNamespace},
		"stringData": data,
	}}
}

// siteStub returns the fields of a Site that the cluster determines: API servers, endpoint and CA.
func (c *Client) siteStub(ctx context.Context) (*configs.Site, error) {
	info, err := c.clusterInfo(ctx)
	if err != nil {
		return nil, err
	}
	site := &configs.Site{APIVersion: configs.APIVersion, Kind: configs.KindSite, CACertHashes: info.pins}
	if site.Masters, err = c.masters(ctx); err != nil {
		return nil, err
	}
	kubeadm, err := c.get(ctx, configMaps, systemNamespace, "kubeadm-config")
	if err != nil {
		return nil, err
	}
	if kubeadm != nil {
		text, _, _ := unstructured.NestedString(kubeadm.Object, "data", "ClusterConfiguration")
		for line := range strings.Lines(text) {
			endpoint, ok := strings.CutPrefix(strings.TrimSpace(line), "controlPlaneEndpoint:")
			host, _, err := net.SplitHostPort(strings.Trim(strings.TrimSpace(endpoint), `"'`))
			if ok && err == nil && net.ParseIP(host) == nil {
				site.Endpoint = host
			}
		}
	}
	return site, nil
}

// masters returns the addresses that the API servers publish in the cluster.
func (c *Client) masters(ctx context.Context) ([]string, error) {
	slicesOf, err := c.list(ctx, endpointSlices, metav1.NamespaceDefault, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=kubernetes"})
	if err != nil {
		return nil, err
	}
	var out []string
	for _, s := range slicesOf {
		raw, err := json.Marshal(s.Object)
		if err != nil {
			return nil, err
		}
		var slice struct {
			Ports     []struct{ Port int }
			Endpoints []struct{ Addresses []string }
		}
		if err := json.Unmarshal(raw, &slice); err != nil || len(slice.Ports) == 0 {
			continue
		}
		for _, e := range slice.Endpoints {
			for _, a := range e.Addresses {
				out = append(out, net.JoinHostPort(a, fmt.Sprint(slice.Ports[0].Port)))
			}
		}
	}
	if len(out) == 0 {
		return nil, errors.New("listing the control-plane nodes: the Service default/kubernetes has no endpoints: do the API servers have --endpoint-reconciler-type=none?")
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// info is the content of cluster-info.
type info struct {
	ca   []byte // PEM
	pins []string
	data map[string]string
}

func (c *Client) clusterInfo(ctx context.Context) (*info, error) {
	const doing = "reading configmaps cluster-info in namespace kube-public"
	obj, err := c.get(ctx, configMaps, publicNamespace, "cluster-info")
	if err != nil {
		return nil, err
	}
	if obj == nil {
		return nil, errors.New(doing + ": not found, so no node can discover the cluster; run `kubeadm init phase bootstrap-token` on a control-plane node")
	}
	i := &info{}
	i.data, _, _ = unstructured.NestedStringMap(obj.Object, "data")
	k, err := kubeapi.ParseKubeconfig([]byte(i.data["kubeconfig"]))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	ca, err := base64.StdEncoding.DecodeString(k.Clusters[0].Cluster.CAData)
	if err != nil {
		return nil, fmt.Errorf("%s: its CA is not base64", doing)
	}
	i.ca = ca
	if i.pins, err = kubeapi.Pins(ca); err != nil {
		return nil, fmt.Errorf("%s: %w; to make it again, run `kubeadm init phase bootstrap-token` on a control-plane node", doing, err)
	}
	return i, nil
}

// CheckToken returns a token, with the reasons why no node can join with it. token is the whole
// token or its ID. The error is a TokenProblem if the cluster has no such token.
func (c *Client) CheckToken(ctx context.Context, token string, now time.Time) (*Token, error) {
	id, secret, whole := strings.Cut(token, ".")
	if err := checkTokenID(token, id); err != nil {
		return nil, fmt.Errorf("checking a token: %w", err)
	}
	obj, err := c.get(ctx, secrets, systemNamespace, kubeapi.TokenSecretName(id))
	if err != nil {
		return nil, err
	}
	if obj == nil {
		return nil, fmt.Errorf("checking token %s: %w", shown(id), TokenProblem{"the cluster has no token with this ID: it never existed, or it expired and was removed", mintAnother})
	}
	t := tokenOf(obj, now)
	if whole && secret != t.secret.Reveal() {
		t.addProblem("correct the token in the Site, or mint another", "the cluster's token with this ID has another secret")
		return &t, nil
	}
	if len(t.Problems) == 0 {
		err = c.tryToken(ctx, &t)
	}
	return &t, err
}

// HasToken reports whether the cluster accepts this token at time now. token includes the secret.
func (c *Client) HasToken(ctx context.Context, token string, now time.Time) (bool, error) {
	id, secret, err := kubeapi.SplitToken(token)
	if err != nil {
		return false, err
	}
	obj, err := c.get(ctx, secrets, systemNamespace, kubeapi.TokenSecretName(id))
	if err != nil || obj == nil {
		return false, err
	}
	t := tokenOf(obj, now)
	return len(t.Problems) == 0 && t.secret.Reveal() == secret, nil
}

var tokenID = regexp.MustCompile(`^[a-z0-9]{6}$`)

// checkTokenID returns an error if the text is neither a token nor an ID.
func checkTokenID(token, id string) error {
	if id != token {
		_, _, err := kubeapi.SplitToken(token)
		return err
	}
	if !tokenID.MatchString(id) {
		return fmt.Errorf("%q is neither a token nor a token's ID, which has six lower-case letters and digits, e.g. abcdef", shown(id))
	}
	return nil
}

// shown returns the ID of a token for messages, without the secret.
func shown(id string) string {
	if len(id) > 6 {
		return id[:6] + "..."
	}
	return id
}

// tryToken adds the problems of the cluster that prevent joining with a valid token.
func (c *Client) tryToken(ctx context.Context, t *Token) error {
	whole := t.ID + "." + t.secret.Reveal()
	i, err := c.clusterInfo(ctx)
	if err != nil {
		t.addProblem("", "%v", err)
	} else if err := kubeapi.CheckSignature(i.data, whole); err != nil {
		t.addProblem("", "cluster-info is not signed with it (%v): the controller manager does that within seconds, if --controllers includes bootstrapsigner", err)
	}
	as, err := c.as(whole)
	if err != nil {
		return err
	}
	lacks, err := as.missingPermissions(ctx, []permission{
		{"create", csrs, "", ""},
		{"get", configMaps, systemNamespace, "kubeadm-config"},
		{"get", nodes, "", ""},
	})
	switch {
	case apierrors.IsUnauthorized(err):
		t.addProblem("", "the API server does not accept it: kube-apiserver needs --enable-bootstrap-token-auth")
	case err != nil:
		return err
	}
	for _, r := range lacks {
		t.addProblem("to grant that, run `kubeadm init phase bootstrap-token` on a control-plane node", "its groups may not %s", r)
	}
	return nil
}

// RevokeToken deletes a token. token is the whole token or its ID.
func (c *Client) RevokeToken(ctx context.Context, token string) error {
	id, _, _ := strings.Cut(token, ".")
	if err := checkTokenID(token, id); err != nil {
		return fmt.Errorf("revoking a token: %w", err)
	}
	doing := "revoking token " + id
	if err := c.requirePermissions(ctx, doing, permission{"delete", secrets, systemNamespace, kubeapi.TokenSecretName(id)}); err != nil {
		return err
	}
	err := c.resource(secrets, systemNamespace).Delete(ctx, kubeapi.TokenSecretName(id), metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%s: the cluster has no token with this ID", doing)
	}
	return c.explain(doing, err)
}
