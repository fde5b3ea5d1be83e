package worldtest

import (
	"cmp"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

// ServeHTTP answers the requests to all API servers of the cluster.
func (c *Cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if c.dialError != nil {
		BreakKeptAlive(r, c.dialError)
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	c.Requests = append(c.Requests, r.URL.Path)
	auth := r.Header.Get("Authorization")
	switch {
	case auth != "" && (auth != "Bearer "+TestToken || c.TokenRevoked),
		auth == "" && !c.accepts(r.TLS.PeerCertificates):
		reject(w, http.StatusUnauthorized, "Unauthorized")
	case r.Header.Get("Content-Type") == "application/apply-patch+yaml":
		c.serverSideApply(w, r)
	case slices.Contains(c.DNSObjects, r.URL.Path):
		c.dnsObject(w, r)
	default:
		c.routes.ServeHTTP(w, r)
	}
}

// accepts reports whether a client with these certificates is accepted; there may be none.
func (c *Cluster) accepts(certs []*x509.Certificate) bool {
	if len(certs) == 0 {
		return !c.NoAnonymous
	}
	_, err := certs[0].Verify(x509.VerifyOptions{Roots: c.TLS.ClientCAs, CurrentTime: c.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err == nil
}

// newRoutes returns handlers for the paths that the cluster serves. They run with c.Mu held.
func (c *Cluster) newRoutes() *http.ServeMux {
	mux := http.NewServeMux()
	for pattern, handle := range map[string]http.HandlerFunc{
		"/readyz":  c.readyz,
		"/version": c.version,
		"/api/v1": c.fixed(resources(resource{"secrets", "Secret", true}, resource{"configmaps", "ConfigMap", true},
			resource{"namespaces", "Namespace", false}, resource{"namespaces/status", "Namespace", false})),
		"/apis/rbac.authorization.k8s.io/v1": c.fixed(resources(resource{"roles", "Role", true}, resource{"rolebindings", "RoleBinding", true})),

		"POST /api/v1/namespaces":                        c.createByName,
		"POST /api/v1/namespaces/default/configmaps":     c.createByName,
		"POST /api/v1/namespaces/shop/configmaps":        c.createByName,
		"POST /api/v1/namespaces/kube-system/secrets":    c.createSecret,
		rolesPath + "roles":                              c.createRBAC,
		rolesPath + "rolebindings":                       c.createRBAC,
		"POST /api/v1/namespaces/kube-system/configmaps": c.createMarker,
		markerPath:       c.marker,
		clusterInfoPath:  c.clusterInfo,
		kubeadmConfigMap: c.kubeadmConfig,
		kubeletConfigMap: c.kubeletConfig,
		proxyConfigMap:   c.proxyConfig,
		"/api/v1/namespaces/{namespace}/configmaps":                             c.hubConfigMaps,
		"/apis/apps.openyurt.io/{version}/nodepools":                            c.nodePools,
		"/api/v1/namespaces/default/services/kubernetes":                        c.kubernetesService,
		"/api/v1/services":                                                      c.services,
		"/apis/networking.k8s.io/v1/servicecidrs":                               c.serviceCIDRs,
		"/apis/certificates.k8s.io/":                                            c.certificateRequests,
		"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}": c.lease,
		"/api/v1/nodes/m2/proxy/stats/summary":                                  c.kubeletSummary,
		"/api/v1/pods":                                                          c.pods,
		"POST /api/v1/namespaces/{namespace}/pods/{name}/eviction":              c.evict,
		"/api/v1/nodes/{name}":                                                  c.node,
	} {
		mux.HandleFunc(pattern, handle)
	}
	for pattern, handle := range c.leaseRoutes() {
		mux.HandleFunc(pattern, handle)
	}
	return mux
}

const (
	clusterInfoPath = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
	rolesPath       = "POST /apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/"
)

// reject answers with a Status that has only a message.
func reject(w http.ResponseWriter, code int, message string) {
	http.Error(w, fmt.Sprintf(`{"message":%q}`, message), code)
}

func (c *Cluster) answer(w http.ResponseWriter, v any) {
	if err := json.NewEncoder(w).Encode(v); err != nil {
		c.T.Error(err)
	}
}

// created writes the answer to a successful POST.
func (c *Cluster) created(w http.ResponseWriter) {
	w.WriteHeader(http.StatusCreated)
	c.answer(w, object{})
}

func (c *Cluster) decode(r *http.Request, v any) {
	if err := json.NewDecoder(r.Body).Decode(v); err != nil {
		c.T.Errorf("%s %s: %v", r.Method, r.URL, err)
	}
}

// object is a Kubernetes object, list a list of them.
type (
	object = map[string]any
	list   = []any
)

func (c *Cluster) fixed(v any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { c.answer(w, v) }
}

type resource struct {
	name, kind string
	namespaced bool
}

func resources(all ...resource) object {
	var items list
	for _, r := range all {
		items = append(items, object{"name": r.name, "kind": r.kind, "namespaced": r.namespaced})
	}
	return object{"resources": items}
}

func (c *Cluster) version(w http.ResponseWriter, _ *http.Request) {
	c.answer(w, object{"gitVersion": cmp.Or(c.Version, "v1.36.3")})
}

// pods lists the Pods, one per page.
func (c *Cluster) pods(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if q.Get("fieldSelector") != "spec.nodeName="+c.PodsNode {
		reject(w, http.StatusForbidden, "can only list/watch pods with spec.nodeName field selector")
		return
	}
	at := slices.IndexFunc(c.Pods, func(p kubeapi.Pod) bool { return q.Get("continue") == "" || p.Metadata.Name == q.Get("continue") })
	if at < 0 {
		c.answer(w, object{"items": list{}})
		return
	}
	meta := object{}
	if at+1 < len(c.Pods) {
		meta["continue"] = c.Pods[at+1].Metadata.Name
	}
	c.answer(w, object{"metadata": meta, "items": c.Pods[at : at+1]})
}

// evict removes a Pod if Disrupt allows it. The namespace "terminating" is being deleted.
func (c *Cluster) evict(w http.ResponseWriter, r *http.Request) {
	var e struct {
		Kind          string
		DeleteOptions struct{ Preconditions struct{ UID string } }
	}
	c.decode(r, &e)
	name := r.PathValue("name")
	at := slices.IndexFunc(c.Pods, func(p kubeapi.Pod) bool {
		return p.Metadata.Name == name && p.Metadata.Namespace == r.PathValue("namespace")
	})
	switch {
	case at < 0:
		reject(w, http.StatusNotFound, "not found")
	case e.Kind != "Eviction" || e.DeleteOptions.Preconditions.UID != c.Pods[at].Metadata.UID:
		reject(w, http.StatusConflict, "another pod")
	case r.PathValue("namespace") == "terminating":
		reject(w, http.StatusForbidden, "unable to create new content in namespace terminating because it is being terminated")
	case c.Disrupt != nil && !c.Disrupt(name):
		reject(w, http.StatusTooManyRequests, "Cannot evict pod as it would violate the pod's disruption budget.")
	default:
		c.Pods = slices.Delete(c.Pods, at, at+1)
		c.EvictedPods = append(c.EvictedPods, name)
		c.created(w)
	}
}

func (c *Cluster) readyz(w http.ResponseWriter, _ *http.Request) {
	if c.ReadyzStatus != 0 {
		http.Error(w, "[-]informer-sync failed", c.ReadyzStatus)
		return
	}
	c.answer(w, "ok")
}

// serverSideApply records an applied object of the Cluster's manifests.
func (c *Cluster) serverSideApply(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method != http.MethodPatch || r.URL.RawQuery != "force=true&fieldManager=edgebake":
		c.T.Errorf("applied by %s %s", r.Method, r.URL)
	case strings.HasPrefix(r.URL.Path, "/api/v1/namespaces/shop/") && !slices.Contains(c.Applied, "/api/v1/namespaces/shop"):
		reject(w, http.StatusNotFound, `namespaces "shop" not found`)
	case strings.HasSuffix(r.URL.Path, "/late") && c.ApplyFails:
		reject(w, http.StatusInternalServerError, "failed calling webhook")
	default:
		c.Applied = append(c.Applied, r.URL.Path)
		c.answer(w, object{})
	}
}

// createByName creates an object unless it exists.
func (c *Cluster) createByName(w http.ResponseWriter, r *http.Request) {
	var made struct{ Metadata struct{ Name string } }
	c.decode(r, &made)
	c.createOnce(w, &c.CreatedPaths, r.URL.Path+"/"+made.Metadata.Name)
}

func (c *Cluster) createSecret(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		c.T.Error(err)
	}
	c.createOnce(w, &c.CreatedSecrets, string(b))
}

func (c *Cluster) createRBAC(w http.ResponseWriter, r *http.Request) {
	c.createOnce(w, &c.CreatedRBAC, r.URL.Path)
}

func (c *Cluster) createOnce(w http.ResponseWriter, all *[]string, one string) {
	if slices.Contains(*all, one) {
		reject(w, http.StatusConflict, "already exists")
		return
	}
	*all = append(*all, one)
	c.created(w)
}

// dnsObject returns or deletes an object of CoreDNS.
func (c *Cluster) dnsObject(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodDelete {
		c.DeletedPaths = append(c.DeletedPaths, r.URL.Path)
		c.DNSObjects = slices.DeleteFunc(c.DNSObjects, func(p string) bool { return p == r.URL.Path })
	}
	c.answer(w, object{})
}

// createMarker creates the ConfigMap that records which manifests are applied.
func (c *Cluster) createMarker(w http.ResponseWriter, r *http.Request) {
	var made struct {
		Metadata struct{ Labels map[string]string }
		Data     map[string]string
	}
	c.decode(r, &made)
	if made.Metadata.Labels[applyingLabel] == "" {
		c.T.Error("a new marker is labelled as if all manifests were applied")
	}
	if c.ApplyMarker != nil || c.AllApplied {
		reject(w, http.StatusConflict, "already exists")
		return
	}
	c.ApplyMarker, c.MarkerMode = made.Data, made.Metadata.Labels[applyingLabel]
	c.created(w)
}

func (c *Cluster) marker(w http.ResponseWriter, r *http.Request) {
	switch {
	case c.ApplyMarker == nil && !c.AllApplied:
		http.NotFound(w, r)
	case r.Method == http.MethodPatch && c.MarkerPatchFails:
		reject(w, http.StatusInternalServerError, "failed calling webhook of ConfigMaps")
	case r.Method == http.MethodPatch:
		var patch struct {
			Metadata struct{ Labels map[string]*string }
			Data     map[string]string
		}
		c.decode(r, &patch)
		maps.Copy(c.ApplyMarker, patch.Data)
		if to, ok := patch.Metadata.Labels[applyingLabel]; ok && to == nil {
			c.AllApplied = true
		}
		c.answer(w, object{})
	default:
		labels := map[string]string{}
		if !c.AllApplied {
			labels[applyingLabel] = cmp.Or(c.MarkerMode, "true")
		}
		c.answer(w, object{"metadata": object{"labels": labels}, "data": c.ApplyMarker})
	}
}

func (c *Cluster) clusterInfo(w http.ResponseWriter, r *http.Request) {
	switch {
	case c.NoClusterInfo:
		http.NotFound(w, r)
	case r.Method == http.MethodPatch:
		var patch struct{ Data map[string]*string }
		c.decode(r, &patch)
		if signature, changed := patch.Data["jws-kubeconfig-abcdef"]; !changed || signature != nil {
			c.T.Error("cluster-info still has the signature of its old kubeconfig")
		}
		c.CAPEM = CAOf(c.T, *patch.Data["kubeconfig"])
		c.answer(w, object{})
	default:
		kc := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters:\n- name: \"\"\n  cluster:\n    server: https://192.0.2.11:6443\n    certificate-authority-data: %s\n", base64.StdEncoding.EncodeToString(slices.Concat(c.ExtraCAs, c.CAPEM)))
		data := map[string]string{"kubeconfig": kc}
		if !c.unsigned && !c.TokenRevoked {
			signed := kc
			if c.SignatureStale {
				signed = "the former one"
			}
			data["jws-kubeconfig-abcdef"] = sign(signed, "abcdef", TestSecret)
		}
		c.answer(w, object{"metadata": object{"uid": fmt.Sprint("info-", c.Recreations)}, "data": data})
	}
}

func (c *Cluster) kubeadmConfig(w http.ResponseWriter, r *http.Request) {
	switch {
	case c.UploadedConfigs == nil && c.ServiceSubnet == "":
		http.NotFound(w, r)
		return
	case c.UploadedConfigs == nil:
		c.answer(w, configMap("ClusterConfiguration", "kind: ClusterConfiguration\nnetworking:\n  serviceSubnet: "+c.ServiceSubnet+"\n"))
		return
	case r.Method == http.MethodPatch:
		var patch struct {
			Metadata struct{ Annotations map[string]*string }
		}
		c.decode(r, &patch)
		if c.DocumentsNoteFails && patch.Metadata.Annotations[documentsKey] != nil {
			reject(w, http.StatusServiceUnavailable, "etcd is busy")
			return
		}
		for key, value := range patch.Metadata.Annotations {
			if delete(c.Annotations, key); value != nil {
				c.Annotations[key] = *value
			}
		}
	}
	o := configMap("ClusterConfiguration", c.UploadedConfigs["ClusterConfiguration"])
	o["metadata"] = object{"annotations": c.Annotations}
	c.answer(w, o)
}

func (c *Cluster) kubeletConfig(w http.ResponseWriter, r *http.Request) {
	if c.UploadedConfigs == nil {
		http.NotFound(w, r)
		return
	}
	if r.Method == http.MethodPatch {
		c.T.Errorf("%s was changed", r.URL.Path)
	}
	c.answer(w, configMap("kubelet", c.UploadedConfigs["kubelet"]))
}

func (c *Cluster) proxyConfig(w http.ResponseWriter, r *http.Request) {
	if c.UploadedConfigs["config.conf"] == "" {
		http.NotFound(w, r)
		return
	}
	c.answer(w, configMap("config.conf", c.UploadedConfigs["config.conf"]))
}

func configMap(key, text string) object {
	return object{"data": map[string]string{key: text}}
}

// hubConfigMaps returns the ConfigMaps with yurthub's settings.
func (c *Cluster) hubConfigMaps(w http.ResponseWriter, _ *http.Request) {
	if c.NoRBAC {
		reject(w, http.StatusForbidden, "forbidden")
		return
	}
	c.answer(w, object{})
}

func (c *Cluster) nodePools(w http.ResponseWriter, r *http.Request) {
	switch {
	case c.NoRBAC:
		reject(w, http.StatusForbidden, "forbidden")
	case r.PathValue("version") != c.NodePoolVersion:
		http.NotFound(w, r)
	case c.ConversionFails:
		reject(w, http.StatusInternalServerError, "conversion webhook for apps.openyurt.io/v1beta1, Kind=NodePool failed")
	case c.NoNodePool:
		c.answer(w, object{})
	default:
		c.answer(w, object{"items": list{object{"spec": object{"type": cmp.Or(c.NodePoolType, "Edge")}}}})
	}
}

func (c *Cluster) kubernetesService(w http.ResponseWriter, r *http.Request) {
	if c.ServiceReadDenied {
		http.NotFound(w, r)
		return
	}
	c.answer(w, object{"metadata": object{"uid": fmt.Sprint("service-", c.Recreations)}})
}

// services lists Services in two pages. The first page is empty.
func (c *Cluster) services(w http.ResponseWriter, r *http.Request) {
	address, selected := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "spec.clusterIP=")
	if selected && c.NoFieldSelector {
		reject(w, http.StatusBadRequest, "field label not supported: spec.clusterIP")
		return
	}
	var items list
	for _, ips := range slices.Sorted(maps.Keys(c.Services)) {
		all := strings.Split(ips, ",")
		if selected && all[0] != address {
			continue
		}
		items = append(items, object{
			"metadata": object{"namespace": "shop", "name": c.Services[ips]},
			"spec":     object{"clusterIP": all[0], "clusterIPs": all},
		})
	}
	if r.URL.Query().Get("continue") == "" && !selected {
		c.answer(w, object{"metadata": object{"continue": "a+b"}, "items": list{}})
		return
	}
	c.answer(w, object{"items": items})
}

func (c *Cluster) serviceCIDRs(w http.ResponseWriter, _ *http.Request) {
	if c.ServiceCIDRs == nil {
		reject(w, http.StatusForbidden, "forbidden")
		return
	}
	c.answer(w, object{"items": list{object{"spec": object{"cidrs": c.ServiceCIDRs}}}})
}

// certificateRequests lists CertificateSigningRequests in two pages: kubelet's own on
// the first, yurthub's on the second.
func (c *Cluster) certificateRequests(w http.ResponseWriter, r *http.Request) {
	signer := strings.TrimPrefix(r.URL.Query().Get("fieldSelector"), "spec.signerName=")
	name, user, states, request := "csr-hub01", "system:node:edge-sn0042", c.HubServerCSR, c.request("system:node:edge-sn0042", "kubernetes", "kubernetes.default")
	if signer == "kubernetes.io/kube-apiserver-client" {
		name, user, states, request = "csr-hub00", "system:bootstrap:abcdef", c.HubClientCSR, c.request("system:node:edge-sn0042")
	}
	csr := func(name, created string, request []byte) object {
		return object{
			"metadata": object{"name": name, "creationTimestamp": created},
			"spec":     object{"username": user, "signerName": signer, "request": request},
		}
	}
	if r.URL.Query().Get("continue") == "" {
		own := csr("csr-kubelet", "2026-11-20T11:00:00Z", c.request("system:node:edge-sn0042-other", "edge-sn0042"))
		c.answer(w, object{"metadata": object{"continue": "more"}, "items": list{own}})
		return
	}
	var items list
	for i, state := range strings.Split(states, ", ") {
		item := csr(name+strings.Repeat("-again", i), fmt.Sprintf("2026-11-20T10:00:%02dZ", i), request)
		if state != "" && state != "pending" {
			item["status"] = object{"conditions": list{object{"type": state, "message": "said by the approver"}}}
		}
		items = append(items, item)
	}
	c.answer(w, object{"items": items})
}

func (c *Cluster) lease(w http.ResponseWriter, _ *http.Request) {
	renewed := "2026-11-20T09:00:00.000000Z"
	if c.LeaseRenewTime != nil {
		renewed = c.LeaseRenewTime()
	}
	c.answer(w, object{"spec": object{"renewTime": renewed}})
}

func (c *Cluster) kubeletSummary(w http.ResponseWriter, r *http.Request) {
	if c.KubeletStats == "" {
		http.NotFound(w, r)
		return
	}
	c.answer(w, json.RawMessage(c.KubeletStats))
}

func (c *Cluster) node(w http.ResponseWriter, r *http.Request) {
	if c.registerNode != nil {
		c.registerNode()
	}
	n := c.Nodes[r.PathValue("name")]
	switch {
	case n == nil:
		reject(w, http.StatusNotFound, "not found")
		return
	case r.Method == http.MethodPatch && c.LabelChangeDenied:
		reject(w, http.StatusForbidden, "admission webhook denied the request")
		return
	case r.Method == http.MethodPatch:
		c.patchNode(n, r)
	}
	c.answer(w, c.reported(n))
}

func (c *Cluster) patchNode(n *kubeapi.Node, r *http.Request) {
	var p struct {
		Metadata struct {
			Labels      map[string]*string `json:"labels"`
			Annotations map[string]*string `json:"annotations"`
		} `json:"metadata"`
		Spec map[string]any `json:"spec"`
	}
	c.decode(r, &p)
	if to, ok := p.Spec["unschedulable"]; ok {
		n.Spec.Unschedulable = to == true
	}
	merge(&n.Metadata.Annotations, p.Metadata.Annotations)
	merge(&n.Metadata.Labels, p.Metadata.Labels)
}

// merge changes a map as a JSON merge patch does.
func merge(to *map[string]string, patch map[string]*string) {
	for k, v := range patch {
		switch {
		case v == nil:
			delete(*to, k)
		case *to == nil:
			*to = map[string]string{k: *v}
		default:
			(*to)[k] = *v
		}
	}
}

// reported returns a Node with the status that its kubelet last wrote, or
// that the node controller wrote instead.
func (c *Cluster) reported(n *kubeapi.Node) *kubeapi.Node {
	at := c.KubeletReportTime()
	copied := *n
	if c.ReportedMachineID != nil {
		copied.Status.NodeInfo.MachineID = c.ReportedMachineID(copied.Status.NodeInfo.MachineID)
	}
	if copied.Status.NodeInfo.BootID == "" && c.reportedBootID != nil {
		copied.Status.NodeInfo.BootID = c.reportedBootID()
	}
	copied.Status.Conditions = slices.Clone(n.Status.Conditions)
	for i := range copied.Status.Conditions {
		copied.Status.Conditions[i].LastHeartbeatTime = at
	}
	if c.kubeletSilent != nil && c.kubeletSilent(n.Status.NodeInfo.MachineID) && len(copied.Status.Conditions) > 0 {
		copied.Status.Conditions[0] = kubeapi.Condition{Type: "Ready", Status: "Unknown", Reason: "NodeStatusUnknown", Message: "Kubelet stopped posting node status."}
	}
	if c.NotReady {
		copied.Status.Conditions = []kubeapi.Condition{{Type: "Ready", Status: "False", Reason: "KubeletNotReady", Message: "cni plugin not initialized"}}
	}
	return &copied
}
