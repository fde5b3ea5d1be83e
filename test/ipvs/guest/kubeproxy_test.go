//go:build linux

package guest

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestKubeProxy starts the real kube-proxy on a node with ipvscare, in each of its modes. In mode
// nftables it flushes IPVS once at its start, which breaks the open connections. In the other modes
// it serves a Service, and ipvscare's rules are never missing.
func TestKubeProxy(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.settle()
	n.set("ipv6/conf/all/disable_ipv6", "1") // otherwise each sync is done twice
	for i, mode := range []string{"iptables", "ipvs", "nftables"} {
		l.run(mode, func(t *testing.T) {
			service := fmt.Sprintf("10.96.0.%d", 11+i)
			check(os.WriteFile(serviceFile, []byte(service), 0o644))
			defer os.Remove(serviceFile)
			// This virtual server shows a flush, because no program restores it.
			defer n.output("/bin/ipvsadm", "-D", "-t", "10.103.97.2:7777")
			n.must("/bin/ipvsadm", "-A", "-t", "10.103.97.2:7777", "-s", "wrr")
			marker := func() bool { return strings.Contains(n.rules(), "0A676102:1E61") }
			var watches []*watch
			for range 6 {
				watches = append(watches, n.watch())
			}
			gapped := n.dips()
			defer gapped()
			h := n.hammer(100*time.Millisecond, time.Minute)
			end := sync.OnceValues(func() (failed, ok int) {
				_, failed, ok = h.end(time.Time{})
				return failed, ok
			})
			defer end()
			began := time.Now()
			n.kubeProxy(t, mode)
			if mode == "nftables" { // it flushes at first, and needs a minute for the rest
				eventually(t, "IPVS is flushed", func() bool { return !marker() })
			} else {
				eventually(t, "the Service answers", func() bool {
					c, who, err := n.ask(service+":443", time.Second)
					if err != nil {
						return false
					}
					c.Close()
					return who == "m1"
				})
			}
			flushed := !marker()
			n.expect("m1 m2 m3")
			gap := gapped()
			failed, ok := end()
			t.Logf("RESULT kubeproxy mode=%s flushed=%v ready_ms=%d gap_ms=%d failed=%d ok=%d", mode, flushed, time.Since(began).Milliseconds(), gap.Milliseconds(), failed, ok)
			if want := mode == "nftables"; flushed != want {
				t.Errorf("it flushed IPVS: %v, expected %v", flushed, want)
			}
			if mode != "nftables" && (gap > 0 || failed > 0) && !n.heldUp() {
				t.Errorf("rules were missing for %s, and %d connections failed", gap, failed)
			}
			if mode == "nftables" && gap > restored && !n.heldUp() {
				t.Errorf("rules were missing for %s after the flush, more than %s", gap, restored)
			}
			if ok == 0 {
				t.Error("no connection succeeded")
			}
			for _, w := range watches {
				if flushed {
					n.breaks(w) // although it was idle
					w.close()
				}
			}
			if flushed {
				watches = []*watch{n.watch(), n.watch(), n.watch()}
			}
			for _, w := range watches {
				w.conn.Write([]byte("x"))
			}
			n.stays("m1 m2 m3", 2*time.Second) // longer than until the next check of the rules
			for _, w := range watches {
				n.unbroken(w)
				w.close()
			}
		})
	}
}

// restored is the maximum time until ipvscare has restored all rules after a flush. The promise is
// one second; an emulated VM takes longer.
const restored = 5 * time.Second

// kubeProxy runs kube-proxy on the node until the test ends. Its rules then stay, as on a real
// node.
func (n *machine) kubeProxy(t *testing.T, mode string) {
	config := n.dir + "/kube-proxy.yaml"
	check(os.WriteFile(config, fmt.Appendf(nil, `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: n1
clientConnection: {acceptContentTypes: application/json, contentType: application/json}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
ipvs: {excludeCIDRs: ["10.103.97.2/32"]}
clusterCIDR: 10.244.0.0/16
`, mode), 0o644))
	cmd := n.command("/bin/kube-proxy", "--config", config, "--master", "http://"+n.l.masters[0].addr.String()+":6443", "-v=2")
	log := &journal{since: n.l.began}
	cmd.Stdout, cmd.Stderr = log, log
	n.start(cmd)
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("kube-proxy said:\n%s", log)
		}
	})
}

// dips measures the time during which at least one master does not serve. total stops the
// measurement and returns the sum.
func (n *machine) dips() (total func() time.Duration) {
	stop, sum := make(chan struct{}), make(chan time.Duration)
	go func() {
		var total time.Duration
		var since time.Time
		for {
			switch whole := n.serving() == "m1 m2 m3"; {
			case !whole && since.IsZero():
				since = time.Now()
			case whole && !since.IsZero():
				total, since = total+time.Since(since), time.Time{}
			}
			select {
			case <-stop:
				sum <- total
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return sync.OnceValue(func() time.Duration {
		close(stop)
		return <-sum
	})
}

// serviceFile contains the cluster IP of the only Service, whose endpoint is the first master.
const serviceFile = "/run/service"

// kubeAPI answers kube-proxy's watches: one node, one Service and its endpoint.
func kubeAPI(mux *http.ServeMux) {
	for path, object := range map[string]struct{ group, kind, rest string }{
		"/api/v1/nodes": {"v1", "Node", `"metadata":{"name":"n1"},"status":{"addresses":[{"type":"InternalIP","address":"10.103.0.101"}]}`},
		"/api/v1/services": {"v1", "Service", `"metadata":{"name":"s","namespace":"default"},
			"spec":{"type":"ClusterIP","clusterIP":"SERVICE","clusterIPs":["SERVICE"],"ipFamilies":["IPv4"],"ports":[{"protocol":"TCP","port":443,"targetPort":6443}]}`},
		"/apis/discovery.k8s.io/v1/endpointslices": {"discovery.k8s.io/v1", "EndpointSlice", `"metadata":{"name":"s-1","namespace":"default","labels":{"kubernetes.io/service-name":"s"}},
			"addressType":"IPv4","ports":[{"name":"","protocol":"TCP","port":6443}],"endpoints":[{"addresses":["10.103.0.11"],"conditions":{"ready":true,"serving":true}}]`},
		"/apis/networking.k8s.io/v1/servicecidrs": {"networking.k8s.io/v1", "ServiceCIDR", ""},
	} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			event := func(kind, rest string) {
				fmt.Fprintf(w, `{"type":%q,"object":{"apiVersion":%q,"kind":%q,%s}}`+"\n", kind, object.group, object.kind, rest)
			}
			if object.rest != "" {
				service, _ := os.ReadFile(serviceFile)
				event("ADDED", strings.ReplaceAll(object.rest, "SERVICE", string(service)))
			}
			event("BOOKMARK", `"metadata":{"resourceVersion":"1","annotations":{"k8s.io/initial-events-end":"true"}}`)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		})
	}
}
