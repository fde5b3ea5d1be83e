package scale

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/firstboot/host"
)

// The simulated kubeadm join and kubelet send the requests of a real node, from its audit log: a VM
// without pods, with kubeadm and kubelet v1.36, from power-on until it was idle. Bodies are JSON of
// about the same size as kubelet's protobuf.

const (
	csrs   = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
	leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
	events = "/api/v1/namespaces/default/events"
	nodes  = "/api/v1/nodes"
	csi    = "/apis/storage.k8s.io/v1/csinodes"

	strategicPatch = "application/strategic-merge-patch+json"
)

type object = map[string]any

// client sends requests like client-go: over one connection, repeated after 429.
type client struct {
	n      *node
	agent  string
	server string
	token  string
	http   *http.Client
}

func (n *node) client(agent, server string, ca []byte, token string, cert *tls.Certificate) *client {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	conf := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	if cert != nil {
		conf.Certificates = []tls.Certificate{*cert}
	}
	return &client{n, agent, server, token, &http.Client{Transport: &http.Transport{
		DialContext: n.dialFor("kubeadm and kubelet"), TLSClientConfig: conf, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 10 * time.Second, IdleConnTimeout: 90 * time.Second}}}
}

func (c *client) close() { c.http.CloseIdleConnections() }

// send returns the response to one request, with any status.
func (c *client) send(ctx context.Context, method, path, kind string, body any) (*http.Response, error) {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	for again := 0; ; again++ {
		req, err := http.NewRequestWithContext(ctx, method, c.server+path, bytes.NewReader(text))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Accept", "application/json")
		req.Header.Set("User-Agent", c.agent)
		if c.token != "" {
			req.Header.Set("Authorization", "Bearer "+c.token)
		}
		if body != nil {
			req.Header.Set("Content-Type", kind)
		}
		resp, err := c.http.Do(req)
		if err != nil {
			c.n.fleet.fault(ctx, c.agent+": no answer: "+gist(err))
			return nil, err
		}
		if resp.StatusCode != http.StatusTooManyRequests || again == 10 {
			return resp, nil
		}
		resp.Body.Close()
		c.n.fleet.tooMany.Add(1)
		after, _ := strconv.Atoi(resp.Header.Get("Retry-After")) // without the header, the pause is one second
		if err := host.Sleep(ctx, time.Duration(max(after, 1))*time.Second); err != nil {
			return nil, err
		}
	}
}

// gist returns the kind of an error, so that errors of one kind can be counted together.
func gist(err error) string {
	for _, kind := range []string{"connection refused", "connection reset", "TLS handshake timeout", "deadline exceeded", "GOAWAY", "EOF", "closed"} {
		if strings.Contains(err.Error(), kind) {
			return kind
		}
	}
	return err.Error()
}

// do sends a request and decodes the response into out, unless out is nil.
func (c *client) do(ctx context.Context, method, path, kind string, body, out any) (code int, err error) {
	resp, err := c.send(ctx, method, path, kind, body)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && out != nil && resp.StatusCode < 300 {
		err = json.Unmarshal(text, out)
	}
	return resp.StatusCode, err
}

func (c *client) get(ctx context.Context, path string) int {
	code, _ := c.do(ctx, http.MethodGet, path, "", nil, nil) // do counts errors
	return code
}

// watch follows a list until the stream ends, and calls each with every object.
func (c *client) watch(ctx context.Context, path string, each func(json.RawMessage)) error {
	sep := "?"
	if strings.Contains(path, "?") {
		sep = "&"
	}
	resp, err := c.send(ctx, http.MethodGet, fmt.Sprintf("%s%sallowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&sendInitialEvents=true&timeoutSeconds=%d&watch=true", path, sep, 300+mrand.IntN(300)), "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("watching %s: status %d", path, resp.StatusCode)
	}
	for dec := json.NewDecoder(resp.Body); ; {
		var event struct{ Object json.RawMessage }
		if err := dec.Decode(&event); err != nil {
			return err
		}
		each(event.Object)
	}
}

// reflect watches until ctx ends, like kubelet.
func (c *client) reflect(ctx context.Context, wg *sync.WaitGroup, path string) {
	wg.Go(func() {
		const first, most = 800 * time.Millisecond, 30 * time.Second
		for pause := first; ctx.Err() == nil; pause = min(2*pause, most) {
			began := time.Now()
			// Watch again, whatever ended the watch.
			_ = c.watch(ctx, path, func(json.RawMessage) {})
			if time.Since(began) > time.Minute {
				pause = first
			}
			if host.Sleep(ctx, pause+time.Duration(mrand.Int64N(int64(pause)))) != nil {
				return
			}
		}
	})
}

// kubeadmReads sends the requests of kubeadm join before it starts kubelet.
func (n *node) kubeadmReads(ctx context.Context, c *client) error {
	c.get(ctx, "/api/v1/namespaces/kube-public/configmaps/cluster-info")
	for _, cm := range []struct {
		name string
		must bool
	}{{"kubeadm-config", true}, {"kube-proxy", false}, {"kubelet-config", true}} {
		code := c.get(ctx, "/api/v1/namespaces/kube-system/configmaps/"+cm.name)
		for end := time.Now().Add(350 * time.Millisecond); code != http.StatusOK && time.Now().Before(end); {
			if err := host.Sleep(ctx, 50*time.Millisecond); err != nil {
				return err
			}
			code = c.get(ctx, "/api/v1/namespaces/kube-system/configmaps/"+cm.name)
		}
		if cm.must && code != http.StatusOK {
			return fmt.Errorf("error execution phase preflight: unable to fetch the %s ConfigMap (status %d)", cm.name, code)
		}
	}
	if code := c.get(ctx, nodes+"/"+n.name); code != http.StatusNotFound && code != http.StatusOK {
		return fmt.Errorf("error execution phase kubelet-start: cannot get Node %s (status %d)", n.name, code)
	}
	return nil
}

// credentials are a certificate and its key in PEM.
type credentials struct{ cert, key []byte }

// enrol performs kubelet's TLS bootstrap.
func (n *node) enrol(ctx context.Context, server string, ca []byte, token string, key *ecdsa.PrivateKey) (credentials, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return credentials{}, err
	}
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + n.name, Organization: []string{"system:nodes"}}}, key)
	if err != nil {
		return credentials{}, err
	}
	c := n.client("kubelet-bootstrap", server, ca, token, nil)
	defer c.close()
	var made struct{ Metadata struct{ Name string } }
	code, err := c.do(ctx, http.MethodPost, csrs, "application/json", object{
		"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": object{"generateName": "csr-"},
		"spec": object{"request": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request}),
			"signerName": "kubernetes.io/kube-apiserver-client-kubelet", "usages": []string{"digital signature", "client auth"}},
	}, &made)
	if err == nil && code != http.StatusCreated {
		err = fmt.Errorf("asking for a certificate: status %d", code)
	}
	if err != nil {
		return credentials{}, err
	}
	one := csrs + "?fieldSelector=metadata.name%3D" + made.Metadata.Name
	c.get(ctx, one)
	for {
		var cert []byte
		wctx, done := context.WithCancel(ctx)
		err := c.watch(wctx, one, func(o json.RawMessage) {
			var csr struct{ Status struct{ Certificate []byte } }
			if json.Unmarshal(o, &csr) == nil && len(csr.Status.Certificate) > 0 {
				cert = csr.Status.Certificate
				done()
			}
		})
		done()
		if cert != nil {
			return credentials{cert, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})}, nil
		}
		if ctx.Err() != nil {
			return credentials{}, ctx.Err()
		}
		n.fleet.fault(ctx, "kubelet's watch of its CSR: "+gist(err))
		if err := host.Sleep(ctx, time.Second); err != nil {
			return credentials{}, err
		}
	}
}

// startKubelet starts kubelet with its credentials, own. If own is empty, kubelet requests
// credentials and sends them to enrolled.
func (n *node) startKubelet(server string, ca []byte, token string, own credentials) (enrolled <-chan credentials) {
	ctx, stop := context.WithCancel(context.Background())
	handed, ended := make(chan credentials, 1), make(chan struct{})
	go func() {
		defer close(ended)
		n.kubelet(ctx, server, ca, token, own, handed)
	}()
	n.stopKubelet = func() { stop(); <-ended }
	return handed
}

// kubelet simulates kubelet from its start until ctx ends.
func (n *node) kubelet(ctx context.Context, server string, ca []byte, token string, own credentials, enrolled chan<- credentials) {
	if host.Sleep(ctx, 1200*time.Millisecond) != nil { // start-up time
		return
	}
	// If a response is lost, its CSR cannot be found again, because each CSR has its own key and
	// name.
	for pause := 2 * time.Second; own.cert == nil; pause = min(2*pause, 32*time.Second) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			panic(err)
		}
		if own, err = n.enrol(ctx, server, ca, token, key); err != nil {
			n.fleet.fault(ctx, "kubelet's bootstrap: "+gist(err))
			if host.Sleep(ctx, pause+time.Duration(mrand.Int64N(int64(pause/10)))) != nil {
				return
			}
		}
	}
	pair, err := tls.X509KeyPair(own.cert, own.key)
	if err != nil {
		panic(err)
	}
	enrolled <- own
	k := &kubelet{n: n, client: n.client("kubelet", server, ca, "", &pair)}
	defer k.close()
	var watches sync.WaitGroup
	defer watches.Wait()
	if k.register(ctx, &watches) {
		k.keepLease(ctx)
	}
}

// kubelet is a kubelet that has a certificate.
type kubelet struct {
	*client
	n   *node
	uid string // UID of its Node
}

func (k *kubelet) path() string { return nodes + "/" + k.n.name }

func (k *kubelet) event(ctx context.Context, reason string) (path string) {
	now := time.Now().UTC().Format(time.RFC3339)
	name := fmt.Sprintf("%s.%x", k.n.name, mrand.Int64())
	_, _ = k.do(ctx, http.MethodPost, events, "application/json", object{ // losing the event changes nothing
		"apiVersion": "v1", "kind": "Event", "metadata": object{"name": name, "namespace": "default"},
		"involvedObject": object{"kind": "Node", "name": k.n.name, "uid": k.n.name}, "reason": reason, "message": "Node " + k.n.name + " status is now: " + reason,
		"source": object{"component": "kubelet", "host": k.n.name}, "firstTimestamp": now, "lastTimestamp": now, "count": 1, "type": "Normal",
		"reportingComponent": "kubelet", "reportingInstance": k.n.name}, nil)
	return events + "/" + name
}

func (k *kubelet) repeatEvent(ctx context.Context, path string, count int) {
	_, _ = k.do(ctx, http.MethodPatch, path, strategicPatch, object{"count": count, "lastTimestamp": time.Now().UTC().Format(time.RFC3339)}, nil)
}

func (k *kubelet) patchStatus(ctx context.Context, ready bool) bool {
	code, err := k.do(ctx, http.MethodPatch, k.path()+"/status", strategicPatch, object{"status": k.n.status(ready)}, nil)
	return err == nil && code == http.StatusOK
}

// register creates the Node and makes it Ready. It returns false when ctx ends.
func (k *kubelet) register(ctx context.Context, watches *sync.WaitGroup) bool {
	own := "?fieldSelector=metadata.name%3D" + k.n.name
	services := "/api/v1/services?fieldSelector=spec.clusterIP%21%3DNone"
	// Three watches fail once before the Node exists.
	early, end := context.WithCancel(ctx)
	defer end()
	var first sync.WaitGroup
	for _, path := range []string{services, nodes + own, "/apis/storage.k8s.io/v1/csidrivers"} {
		first.Go(func() { _ = k.watch(early, path, func(json.RawMessage) {}) })
	}
	k.get(ctx, csi+"/"+k.n.name)
	k.get(ctx, k.path())
	k.get(ctx, k.path())
	k.event(ctx, "Starting")
	k.get(ctx, k.path())
	k.get(ctx, leases+"/"+k.n.name)
	k.get(ctx, k.path())
	k.event(ctx, "InvalidDiskCapacity")
	if host.Sleep(ctx, 700*time.Millisecond) != nil {
		return false
	}
	k.reflect(ctx, watches, "/api/v1/pods?fieldSelector=spec.nodeName%3D"+k.n.name)
	memory := k.event(ctx, "NodeHasSufficientMemory")
	_, _ = k.do(ctx, http.MethodDelete, "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3D"+k.n.name, "", nil, nil)
	disk, pid := k.event(ctx, "NodeHasNoDiskPressure"), k.event(ctx, "NodeHasSufficientPID")
	for _, path := range []string{memory, disk, pid} {
		k.repeatEvent(ctx, path, 2)
	}
	k.event(ctx, "NodeAllocatableEnforced")
	k.repeatEvent(ctx, memory, 3)
	end()
	first.Wait()
	for {
		code, err := k.do(ctx, http.MethodPost, nodes, "application/json", k.n.object(), nil)
		if err == nil && (code == http.StatusCreated || code == http.StatusConflict) {
			break
		}
		if host.Sleep(ctx, time.Second) != nil {
			return false
		}
	}
	k.get(ctx, k.path())
	k.get(ctx, k.path())
	k.repeatEvent(ctx, disk, 3)
	k.repeatEvent(ctx, pid, 3)
	k.get(ctx, csi+"/"+k.n.name)
	var seen struct{ Metadata struct{ UID string } }
	for {
		if code, err := k.do(ctx, http.MethodGet, k.path(), "", nil, &seen); err == nil && code == http.StatusOK {
			break
		}
		if host.Sleep(ctx, time.Second) != nil {
			return false
		}
	}
	k.uid = seen.Metadata.UID
	_, _ = k.do(ctx, http.MethodPost, csi, "application/json", object{"apiVersion": "storage.k8s.io/v1", "kind": "CSINode",
		"metadata": object{"name": k.n.name, "ownerReferences": k.owner()}, "spec": object{"drivers": []any{}}}, nil)
	k.patchStatus(ctx, false)
	for _, path := range []string{services, "/apis/node.k8s.io/v1/runtimeclasses", nodes + own, "/apis/storage.k8s.io/v1/csidrivers"} {
		k.reflect(ctx, watches, path)
	}
	k.event(ctx, "NodeReady")
	for !k.patchStatus(ctx, true) {
		if host.Sleep(ctx, time.Second) != nil {
			return false
		}
	}
	k.n.isReady()
	return true
}

func (k *kubelet) owner() []any {
	return []any{object{"apiVersion": "v1", "kind": "Node", "name": k.n.name, "uid": k.uid}}
}

// keepLease renews the lease every 10 s, and sends the status every five minutes.
func (k *kubelet) keepLease(ctx context.Context) {
	var held object
	const every = 5 * time.Minute
	statusDue := time.Now().Add(every + time.Duration(mrand.Int64N(int64(every/2))))
	for host.Sleep(ctx, 10*time.Second+time.Duration(mrand.Int64N(int64(400*time.Millisecond)))) == nil {
		spec := object{"holderIdentity": k.n.name, "leaseDurationSeconds": 40, "renewTime": time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")}
		method, path, lease := http.MethodPut, leases+"/"+k.n.name, held
		if held == nil {
			var there object
			if code, err := k.do(ctx, http.MethodGet, path, "", nil, &there); err == nil && code == http.StatusOK {
				held, lease = there, there // the lease exists: the response to its renewal was lost
			}
		}
		if held == nil {
			k.get(ctx, k.path())
			method, path = http.MethodPost, leases
			lease = object{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
				"metadata": object{"name": k.n.name, "namespace": "kube-node-lease", "ownerReferences": k.owner()}}
		}
		lease["spec"] = spec
		rctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		var now object
		code, err := k.do(rctx, method, path, "application/json", lease, &now)
		cancel()
		switch {
		case err == nil && (code == http.StatusOK || code == http.StatusCreated):
			held = now
			k.n.leased.Store(time.Now().UnixNano())
		case err == nil && (code == http.StatusConflict || code == http.StatusNotFound):
			held = nil
			fallthrough
		default:
			k.n.fleet.fault(ctx, fmt.Sprintf("a lease was not renewed (status %d)", code))
		}
		if time.Now().After(statusDue) {
			k.patchStatus(ctx, true)
			statusDue = time.Now().Add(every)
		}
	}
}

// object returns the Node as kubelet registers it.
func (n *node) object() object {
	return object{"apiVersion": "v1", "kind": "Node", "spec": object{}, "status": n.status(false),
		"metadata": object{"name": n.name, "annotations": object{"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
			"labels": object{"beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "kubernetes.io/hostname": n.name, "kubernetes.io/os": "linux"}}}
}

// status returns the Node's status, for a machine with eight images.
func (n *node) status(ready bool) object {
	now := time.Now().UTC().Format(time.RFC3339)
	state, reason := "False", "KubeletNotReady"
	if ready {
		state, reason = "True", "KubeletReady"
	}
	condition := func(kind, state, reason string) object {
		return object{"type": kind, "status": state, "reason": reason, "message": "kubelet reports " + reason, "lastHeartbeatTime": now, "lastTransitionTime": now}
	}
	var images []object
	for i := range 8 {
		name := fmt.Sprintf("registry.example.org/component-%d", i)
		images = append(images, object{"sizeBytes": 12345678 + i, "names": []string{name + "@sha256:" + strings.Repeat("0123456789abcdef", 4), name + ":v1.36.3"}})
	}
	capacity := object{"cpu": "4", "memory": "8007460Ki", "pods": "110", "ephemeral-storage": "30298176Ki"}
	return object{"capacity": capacity, "allocatable": capacity, "images": images,
		"addresses":       []object{{"type": "InternalIP", "address": n.ip.String()}, {"type": "Hostname", "address": n.name}},
		"daemonEndpoints": object{"kubeletEndpoint": object{"Port": 10250}},
		"conditions": []object{condition("MemoryPressure", "False", "KubeletHasSufficientMemory"), condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
			condition("PIDPressure", "False", "KubeletHasSufficientPID"), condition("Ready", state, reason)},
		"nodeInfo": object{"architecture": "amd64", "bootID": "boot-0", "containerRuntimeVersion": "containerd://2.2.9", "kernelVersion": "6.12.118+deb13-cloud-amd64", "kubeProxyVersion": "",
			"kubeletVersion": "v1.36.3", "machineID": n.machineID, "operatingSystem": "linux", "osImage": "Debian GNU/Linux 13 (trixie)", "systemUUID": n.uuid}}
}

var errNoCertificate = errors.New("error execution phase kubelet-start: failed while waiting for the kubelet to start: TLS bootstrap")
