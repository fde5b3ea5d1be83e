package cluster

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/edgebake/edgebake/test/fleettest"
	"github.com/edgebake/edgebake/test/lab"
)

// nodesOfRollout is the number of Nodes in TestRolloutOfARealCluster; nightly runs have 1,000.
const nodesOfRollout = 50

// TestRolloutOfARealCluster runs a rollout on many Nodes of a real API server. The simulated
// machines answer with their own certificates. The test kills the rollout at random points and runs
// it again.
// The machines at risk must stay within the budget, no machine may restart twice, and the number of
// requests is limited.
func TestRolloutOfARealCluster(t *testing.T) {
	lc := needCluster(t)
	count := nodesOfRollout
	if os.Getenv("EDGEBAKE_NIGHTLY") != "" {
		count = 1000
	}
	const oldPlan, newPlan = "0123456789abcdef", "fedcba9876543210"
	const bad = 3
	budget := max(4, count/50)
	var mu sync.Mutex
	machines := map[string]*fleettest.Machine{}
	for i := range count {
		name, outcome := fmt.Sprintf("fleet-%d", i), fleettest.Works
		if i%(count/bad) == 1 && i/(count/bad) < bad {
			outcome = fleettest.Bad
		}
		createNode(t, lc, name, map[string]string{"fleet": "rollout"})
		machines[name] = fleettest.NewMachine(name, outcome, oldPlan, newPlan)
	}
	// The simulated machines: each reads its Node and answers with its own certificate.
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	most := 0
	ca, err := os.ReadFile(lc.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	type report struct {
		ready bool
		at    time.Time
	}
	reports := map[string]report{} // the last one that each machine wrote: a Node without reports is not Ready
	step := func(m *fleettest.Machine, c *kubeapi.Client) {
		path := "/api/v1/nodes/" + m.Name
		meta, err := c.GetMetadata(ctx, path)
		if err != nil {
			return
		}
		_, halted := meta.Annotations[order.AnnotationHalt]
		mu.Lock()
		answer := m.Step(meta.Annotations[order.AnnotationOrder], halted).String()
		last := reports[m.Name]
		due := last.ready != m.Ready || m.Ready && time.Since(last.at) > 20*time.Second
		now, risk := m.Ready, 0
		for _, o := range machines {
			if o.AtRisk {
				risk++
			}
		}
		most = max(most, risk)
		mu.Unlock()
		if answer != meta.Annotations[order.AnnotationAnswer] {
			patch := map[string]any{"metadata": map[string]any{"annotations": map[string]string{order.AnnotationAnswer: answer}}}
			if err := c.MergePatch(ctx, path, patch); err != nil && ctx.Err() == nil {
				t.Log(err) // the next step tries again
			}
		}
		if due {
			status := map[bool]string{true: "True", false: "False"}[now]
			at := time.Now()
			written := at.UTC().Format(time.RFC3339)
			if err := c.MergePatch(ctx, path+"/status", map[string]any{"status": map[string]any{"conditions": []map[string]string{
				{"type": "Ready", "status": status, "reason": "x", "message": "x", "lastHeartbeatTime": written, "lastTransitionTime": written}}}}); err != nil {
				if ctx.Err() == nil {
					t.Log(err)
				}
				return
			}
			mu.Lock()
			reports[m.Name] = report{now, at}
			mu.Unlock()
		}
	}
	server := adminAPI(t, lc.Kubeconfig).Server
	for name, m := range machines {
		pem := nodeCertificate(t, lc, name, time.Now().Add(time.Hour))
		running.Go(func() {
			pair, err := tls.X509KeyPair(pem, pem)
			if err != nil {
				t.Error(err)
				return
			}
			c, err := (&kubeapi.Client{Server: server, CA: ca, Cert: &pair}).Kept()
			for err == nil && ctx.Err() == nil {
				step(m, c)
				select {
				case <-ctx.Done():
				case <-time.After(time.Duration(200+rand.IntN(400)*max(1, count/50)) * time.Millisecond):
				}
			}
		})
	}
	ring, err := cluster.Selector("fleet=rollout")
	if err != nil {
		t.Fatal(err)
	}
	r := cluster.Rollout{Order: order.Order{Image: "https://images.example.com/edge.raw.zst", Golden: strings.Repeat("ab", 32)},
		Info:  ondisk.ImageInfo{Plan: newPlan, Arch: "amd64", Kubernetes: "v1.30.0", UpdateSerial: 2},
		Rings: []cluster.Ring{ring}, Drain: time.Hour, Restart: time.Hour, Fetch: time.Hour, Tick: 200 * time.Millisecond}
	for _, err := range []error{r.Parallel.Set("20%"), r.Budget.Set(strconv.Itoa(budget))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	client, requests := counted(t, lc)
	until(t, "the machines to answer", func() bool {
		rows, err := client.CheckRollout(ctx, &r)
		answered := 0
		for _, row := range rows {
			if row.State == cluster.UpdatePending {
				answered++
			}
		}
		return err == nil && answered == count
	})
	before, began, kills := requests(), time.Now(), 0
	for {
		short, stop := context.WithTimeout(ctx, time.Duration(1000+rand.IntN(8000))*time.Millisecond)
		err := client.Update(short, &r, func(cluster.UpdateRow) {}, func(text string) { t.Log(text) })
		killed := short.Err() != nil
		stop()
		if killed && kills < 10 {
			kills++
			continue
		}
		if killed {
			err = client.Update(ctx, &r, func(cluster.UpdateRow) {}, func(text string) { t.Log(text) })
		}
		if err == nil || !strings.Contains(err.Error(), fmt.Sprint(bad, " failed")) {
			t.Fatal(err)
		}
		break
	}
	took, after := time.Since(began), requests()
	cancel()
	running.Wait()
	updated, restarts := 0, 0
	for name, m := range machines {
		if m.Plan == newPlan {
			updated++
		}
		if restarts += m.Restarts; m.Restarts != 1 {
			t.Errorf("%s restarted %d times", name, m.Restarts)
		}
		var node struct {
			Metadata struct{ Annotations map[string]string }
			Spec     struct{ Unschedulable bool }
		}
		if err := lc.Get(t.Context(), "/api/v1/nodes/"+name, &node); err != nil || node.Spec.Unschedulable || node.Metadata.Annotations[order.AnnotationOrder] != "" {
			t.Errorf("%s: %+v, %v", name, node, err)
		}
	}
	if updated != count-bad || most > budget {
		t.Errorf("%d of %d updated, at most %d at risk", updated, count, most)
	}
	t.Logf("%d nodes in %s, killed %d times, at most %d of %d at risk", count, took.Round(time.Second), kills, most, budget)
	for what, n := range after {
		if n -= before[what]; n > 0 {
			t.Logf("%d %s: %.2f for each node", n, what, float64(n)/float64(count))
		}
	}
	// The order, the cordon, the restart and the result are one change each; a kill or a conflict
	// repeats one.
	if n := after["PATCH nodes"]; n > 6*count+10*kills {
		t.Errorf("%d changes of %d nodes", n, count)
	}
}

// counted returns a client of the cluster that counts requests by verb and resource.
func counted(t *testing.T, lc *lab.Cluster) (*cluster.Client, func() map[string]int) {
	t.Helper()
	admin := adminAPI(t, lc.Kubeconfig)
	to, err := url.Parse(admin.Server)
	if err != nil {
		t.Fatal(err)
	}
	roots, err := kubeapi.Pool(admin.CA)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	count := map[string]int{}
	proxy := &httputil.ReverseProxy{FlushInterval: -1, ErrorHandler: func(http.ResponseWriter, *http.Request, error) {}, ErrorLog: log.New(io.Discard, "", 0),
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{*admin.Cert}}, ForceAttemptHTTP2: true},
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(to) }}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
		what := r.Method + " " + parts[min(2, len(parts)-1)]
		switch {
		case r.URL.Query().Get("watch") != "":
			what = "watches of nodes"
		case strings.HasSuffix(r.URL.Path, "/nodes"):
			what = "lists of nodes"
		case strings.HasSuffix(r.URL.Path, "/pods"):
			what = "lists of a node's pods"
		}
		mu.Lock()
		count[what]++
		mu.Unlock()
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	conf := fmt.Sprintf("{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}], clusters: [{name: a, cluster: {server: %q}}], users: [{name: a, user: {}}]}", server.URL)
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := cluster.Open(file, "")
	if err != nil {
		t.Fatal(err)
	}
	return c, func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(count)
	}
}
