package worldtest

import (
	"cmp"
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
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
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

	"github.com/edgebake/edgebake/cluster/api"
)

func (c *Cluster) clone(t *testing.T) *Cluster {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	n := &Cluster{
		T: t, Ca: c.Ca, Key: c.Key, Pem: c.Pem, Pin: c.Pin, Names: c.Names, Tls: c.Tls, Now: c.Now, Issued: c.Issued,
		Down: maps.Clone(c.Down), Births: c.Births, NoService: c.NoService, made: maps.Clone(c.made), Applied: slices.Clone(c.Applied), Marked: c.Marked, Marker: maps.Clone(c.Marker), markerMode: c.markerMode, Configs: maps.Clone(c.Configs), Annotations: maps.Clone(c.Annotations), Created: slices.Clone(c.Created), NoNotes: c.NoNotes, WebhookDown: c.WebhookDown, unsigned: c.unsigned, Revoked: c.Revoked, Nodes: map[string]*api.Node{}, NotReady: c.NotReady,
		Csr: c.Csr, ClientCSR: c.ClientCSR, Revive: c.Revive, NoRBAC: c.NoRBAC, NoPool: c.NoPool, PoolType: c.PoolType,
		RefusesNode: c.RefusesNode, LabelsKept: c.LabelsKept, Pools: c.Pools, NoWebhook: c.NoWebhook,
		requests: slices.Clone(c.requests), Unpublished: c.Unpublished, Changed: c.Changed, Summary: c.Summary, Objects: slices.Clone(c.Objects), Rules: slices.Clone(c.Rules),
	}
	for name, node := range c.Nodes {
		m := *node
		m.Metadata.Labels, m.Metadata.Annotations = maps.Clone(node.Metadata.Labels), maps.Clone(node.Metadata.Annotations)
		m.Status.Conditions = slices.Clone(node.Status.Conditions)
		n.Nodes[name] = &m
	}
	n.Serve(t)
	return n
}

// Asked counts the requests by path.
func (c *Cluster) Asked() map[string]int {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	n := map[string]int{}
	for _, path := range c.requests {
		n[path]++
	}
	return n
}

// Of makes it the cluster that a machine is in.
func (c *Cluster) Of(w *World) {
	c.Renewed, c.silent, c.Now, c.registers = w.kubeletReported, w.kubeletSilent, w.Truth, func() { w.kubeletRegisters(c) }
	c.wrong = func(addr string) error {
		if err := w.unreachable(); err != nil {
			return err
		}
		if w.Refuses != nil {
			if err, ours := w.Refuses(addr); ours {
				return err
			}
		}
		return c.Refuses(addr)
	}
}

// Cluster is a CA and API servers that all answer alike.
type Cluster struct {
	T      *testing.T
	Ca     *x509.Certificate
	Key    crypto.Signer
	Pem    []byte
	Pin    string
	Names  []string // in its API servers' certificate
	Tls    *tls.Config
	server Listener
	Issued *sync.Map        // certificates of clients; clones share it
	Now    func() time.Time // its clock

	Mu   sync.Mutex
	Down map[string]bool
	// Elsewhere are addresses of this network that belong to other clusters.
	Elsewhere map[string]*Cluster
	unsigned  bool
	Revoked   bool
	// Ready, if set, is the status of /readyz, e.g. while it starts.
	Ready int
	// ServiceCIDRs and ServiceSubnet are its service ranges, by object and as
	// kubeadm noted them; services are Services by address.
	ServiceCIDRs  []string
	ServiceSubnet string
	Services      map[string]string
	NoSelector    bool // it knows no field selector for addresses
	// KnownOnly: it answers nobody who does not say who he is, as an
	// AuthenticationConfiguration for the health paths alone has it.
	KnownOnly bool
	Nodes     map[string]*api.Node
	NotReady  bool
	// Csr is the state of yurthub's request: Approved, Denied or pending; or
	// those of several, the oldest first, with ", " between.
	Csr string
	// ClientCSR is that of the one it makes with the token; "": approved.
	ClientCSR string
	// Revive: a Node that was there turns Ready with its kubelet.
	Revive bool
	NoRBAC bool
	// NoPool: there is no NodePool; PoolType is its type, "": Edge.
	NoPool   bool
	PoolType string
	// RefusesNode: a webhook lets nobody make a Node.
	RefusesNode bool
	// LabelsKept: a webhook lets nobody change a Node's labels.
	LabelsKept bool
	Pools      string // version of NodePools that is served
	NoWebhook  bool   // that turns NodePools from one version into another
	requests   []string
	// NoService: nodes may not read Services, as where their authorizer is off.
	NoService bool
	// Births counts how often it was born again with its keys.
	Births int
	// Beside are further CAs that cluster-info has, PEM.
	Beside []byte
	// made counts the Nodes of each name that were registered.
	made map[string]int
	// Changed: cluster-info has another kubeconfig, and still the former one's signature.
	Changed bool
	// Unpublished: there is no cluster-info yet.
	Unpublished bool
	Objects     []string // that were created
	// Applied are the paths of objects that were applied; marked says that
	// somebody has noted that all are. WebhookDown refuses one of them.
	Applied     []string
	Marked      bool
	WebhookDown bool
	// Marker is what is noted of each of them; NoNotes refuses more of that.
	Marker     map[string]string
	markerMode string
	NoNotes    bool
	// NoDocuments refuses the note of the documents that were uploaded.
	NoDocuments bool
	// Configs are what kubeadm has uploaded, annotations those of kubeadm-config.
	Configs, Annotations map[string]string
	Summary              string // what kubelet of m2 says of its machine
	// Created are the paths of objects that are there or were created.
	Created []string
	// Dns are the paths of CoreDNS' objects that are there, deleted those that were.
	Dns, Deleted []string
	Rules        []string // in kube-public, that were created
	// Lease is when kubelet last renewed the lease of its Node.
	Lease func() string
	// Renewed is when kubelet last reported.
	Renewed func() time.Time
	// silent reports whether that machine's kubelet has been off for a while.
	silent func(machineID string) bool
	// Twin is the machine that the Node shows now, if another one reports as it too.
	Twin func(own string) string
	// registers has kubelet of this machine register its Node, if it is to. mu is held.
	registers func()
	// wrong is what is wrong by now with the way from the machine to that address.
	wrong func(addr string) error
}

// NewCluster makes one whose certificate has kubernetes and names.
func NewCluster(t *testing.T, names ...string) *Cluster {
	ca, key := NewCA(t, "kubernetes")
	return NewClusterOf(t, ca, key, names...)
}

// NewClusterOf makes one with that CA.
func NewClusterOf(t *testing.T, ca *x509.Certificate, key crypto.Signer, names ...string) *Cluster {
	c := &Cluster{T: t, Issued: new(sync.Map), Down: map[string]bool{}, Nodes: map[string]*api.Node{}, Pools: "v1beta2", Ca: ca, Key: key,
		Names: append([]string{"kubernetes", "192.0.2.11", "192.0.2.12"}, names...), Now: func() time.Time { return WorldStart }}
	c.Pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Ca.Raw})
	c.Pin = api.Pin(c.Ca)
	pool := x509.NewCertPool()
	pool.AddCert(c.Ca)
	c.Tls = &tls.Config{ClientAuth: tls.RequestClientCert, ClientCAs: pool} // as kube-apiserver, which answers 401 to one that it does not accept
	c.Serve(t)
	return c
}

func (c *Cluster) Serve(t *testing.T) {
	conf := c.Tls.Clone()
	Shown(conf, func() time.Time { return c.Now() }, func(from, until time.Time) tls.Certificate {
		return IssueFor(c.T, c.Ca, c.Key, "kube-apiserver", c.Names, from, until)
	})
	c.server = Serve(t, &http.Server{
		Handler: c, TLSConfig: conf, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){}, // HTTP/1 will do
	})
}

// Shown gives a server a certificate of a year by its own clock, renewed when half of
// it is over.
func Shown(conf *tls.Config, now func() time.Time, issue func(from, until time.Time) tls.Certificate) {
	var mu sync.Mutex
	var cert tls.Certificate
	conf.Time = now
	conf.SessionTicketsDisabled = true // they are made when nobody waits for the server
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

// IssueFor makes a certificate with which servers and clients of these names prove
// themselves.
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

// Backdate is how long before it is made a certificate of kubeadm or of the
// controller manager begins.
const Backdate = 5 * time.Minute

// NewCA makes one of Ed25519, as issue makes keys: half of what machines that are
// booted by the thousand do is handshakes, and these are the cheapest.
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

// issue makes a certificate; who asks says for which time.
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

// Client makes kubelet's certificate and key, PEM in one file.
func (c *Cluster) Client(cn string, until time.Time) string {
	from := c.Now().Add(-Backdate)
	if until.Before(from) { // it has expired
		from = until.AddDate(-1, 0, 0)
	}
	return c.ClientFrom(cn, from, until)
}

// ClientFrom issues the same to who asks again: what a machine does is the same
// each time, to the byte.
func (c *Cluster) ClientFrom(cn string, from, until time.Time) string {
	pair, _ := c.Issued.LoadOrStore(fmt.Sprint(cn, from, until), sync.OnceValue(func() string { return c.newPair(cn, from, until) }))
	return pair.(func() string)()
}

func (c *Cluster) newPair(cn string, from, until time.Time) string {
	return PairPEM(c.T, issue(c.T, c.Ca, c.Key, &x509.Certificate{
		Subject:     pkix.Name{CommonName: cn, Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, NotBefore: from, NotAfter: until,
	}))
}

// PairPEM is a certificate and its key, in one text.
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
	other := c.Elsewhere[addr]
	c.Mu.Unlock()
	if other != nil {
		return other.Dial(ctx, addr)
	}
	if err := c.Refuses(addr); err != nil {
		return nil, err
	}
	return c.server.Dial(ctx, addr)
}

// Refuses is what is wrong with an address that is not elsewhere.
func (c *Cluster) Refuses(addr string) error {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if c.Elsewhere[addr] != nil {
		return errors.New("connection reset by peer") // it was not, when it was reached
	}
	if c.Down[addr] {
		return errors.New("connection refused")
	}
	if !strings.HasPrefix(addr, "192.0.2.") && !strings.HasPrefix(addr, "apiserver.cluster.local:") {
		return fmt.Errorf("no route to %s", addr)
	}
	return nil
}

// Register is kubelet's first POST.
func (c *Cluster) Register(name, joinConf, machineID string) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	c.add(name, joinConf, machineID)
}

// add is register. c.mu is held.
func (c *Cluster) add(name, joinConf, machineID string) {
	if n := c.Nodes[name]; n != nil {
		if c.Revive {
			n.Status.Conditions[0].Status = "True"
			n.Status.NodeInfo.MachineID = machineID // kubelet's first report
		}
		return // it keeps its labels
	}
	if c.RefusesNode {
		return
	}
	n := &api.Node{}
	n.Metadata.Name, n.Metadata.UID = name, fmt.Sprint("node-", c.Births)
	if c.made == nil {
		c.made = map[string]int{}
	}
	if c.made[n.Metadata.UID+name]++; c.made[n.Metadata.UID+name] > 1 {
		n.Metadata.UID += fmt.Sprint("-", c.made[n.Metadata.UID+name])
	}
	n.Status.NodeInfo.MachineID = machineID
	n.Metadata.Labels = map[string]string{}
	for pair := range strings.SplitSeq(kubeletArgs(c.T, joinConf)["node-labels"], ",") {
		if k, v, ok := strings.Cut(pair, "="); ok {
			n.Metadata.Labels[k] = v
		}
	}
	n.Status.Conditions = []api.Condition{{Type: "Ready", Status: "True"}}
	c.Nodes[name] = n
}

// hubTrouble reports whether yurthub lacks something of the cluster.
func (c *Cluster) hubTrouble(before17 bool) bool {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	pools := "v1beta2"
	if before17 {
		pools = "v1beta1"
	}
	return c.NoRBAC || c.Pools != pools || c.NoWebhook || strings.HasSuffix(c.Csr, "pending") || strings.HasSuffix(c.Csr, "Denied")
}

func (c *Cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if c.wrong != nil {
		KeptAlive(r, c.wrong)
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	c.requests = append(c.requests, r.URL.Path)
	answer := func(v any) {
		if err := json.NewEncoder(w).Encode(v); err != nil {
			c.T.Error(err)
		}
	}
	auth := r.Header.Get("Authorization")
	if auth != "" && (auth != "Bearer "+TestToken || c.Revoked) {
		http.Error(w, `{"message":"Unauthorized"}`, http.StatusUnauthorized)
		return
	}
	if auth == "" && !c.accepts(r.TLS.PeerCertificates) {
		http.Error(w, `{"message":"Unauthorized"}`, http.StatusUnauthorized)
		return
	}
	switch {
	case r.URL.Path == "/readyz" && c.Ready != 0:
		http.Error(w, "[-]informer-sync failed", c.Ready)
	case r.URL.Path == "/readyz":
		answer("ok")
	case r.URL.Path == "/api/v1":
		answer(map[string]any{"resources": []any{map[string]any{"name": "secrets", "kind": "Secret", "namespaced": true},
			map[string]any{"name": "configmaps", "kind": "ConfigMap", "namespaced": true}, map[string]any{"name": "namespaces", "kind": "Namespace"},
			map[string]any{"name": "namespaces/status", "kind": "Namespace"}}})
	case r.Header.Get("Content-Type") == "application/apply-patch+yaml":
		switch {
		case r.Method != http.MethodPatch || r.URL.RawQuery != "force=true&fieldManager=edgebake":
			c.T.Errorf("applied by %s %s", r.Method, r.URL)
		case strings.HasPrefix(r.URL.Path, "/api/v1/namespaces/shop/") && !slices.Contains(c.Applied, "/api/v1/namespaces/shop"):
			http.Error(w, `{"message":"namespaces \"shop\" not found"}`, http.StatusNotFound)
		case strings.HasSuffix(r.URL.Path, "/late") && c.WebhookDown:
			http.Error(w, `{"message":"failed calling webhook"}`, http.StatusInternalServerError)
		default:
			c.Applied = append(c.Applied, r.URL.Path)
			answer(map[string]any{})
		}
	case r.Method == http.MethodPost && (r.URL.Path == "/api/v1/namespaces" || r.URL.Path == "/api/v1/namespaces/default/configmaps" || r.URL.Path == "/api/v1/namespaces/shop/configmaps"):
		var made struct{ Metadata struct{ Name string } }
		if err := json.NewDecoder(r.Body).Decode(&made); err != nil {
			c.T.Error(err)
		}
		path := r.URL.Path + "/" + made.Metadata.Name
		if slices.Contains(c.Created, path) {
			http.Error(w, `{"message":"already exists"}`, http.StatusConflict)
			return
		}
		c.Created = append(c.Created, path)
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	case slices.Contains(c.Dns, r.URL.Path) && r.Method == http.MethodDelete:
		c.Deleted = append(c.Deleted, r.URL.Path)
		c.Dns = slices.DeleteFunc(c.Dns, func(p string) bool { return p == r.URL.Path })
		answer(map[string]any{})
	case slices.Contains(c.Dns, r.URL.Path):
		answer(map[string]any{})
	case r.URL.Path == markerPath && c.Marker == nil && !c.Marked:
		http.NotFound(w, r)
	case r.URL.Path == markerPath && r.Method == http.MethodPatch:
		var patch struct {
			Metadata struct{ Labels map[string]*string }
			Data     map[string]string
		}
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
			c.T.Error(err)
		}
		if c.NoNotes {
			http.Error(w, `{"message":"failed calling webhook of ConfigMaps"}`, http.StatusInternalServerError)
			return
		}
		maps.Copy(c.Marker, patch.Data)
		if to, ok := patch.Metadata.Labels[applyingLabel]; ok && to == nil {
			c.Marked = true
		}
		answer(map[string]any{})
	case r.URL.Path == markerPath && r.Method == http.MethodGet:
		labels := map[string]string{}
		if !c.Marked {
			labels[applyingLabel] = cmp.Or(c.markerMode, "true")
		}
		answer(map[string]any{"metadata": map[string]any{"labels": labels}, "data": c.Marker})
	case r.URL.Path == "/api/v1/namespaces/kube-system/configmaps" && r.Method == http.MethodPost:
		var made struct {
			Metadata struct{ Labels map[string]string }
			Data     map[string]string
		}
		if err := json.NewDecoder(r.Body).Decode(&made); err != nil || made.Metadata.Labels[applyingLabel] == "" {
			c.T.Errorf("the marker says at once that all is applied (%v)", err)
		}
		if c.Marker != nil || c.Marked {
			http.Error(w, `{"message":"already exists"}`, http.StatusConflict)
			return
		}
		c.Marker, c.markerMode = made.Data, made.Metadata.Labels[applyingLabel]
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	case r.URL.Path == "/api/v1/namespaces/kube-system/secrets" && r.Method == http.MethodPost:
		b, err := io.ReadAll(r.Body)
		if err != nil {
			c.T.Error(err)
		}
		if slices.Contains(c.Objects, string(b)) {
			http.Error(w, `{"message":"already exists"}`, http.StatusConflict)
			return
		}
		c.Objects = append(c.Objects, string(b))
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	case r.URL.Path == "/apis/rbac.authorization.k8s.io/v1":
		answer(map[string]any{"resources": []any{map[string]any{"name": "roles", "kind": "Role", "namespaced": true}, map[string]any{"name": "rolebindings", "kind": "RoleBinding", "namespaced": true}}})
	case strings.HasPrefix(r.URL.Path, "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/role") && r.Method == http.MethodPost:
		if slices.Contains(c.Rules, r.URL.Path) {
			http.Error(w, `{"message":"already exists"}`, http.StatusConflict)
			return
		}
		c.Rules = append(c.Rules, r.URL.Path)
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	case r.URL.Path == "/api/v1/namespaces/kube-public/configmaps/cluster-info" && c.Unpublished:
		http.NotFound(w, r)
	case r.URL.Path == "/api/v1/namespaces/kube-public/configmaps/cluster-info" && r.Method == http.MethodPatch:
		var patch struct{ Data map[string]*string }
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
			c.T.Error(err)
		}
		if signature, changed := patch.Data["jws-kubeconfig-abcdef"]; !changed || signature != nil {
			c.T.Error("the signature of the former kubeconfig stays")
		}
		c.Pem = TrustedBy(c.T, *patch.Data["kubeconfig"])
		answer(map[string]any{})
	case r.URL.Path == "/api/v1/namespaces/kube-public/configmaps/cluster-info":
		kc := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters:\n- name: \"\"\n  cluster:\n    server: https://192.0.2.11:6443\n    certificate-authority-data: %s\n", base64.StdEncoding.EncodeToString(slices.Concat(c.Beside, c.Pem)))
		data := map[string]string{"kubeconfig": kc}
		if !c.unsigned && !c.Revoked {
			text := kc
			if c.Changed {
				text = "the former one"
			}
			data["jws-kubeconfig-abcdef"] = sign(text, "abcdef", TestSecret)
		}
		answer(map[string]any{"metadata": map[string]string{"uid": fmt.Sprint("info-", c.Births)}, "data": data})
	case r.URL.Path == "/api/v1/namespaces/default/services/kubernetes" && !c.NoService:
		answer(map[string]any{"metadata": map[string]string{"uid": fmt.Sprint("service-", c.Births)}})
	case r.URL.Path == "/apis/networking.k8s.io/v1/servicecidrs" && c.ServiceCIDRs != nil:
		answer(map[string]any{"items": []any{map[string]any{"spec": map[string]any{"cidrs": c.ServiceCIDRs}}}})
	case r.URL.Path == "/apis/networking.k8s.io/v1/servicecidrs":
		http.Error(w, `{"message":"forbidden"}`, http.StatusForbidden)
	case r.URL.Path == "/api/v1/nodes/m2/proxy/stats/summary" && c.Summary != "":
		answer(json.RawMessage(c.Summary))
	case r.URL.Path == proxyConfigMap && c.Configs["config.conf"] != "":
		answer(map[string]any{"data": map[string]string{"config.conf": c.Configs["config.conf"]}})
	case (r.URL.Path == kubeadmConfigMap || r.URL.Path == kubeletConfigMap) && c.Configs != nil:
		if r.Method == http.MethodPatch {
			var patch struct {
				Metadata struct{ Annotations map[string]*string }
			}
			if err := json.NewDecoder(r.Body).Decode(&patch); err != nil || r.URL.Path != kubeadmConfigMap {
				c.T.Errorf("%s is changed (%v)", r.URL.Path, err)
			}
			if c.NoDocuments && patch.Metadata.Annotations[documentsKey] != nil {
				http.Error(w, `{"message":"etcd is busy"}`, http.StatusServiceUnavailable)
				return
			}
			for key, value := range patch.Metadata.Annotations {
				if delete(c.Annotations, key); value != nil {
					c.Annotations[key] = *value
				}
			}
		}
		if r.URL.Path == kubeletConfigMap {
			answer(map[string]any{"data": map[string]string{"kubelet": c.Configs["kubelet"]}})
			return
		}
		answer(map[string]any{"metadata": map[string]any{"annotations": c.Annotations}, "data": map[string]string{"ClusterConfiguration": c.Configs["ClusterConfiguration"]}})
	case r.URL.Path == "/api/v1/namespaces/kube-system/configmaps/kubeadm-config" && c.ServiceSubnet != "":
		answer(map[string]any{"data": map[string]string{"ClusterConfiguration": "kind: ClusterConfiguration\nnetworking:\n  serviceSubnet: " + c.ServiceSubnet + "\n"}})
	case r.URL.Path == "/api/v1/services":
		selector, selected := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "spec.clusterIP=")
		if selected && c.NoSelector {
			http.Error(w, `{"message":"field label not supported: spec.clusterIP"}`, http.StatusBadRequest)
			return
		}
		var items []any
		for _, ips := range slices.Sorted(maps.Keys(c.Services)) {
			all := strings.Split(ips, ",")
			if selected && all[0] != selector {
				continue
			}
			items = append(items, map[string]any{
				"metadata": map[string]any{"namespace": "shop", "name": c.Services[ips]},
				"spec":     map[string]any{"clusterIP": all[0], "clusterIPs": all},
			})
		}
		if r.URL.Query().Get("continue") == "" && !selected { // the first page holds none of them
			answer(map[string]any{"metadata": map[string]any{"continue": "a+b"}, "items": []any{}})
			return
		}
		answer(map[string]any{"items": items})
	case r.URL.Path == "/version":
		answer(map[string]string{"gitVersion": "v1.36.3"})
	case strings.HasPrefix(r.URL.Path, "/apis/certificates.k8s.io/"):
		signer := strings.TrimPrefix(r.URL.Query().Get("fieldSelector"), "spec.signerName=")
		name, user, state, request := "csr-hub01", "system:node:edge-sn0042", c.Csr, c.request("system:node:edge-sn0042", "kubernetes", "kubernetes.default")
		if signer == "kubernetes.io/kube-apiserver-client" {
			name, user, state, request = "csr-hub00", "system:bootstrap:abcdef", c.ClientCSR, c.request("system:node:edge-sn0042")
		}
		var items []any
		for i, state := range strings.Split(state, ", ") {
			if i > 0 {
				name += "-again"
			}
			item := map[string]any{
				"metadata": map[string]any{"name": name, "creationTimestamp": fmt.Sprintf("2026-11-20T10:00:%02dZ", i)},
				"spec":     map[string]any{"username": user, "signerName": signer, "request": request},
			}
			if state != "" && state != "pending" {
				item["status"] = map[string]any{"conditions": []any{map[string]any{"type": state, "message": "said by the approver"}}}
			}
			items = append(items, item)
		}
		// Kubelet's own is none of yurthub's, and the last page is not the first.
		own := map[string]any{
			"metadata": map[string]any{"name": "csr-kubelet", "creationTimestamp": "2026-11-20T11:00:00Z"},
			"spec":     map[string]any{"username": user, "signerName": signer, "request": c.request("system:node:edge-sn0042-other", "edge-sn0042")},
		}
		if r.URL.Query().Get("continue") == "" {
			answer(map[string]any{"metadata": map[string]any{"continue": "more"}, "items": []any{own}})
			return
		}
		answer(map[string]any{"items": items})
	case strings.HasSuffix(r.URL.Path, "/configmaps"), strings.HasSuffix(r.URL.Path, "/nodepools"):
		if c.NoRBAC {
			http.Error(w, `{"message":"forbidden"}`, http.StatusForbidden)
			return
		}
		if strings.HasSuffix(r.URL.Path, "/nodepools") && r.URL.Path != "/apis/apps.openyurt.io/"+c.Pools+"/nodepools" {
			http.NotFound(w, r)
			return
		}
		if c.NoWebhook && strings.HasSuffix(r.URL.Path, "/nodepools") {
			http.Error(w, `{"message":"conversion webhook for apps.openyurt.io/v1beta1, Kind=NodePool failed"}`, http.StatusInternalServerError)
			return
		}
		if strings.HasSuffix(r.URL.Path, "/nodepools") && !c.NoPool {
			answer(map[string]any{"items": []any{map[string]any{"spec": map[string]any{"type": cmp.Or(c.PoolType, "Edge")}}}})
			return
		}
		answer(map[string]any{})
	case strings.HasPrefix(r.URL.Path, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"):
		renewed := "2026-11-20T09:00:00.000000Z"
		if c.Lease != nil {
			renewed = c.Lease()
		}
		answer(map[string]any{"spec": map[string]any{"renewTime": renewed}})
	case strings.HasPrefix(r.URL.Path, "/api/v1/nodes/"):
		if c.registers != nil {
			c.registers()
		}
		n := c.Nodes[strings.TrimPrefix(r.URL.Path, "/api/v1/nodes/")]
		if n == nil {
			http.Error(w, `{"message":"not found"}`, http.StatusNotFound)
			return
		}
		if r.Method == http.MethodPatch && c.LabelsKept {
			http.Error(w, `{"message":"admission webhook denied the request"}`, http.StatusForbidden)
			return
		}
		if r.Method == http.MethodPatch {
			var p struct {
				Metadata struct {
					Labels      map[string]*string `json:"labels"`
					Annotations map[string]string  `json:"annotations"`
				} `json:"metadata"`
			}
			if err := json.NewDecoder(r.Body).Decode(&p); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			if len(p.Metadata.Annotations) > 0 {
				n.Metadata.Annotations = p.Metadata.Annotations
			}
			for k, v := range p.Metadata.Labels {
				if v == nil {
					delete(n.Metadata.Labels, k)
				} else {
					n.Metadata.Labels[k] = *v
				}
			}
		}
		copied := *n
		if c.Twin != nil {
			copied.Status.NodeInfo.MachineID = c.Twin(copied.Status.NodeInfo.MachineID)
		}
		copied.Status.Conditions = slices.Clone(n.Status.Conditions)
		for i := range copied.Status.Conditions {
			copied.Status.Conditions[i].LastHeartbeatTime = c.Renewed()
		}
		if c.silent(n.Status.NodeInfo.MachineID) && len(copied.Status.Conditions) > 0 {
			copied.Status.Conditions[0] = api.Condition{Type: "Ready", Status: "Unknown", Reason: "NodeStatusUnknown", Message: "Kubelet stopped posting node status."}
		}
		if c.NotReady {
			copied.Status.Conditions = []api.Condition{{Type: "Ready", Status: "False", Reason: "KubeletNotReady", Message: "cni plugin not initialized"}}
		}
		answer(&copied)
	default:
		http.NotFound(w, r)
	}
}

// accepts reports whether a client may show these certificates, or none. mu is held.
func (c *Cluster) accepts(certs []*x509.Certificate) bool {
	if len(certs) == 0 {
		return !c.KnownOnly
	}
	_, err := certs[0].Verify(x509.VerifyOptions{Roots: c.Tls.ClientCAs, CurrentTime: c.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err == nil
}

func sign(payload, id, secret string) string {
	header := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"HS256","kid":"` + id + `"}`))
	m := hmac.New(sha256.New, []byte(secret))
	m.Write([]byte(header + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))))
	return header + ".." + base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// Times is how often each object was applied.
func (c *Cluster) Times() map[string]int {
	n := map[string]int{}
	for _, path := range c.Applied {
		n[path]++
	}
	return n
}

// AllDown switches every master off or on, and with them what is behind the endpoint.
func (c *Cluster) AllDown(down bool) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	for _, m := range []string{"192.0.2.11:6443", "192.0.2.12:6443", "192.0.2.13:6443", OwnEndpoint} {
		c.Down[m] = down
	}
}

// TrustedBy is the CA that a kubeconfig trusts.
func TrustedBy(t *testing.T, conf string) []byte {
	t.Helper()
	k, err := api.ParseKubeconfig([]byte(conf))
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
