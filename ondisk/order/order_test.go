package order

import (
	"strings"
	"testing"
)

var golden = strings.Repeat("0123456789abcdef", 4)

func TestParse(t *testing.T) {
	t.Parallel()
	const url = "https://images.example.com/my-edge.raw.zst"
	for text, want := range map[string]Order{
		url + "@sha256:" + golden:                                                        {Image: url, Golden: golden},
		"  " + url + "@sha256:" + golden + "\n hold":                                     {Image: url, Golden: golden, Hold: true},
		"http://a@sha256:b/x@sha256:" + golden:                                           {},
		url + "@sha256:" + golden + " again=2 max-bytes=20M hold limit-rate=500k":        {Image: url, Golden: golden, Hold: true, MaxBytes: "20M", Rate: "500k", Again: "2"},
		url + "@sha256:" + golden + " hold no-drain":                                     {Image: url, Golden: golden, Hold: true, NoDrain: true},
		"oci://r.example.com/edge/my-edge:2026.11@sha256:" + golden + " hold":            {Image: "oci://r.example.com/edge/my-edge:2026.11", Golden: golden, Hold: true},
		"oci://r.example.com:5000/e@sha256:" + golden + "@sha256:" + golden:              {Image: "oci://r.example.com:5000/e@sha256:" + golden, Golden: golden},
		"http://10.0.0.1:8080/a?b=c&d=%20e@sha256:" + golden + " again=2026-11-26T19:00": {Image: "http://10.0.0.1:8080/a?b=c&d=%20e", Golden: golden, Again: "2026-11-26T19:00"},
	} {
		o, err := Parse(text)
		if want == (Order{}) {
			if err == nil {
				t.Errorf("%q is accepted: %+v", text, o)
			}
			continue
		}
		if err != nil || o != want {
			t.Errorf("%q: %+v, %v", text, o, err)
		}
		if again, err := Parse(o.String()); err != nil || again != o {
			t.Errorf("%q is written as %q: %v", text, o, err)
		}
	}
	held := Order{Image: url, Golden: golden, Hold: true}
	if free, _ := Parse(held.Key()); free.Hold || free.Key() != held.Key() {
		t.Errorf("hold makes another order: %q", held.Key())
	}
}

// TestParseRejects checks that all errors are reported at once.
func TestParseRejects(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"": {"empty"},
		"ftp://x/y@sha256:00 max-bytes=-1 limit-rate= again=a/b now": {"URL@sha256:GOLDEN", "begins with https://", "max-bytes", "limit-rate", "again", `"now"`},
		"https://u:p@x/y@sha256:" + golden:                           {"credentials"},
		"https:///y@sha256:" + golden:                                {"not a URL"},
		"oci://r.example.com/e@sha256:" + golden:                     {"has no tag"},
		"oci://r.example.com/E:1@sha256:" + golden:                   {"not a repository", "oci://REGISTRY/REPOSITORY:TAG"},
		"oci://a:b@r.example.com/e:1@sha256:" + golden:               {"image reference"},
		"https://x/y@sha256:" + strings.ToUpper(golden):              {"URL@sha256:GOLDEN"},
		"https://x/" + strings.Repeat("y", 2048):                     {"at most 2048"},
	} {
		_, err := Parse(text)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%q: %v, want %q", text, err, w)
			}
		}
	}
}

func TestAnswer(t *testing.T) {
	t.Parallel()
	a := Answer{Plan: "p1", Serial: 3, Order: "https://x/y@sha256:" + golden, State: StateWorking, Step: "root", Fetched: 1, Total: 2}
	if got := ParseAnswer(a.String()); got != a {
		t.Errorf("%+v", got)
	}
	a.Reason = strings.Repeat("\x1b[2J", 1000)
	if s := a.String(); len(s) > 4*maxOrder || strings.Contains(s, `\u001b`) {
		t.Errorf("%d bytes", len(s))
	}
	for _, text := range []string{"", "{", "[]", `{"serial":"x"}`, strings.Repeat(" ", 4*maxOrder) + "{}"} {
		if got := ParseAnswer(text); got != (Answer{}) {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

// FuzzParse checks that any accepted order has a URL, and that the text of its String can be
// parsed.
func FuzzParse(f *testing.F) {
	f.Add("https://images.example.com/my-edge.raw.zst@sha256:" + golden + " hold max-bytes=20M")
	f.Fuzz(func(t *testing.T, text string) {
		ParseAnswer(text)
		o, err := Parse(text)
		if err != nil {
			return
		}
		if CheckImage(o.Image) != nil || len(o.Golden) != 64 {
			t.Errorf("%+v", o)
		}
		if again, err := Parse(o.String()); err != nil || again != o {
			t.Errorf("%+v is written as %q: %+v, %v", o, o, again, err)
		}
	})
}
