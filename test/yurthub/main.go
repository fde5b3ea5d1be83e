// Command yurthub is a stand-in for OpenYurt's yurthub, for tests only. It exists because CI can
// reach neither a registry nor OpenYurt's module. It implements the parts of yurthub 1.7 on which a
// node built by edgebake depends:
//
//   - It has the same flags, and the same ones are required.
//   - It opens no port before both certificates exist, and gives up after four minutes
//     without them.
//   - It gets its identity from kubelet's certificate or from a bootstrap kubeconfig. Each
//     certificate comes from a CSR for the right signer. The root directory is wiped if
//     the server in yurthub.conf is not in the list of servers any more.
//   - It has the ports 10267 (health), 10261 (HTTP), 10268 (HTTPS, dummy address) and
//     10269 (HTTPS, node address).
//   - /v1/readyz waits until ConfigMaps and NodePools can be listed.
//   - Requests go to a healthy API server with the node's certificate. If there is none,
//     kubelet is served from a cache on disk.
//
// With YURTHUB_STAND_IN=v1.6.1 in its environment, as in the container image made by test/images,
// it behaves like a version before 1.7: no --node-ip, no port 10269, and no node pool required. If
// the program ip is missing, as in that image, it makes no dummy interface and serves pods on the
// loopback address.
//
// One difference remains: if the Autonomy condition of a node was never set through a server, the
// real program answers offline requests for the node's own Node with 500, while this program serves
// the cache.
//
// It has no filters, no multiplexing, no leaders of node pools, no tenants and no garbage
// collection. The tests compare its answers with those of the real program, which are recorded in
// testdata/transcripts.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// options are the flags of yurthub, including those that have no effect here.
type options struct {
	nodeName, nodePool, nodeIP     string
	servers                        []*url.URL
	bind, bindProxy, dummyIP       string
	dummyName                      string
	dummy, enableNodePool          bool
	workingMode, namespace, lbMode string
	bootstrapMode, bootstrapFile   string
	rootDir, cacheDir              string
	orgs                           []string
	interval, timeout              time.Duration
	healthyThreshold, retries      int
	healthPort, proxyPort, tlsPort int
	poolPort                       int
	etc, kubeletDir                string
	giveUp                         time.Duration
	before17                       bool
}

// parse reads and checks the command line. Like yurthub, it reports only the first problem.
func parse(args []string, version string) (*options, error) {
	o := &options{before17: strings.HasPrefix(version, "v1.6.")}
	fs := flag.NewFlagSet("yurthub", flag.ContinueOnError)
	fs.StringVar(&o.nodeName, "node-name", "", "")
	fs.StringVar(&o.nodePool, "nodepool-name", "", "")
	serverAddr := fs.String("server-addr", "", "")
	fs.StringVar(&o.bind, "bind-address", "127.0.0.1", "")
	fs.StringVar(&o.bindProxy, "bind-proxy-address", "127.0.0.1", "")
	fs.StringVar(&o.dummyIP, "dummy-if-ip", "169.254.2.1", "")
	fs.StringVar(&o.dummyName, "dummy-if-name", "hub-dummy0", "")
	fs.BoolVar(&o.dummy, "enable-dummy-if", true, "")
	fs.BoolVar(&o.enableNodePool, "enable-node-pool", true, "")
	fs.StringVar(&o.workingMode, "working-mode", "edge", "")
	fs.StringVar(&o.namespace, "namespace", "kube-system", "")
	fs.StringVar(&o.lbMode, "lb-mode", "rr", "")
	fs.StringVar(&o.bootstrapMode, "bootstrap-mode", "token", "")
	fs.StringVar(&o.bootstrapFile, "bootstrap-file", "", "")
	fs.StringVar(&o.rootDir, "root-dir", "/var/lib/yurthub", "")
	fs.StringVar(&o.cacheDir, "disk-cache-path", "/etc/kubernetes/cache", "")
	orgs := fs.String("hub-cert-organizations", "", "")
	interval := fs.Int("heartbeat-interval-seconds", 10, "")
	timeout := fs.Int("heartbeat-timeout-seconds", 2, "")
	fs.IntVar(&o.retries, "heartbeat-failed-retry", 3, "")
	fs.IntVar(&o.healthyThreshold, "heartbeat-healthy-threshold", 2, "")
	fs.IntVar(&o.healthPort, "serve-port", 10267, "")
	fs.IntVar(&o.proxyPort, "proxy-port", 10261, "")
	fs.IntVar(&o.tlsPort, "proxy-secure-port", 10268, "")
	if o.before17 {
		o.dummyName = "yurthub-dummy0"
	} else {
		fs.StringVar(&o.nodeIP, "node-ip", "", "")
		fs.IntVar(&o.poolPort, "multiplexer-port", 10269, "")
	}
	for _, name := range []string{
		"v", "discovery-token-ca-cert-hash", "gc-frequency", "max-requests-in-flight", "kubelet-health-grace-period",
		"min-request-timeout", "disabled-resource-filters", "join-token",
	} {
		fs.String(name, "", "")
	}
	for _, name := range []string{
		"discovery-token-unsafe-skip-ca-verification", "profiling", "enable-iptables", "enable-resource-filter",
		"enable-pool-service-topology",
	} {
		fs.Bool(name, false, "")
	}
	// These flags exist only in this program, for tests on one machine.
	fs.StringVar(&o.etc, "stand-in-etc", "/etc/kubernetes", "")
	fs.StringVar(&o.kubeletDir, "stand-in-kubelet-dir", "/var/lib/kubelet", "")
	fs.DurationVar(&o.giveUp, "stand-in-give-up", 4*time.Minute, "")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	o.interval = time.Duration(*interval) * time.Second
	o.timeout = time.Duration(*timeout) * time.Second
	if *orgs != "" {
		o.orgs = strings.Split(*orgs, ",")
	}
	if err := o.check(*serverAddr); err != nil {
		return nil, err
	}
	for s := range strings.SplitSeq(*serverAddr, ",") {
		u, err := url.Parse(s)
		if err != nil {
			return nil, fmt.Errorf("parsing server address %s: %w", s, err)
		}
		if u.Scheme != "https" {
			return nil, fmt.Errorf("server address %s: only the https scheme is supported", s)
		}
		o.servers = append(o.servers, &url.URL{Scheme: u.Scheme, Host: u.Host})
	}
	if o.nodeIP == "" && !o.before17 {
		ip, err := defaultAddress()
		if err != nil {
			return nil, err
		}
		o.nodeIP = ip
	}
	return o, nil
}

// check checks each flag by itself.
func (o *options) check(serverAddr string) error {
	switch {
	case o.nodeName == "":
		return errors.New("node name is empty")
	case serverAddr == "":
		return errors.New("server address is empty")
	case o.workingMode != "edge" && o.workingMode != "cloud":
		return fmt.Errorf("working mode %s is not supported", o.workingMode)
	case o.bootstrapMode != "kubeletcertificate" && o.bootstrapFile == "":
		return errors.New("neither a bootstrap file nor kubelet's certificate is given")
	case o.lbMode != "rr" && o.lbMode != "priority":
		return fmt.Errorf("lb mode (%s) is not supported", o.lbMode)
	case o.nodePool == "" && !o.before17:
		return errors.New("node pool name is empty")
	case len(o.dummyName) > 15:
		return fmt.Errorf("dummy interface name %s is longer than 15", o.dummyName)
	}
	if ip := net.ParseIP(o.dummyIP); ip == nil || !strings.HasPrefix(o.dummyIP, "169.254.") ||
		strings.HasPrefix(o.dummyIP, "169.254.31.") || o.dummyIP == "169.254.1.1" {
		return fmt.Errorf("dummy address %s is not usable", o.dummyIP)
	}
	return nil
}

// defaultAddress returns the source address of the default route.
func defaultAddress() (string, error) {
	c, err := net.Dial("udp", "192.0.2.1:9")
	if err != nil {
		return "", fmt.Errorf("finding the node address: %w", err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).IP.String(), nil
}

func main() {
	log.SetFlags(log.Ltime)
	log.SetPrefix("stand-in yurthub: ")
	version := cmp.Or(os.Getenv("YURTHUB_STAND_IN"), "v1.7.0")
	if slices.Contains(os.Args[1:], "--version") {
		fmt.Println("yurthub: " + version + "-stand-in")
		return
	}
	o, err := parse(os.Args[1:], version)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err = run(ctx, o)
	stopped := ctx.Err() != nil
	stop()
	if err != nil && !stopped {
		log.Print(err)
		os.Exit(255)
	}
}

func run(ctx context.Context, o *options) error {
	id, err := newIdentity(o)
	if err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, o.giveUp)
	err = id.obtain(wait)
	cancel()
	if err != nil {
		return fmt.Errorf("waiting for the certificates: %w", err)
	}
	h := newHealth(o, id)
	go h.run(ctx)
	p := &proxy{o: o, id: id, health: h, cache: &cache{dir: o.cacheDir}}
	go p.sync(ctx)
	return p.serve(ctx)
}
