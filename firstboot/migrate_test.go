package firstboot

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
)

// field finds "a.b" among the yaml names of a document.
func field(t reflect.Type, path string) bool {
	name, rest, more := strings.Cut(path, ".")
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return false
	}
	for i := range t.NumField() {
		if tag, _, _ := strings.Cut(t.Field(i).Tag.Get("yaml"), ","); tag == name {
			return !more || field(t.Field(i).Type, rest)
		}
	}
	return false
}

func TestMigrationNamesWhatExists(t *testing.T) {
	docs := map[string]reflect.Type{"Site": reflect.TypeFor[configs.Site](), "Image": reflect.TypeFor[configs.Image]()}
	for _, m := range migrations {
		seen := map[string]bool{}
		for _, f := range m.Flags {
			if seen[f.Flag] {
				t.Errorf("%s %s is named twice", m.Command, f.Flag)
			}
			seen[f.Flag] = true
			kind, name, _ := strings.Cut(f.Ours, " ")
			switch {
			case f.Ours == "-" && f.Note == "":
				t.Errorf("%s %s: neither an equivalent nor a reason", m.Command, f.Flag)
			case f.Ours == "-", kind == "firstboot": // cmd/firstboot tests its flags
			case docs[kind] == nil || !field(docs[kind], name):
				t.Errorf("%s %s: there is no %s", m.Command, f.Flag, f.Ours)
			}
		}
	}
}

func TestMigrationPageIsTheCodes(t *testing.T) {
	const page = "../docs/migrate.md"
	if *update {
		if err := os.WriteFile(page, []byte(MigrationPage()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if string(b) != MigrationPage() {
		t.Error("docs/migrate.md is not what the code says (go test ./firstboot -update)")
	}
}
