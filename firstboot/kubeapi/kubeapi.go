// Package kubeapi is first boot's client for kube-apiserver: discovery through the published
// cluster-info, reads, and the few writes that a node needs (objects, patches, evictions). It uses
// net/http, because client-go is larger than all of firstboot.
//
// Invariants: no secret is sent to a server before its certificate is verified, with a CA that the
// caller pinned or that the token's signature confirms. No error contains a secret. The size of
// every answer is limited.
package kubeapi

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/servercert"
)

// maxAnswer is the size in bytes of the largest answer that is read. A ConfigMap has at most 1 MiB.
const maxAnswer = 4 << 20

// DialFunc opens a connection.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// Client sends requests to one API server.
type Client struct {
	// Server is "https://host:port".
	Server string
	// CA has the PEM certificates with which the server is verified.
	CA []byte
	// ServerName is the name that the server's certificate must have; empty: the host in Server.
	ServerName string
	// Token is sent as a bearer token; empty: none is sent.
	Token string
	// Cert is the client's certificate; nil if there is none.
	Cert *tls.Certificate
	Dial DialFunc
	// Now returns the time at which certificates are checked; nil: this computer's clock.
	Now func() time.Time
	// Transports, if not nil, is shared with other clients that have the same Dial.
	Transports *Transports

	// kept, if not nil, is the transport of all requests.
	kept *http.Transport
}

// Transports shares connections to API servers between clients: requests in quick succession to the
// same server with the same certificate use one connection.
type Transports struct {
	mu  sync.Mutex
	all map[[sha256.Size]byte]*http.Transport
}

// Close closes all idle connections.
func (w *Transports) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, tr := range w.all {
		tr.CloseIdleConnections()
	}
	w.all = nil
}

// of returns the transport for c. Clients that differ in CA, server name or client certificate get
// different transports.
func (w *Transports) of(c *Client) (*http.Transport, error) {
	id := sha256.New()
	part := func(b []byte) { fmt.Fprintf(id, "%d\n%s", len(b), b) }
	part(c.CA)
	part([]byte(c.ServerName))
	if c.Cert != nil {
		for _, der := range c.Cert.Certificate {
			part(der)
		}
	}
	key := [sha256.Size]byte(id.Sum(nil))
	w.mu.Lock()
	defer w.mu.Unlock()
	if tr := w.all[key]; tr != nil {
		return tr, nil
	}
	conf, err := c.tls()
	if err != nil {
		return nil, err
	}
	if w.all == nil {
		w.all = map[[sha256.Size]byte]*http.Transport{}
	}
	w.all[key] = keeping(transport(c.Dial, conf))
	return w.all[key], nil
}

// keptFor is how long an idle connection is kept.
const keptFor = 5 * time.Second

// Kept returns a client that uses one connection for requests in quick succession.
func (c *Client) Kept() (*Client, error) {
	if c.kept != nil || c.Transports != nil {
		return c, nil
	}
	tr, err := c.transport()
	if err != nil {
		return nil, err
	}
	k := *c
	k.kept = keeping(tr)
	return &k, nil
}

func keeping(tr *http.Transport) *http.Transport {
	tr.DisableKeepAlives, tr.IdleConnTimeout = false, keptFor
	return tr
}

// StatusError is an answer with a status other than 200 and 201.
type StatusError struct {
	Code    int
	Path    string
	Message string
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s answered %d %s", e.Path, e.Code, http.StatusText(e.Code))
	if e.Message != "" {
		s += ": " + e.Message
	}
	return s
}

// Code returns the HTTP status in err, or 0 if err has none.
func Code(err error) int {
	var se *StatusError
	if errors.As(err, &se) {
		return se.Code
	}
	return 0
}

// Get reads path and decodes the JSON answer into out, which may be nil.
func (c *Client) Get(ctx context.Context, path string, out any) error {
	tr, err := c.transport()
	if err != nil {
		return err
	}
	return getOver(ctx, tr, c.Server, path, c.Token, out)
}

func (c *Client) transport() (*http.Transport, error) {
	if c.kept != nil {
		return c.kept, nil
	}
	if c.Transports != nil {
		return c.Transports.of(c)
	}
	conf, err := c.tls()
	if err != nil {
		return nil, err
	}
	return transport(c.Dial, conf), nil
}

func (c *Client) tls() (*tls.Config, error) {
	pool, err := Pool(c.CA)
	if err != nil {
		return nil, err
	}
	conf := &tls.Config{RootCAs: pool, ServerName: c.ServerName, MinVersion: tls.VersionTLS12, Time: c.Now,
		VerifyConnection: func(cs tls.ConnectionState) error { return servercert.Check(cs.PeerCertificates[0]) }}
	if c.Cert != nil {
		conf.Certificates = []tls.Certificate{*c.Cert}
	}
	return conf, nil
}

// MergePatch changes an object with a JSON merge patch (RFC 7386).
func (c *Client) MergePatch(ctx context.Context, path string, patch any) error {
	body, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("encoding the change of %s: %w", path, err)
	}
	return c.send(ctx, http.MethodPatch, path, mergePatch, body)
}

const mergePatch = "application/merge-patch+json"

// GetMetadata reads only the metadata of an object.
func (c *Client) GetMetadata(ctx context.Context, path string) (*Metadata, error) {
	tr, err := c.transport()
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Server+path, nil)
	if err != nil {
		return nil, fmt.Errorf("asking %s: %w", c.Server, err)
	}
	req.Header.Set("Accept", metadataOnly)
	var out struct {
		Metadata Metadata `json:"metadata"`
	}
	return &out.Metadata, do(req, tr, c.Token, &out)
}

// metadataOnly is the media type of objects reduced to their metadata.
const metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

// Delete deletes an object, and its dependents in the background.
func (c *Client) Delete(ctx context.Context, path string) error {
	return c.send(ctx, http.MethodDelete, path+"?propagationPolicy=Background", "", nil)
}

// send requests a change. contentType describes body; it is empty if there is no body.
func (c *Client) send(ctx context.Context, method, path, contentType string, body []byte) error {
	tr, err := c.transport()
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, c.Server+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("asking %s: %w", c.Server, err)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if contentType == mergePatch {
		req.Header.Set("Accept", metadataOnly) // the answer is not used
	}
	return do(req, tr, c.Token, nil)
}

func get(ctx context.Context, dial DialFunc, conf *tls.Config, server, path, token string, out any) error {
	return getOver(ctx, transport(dial, conf), server, path, token, out)
}

func getOver(ctx context.Context, tr *http.Transport, server, path, token string, out any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, server+path, nil)
	if err != nil {
		return fmt.Errorf("asking %s: %w", server, err)
	}
	return do(req, tr, token, out)
}

func transport(dial DialFunc, conf *tls.Config) *http.Transport {
	return &http.Transport{
		DialContext:         dial,
		TLSClientConfig:     conf,
		TLSHandshakeTimeout: 10 * time.Second,
		DisableKeepAlives:   true, // a client rarely sends a second request
	}
}

// do sends one request and decodes its answer.
func do(req *http.Request, tr *http.Transport, token string, out any) error {
	if req.Header.Get("Accept") == "" {
		req.Header.Set("Accept", "application/json")
	}
	req.Header.Set("User-Agent", "edgebake-firstboot")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	client := &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse // do not send the token to another server
	}}
	res, err := client.Do(req)
	if err != nil {
		return err // the error contains method, URL and cause
	}
	defer res.Body.Close()
	where := req.URL.Redacted()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	if err != nil {
		return fmt.Errorf("reading the answer of %s: %w", where, err)
	}
	if len(body) > maxAnswer {
		return fmt.Errorf("reading the answer of %s: longer than %d bytes", where, maxAnswer)
	}
	if res.StatusCode != http.StatusOK && res.StatusCode != http.StatusCreated {
		var status struct {
			Message string `json:"message"`
		}
		_ = json.Unmarshal(body, &status) // without a message if the body is not JSON (a proxy's error page)
		return &StatusError{Code: res.StatusCode, Path: req.URL.Path, Message: quoted(status.Message)}
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(body, out); err != nil {
		return fmt.Errorf("decoding the answer of %s: %w", where, err)
	}
	return nil
}

// quoted shortens a server's text and makes it printable, for consoles and reports. An attacker may
// have sent the text, because the server is not always verified.
func quoted(s string) string { return quotedTo(500, s) }

func quotedTo(most int, s string) string {
	return printable.Line(strings.ToValidUTF8(s[:min(len(s), most)], ""))
}

// Pool returns a pool of the certificates in pemData, or an error if it has none.
func Pool(pemData []byte) (*x509.CertPool, error) {
	certs, err := ParseCerts(pemData)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	for _, c := range certs {
		pool.AddCert(c)
	}
	return pool, nil
}

// ParseCerts returns every certificate in pemData, or an error if it has none.
func ParseCerts(pemData []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		var b *pem.Block
		if b, pemData = pem.Decode(pemData); b == nil {
			break
		}
		if b.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return nil, fmt.Errorf("parsing a CA certificate: %w", err)
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 {
		return nil, errors.New("parsing CA certificates: no certificate found")
	}
	return certs, nil
}

// Metadata has the fields of an object's metadata that are used here.
type Metadata struct {
	Name              string            `json:"name"`
	UID               string            `json:"uid"`
	Labels            map[string]string `json:"labels"`
	Annotations       map[string]string `json:"annotations"`
	CreationTimestamp string            `json:"creationTimestamp"`
}

// Node has the fields of a Node object that are used here.
type Node struct {
	Metadata Metadata `json:"metadata"`
	Spec     struct {
		Unschedulable bool    `json:"unschedulable"`
		Taints        []Taint `json:"taints,omitempty"`
	} `json:"spec"`
	Status struct {
		Conditions []Condition `json:"conditions"`
		Addresses  []struct {
			Type    string `json:"type"`
			Address string `json:"address"`
		} `json:"addresses"`
		NodeInfo struct {
			MachineID  string `json:"machineID"`
			SystemUUID string `json:"systemUUID"`
			// BootID identifies the boot in which kubelet last reported.
			BootID string `json:"bootID"`
		} `json:"nodeInfo"`
	} `json:"status"`
}

// Taint is a taint of a Node.
type Taint struct {
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
}

// Condition is a condition of a Node.
type Condition struct {
	Type    string `json:"type"`
	Status  string `json:"status"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	// LastHeartbeatTime is when kubelet last reported this condition, by kubelet's clock.
	LastHeartbeatTime time.Time `json:"lastHeartbeatTime,omitzero"`
}

// Ready reports whether the Node is Ready, and the reason from that condition.
func (n *Node) Ready() (ready bool, why string) {
	for _, c := range n.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True", strings.TrimSpace(c.Reason + ": " + c.Message)
		}
	}
	return false, "kubelet has not reported yet"
}

// Heartbeat returns when kubelet last reported, by kubelet's clock, in whole seconds.
func (n *Node) Heartbeat() time.Time {
	for _, c := range n.Status.Conditions {
		if c.Type == "Ready" {
			return c.LastHeartbeatTime
		}
	}
	return time.Time{}
}

// GetNode reads one Node.
func (c *Client) GetNode(ctx context.Context, name string) (*Node, error) {
	n := new(Node)
	if err := c.Get(ctx, "/api/v1/nodes/"+name, n); err != nil {
		return nil, err
	}
	return n, nil
}

// Version returns the server's version of Kubernetes, for example v1.37.2.
func (c *Client) Version(ctx context.Context) (string, error) {
	var v struct {
		GitVersion string `json:"gitVersion"`
	}
	if err := c.Get(ctx, "/version", &v); err != nil {
		return "", err
	}
	return v.GitVersion, nil
}

// Pod has the fields of a Pod object that are used here.
type Pod struct {
	Metadata struct {
		Name              string           `json:"name"`
		Namespace         string           `json:"namespace"`
		UID               string           `json:"uid"`
		DeletionTimestamp string           `json:"deletionTimestamp,omitempty"`
		OwnerReferences   []OwnerReference `json:"ownerReferences,omitempty"`
	} `json:"metadata"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// Stays reports whether a drain leaves the pod on its node: the pod has ended, or no controller
// would create it elsewhere (it is static, of a DaemonSet, or has no controller).
func (p *Pod) Stays() bool {
	i := slices.IndexFunc(p.Metadata.OwnerReferences, func(o OwnerReference) bool { return o.Controller })
	return i < 0 || p.Metadata.OwnerReferences[i].Kind == "DaemonSet" || p.Metadata.OwnerReferences[i].Kind == "Node" ||
		p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed"
}

// OwnerReference names the owner of an object.
type OwnerReference struct {
	Kind       string `json:"kind"`
	Controller bool   `json:"controller,omitempty"`
}

// podsPage is the number of pods requested in one answer. A pod has about 10 KiB, and an answer is
// limited to maxAnswer.
const podsPage = 50

// PodsOn lists the pods of a Node.
func (c *Client) PodsOn(ctx context.Context, node string) ([]Pod, error) {
	var all []Pod
	query := url.Values{"fieldSelector": {"spec.nodeName=" + node}, "limit": {strconv.Itoa(podsPage)}}
	for {
		var list struct {
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []Pod `json:"items"`
		}
		if err := c.Get(ctx, "/api/v1/pods?"+query.Encode(), &list); err != nil {
			return nil, err
		}
		all = append(all, list.Items...)
		if list.Metadata.Continue == "" {
			return all, nil
		}
		query.Set("continue", list.Metadata.Continue)
	}
}

// Evict requests the eviction of the pod with p's UID. The API server answers 429 while a
// disruption budget forbids the eviction.
func (c *Client) Evict(ctx context.Context, p Pod) error {
	path := fmt.Sprintf("/api/v1/namespaces/%s/pods/%s/eviction", p.Metadata.Namespace, p.Metadata.Name)
	body, err := json.Marshal(map[string]any{
		"apiVersion": "policy/v1", "kind": "Eviction",
		"metadata":      map[string]any{"name": p.Metadata.Name, "namespace": p.Metadata.Namespace},
		"deleteOptions": map[string]any{"preconditions": map[string]any{"uid": p.Metadata.UID}},
	})
	if err != nil {
		return fmt.Errorf("encoding the eviction of %s: %w", p.Metadata.Name, err)
	}
	return c.send(ctx, http.MethodPost, path, "application/json", body)
}
