package main

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

// living is a fake API server. It has the objects of a running cluster with kubeadm, flannel and
// three nodes.
type living struct {
	*httptest.Server
	answers map[string]string
	denied  string // the resource that the user may not use
	minted  []string
}

func newLiving(t *testing.T) *living {
	l := &living{}
	l.Server = httptest.NewTLSServer(l)
	t.Cleanup(l.Close)
	ca := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: l.Certificate().Raw}))
	info, err := json.Marshal("apiVersion: v1\nkind: Config\nclusters:\n- name: \"\"\n  cluster: {server: \"https://x:6443\", certificate-authority-data: " + ca + "}\n")
	if err != nil {
		t.Fatal(err)
	}
	l.answers = map[string]string{
		"/version": `{"gitVersion": "v1.36.3+vendor.1"}`,
		"/api/v1/namespaces/kube-public/configmaps/cluster-info":   `{"kind": "ConfigMap", "apiVersion": "v1", "data": {"kubeconfig": ` + string(info) + `}}`,
		"/api/v1/namespaces/kube-system/configmaps/kubeadm-config": `{"kind": "ConfigMap", "apiVersion": "v1", "data": {"ClusterConfiguration": "controlPlaneEndpoint: cp.example.com:6443\n"}}`,
		"/apis/discovery.k8s.io/v1/namespaces/default/endpointslices": `{"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "items": [
			{"ports": [{"port": 6443}], "endpoints": [{"addresses": ["192.168.7.12"]}, {"addresses": ["192.168.7.11"]}]}]}`,
		"/api/v1/nodes": `{"kind": "NodeList", "apiVersion": "v1", "items": [
			{"status": {"images": [{"names": ["registry.k8s.io/pause@sha256:0", "registry.k8s.io/pause:3.9"]}]}},
			{"status": {"images": [{"names": ["registry.k8s.io/pause:3.10"]}, {"names": ["registry.k8s.io/etcd:3.6.1"]}]}}, {}]}`,
		"/apis/apps/v1/daemonsets": `{"kind": "DaemonSetList", "apiVersion": "apps/v1", "items": [
			{"metadata": {"name": "kube-flannel", "namespace": "kube-flannel"}, "spec": {"template": {"spec": {
				"initContainers": [{"name": "cni", "image": "ghcr.io/flannel-io/flannel-cni-plugin:v1.7.1"}],
				"containers": [{"name": "flannel", "image": "ghcr.io/flannel-io/flannel:v0.27.0", "env": [{"name": "PASSWORD", "value": "hunter2"}]}]}}}},
			{"metadata": {"name": "kube-proxy", "namespace": "kube-system"}, "spec": {"template": {"spec": {
				"containers": [{"name": "kube-proxy", "image": "registry.k8s.io/kube-proxy:v1.36.3"}]}}}},
			{"metadata": {"name": "kube-proxy-windows", "namespace": "kube-system"}, "spec": {"template": {"spec": {
				"nodeSelector": {"kubernetes.io/os": "windows"}, "containers": [{"name": "p", "image": "x/y:1"}]}}}}]}`,
	}
	return l
}

func (l *living) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	switch answer, ok := l.answers[r.URL.Path]; {
	case strings.HasSuffix(r.URL.Path, "/selfsubjectaccessreviews"):
		var in map[string]any
		_ = json.NewDecoder(r.Body).Decode(&in)
		of := in["spec"].(map[string]any)["resourceAttributes"].(map[string]any)["resource"]
		in["status"] = map[string]any{"allowed": of != l.denied}
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(in)
	case r.Method == http.MethodPost:
		var in map[string]any
		_ = json.NewDecoder(r.Body).Decode(&in)
		name := in["metadata"].(map[string]any)["name"].(string)
		l.minted = append(l.minted, name)
		data := map[string]string{}
		for k, v := range in["stringData"].(map[string]any) {
			data[k] = base64.StdEncoding.EncodeToString([]byte(v.(string)))
		}
		kept, _ := json.Marshal(map[string]any{"kind": "Secret", "apiVersion": "v1", "type": in["type"], "metadata": in["metadata"], "data": data})
		l.answers[r.URL.Path+"/"+name] = string(kept)
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(in)
	case ok:
		_, _ = w.Write([]byte(answer))
	default:
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte(`{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"}`))
	}
}

// kubeconfig writes the kubeconfig of the cluster's administrator.
func (l *living) kubeconfig(c *program) {
	c.file("kubeconfig", "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {token: t}}]\n"+
		"clusters: [{name: a, cluster: {insecure-skip-tls-verify: true, server: '"+l.URL+"'}}]\n")
}

// TestInitFromCluster checks that the documents that init writes for a running cluster are valid,
// and that later runs keep edited files and valid tokens.
func TestInitFromCluster(t *testing.T) {
	c, l := newCLI(t), newLiving(t)
	l.kubeconfig(c)
	c.file("id.pub", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE0Y2vFLE7fQ2HHmGEUQGTqWn4Ri9GJMn1T9AeeQkMi+ me\n")
	c.run(0, "init", "--kubeconfig", "kubeconfig", "--ssh-key", "id.pub")
	c.want(c.out, "wrote image.yaml", "wrote site.yaml", "wrote agents.yaml", "Kubernetes v1.36.3; token ", "Next: edgebake build\n")
	c.want(c.err, "Left out, since they are not for Linux: kube-proxy-windows")
	text := func(name string) string {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	all := func() map[string]string {
		return map[string]string{"image.yaml": text("image.yaml"), "site.yaml": text("site.yaml"), "agents.yaml": text("agents.yaml")}
	}
	token := func() string {
		t.Helper()
		site, err := configs.ParseSite("site.yaml", []byte(text("site.yaml")))
		if err != nil {
			t.Fatal(err)
		}
		id, _, _ := strings.Cut(site.Credentials.Token.Reveal(), ".")
		return kubeapi.TokenSecretName(id)
	}
	c.want(text("image.yaml"), "\n  version: v1.36.3\n", "\n  sandbox: registry.k8s.io/pause:3.10\n", "\nimagesFrom: [agents.yaml]\n")
	agents := text("agents.yaml")
	c.want(agents, "image: ghcr.io/flannel-io/flannel-cni-plugin:v1.7.1", "image: ghcr.io/flannel-io/flannel:v0.27.0", "image: registry.k8s.io/kube-proxy:v1.36.3")
	if strings.Contains(agents, "hunter2") || strings.Contains(agents, "x/y") {
		t.Errorf("agents.yaml contains a password, or an image that is not for Linux:\n%s", agents)
	}
	c.run(0, "validate", "image.yaml", "site.yaml")
	site, err := configs.ParseSite("site.yaml", []byte(text("site.yaml")))
	if err != nil {
		t.Fatal(err)
	}
	pins, err := kubeapi.Pins(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: l.Certificate().Raw}))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(site.Masters, []string{"192.168.7.11:6443", "192.168.7.12:6443"}) || site.Endpoint != "cp.example.com" ||
		!slices.Equal(site.CACertHashes, pins) || !slices.Equal(l.minted, []string{token()}) {
		t.Errorf("%s\nminted %q, the CA is %q", text("site.yaml"), l.minted, pins)
	}
	if st, err := os.Stat("site.yaml"); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("site.yaml has mode %v, want 0600 (%v)", st.Mode(), err)
	}

	// A second run keeps all files, including edited ones, and creates no token.
	before := all()
	c.run(0, "init", "--kubeconfig", "kubeconfig", "--ssh-key", "id.pub")
	c.want(c.out, "kept the existing image.yaml", "kept the existing site.yaml", "kept the existing agents.yaml", "the Site's token is still valid", "Next: edgebake build\n")
	if !maps.Equal(all(), before) || len(l.minted) != 1 {
		t.Errorf("minted %q, %q", l.minted, all())
	}
	edited := maps.Clone(before)
	edited["image.yaml"] += "# for the shops\n"
	edited["site.yaml"] += "labels: {a: b}\n"
	for name, doc := range edited {
		c.file(name, doc)
	}
	c.run(0, "init", "--kubeconfig", "kubeconfig")
	if !maps.Equal(all(), edited) || len(l.minted) != 1 {
		t.Errorf("minted %q, %q", l.minted, all())
	}

	// Other forms of init also keep the values from the cluster.
	for _, form := range [][]string{{"init"}, {"init", "--cluster"}} {
		c.run(0, form...)
		c.want(c.out, "kept the existing image.yaml")
		if !maps.Equal(all(), edited) {
			t.Errorf("%q changed the files: %q", form, all())
		}
	}
	if err := os.Remove("cluster.yaml"); err != nil {
		t.Fatal(err)
	}

	// An expired token is replaced, but not in an edited file.
	delete(l.answers, "/api/v1/namespaces/kube-system/secrets/"+l.minted[0])
	c.run(1, "init", "--kubeconfig", "kubeconfig", "--ssh-key", "id.pub")
	c.want(c.err, "site.yaml exists and is not changed; write these values into it, or replace it with --force:\n  credentials.token: a valid token")
	if !maps.Equal(all(), edited) || len(l.minted) != 1 {
		t.Errorf("minted %q, %q", l.minted, all())
	}
	c.file("site.yaml", before["site.yaml"])
	c.run(0, "init", "--kubeconfig", "kubeconfig", "--ssh-key", "id.pub")
	c.want(c.out, "replaced site.yaml (unedited)")
	if len(l.minted) != 2 || l.minted[1] == l.minted[0] || token() != l.minted[1] {
		t.Errorf("minted %q, %s", l.minted, text("site.yaml"))
	}

	// If the cluster has changed, the values that an edited Image lacks are listed. With --force,
	// the files are replaced.
	l.answers["/version"] = `{"gitVersion": "v1.36.5"}`
	c.run(1, "init", "--kubeconfig", "kubeconfig", "--ssh-key", "id.pub")
	c.want(c.err, "image.yaml exists and is not changed; write these values into it, or replace it with --force:\n  kubernetes.version: v1.36.5\n")
	if text("image.yaml") != edited["image.yaml"] || len(l.minted) != 2 {
		t.Errorf("minted %q, %s", l.minted, text("image.yaml"))
	}
	c.run(0, "init", "--kubeconfig", "kubeconfig", "--force")
	c.want(text("image.yaml"), "\n  version: v1.36.5\n")
	if strings.Contains(text("image.yaml"), "for the shops") || len(l.minted) != 3 || token() != l.minted[2] {
		t.Errorf("minted %q, %s\n%s", l.minted, text("image.yaml"), text("site.yaml"))
	}
	c.run(0, "validate", "image.yaml", "site.yaml")
}

// TestInitFromClusterFails checks that if the cluster cannot be read, init writes nothing and
// creates no token.
func TestInitFromClusterFails(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(l *living)
		want   string
	}{
		"rights":  {func(l *living) { l.denied = "daemonsets" }, "list daemonsets.apps"},
		"old":     {func(l *living) { l.answers["/version"] = `{"gitVersion": "v1.28.3"}` }, "no image for Kubernetes v1.28.3: "},
		"version": {func(l *living) { l.answers["/version"] = "<html>" }, `the API server reports the invalid version ""`},
		"no cluster-info": {func(l *living) {
			maps.DeleteFunc(l.answers, func(path, _ string) bool { return strings.HasSuffix(path, "cluster-info") })
		}, "run `kubeadm init phase bootstrap-token` on a control-plane node"},
	} {
		t.Run(name, func(t *testing.T) {
			c, l := newCLI(t), newLiving(t)
			l.kubeconfig(c)
			tt.change(l)
			c.run(1, "init", "--kubeconfig", "kubeconfig")
			c.want(c.err, tt.want)
			if left, err := os.ReadDir("."); err != nil || len(left) != 1 || l.minted != nil {
				t.Errorf("init left the files %v, minted %q, %v", left, l.minted, err)
			}
		})
	}
}
