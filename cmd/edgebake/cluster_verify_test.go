package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// TestClusterVerifyAsJSON checks that the JSON has the fields that scripts read, and when verify
// advises other flags for kube-controller-manager. The test's cluster has an API server, but none
// of the objects that nodes need.
func TestClusterVerifyAsJSON(t *testing.T) {
	c := newCLI(t)
	rates, mask, nodes := []string{"--kube-api-qps=150", "--kube-api-qps=50"}, "--v=2", 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch r.URL.Path {
		case "/version":
			io.WriteString(w, `{}`)
		case "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices":
			io.WriteString(w, `{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList", "items": [{"ports": [{"port": 6443}], "endpoints": [{"addresses": ["10.0.0.1"]}]}]}`)
		case "/api/v1/namespaces/kube-system/pods":
			var managers []string
			for i, rate := range rates {
				managers = append(managers, fmt.Sprintf(`{"metadata": {"name": "manager-%d", "namespace": "kube-system"}, "spec": {"containers": [{"command": ["kube-controller-manager", "--allocate-node-cidrs=true", "--cluster-cidr=10.244.0.0/20,fd00::/48", %q, %q]}]}}`, i, rate, mask))
			}
			io.WriteString(w, `{"apiVersion": "v1", "kind": "PodList", "items": [`+strings.Join(managers, ",")+`]}`)
		case "/api/v1/nodes":
			io.WriteString(w, `{"apiVersion": "v1", "kind": "NodeList", "items": [`+strings.Join(slices.Repeat([]string{"{}"}, nodes), ",")+`]}`)
		default:
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}`)
		}
	}))
	t.Cleanup(server.Close)
	c.file("admin.conf", fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
clusters: [{name: a, cluster: {server: %q}}], users: [{name: a, user: {}}]}`, server.URL))
	c.run(1, "cluster", "verify", "--kubeconfig", "admin.conf", "-o", "json")
	var rows []map[string]string
	if err := json.Unmarshal([]byte(c.out), &rows); err != nil {
		t.Fatalf("%v in %s", err, c.out)
	}
	states := map[string]string{}
	for _, row := range rows {
		if row["name"] == "" || !slices.Contains([]string{"ok", "failed", "unknown"}, row["state"]) || row["state"] == "failed" && row["fix"] == "" {
			t.Errorf("%q", row)
		}
		states[row["name"]] = row["state"]
	}
	for what, state := range map[string]string{
		"cluster-info is published":                            "failed",
		"configmaps edgebake-masters in namespace kube-public": "failed",
		"configmaps kube-proxy in namespace kube-system":       "ok",
		"OpenYurt": "unknown",
	} {
		if states[what] != state {
			t.Errorf("%s is %q, want %s, of %q", what, states[what], state, states)
		}
	}
	c.want(c.err, fmt.Sprintf("edgebake: verifying %s: 4 of 8 checks failed\n", server.URL))
	const certificates = "many nodes get their certificates quickly"
	if states[certificates] != "unknown" {
		t.Errorf("50 requests a second: %q", states)
	}
	const room = "the pod network has space for more nodes"
	if states[room] != "" {
		t.Errorf("no node: %q", states)
	}
	rates, nodes = []string{"--kube-api-qps=150"}, 12
	c.run(1, "cluster", "verify", "--kubeconfig", "admin.conf")
	if strings.Contains(c.out, certificates) {
		t.Errorf("150 requests a second: %s", c.out)
	}
	rates = []string{"--kube-api-qps=-1"} // no limit
	c.run(1, "cluster", "verify", "--kubeconfig", "admin.conf")
	if strings.Contains(c.out, certificates) {
		t.Errorf("without a limit: %s", c.out)
	}
	if !strings.Contains(c.out, room) || !strings.Contains(c.out, "has space for 16 nodes, and the cluster has 12") {
		t.Errorf("12 nodes in a network of 16: %s", c.out)
	}
	mask = "--node-cidr-mask-size-ipv4=26"
	c.run(1, "cluster", "verify", "--kubeconfig", "admin.conf")
	if strings.Contains(c.out, room) {
		t.Errorf("12 nodes in a network of 64: %s", c.out)
	}
}
