package worldtest

import (
	"reflect"
	"testing"
)

// TestClone checks that a copy of a machine shares nothing with it, and that Fingerprint sees each
// field of its state. Otherwise tests would skip power cuts after which a machine differs only there.
func TestClone(t *testing.T) {
	for _, of := range []reflect.Type{reflect.TypeFor[machineState](), reflect.TypeFor[machineSettings](), reflect.TypeFor[clusterState](), reflect.TypeFor[clusterSettings]()} {
		hashed := of == reflect.TypeFor[machineState]() || of == reflect.TypeFor[clusterState]()
		for i := range of.NumField() {
			f := of.Field(i)
			if hashed && !f.IsExported() {
				t.Errorf("%s.%s must begin with a capital letter: Fingerprint does not see it", of.Name(), f.Name)
			}
			switch f.Type.Kind() {
			case reflect.Interface, reflect.Pointer, reflect.Chan:
				if f.Name != "UpdateLease" { // which Cluster.clone copies
					t.Errorf("%s.%s: a copy would share it", of.Name(), f.Name)
				}
			}
		}
	}
	type sample struct {
		Map   map[string]int
		Slice []string
		Nil   map[string]int
		plain int
	}
	from := sample{Map: map[string]int{"a": 1}, Slice: make([]string, 1, 2), plain: 7}
	to := cloned(from)
	if !reflect.DeepEqual(to, from) {
		t.Errorf("the copy is %+v", to)
	}
	to.Map["a"], to.Slice[0] = 2, "b"
	if from.Map["a"] != 1 || from.Slice[0] != "" {
		t.Errorf("the copy shares a map or a slice: %+v", from)
	}
}
