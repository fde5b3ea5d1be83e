package oracle

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/clusterdoc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxy "k8s.io/kube-proxy/config/v1alpha1"
	kubelet "k8s.io/kubelet/config/v1beta1"
)

var update = flag.Bool("update", false, "write what was made of others' types")

const componentForms = "../../configs/kubeadm/componentforms.txt"

// TestComponentForms checks that the schemas of kubelet's and kube-proxy's documents have the same
// fields as Kubernetes' own types.
func TestComponentForms(t *testing.T) {
	var lines []string
	add := func(path, value string) { lines = append(lines, path+" "+value+"\n") }
	componentForm(reflect.TypeFor[kubelet.KubeletConfiguration](), "KubeletConfiguration", add)
	componentForm(reflect.TypeFor[kubeproxy.KubeProxyConfiguration](), "KubeProxyConfiguration", add)
	slices.Sort(lines)
	want := []byte(strings.Join(lines, ""))
	if *update {
		if err := os.WriteFile(componentForms, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(componentForms)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s is not of these types (%v): go test -run TestComponentForms -update", componentForms, err)
	}
	mod, err := os.ReadFile("go.mod")
	version := regexp.MustCompile(`k8s\.io/kubelet v0\.(\d+)\.`).FindSubmatch(mod)
	if err != nil || version == nil {
		t.Fatalf("go.mod has no kubelet: %v", err)
	}
	const document = "apiVersion: edgebake.io/v1alpha1\nkind: Cluster\nname: c\nkubernetesVersion: v1.36.3\nmasters: [{name: m1, address: 192.0.2.1}]\n---\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nnobodys: 1\n"
	if _, err := clusterdoc.Parse("c", []byte(document)); err == nil || !strings.Contains(err.Error(), "unknown field in Kubernetes v1."+string(version[1])) {
		t.Errorf("fields are judged as those of another version than 1.%s: %v", version[1], err)
	}
}

// componentForm adds the JSON fields of a type.
func componentForm(t reflect.Type, path string, add func(path, value string)) {
	switch {
	case t.Kind() == reflect.Pointer:
		componentForm(t.Elem(), path, add)
		return
	case t == reflect.TypeFor[metav1.Duration]() || t == reflect.TypeFor[metav1.Time]():
		add(path, "string")
		return
	case reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]()):
		add(path, "any") // several types
		return
	}
	switch t.Kind() {
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			switch {
			case name == "-":
			case name == "" && (f.Anonymous || strings.Contains(options, "inline")):
				componentForm(f.Type, path, add)
			default:
				componentForm(f.Type, path+"."+name, add)
			}
		}
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			add(path, "string")
			return
		}
		componentForm(t.Elem(), path+"[]", add)
	case reflect.Map:
		componentForm(t.Elem(), path+".*", add)
	case reflect.String:
		add(path, "string")
	case reflect.Bool:
		add(path, "boolean")
	case reflect.Float32, reflect.Float64:
		add(path, "number")
	case reflect.Int, reflect.Int32, reflect.Int64, reflect.Uint, reflect.Uint32, reflect.Uint64:
		add(path, "integer")
	default:
		panic(fmt.Sprintf("BUG: %s is a %s", path, t))
	}
}
