package cluster

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/test/lab"
)

// manifests has objects that cannot be applied in their order: an object's kind or namespace comes
// later, and a webhook has no server yet.
const manifests = `apiVersion: shops.example.com/v1
kind: Till
metadata: {name: first, namespace: tills}
spec: {drawer: 1}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: tills.shops.example.com}
spec:
  group: shops.example.com
  names: {kind: Till, plural: tills}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {drawer: {type: integer}}}}}}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Namespace, metadata: {name: tills}}
- apiVersion: admissionregistration.k8s.io/v1
  kind: ValidatingWebhookConfiguration
  metadata: {name: tills}
  webhooks:
  - name: tills.shops.example.com
    admissionReviewVersions: [v1]
    sideEffects: None
    clientConfig: {url: "URL", caBundle: CA}
    rules: [{apiGroups: [shops.example.com], apiVersions: [v1], resources: [tills], operations: [CREATE, UPDATE]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: edgebake-tills}
rules: [{apiGroups: [shops.example.com], resources: [tills], verbs: [get]}]
`

// gone waits until an object no longer exists, because namespaces are deleted in the background.
func gone(t *testing.T, lc *lab.Cluster, path string) {
	t.Helper()
	var err error
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		if err = lc.Get(context.Background(), path, new(lab.Object)); lab.NotFound(err) {
			return
		}
	}
	t.Errorf("%s still exists 5 minutes after it was deleted: %v", path, err)
}

// TestManifestsAreApplied checks with a real API server that in the end all objects exist, applying
// them again changes nothing, and a field that another client owns is overwritten.
func TestManifestsAreApplied(t *testing.T) {
	lc := needCluster(t)
	ctx := t.Context()
	var serves atomic.Bool
	hook := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !serves.Load() {
			http.Error(w, "no pod", http.StatusServiceUnavailable)
			return
		}
		var review struct {
			APIVersion string               `json:"apiVersion"`
			Kind       string               `json:"kind"`
			Request    struct{ UID string } `json:"request"`
		}
		body, err := io.ReadAll(r.Body)
		if err == nil {
			err = json.Unmarshal(body, &review)
		}
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"apiVersion": review.APIVersion, "kind": review.Kind, "response": map[string]any{"uid": review.Request.UID, "allowed": true}})
	}))
	defer hook.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hook.Certificate().Raw})
	text := strings.NewReplacer("URL", hook.URL, "caBundle: CA", "caBundle: "+base64.StdEncoding.EncodeToString(ca)).Replace(manifests)
	objects, err := kubeapi.Objects("tills.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	c := adminAPI(t, lc.Kubeconfig)
	t.Cleanup(func() {
		for _, p := range []string{"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/tills", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/tills.shops.example.com",
			"/api/v1/namespaces/tills", "/apis/rbac.authorization.k8s.io/v1/clusterroles/edgebake-tills"} {
			if err := lc.Delete(context.Background(), p); err != nil {
				t.Error(err)
			}
			gone(t, lc, p) // TestPrepareVerifyRevert compares all objects of the cluster
		}
	})

	left, err := applyAll(ctx, c, objects)
	if len(left) != 1 || err == nil || !strings.HasPrefix(left[0].Where, "tills.yaml, document 1 (Till first)") {
		t.Fatalf("left %v: %v", left, err)
	}
	for _, want := range []string{"webhook", ""} {
		until(t, "the one that is left to fail because of "+want, func() bool {
			if left, err = applyAll(ctx, c, left); want == "" {
				return err == nil && len(left) == 0
			}
			return err != nil && strings.Contains(err.Error(), want)
		})
		serves.Store(true)
	}
	var till struct {
		Metadata struct {
			ResourceVersion string           `json:"resourceVersion"`
			ManagedFields   []map[string]any `json:"managedFields"`
		} `json:"metadata"`
		Spec struct{ Drawer int } `json:"spec"`
	}
	const path = "/apis/shops.example.com/v1/namespaces/tills/tills/first"
	if err := c.Get(ctx, path, &till); err != nil || till.Spec.Drawer != 1 || len(till.Metadata.ManagedFields) != 1 || till.Metadata.ManagedFields[0]["manager"] != "edgebake" {
		t.Errorf("%+v, %v", till, err)
	}
	before := till.Metadata.ResourceVersion
	if left, err := applyAll(ctx, c, objects); err != nil || len(left) > 0 {
		t.Errorf("again: left %v, %v", left, err)
	}
	if err := c.Get(ctx, path, &till); err != nil || till.Metadata.ResourceVersion != before {
		t.Errorf("applying it again has changed it: %v", err)
	}
	if err := c.MergePatch(ctx, path, map[string]any{"spec": map[string]int{"drawer": 7}}); err != nil {
		t.Fatal(err)
	}
	if left, err := applyAll(ctx, c, objects); err != nil || len(left) > 0 {
		t.Errorf("after somebody's change: left %v, %v", left, err)
	}
	if err := c.Get(ctx, path, &till); err != nil || till.Spec.Drawer != 1 {
		t.Errorf("%+v, %v", till, err)
	}

	// The error names an object that the API server never accepts.
	bad, err := kubeapi.Objects("bad.yaml", []byte("apiVersion: v1\nkind: Service\nmetadata: {name: bad}\nspec: {ports: [{port: 99999}]}\n---\napiVersion: v1\nkind: Namespaec\nmetadata: {name: bad}\n"))
	if err != nil {
		t.Fatal(err)
	}
	left, err = applyAll(ctx, c, bad)
	if len(left) != 2 || err == nil || !strings.Contains(err.Error(), "applying bad.yaml, document 1 (Service bad): ") || !strings.Contains(err.Error(), "does not know the kind Namespaec") {
		t.Errorf("left %v: %v", left, err)
	}
}

// applyAll applies each object once and returns those that failed.
func applyAll(ctx context.Context, c *kubeapi.Client, objects []kubeapi.Object) (left []kubeapi.Object, _ error) {
	var errs []error
	applier := c.Applier()
	for _, o := range objects {
		if err := applier.Apply(ctx, o); err != nil {
			left, errs = append(left, o), append(errs, err)
		}
	}
	return left, errors.Join(errs...)
}

// adminAPI returns first boot's client with an administrator's kubeconfig.
func adminAPI(t *testing.T, kubeconfig string) *kubeapi.Client {
	t.Helper()
	text, err := os.ReadFile(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	k, err := kubeapi.ParseKubeconfig(text)
	if err != nil {
		t.Fatal(err)
	}
	c, err := k.Client("/", nil, keyPair)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = c.Kept(); err != nil {
		t.Fatal(err)
	}
	return c
}
