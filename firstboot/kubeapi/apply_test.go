package kubeapi

import (
	"strings"
	"testing"
)

// TestObjects checks that each item of a List becomes an object. The error for a document that is
// no object names file and document, but does not quote the document.
func TestObjects(t *testing.T) {
	all, err := Objects("a.yaml", []byte("# first\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\n---\napiVersion: v1\nkind: List\nitems:\n- {apiVersion: apps/v1, kind: Deployment, metadata: {name: b, namespace: a}, spec: {replicas: 2}}\n- {apiVersion: v1, kind: Secret, metadata: {name: c}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, o := range all {
		got = append(got, o.Where+": "+o.apiVersion+" "+o.namespace)
	}
	if want := "a.yaml, document 1 (Namespace a): v1 \na.yaml, document 3, item 1 (Deployment b): apps/v1 a\na.yaml, document 3, item 2 (Secret c): v1 "; strings.Join(got, "\n") != want {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), want)
	}
	for text, want := range map[string]string{
		"kind: Secret\nmetadata: {name: hunter2}\n":                             "a.yaml, document 1: apiVersion, kind or metadata.name is missing",
		"apiVersion: v1\nkind: List\nitems: [hunter2]\n":                        "a.yaml, document 1: item 1 is not a Kubernetes object",
		"apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\n[hunter2: ": "reading a.yaml: document 2 is not YAML",
	} {
		if _, err := Objects("a.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestObjectsAreAsToKubectl checks that Objects accepts the same manifests as `kubectl apply`, for
// example with port numbers as keys, as in configurations of ingress controllers.
func TestObjectsAreAsToKubectl(t *testing.T) {
	all, err := Objects("a.yaml", []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, annotations: {built: 2024-01-02}}\ndata:\n  3306: db/mysql:3306\n  deep: {8: [2024-01-02]}\n"))
	if err != nil || len(all) != 1 {
		t.Fatalf("%d objects, %v", len(all), err)
	}
	if want := `{"apiVersion":"v1","data":{"3306":"db/mysql:3306","deep":{"8":["2024-01-02"]}},"kind":"ConfigMap","metadata":{"annotations":{"built":"2024-01-02"},"name":"a"}}`; string(all[0].json) != want {
		t.Errorf("got\n%s, want\n%s", all[0].json, want)
	}
}
