package configs

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/test/desk"
)

// hostileSite is the beginning of a Site. The tests extend it to at most 256 KiB, the largest size
// of a Site on an untrusted stick.
const hostileSite = "apiVersion: edgebake.io/v1alpha1\nkind: Site\nnodeName: a\nmasters: [10.0.0.1:6443]\n"

// packText packs a text in the same way as manifest.Pack packs manifests.
func packText(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return base64.StdEncoding.EncodeToString(b.Bytes())
}

// TestASiteThatIsABurden checks that reading any Site from an untrusted stick needs little time and
// memory, and gives few messages.
func TestASiteThatIsABurden(t *testing.T) {
	many := func(n int, format string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	manifest := func(text string) string {
		return "nodeType: control-plane\ncredentials:\n  keys:\n    manifests: " + packText(t, `[{"name":"a.yaml","text":"`+text+`"}]`) + "\n"
	}
	nested := strings.Repeat(`{kind: List, apiVersion: v1, items: [`, 2_000) + strings.Repeat("]}", 2_000)
	for name, c := range map[string]struct{ doc, want string }{
		"equal keys in a manifest":       {manifest("{" + strings.Repeat("a,", 5_000) + "}"), `mapping key "a" already defined`},
		"millions of them":               {manifest("{" + strings.Repeat("a,", 10_000_000) + "}"), "the document is too large"},
		"distinct keys in a manifest":    {manifest("{" + many(60_000, "k%d,") + "}"), "a mapping with 60000 keys"},
		"millions of documents":          {manifest(strings.Repeat(`---\na\n`, 2_000_000)), "expected a Kubernetes object"},
		"millions of manifests":          {"nodeType: control-plane\ncredentials: {keys: {manifests: " + packText(t, "["+strings.Repeat("{},", 10_000_000)+"{}]") + "}}\n", "more than 10000 files"},
		"Lists in Lists":                 {manifest(nested), "is required"},
		"taints that are equal":          {"taints: [" + strings.Repeat("{key: a, effect: NoSchedule},", 8_000) + "]\n", "want at most 1000"},
		"taints that are no taints":      {"taints: [" + strings.Repeat("a=b,", 60_000) + "]\n", "want at most 1000"},
		"the same list, often":           {"organizations: &a [" + strings.Repeat("x,", 900) + "]\nusers: [" + strings.Repeat("{name: a, groups: *a},", 900) + "]\n", "with its aliases it has more than 20000 values"},
		"unknown fields":                 {many(16_000, "nodeNam%d: 1\n"), "more problems"},
		"equal fields":                   {strings.Repeat("vip: a\n", 16_000), "more problems"},
		"a long name of a field":         {"? " + strings.Repeat("x", 200_000) + "\n: 1\n", "unknown field"},
		"labels with control characters": {"labels: {" + many(9_000, `"a%d": "\e",`) + "}\n", "more problems"},
		"labels that are too many":       {"labels: {" + many(22_000, `a%d: b,`) + "}\n", "20000 values"},
		"kubeadm's documents":            {"nodeType: control-plane\ncontrolPlane:\n  kubeadm: |\n" + strings.Repeat("    ---\n    a: b\n", 12_000), "more problems"},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			var err error
			took := desk.Processor(t, func() { _, err = ParseSite("site.yaml", []byte(hostileSite+c.doc)) })
			runtime.ReadMemStats(&after)
			var probs Problems
			if !errors.As(err, &probs) || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%.3000v", err)
			}
			if len(probs) > strict.MaxProblems+1 || len(err.Error()) > 80<<10 {
				t.Errorf("%d problems, %d bytes", len(probs), len(err.Error()))
			}
			for _, p := range probs {
				if len([]rune(p.Error())) > 1300 {
					t.Errorf("a problem has %d bytes", len(p.Error()))
				}
			}
			if took > 30*time.Second {
				t.Errorf("parsing took %s", took)
			}
			if got := (after.TotalAlloc - before.TotalAlloc) >> 20; got > 1024 {
				t.Errorf("parsing took %d MiB of memory", got)
			}
			t.Logf("%s, %d MiB, %d problems", took.Round(time.Millisecond), (after.TotalAlloc-before.TotalAlloc)>>20, len(probs))
		})
	}
}

// TestTheRest checks that the last problem counts those that are not reported.
func TestTheRest(t *testing.T) {
	doc := hostileSite + "caCertHashes: [" + strings.Repeat("a,", 70) + "]\n"
	_, err := ParsePublicSite("site.yaml", []byte(doc))
	var probs Problems
	if !errors.As(err, &probs) || len(probs) != strict.MaxProblems+1 {
		t.Fatal(err)
	}
	LocateSite("site.yaml", []byte(doc), probs)
	if last := probs[strict.MaxProblems].Error(); !strings.HasSuffix(last, "and 20 more problems") {
		t.Errorf("the last is %q", last)
	}
}
