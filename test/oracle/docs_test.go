package oracle

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
)

// TestDocsOfKubernetes checks every Kubernetes document in the docs against its API type: a field
// must not be unknown, given twice or of another type.
func TestDocsOfKubernetes(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{batchv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	strict := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{Yaml: true, Strict: true})
	if _, _, err := strict.Decode([]byte("apiVersion: v1\nkind: Namespace\nmetadata: {nam: x}\n"), nil, nil); err == nil {
		t.Error("an unknown field passes")
	}
	files, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?ms)^```ya?ml\n(.*?)^```")
	kind := regexp.MustCompile(`(?m)^kind: (\w+)$`)
	found := map[string]int{}
	for _, file := range append(files, "../../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range block.FindAllSubmatch(text, -1) {
			for doc := range strings.SplitSeq(string(m[1]), "\n---\n") {
				k := kind.FindStringSubmatch(doc)
				if k == nil || strings.Contains(doc, "\napiVersion: edgebake.io/") || strings.HasPrefix(doc, "apiVersion: edgebake.io/") {
					continue
				}
				found[filepath.Base(file)+" "+k[1]]++
				if _, _, err := strict.Decode([]byte(doc), nil, nil); err != nil {
					t.Errorf("%s: %s: %v", file, k[1], err)
				}
			}
		}
	}
	t.Log(found)
	for name, n := range map[string]int{"fleet.md Job": 2, "fleet.md PersistentVolumeClaim": 2, "fleet.md Namespace": 1, "fleet.md ConfigMap": 1, "ipvscare.md ConfigMap": 1, "openyurt.md ClusterRole": 1} {
		if found[name] < n {
			t.Errorf("%d of %s, expected %d", found[name], name, n)
		}
	}
}
