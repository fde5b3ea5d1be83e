package worldtest

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
)

func (c *Cluster) clone(t *testing.T) *Cluster {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	n := &Cluster{
		T: t, CA: c.CA, Key: c.Key, CAPEM: c.CAPEM, Pin: c.Pin, Names: c.Names, TLS: c.TLS, Now: c.Now, Issued: c.Issued,
		clusterState: cloned(c.clusterState), clusterSettings: cloned(c.clusterSettings),
	}
	for name, node := range c.Nodes {
		m := *node
		m.Metadata.Labels, m.Metadata.Annotations = maps.Clone(node.Metadata.Labels), maps.Clone(node.Metadata.Annotations)
		m.Status.Conditions = slices.Clone(node.Status.Conditions)
		n.Nodes[name] = &m
	}
	if c.UpdateLease != nil {
		l := *c.UpdateLease
		n.UpdateLease = &l
	}
	n.Serve(t)
	return n
}

// RequestCounts returns the number of requests by path.
func (c *Cluster) RequestCounts() map[string]int {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	n := map[string]int{}
	for _, path := range c.Requests {
		n[path]++
	}
	return n
}

// Attach makes c the cluster of a machine.
func (c *Cluster) Attach(w *World) {
	c.KubeletReportTime, c.kubeletSilent, c.Now, c.registerNode = w.kubeletReportTime, w.kubeletSilent, w.ClusterTime, func() { w.registerNode(c) }
	c.reportedBootID = func() string { return machine.BootID(w.Env()) }
	c.dialError = func(addr string) error {
		if err := w.networkError(); err != nil {
			return err
		}
		if w.RefuseDial != nil {
			if err, ours := w.RefuseDial(addr); ours {
				return err
			}
		}
		return c.DialError(addr)
	}
}

// Cluster is a fake cluster: a CA, and API servers that all give the same answers.
type Cluster struct {
	T      *testing.T
	CA     *x509.Certificate
	Key    crypto.Signer
	CAPEM  []byte
	Pin    string
	Names  []string // in the API servers' certificate
	TLS    *tls.Config
	server Listener
	routes *http.ServeMux
	Issued *sync.Map        // client certificates; clones share it
	Now    func() time.Time // the cluster's clock

	Mu sync.Mutex
	clusterState
	clusterSettings

	// A copy does not have the fields below.

	// OtherClusters maps addresses to the other clusters to which they belong.
	OtherClusters map[string]*Cluster
	// LeaseRace changes the UpdateLease once, after its next read.
	LeaseRace func(*UpdateLease)
	// Disrupt reports whether a disruption budget allows an eviction; nil: always.
	Disrupt func(name string) bool
	// LeaseRenewTime returns when kubelet last renewed the lease of its Node.
	LeaseRenewTime func() string
	// KubeletReportTime returns when kubelet last reported.
	KubeletReportTime func() time.Time
	// reportedBootID returns the boot that a Node without a BootID shows.
	reportedBootID func() string
	// kubeletSilent reports whether that machine's kubelet has been off for 40 s.
	kubeletSilent func(machineID string) bool
	// ReportedMachineID returns the machine ID that the Node shows if
	// another machine reports as it too.
	ReportedMachineID func(own string) string
	// registerNode registers this machine's Node if kubelet would do so now. Mu is held.
	registerNode func()
	// dialError returns the error of a new connection from the machine to an address.
	dialError func(addr string) error
}

// clusterState is the state of a cluster, which World.CloneWith copies and World.Fingerprint hashes.
type clusterState struct {
	Down  map[string]bool
	Nodes map[string]*kubeapi.Node
	// HubServerCSR is the state of yurthub's request for a server certificate: Approved, Denied or
	// pending. If there are several requests, it has their states, oldest first, separated by ", ".
	HubServerCSR string
	// HubClientCSR is the state of yurthub's request for a client certificate; "" means approved.
	HubClientCSR string
	// NoClusterInfo means that there is no cluster-info.
	NoClusterInfo  bool
	CreatedSecrets []string // created Secrets
	CreatedRBAC    []string // created Roles and RoleBindings in kube-public
	// ApplyMarker is the data of the ConfigMap edgebake-manifests, and MarkerMode its label
	// edgebake.io/applying.
	ApplyMarker map[string]string
	MarkerMode  string
	// UploadedConfigs has the documents that kubeadm has uploaded;
	// Annotations has those of kubeadm-config.
	UploadedConfigs, Annotations map[string]string
	// CreatedPaths has the paths of objects that exist or were created.
	CreatedPaths []string
	// AllApplied means that the marker shows all objects as applied.
	AllApplied  bool
	UpdateLease *UpdateLease // may be nil
}

// clusterSettings has the rest of what World.CloneWith copies of a cluster.
type clusterSettings struct {
	unsigned     bool
	TokenRevoked bool
	// ReadyzStatus, if not 0, is the status of /readyz.
	ReadyzStatus int
	// ServiceCIDRs has the service ranges as objects, ServiceSubnet has them as in kubeadm-config.
	// Services maps addresses to Services.
	ServiceCIDRs    []string
	ServiceSubnet   string
	Services        map[string]string
	NoFieldSelector bool // no field selector for addresses
	// NoAnonymous rejects anonymous requests, as an AuthenticationConfiguration may.
	NoAnonymous bool
	NotReady    bool
	// NodeRevives means that an existing Node turns Ready when its kubelet starts.
	NodeRevives bool
	NoRBAC      bool
	// NoNodePool means that there is no NodePool. NodePoolType is its type, by default Edge.
	NoNodePool   bool
	NodePoolType string
	// NodeCreationDenied means that a webhook denies new Nodes.
	NodeCreationDenied bool
	// LabelChangeDenied means that a webhook denies changes of a Node's labels.
	LabelChangeDenied bool
	NodePoolVersion   string // served version of NodePools
	ConversionFails   bool   // the conversion of NodePools fails
	Requests          []string
	// ServiceReadDenied means that nodes may not read Services.
	ServiceReadDenied bool
	// Recreations counts how often the cluster was recreated with the same keys.
	Recreations int
	// ExtraCAs has additional CAs in cluster-info (PEM).
	ExtraCAs []byte
	// Registrations counts the registrations of each Node.
	Registrations map[string]int
	// SignatureStale means that the signature in cluster-info is still that of a former kubeconfig.
	SignatureStale bool
	// Applied has the paths of applied objects. ApplyFails rejects one object.
	Applied    []string
	ApplyFails bool
	// MarkerPatchFails rejects changes of the marker.
	MarkerPatchFails bool
	// DocumentsNoteFails rejects the annotation about uploaded documents.
	DocumentsNoteFails bool
	KubeletStats       string // answer of kubelet on m2 to stats/summary
	// DNSObjects has the paths of CoreDNS' existing objects;
	// DeletedPaths has those that were deleted.
	DNSObjects, DeletedPaths []string
	// Version is the version of the API servers.
	Version string
	// Pods are the Pods of the Node PodsNode. EvictedPods has the names of evicted ones.
	Pods        []kubeapi.Pod
	PodsNode    string
	EvictedPods []string
}

// NewCluster makes a cluster. names are added to the API servers' certificate.
func NewCluster(t *testing.T, names ...string) *Cluster {
	ca, key := NewCA(t, "kubernetes")
	return NewClusterOf(t, ca, key, names...)
}

// NewClusterOf makes a cluster with this CA.
func NewClusterOf(t *testing.T, ca *x509.Certificate, key crypto.Signer, names ...string) *Cluster {
	c := &Cluster{T: t, Issued: new(sync.Map), CA: ca, Key: key,
		clusterState: clusterState{Down: map[string]bool{}, Nodes: map[string]*kubeapi.Node{}}, clusterSettings: clusterSettings{NodePoolVersion: "v1beta2"},
		Names: append([]string{"kubernetes", "192.0.2.11", "192.0.2.12"}, names...), Now: func() time.Time { return WorldStart }}
	c.CAPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.CA.Raw})
	c.Pin = kubeapi.Pin(c.CA)
	pool := x509.NewCertPool()
	pool.AddCert(c.CA)
	c.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, ClientCAs: pool} // like kube-apiserver, which answers 401 to an invalid one
	c.Serve(t)
	return c
}

// Serve starts the cluster's API servers.
func (c *Cluster) Serve(t *testing.T) {
	c.routes = c.newRoutes()
	conf := c.TLS.Clone()
	RenewedCertificate(conf, func() time.Time { return c.Now() }, func(from, until time.Time) tls.Certificate {
		return IssueFor(c.T, c.CA, c.Key, "kube-apiserver", c.Names, from, until)
	})
	c.server = Serve(t, &http.Server{
		Handler: c, TLSConfig: conf, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){}, // HTTP/1 is enough
	})
}

// RenewedCertificate gives a server a certificate that is valid for a year by the
// server's clock, and renews it after half a year.
func RenewedCertificate(conf *tls.Config, now func() time.Time, issue func(from, until time.Time) tls.Certificate) {
	var mu sync.Mutex
	var cert tls.Certificate
	conf.Time = now
	conf.SessionTicketsDisabled = true // tickets would be made at times when nobody waits for the server
	conf.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		if now := now(); cert.Leaf == nil || now.AddDate(0, 6, 0).After(cert.Leaf.NotAfter) {
			cert = issue(now.Add(-Backdate), now.AddDate(1, 0, 0))
		}
		c := cert
		return &c, nil
	}
}

// IssueFor issues a certificate for servers and clients with these names.
func IssueFor(t *testing.T, ca *x509.Certificate, key crypto.Signer, cn string, names []string, from, until time.Time) tls.Certificate {
	tmpl := &x509.Certificate{
		Subject: pkix.Name{CommonName: cn}, NotBefore: from, NotAfter: until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, name)
		}
	}
	return issue(t, ca, key, tmpl)
}

// Backdate is how long before its issue the validity of a certificate from
// kubeadm or the controller manager starts.
const Backdate = 5 * time.Minute

// NewCA makes a CA with an Ed25519 key, which has the cheapest handshakes.
func NewCA(t *testing.T, name string) (*x509.Certificate, crypto.Signer) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: WorldStart.Add(-time.Hour), NotAfter: WorldStart.AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, public, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// issue issues a certificate with the validity of tmpl.
func issue(t *testing.T, ca *x509.Certificate, caKey crypto.Signer, tmpl *x509.Certificate) tls.Certificate {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if tmpl.NotBefore.IsZero() || tmpl.NotAfter.IsZero() {
		t.Fatalf("%s is valid from %s to %s", tmpl.Subject, tmpl.NotBefore, tmpl.NotAfter)
	}
	tmpl.SerialNumber = big.NewInt(2)
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca, public, caKey)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// Client issues a kubelet's certificate and key, as PEM in one text.
func (c *Cluster) Client(cn string, until time.Time) string {
	from := c.Now().Add(-Backdate)
	if until.Before(from) { // it has expired
		from = until.AddDate(-1, 0, 0)
	}
	return c.ClientFrom(cn, from, until)
}

// ClientFrom is Client with a start of validity. Equal arguments give equal bytes.
func (c *Cluster) ClientFrom(cn string, from, until time.Time) string {
	pair, _ := c.Issued.LoadOrStore(fmt.Sprint(cn, from, until), sync.OnceValue(func() string { return c.newPair(cn, from, until) }))
	return pair.(func() string)()
}

func (c *Cluster) newPair(cn string, from, until time.Time) string {
	return PairPEM(c.T, issue(c.T, c.CA, c.Key, &x509.Certificate{
		Subject:     pkix.Name{CommonName: cn, Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, NotBefore: from, NotAfter: until,
	}))
}

// PairPEM returns a certificate and its key, as PEM in one text.
func PairPEM(t *testing.T, cert tls.Certificate) string {
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]})) +
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
}

// request makes a certificate request.
func (c *Cluster) request(cn string, names ...string) []byte {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: cn}, DNSNames: names}, c.Key)
	if err != nil {
		c.T.Error(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

func (c *Cluster) Dial(ctx context.Context, addr string) (net.Conn, error) {
	c.Mu.Lock()
	other := c.OtherClusters[addr]
	c.Mu.Unlock()
	if other != nil {
		return other.Dial(ctx, addr)
	}
	if err := c.DialError(addr); err != nil {
		return nil, err
	}
	return c.server.Dial(ctx, addr)
}

// DialError returns the error of a connection to one of the cluster's own addresses.
func (c *Cluster) DialError(addr string) error {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if c.OtherClusters[addr] != nil {
		return errors.New("connection reset by peer") // the address has moved to another cluster
	}
	if c.Down[addr] {
		return errors.New("connection refused")
	}
	if !strings.HasPrefix(addr, "192.0.2.") && !strings.HasPrefix(addr, "apiserver.cluster.local:") {
		return fmt.Errorf("no route to %s", addr)
	}
	return nil
}

// Register registers a Node, as kubelet does.
func (c *Cluster) Register(name, joinConf, machineID string) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	c.register(name, joinConf, machineID)
}

// register is Register for callers that hold c.Mu.
func (c *Cluster) register(name, joinConf, machineID string) {
	if n := c.Nodes[name]; n != nil {
		if c.NodeRevives {
			n.Status.Conditions[0].Status = "True"
			n.Status.NodeInfo.MachineID = machineID // kubelet's first report
		}
		return // it keeps its labels
	}
	if c.NodeCreationDenied {
		return
	}
	n := &kubeapi.Node{}
	n.Metadata.Name, n.Metadata.UID = name, fmt.Sprint("node-", c.Recreations)
	if c.Registrations == nil {
		c.Registrations = map[string]int{}
	}
	if c.Registrations[n.Metadata.UID+name]++; c.Registrations[n.Metadata.UID+name] > 1 {
		n.Metadata.UID += fmt.Sprint("-", c.Registrations[n.Metadata.UID+name])
	}
	n.Status.NodeInfo.MachineID = machineID
	n.Metadata.Labels = map[string]string{}
	for pair := range strings.SplitSeq(kubeletArgs(c.T, joinConf)["node-labels"], ",") {
		if k, v, ok := strings.Cut(pair, "="); ok {
			n.Metadata.Labels[k] = v
		}
	}
	n.Status.Conditions = []kubeapi.Condition{{Type: "Ready", Status: "True"}}
	c.Nodes[name] = n
}

// hubTrouble reports whether the cluster lacks something that yurthub needs. before17 means a
// yurthub older than v1.7, which needs NodePools v1beta1.
func (c *Cluster) hubTrouble(before17 bool) bool {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	pools := "v1beta2"
	if before17 {
		pools = "v1beta1"
	}
	return c.NoRBAC || c.NodePoolVersion != pools || c.ConversionFails || strings.HasSuffix(c.HubServerCSR, "pending") || strings.HasSuffix(c.HubServerCSR, "Denied")
}

func sign(payload, id, secret string) string {
	header := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"HS256","kid":"` + id + `"}`))
	m := hmac.New(sha256.New, []byte(secret))
	m.Write([]byte(header + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))))
	return header + ".." + base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// ApplyCounts returns how often each object was applied.
func (c *Cluster) ApplyCounts() map[string]int {
	n := map[string]int{}
	for _, path := range c.Applied {
		n[path]++
	}
	return n
}

// AllDown switches every API server and the endpoint off or on.
func (c *Cluster) AllDown(down bool) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	for _, m := range []string{"192.0.2.11:6443", "192.0.2.12:6443", "192.0.2.13:6443", Endpoint} {
		c.Down[m] = down
	}
}

// CAOf returns the CA in a kubeconfig.
func CAOf(t *testing.T, conf string) []byte {
	t.Helper()
	k, err := kubeapi.ParseKubeconfig([]byte(conf))
	if err != nil {
		t.Fatal(err)
	}
	c, err := k.Cluster()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := c.CA("")
	if err != nil {
		t.Fatal(err)
	}
	return ca
}
