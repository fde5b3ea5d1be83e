package artifact

import (
	"reflect"
	"strings"
	"testing"
)

func TestReadRejects(t *testing.T) {
	t.Parallel()
	for doc, words := range map[string][]string{
		`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json"}}`:                          {"a container image"},
		`{"schemaVersion":2,"manifests":[{}]}`:                                                                           {"a container image"},
		`{"schemaVersion":2,"artifactType":"application/vnd.cncf.helm.v1"}`:                                              {"its type is", "helm"},
		`{"schemaVersion":2,"artifactType":"application/vnd.edgebake.image.v9"}`:                                         {"image.v9", "use the edgebake that pushed it"},
		`{"artifactType":"` + Type + `","config":{"digest":"sha256:../../x","size":5}}`:                                  {"names a blob", "../../x"},
		`{"artifactType":"` + Type + `","config":{"digest":"sha256:` + strings.Repeat("a", 64) + `","size":9000000000}}`: {"the config has", "at most"},
		`{"artifactType":"` + Type + `","config":{"digest":"sha256:` + strings.Repeat("a", 64) + `","size":1}}`:          {"no parts"},
		`{"artifactType":"` + Type + `","config":{"digest":"sha256:` + strings.Repeat("a", 64) + `","size":-1}}`:         {"of -1 bytes"},
		`{"artifactType":"` + Type + "\\u001b[2J\"}":                                                                     {`\x1b`},
		`{"artifactType":`: {"cannot be read"},
	} {
		_, err := Read([]byte(doc))
		for _, w := range words {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: error lacks %q: %v", doc, w, err)
			}
		}
	}
}

func TestRanges(t *testing.T) {
	t.Parallel()
	m := &Manifest{Layers: []Descriptor{{Size: 10}, {Size: 5}, {Size: 20}}}
	if m.Stored() != 35 {
		t.Error(m.Stored())
	}
	for at, want := range map[[2]int64][]Range{
		{0, 10}:  {{0, 0, 10}},
		{9, 2}:   {{0, 9, 10}, {1, 0, 1}},
		{9, 20}:  {{0, 9, 10}, {1, 0, 5}, {2, 0, 14}},
		{34, 5}:  {{2, 19, 20}},
		{35, 5}:  nil,
		{12, 0}:  nil,
		{10, 25}: {{1, 0, 5}, {2, 0, 20}},
	} {
		if got := m.Ranges(at[0], at[1]); !reflect.DeepEqual(got, want) {
			t.Errorf("%v: %v, want %v", at, got, want)
		}
	}
}

// FuzzRead reads any manifest, and checks that an accepted one can be read in ranges.
func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"artifactType":"` + Type + `","config":{"digest":"sha256:` + strings.Repeat("a", 64) + `","size":1},"layers":[{"mediaType":"` + PartType + `","digest":"sha256:` + strings.Repeat("b", 64) + `","size":7}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > MaxManifest {
			return
		}
		m, err := Read(b)
		if err != nil {
			return
		}
		n := int64(0)
		for _, r := range m.Ranges(0, m.Stored()) {
			n += r.To - r.Off
		}
		if n != m.Stored() || n <= 0 {
			t.Errorf("ranges of %d bytes of %d", n, m.Stored())
		}
	})
}
