package lab

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/template"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/configs/kubeadm"
)

// Values for the Sites of clusters that this package makes.
const (
	Endpoint = "apiserver.cluster.local"
	VIP      = "10.103.97.2"
	VIP6     = "fd00:97::2"
)

// Cluster is a control plane: etcd, one to three API servers, a controller
// manager and a scheduler, as processes of this host.
type Cluster struct {
	// Masters are the addresses at which guests reach the API servers.
	Masters []string
	// Token is a bootstrap token, valid for a day.
	Token string
	// CAHash is the pin of the CA: "sha256:…" of its public key.
	CAHash string
	// CAFile is the file with the CA's certificate.
	CAFile string
	// Kubeconfig is an administrator's kubeconfig file.
	Kubeconfig string
	// APIServers are in the order of Masters. A test may kill or stop all but the last. The
	// controller manager and the scheduler use only the last one, because leader election would
	// take 15 seconds more.
	APIServers []*Process

	lab    *Lab
	net    Net
	progs  *Programs
	tuning Tuning
	dir    string
	hosts  []string // addresses at which this host reaches the masters
	etcd   string   // URL for clients
	http   *http.Client
	other  []*Process // etcd, controller manager, scheduler

	requests sync.Mutex
	last     int // index of the master that answered last
}

// Tuning has options of a control plane. The zero value is the default for tests.
type Tuning struct {
	// Pods is the CIDR of pods; empty: a CIDR for 256 nodes.
	Pods string
	// Durable makes etcd sync its writes to disk.
	Durable bool
	// ControllerManager has additional arguments for kube-controller-manager.
	ControllerManager []string
	// AuditPolicy is the policy for the audit logs of the API servers. If it is empty, only the
	// creation of Nodes is logged.
	AuditPolicy string
}

// Processes returns the processes of the control plane.
func (c *Cluster) Processes() []*Process { return slices.Concat(c.APIServers, c.other) }

// ranges has the CIDRs that a cluster uses for itself, and the address of its DNS.
type ranges struct{ services, pods, dns string }

func (c *Cluster) ranges() ranges {
	if c.ipv6() {
		return ranges{"fd00:96::/112", "fd00:244::/56", "fd00:96::a"}
	}
	return ranges{"10.96.0.0/16", cmp.Or(c.tuning.Pods, "10.244.0.0/16"), "10.96.0.10"}
}

// VIP returns the virtual address of the masters, which is of the same family as their addresses.
func (c *Cluster) VIP() string {
	if c.ipv6() {
		return VIP6
	}
	return VIP
}

func (c *Cluster) ipv6() bool { return strings.HasPrefix(c.Masters[0], "[") }

// kubeadmConfig is the configuration for making the PKI and the objects that joining nodes read.
// The API servers' certificate is valid for each master, for the VIP, and for this host in QEMU's
// user-mode network.
var kubeadmConfig = template.Must(template.New("").Parse(`apiVersion: kubeadm.k8s.io/{{.API}}
kind: InitConfiguration
localAPIEndpoint:
  advertiseAddress: "{{.Advertise}}"
  bindPort: {{.Port}}
nodeRegistration:
  name: master1
  criSocket: unix:///run/containerd/containerd.sock
bootstrapTokens:
- token: {{.Token}}
  ttl: 24h0m0s
  usages: [signing, authentication]
  groups: ["system:bootstrappers:kubeadm:default-node-token"]
---
apiVersion: kubeadm.k8s.io/{{.API}}
kind: ClusterConfiguration
kubernetesVersion: {{.Version}}
controlPlaneEndpoint: {{.Endpoint}}:{{.Port}}
certificatesDir: {{.PKI}}
networking: {serviceSubnet: "{{.Services}}", podSubnet: "{{.Pods}}"}
etcd: {external: {endpoints: ["{{.Etcd}}"]}}
apiServer:
  certSANs: [{{.Endpoint}}, "{{.VIP}}", 10.0.2.2, 127.0.0.1, localhost{{range .Addrs}}, "{{.}}"{{end}}]
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: systemd
# kubeadm would write the folder of this host in its place.
authentication: {x509: {clientCAFile: /etc/kubernetes/pki/ca.crt}}
clusterDomain: cluster.local
clusterDNS: ["{{.DNS}}"]
failSwapOn: false
`))

// StartCluster starts a control plane with this number of masters, and waits until nodes can join
// it, which takes about 10 seconds on an idle machine.
func (l *Lab) StartCluster(ctx context.Context, progs *Programs, network Net, masters int) (*Cluster, error) {
	return l.StartTunedCluster(ctx, progs, network, masters, Tuning{})
}

// StartLocalCluster starts a control plane with one master on a free port of this computer's
// loopback address.
func (l *Lab) StartLocalCluster(ctx context.Context, progs *Programs) (*Cluster, Loopback, error) {
	network, err := FreeLoopback()
	if err != nil {
		return nil, Loopback{}, err
	}
	c, err := l.StartCluster(ctx, progs, network, 1)
	return c, network, err
}

// StartTunedCluster is like StartCluster, with a Tuning.
func (l *Lab) StartTunedCluster(ctx context.Context, progs *Programs, network Net, masters int, tuning Tuning) (*Cluster, error) {
	if masters < 1 || masters > MaxMasters {
		return nil, fmt.Errorf("starting a control plane with %d masters: want 1 to %d", masters, MaxMasters)
	}
	token, err := newToken()
	if err != nil {
		return nil, err
	}
	c := &Cluster{Token: token, lab: l, net: network, progs: progs, tuning: tuning, dir: filepath.Join(l.Dir, "cluster")}
	c.CAFile = filepath.Join(c.dir, "pki", "ca.crt")
	c.Kubeconfig = filepath.Join(c.dir, "super-admin.conf")
	// Remove the cluster of an earlier run, because it has another CA.
	if err := os.RemoveAll(c.dir); err != nil {
		return nil, fmt.Errorf("starting a control plane: %w", err)
	}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, fmt.Errorf("starting a control plane: %w", err)
	}
	for n := range masters {
		host, guest := network.Master(n)
		c.hosts = append(c.hosts, host.String())
		c.Masters = append(c.Masters, guest.String())
	}
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"etcd", c.startEtcd},
		{"certificates", c.makePKI},
		{"API servers", c.startAPIServers},
		{"controller manager and scheduler", c.startControllers},
		{"objects that joining nodes read", c.openToNodes},
	} {
		start := time.Now()
		if err := step.do(ctx); err != nil {
			return nil, fmt.Errorf("starting a control plane: %s: %w", step.name, err)
		}
		l.say("control plane: %s, %.1f s", step.name, time.Since(start).Seconds())
	}
	return c, nil
}

func newToken() (string, error) {
	// rand.Text returns upper-case base32, but tokens must be in lower case.
	id, secret := strings.ToLower(rand.Text()), strings.ToLower(rand.Text())
	if len(id) < 6 || len(secret) < 16 {
		return "", errors.New("making a bootstrap token: too little randomness")
	}
	return id[:6] + "." + secret[:16], nil
}

func (c *Cluster) start(name string, argv ...string) (*Process, error) {
	return c.lab.start(name, c.net.Wrap(argv), nil)
}

func (c *Cluster) startEtcd(ctx context.Context) error {
	// The network namespace is empty, so a port that is free on the host is also free there.
	ports, err := FreePorts(2)
	if err != nil {
		return err
	}
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", ports[0]), fmt.Sprintf("http://127.0.0.1:%d", ports[1])
	c.etcd = client
	argv := []string{c.progs.Etcd, "--data-dir", filepath.Join(c.dir, "etcd"),
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer}
	if !c.tuning.Durable {
		argv = append(argv, "--unsafe-no-fsync")
	}
	p, err := c.start("etcd", argv...)
	if err != nil {
		return err
	}
	c.other = append(c.other, p)
	plain := &http.Client{Transport: &http.Transport{DialContext: c.net.Dial}}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	return c.lab.poll(ctx, "etcd to be healthy", c.other, func(ctx context.Context) (bool, error) {
		b, err := get(ctx, plain, client+"/health")
		return bytes.Contains(b, []byte(`"health":"true"`)), err
	})
}

func get(ctx context.Context, c *http.Client, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// kubeadm runs one phase of `kubeadm init`.
func (c *Cluster) kubeadm(ctx context.Context, args ...string) error {
	argv := append([]string{c.progs.Kubeadm, "init", "phase"}, args...)
	_, err := c.lab.run(ctx, c.net.Wrap(append(argv, "--config", filepath.Join(c.dir, "kubeadm.yaml")))...)
	return err
}

func (c *Cluster) makePKI(ctx context.Context) error {
	_, advertise := c.net.Master(0)
	var addrs []string
	for n := range c.hosts {
		_, guest := c.net.Master(n)
		addrs = append(addrs, guest.Addr().String())
	}
	format := "v1beta4"
	if kubeadm.Before(c.progs.Version, 31) {
		format = "v1beta3"
	}
	var b bytes.Buffer
	if err := kubeadmConfig.Execute(&b, map[string]any{
		"API": format, "Advertise": advertise.Addr(), "Port": advertise.Port(), "Token": c.Token, "Version": c.progs.Version,
		"Endpoint": Endpoint, "VIP": c.VIP(), "Services": c.ranges().services, "Pods": c.ranges().pods, "DNS": c.ranges().dns, "PKI": filepath.Join(c.dir, "pki"), "Etcd": c.etcd, "Addrs": addrs,
	}); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.dir, "kubeadm.yaml"), b.Bytes(), 0o600); err != nil {
		return err
	}
	if err := c.kubeadm(ctx, "certs", "all"); err != nil {
		return err
	}
	// Use super-admin, because admin.conf has no rights before `kubeadm init` is complete.
	for _, k := range []string{"super-admin", "controller-manager", "scheduler"} {
		if err := c.kubeadm(ctx, "kubeconfig", k, "--kubeconfig-dir", c.dir); err != nil {
			return err
		}
		// Replace the endpoint in the kubeconfigs, which this host cannot resolve.
		if err := replaceServer(filepath.Join(c.dir, k+".conf"), c.admin()); err != nil {
			return err
		}
	}
	ca, err := os.ReadFile(c.CAFile)
	if err != nil {
		return err
	}
	block, _ := pem.Decode(ca)
	if block == nil {
		return fmt.Errorf("reading %s: no PEM in it", c.CAFile)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return fmt.Errorf("reading %s: %w", c.CAFile, err)
	}
	sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	c.CAHash = "sha256:" + hex.EncodeToString(sum[:])
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	pair, err := clientPair(c.Kubeconfig)
	if err != nil {
		return err
	}
	c.http = &http.Client{Transport: &http.Transport{DialContext: c.net.Dial,
		TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}}}}
	return nil
}

// admin returns the URL of the API server that clients on this host use.
func (c *Cluster) admin() string { return "https://" + c.hosts[len(c.hosts)-1] }

func replaceServer(file, url string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	lines := strings.Split(string(b), "\n")
	for i, l := range lines {
		if key, _, ok := strings.Cut(l, "server: "); ok && strings.TrimSpace(key) == "" {
			lines[i] = key + "server: " + url
		}
	}
	return os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600)
}

// clientPair returns the client certificate in a kubeconfig.
func clientPair(file string) (tls.Certificate, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return tls.Certificate{}, err
	}
	var conf struct {
		Users []struct {
			User struct {
				Cert string `yaml:"client-certificate-data"`
				Key  string `yaml:"client-key-data"`
			}
		}
	}
	if err := yaml.Unmarshal(b, &conf); err != nil {
		return tls.Certificate{}, fmt.Errorf("reading %s: %w", file, err)
	}
	if len(conf.Users) != 1 {
		return tls.Certificate{}, fmt.Errorf("reading %s: %d users, expected one", file, len(conf.Users))
	}
	cert, err1 := base64.StdEncoding.DecodeString(conf.Users[0].User.Cert)
	key, err2 := base64.StdEncoding.DecodeString(conf.Users[0].User.Key)
	if err := errors.Join(err1, err2); err != nil {
		return tls.Certificate{}, fmt.Errorf("reading %s: %w", file, err)
	}
	return tls.X509KeyPair(cert, key)
}

func (c *Cluster) startAPIServers(ctx context.Context) error {
	for n := range c.hosts {
		if err := c.StartAPIServer(n); err != nil {
			return err
		}
	}
	for n := range c.hosts {
		if err := c.WaitAPIServer(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// StartAPIServer starts the nth API server, or starts it again.
func (c *Cluster) StartAPIServer(n int) error {
	host, guest := c.net.Master(n)
	pki := func(name string) string { return filepath.Join(c.dir, "pki", name) }
	audit, err := c.auditArgs(n)
	if err != nil {
		return err
	}
	p, err := c.start("apiserver"+strconv.Itoa(n+1), append([]string{c.progs.APIServer,
		"--bind-address", host.Addr().String(), "--advertise-address", guest.Addr().String(), "--secure-port", strconv.Itoa(int(host.Port())),
		"--etcd-servers", c.etcd,
		"--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction", "--enable-bootstrap-token-auth",
		"--client-ca-file", pki("ca.crt"), "--tls-cert-file", pki("apiserver.crt"), "--tls-private-key-file", pki("apiserver.key"),
		"--kubelet-client-certificate", pki("apiserver-kubelet-client.crt"), "--kubelet-client-key", pki("apiserver-kubelet-client.key"),
		"--service-account-key-file", pki("sa.pub"), "--service-account-signing-key-file", pki("sa.key"),
		"--service-account-issuer", "https://kubernetes.default.svc.cluster.local", "--service-cluster-ip-range", c.ranges().services,
		"--proxy-client-cert-file", pki("front-proxy-client.crt"), "--proxy-client-key-file", pki("front-proxy-client.key"),
		"--requestheader-client-ca-file", pki("front-proxy-ca.crt"), "--requestheader-allowed-names", "front-proxy-client",
		"--requestheader-extra-headers-prefix", "X-Remote-Extra-", "--requestheader-group-headers", "X-Remote-Group",
		"--requestheader-username-headers", "X-Remote-User",
		"--kubelet-preferred-address-types", "InternalIP",
		"--profiling=false", "--allow-privileged", "--v=1"}, audit...)...)
	if err != nil {
		return err
	}
	if n < len(c.APIServers) {
		c.APIServers[n] = p
	} else {
		c.APIServers = append(c.APIServers, p)
	}
	return nil
}

// WaitAPIServer waits until the nth API server is ready.
func (c *Cluster) WaitAPIServer(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Minute)
	defer cancel()
	return c.lab.poll(ctx, fmt.Sprintf("API server %d to be ready", n+1), []*Process{c.APIServers[n]}, func(ctx context.Context) (bool, error) {
		b, err := get(ctx, c.http, "https://"+c.hosts[n]+"/readyz")
		return string(b) == "ok", err
	})
}

func (c *Cluster) startControllers(ctx context.Context) error {
	conf := func(name string) string { return filepath.Join(c.dir, name+".conf") }
	pki := func(name string) string { return filepath.Join(c.dir, "pki", name) }
	// Neither opens a port, because other clusters on this host may use the same ports.
	for name, argv := range map[string][]string{
		"controller-manager": append([]string{c.progs.ControllerManager, "--kubeconfig", conf("controller-manager"), "--secure-port=0",
			"--controllers=*,bootstrapsigner,tokencleaner", "--use-service-account-credentials", "--leader-elect=false",
			"--cluster-signing-cert-file", pki("ca.crt"), "--cluster-signing-key-file", pki("ca.key"), "--root-ca-file", pki("ca.crt"),
			"--service-account-private-key-file", pki("sa.key"),
			"--allocate-node-cidrs", "--cluster-cidr", c.ranges().pods, "--service-cluster-ip-range", c.ranges().services}, c.tuning.ControllerManager...),
		"scheduler": {c.progs.Scheduler, "--kubeconfig", conf("scheduler"), "--secure-port=0", "--leader-elect=false"},
	} {
		p, err := c.start(name, argv...)
		if err != nil {
			return err
		}
		c.other = append(c.other, p)
	}
	return nil
}

// openToNodes uploads the objects that `kubeadm join` reads, and waits until cluster-info is signed
// with the token.
func (c *Cluster) openToNodes(ctx context.Context) (err error) {
	if kubeadm.Before(c.progs.Version, 36) {
		// kubeadm before 1.36 annotates the master's Node here. Create the Node, because no kubelet
		// has registered it.
		const nodes, name = "/api/v1/nodes", "master1"
		if err := c.Create(ctx, nodes, map[string]any{
			"apiVersion": "v1", "kind": "Node",
			"metadata": map[string]any{"name": name, "labels": map[string]string{"kubernetes.io/hostname": name}},
		}); err != nil {
			return err
		}
		defer func(ctx context.Context) { err = errors.Join(err, c.Delete(ctx, nodes+"/"+name)) }(ctx)
	}
	for _, phase := range [][]string{{"upload-config", "all"}, {"bootstrap-token"}} {
		if err := c.kubeadm(ctx, append(phase, "--kubeconfig", c.Kubeconfig)...); err != nil {
			return err
		}
	}
	// kubeadm's phase has written the address at which this host reaches the cluster, but nodes use
	// the endpoint.
	const path = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
	var info struct{ Data map[string]string }
	if err := c.Get(ctx, path, &info); err != nil {
		return err
	}
	_, guest := c.net.Master(0)
	fixed := strings.Replace(info.Data["kubeconfig"], c.admin(), fmt.Sprintf("https://%s:%d", Endpoint, guest.Port()), 1)
	if fixed == info.Data["kubeconfig"] {
		return fmt.Errorf("cluster-info does not name %s:\n%s", c.admin(), fixed)
	}
	if err := c.Patch(ctx, path, map[string]any{"data": map[string]string{"kubeconfig": fixed}}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	id, _, _ := strings.Cut(c.Token, ".")
	return c.lab.poll(ctx, "cluster-info to be signed", c.other, func(ctx context.Context) (bool, error) {
		if err := c.Get(ctx, path, &info); err != nil {
			return false, err
		}
		return info.Data["jws-kubeconfig-"+id] != "", nil
	})
}

// Get reads an object from the API into v.
func (c *Cluster) Get(ctx context.Context, path string, v any) error {
	return c.do(ctx, http.MethodGet, path, "", nil, v)
}

// Patch applies the merge patch body to an object.
func (c *Cluster) Patch(ctx context.Context, path string, body any) error {
	return c.do(ctx, http.MethodPatch, path, "application/merge-patch+json", body, nil)
}

// Create creates an object in the collection at path.
func (c *Cluster) Create(ctx context.Context, path string, body any) error {
	return c.do(ctx, http.MethodPost, path, "application/json", body, nil)
}

// Delete removes an object.
func (c *Cluster) Delete(ctx context.Context, path string) error {
	return c.do(ctx, http.MethodDelete, path, "", nil, nil)
}

// StatusError is an error response of the API server.
type StatusError struct {
	Code    int
	Message string
}

func (e *StatusError) Error() string { return fmt.Sprintf("HTTP %d: %s", e.Code, e.Message) }

// NotFound reports whether err means that an object does not exist.
func NotFound(err error) bool {
	var se *StatusError
	return errors.As(err, &se) && se.Code == http.StatusNotFound
}

// do sends a request to the master that answered last, and then to the others until one answers.
func (c *Cluster) do(ctx context.Context, method, path, contentType string, body, v any) error {
	var data []byte
	if body != nil {
		var err error
		if data, err = json.Marshal(body); err != nil {
			return err
		}
	}
	c.requests.Lock()
	first := c.last
	c.requests.Unlock()
	var errs []error
	for i := range c.hosts {
		n := (first + i) % len(c.hosts)
		err := c.doAt(ctx, n, method, path, contentType, data, v)
		var se *StatusError
		if err == nil || errors.As(err, &se) {
			c.requests.Lock()
			c.last = n
			c.requests.Unlock()
			if err != nil {
				return fmt.Errorf("%s %s: %w", method, path, err)
			}
			return nil
		}
		errs = append(errs, err)
	}
	return fmt.Errorf("%s %s: no API server answers: %w", method, path, errors.Join(errs...))
}

func (c *Cluster) doAt(ctx context.Context, n int, method, path, contentType string, data []byte, v any) error {
	limit := 5 * time.Second
	if c.lab.slow {
		limit = 20 * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "https://"+c.hosts[n]+path, bytes.NewReader(data))
	if err != nil {
		return err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		var st struct{ Message string }
		if json.Unmarshal(b, &st) != nil || st.Message == "" {
			st.Message = string(b)
		}
		return &StatusError{resp.StatusCode, st.Message}
	}
	if v == nil {
		return nil
	}
	return json.Unmarshal(b, v)
}

// Kubectl runs kubectl as the cluster's administrator.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	out, err := c.lab.run(ctx, c.net.Wrap(append([]string{c.progs.Kubectl, "--kubeconfig", c.Kubeconfig}, args...))...)
	return string(out), err
}
