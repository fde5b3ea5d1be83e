package plan

import (
	"encoding/json"
	"errors"
	"maps"
	"strings"
	"testing"
)

// hex64 returns an SHA-256 that is easy to recognize.
func hex64(digit string) string { return strings.Repeat(digit, 64) }

func sample() *Plan {
	return &Plan{
		Version: Version, Name: "x", Builder: "1", Arch: "amd64", SourceDate: 1,
		Inputs: map[string]Input{
			"base":    {Make: "mmdebstrap", Recipe: json.RawMessage(`{"suite":"trixie"}`), SHA256: hex64("a")},
			"kubelet": {Fetch: []string{"https://one.test/kubelet"}, SHA256: hex64("b")},
			"ctr":     {File: "bin/ctr", SHA256: hex64("c")},
		},
		Layers:     []Layer{{Name: "base", Input: "base"}},
		Partitions: []Partition{{Label: "ROOT-A", FS: "ext4"}},
		Config:     json.RawMessage(`{}`),
	}
}

func id(t *testing.T, p *Plan) string {
	t.Helper()
	s, err := p.ID()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestIDFollowsBytes(t *testing.T) {
	first := id(t, sample())
	same := map[string]func(*Plan){
		"another mirror": func(p *Plan) {
			p.Inputs["kubelet"] = Input{Fetch: []string{"https://two.test/kubelet"}, SHA256: hex64("b")}
		},
		"another directory": func(p *Plan) { p.Inputs["ctr"] = Input{File: "/else/ctr", SHA256: hex64("c")} },
		"another recipe":    func(p *Plan) { p.Inputs["base"] = Input{Make: "oci", SHA256: hex64("a")} },
	}
	for name, change := range same {
		p := sample()
		change(p)
		if id(t, p) != first {
			t.Errorf("%s changes the id", name)
		}
	}
	other := map[string]func(*Plan){
		"digest":    func(p *Plan) { p.Inputs["ctr"] = Input{SHA256: hex64("d")} },
		"input":     func(p *Plan) { delete(p.Inputs, "ctr") },
		"layer":     func(p *Plan) { p.Layers[0].Replace = true },
		"partition": func(p *Plan) { p.Partitions[0].Size = 1 },
		"config":    func(p *Plan) { p.Config = json.RawMessage(`{"a":1}`) },
		"rendered":  func(p *Plan) { p.Rendered = "2" },
		"date":      func(p *Plan) { p.SourceDate = 2 },
		"arch":      func(p *Plan) { p.Arch = "arm64" },
		"name":      func(p *Plan) { p.Name = "y" },
	}
	for name, change := range other {
		p := sample()
		change(p)
		if id(t, p) == first {
			t.Errorf("another %s has the same id", name)
		}
	}
}

func TestUnpinned(t *testing.T) {
	p := sample()
	p.Inputs["base"] = Input{Make: "mmdebstrap"}
	if _, err := p.ID(); !errors.Is(err, ErrUnpinned) || !strings.Contains(err.Error(), "base") {
		t.Errorf("%v", err)
	}
	b, err := p.Encode()
	if err != nil || strings.Contains(string(b), `"id"`) {
		t.Errorf("%v\n%s", err, b)
	}
}

func TestLock(t *testing.T) {
	raw, err := sample().Lock().Encode()
	if err != nil {
		t.Fatal(err)
	}
	l, err := DecodeLock(raw)
	if err != nil {
		t.Fatal(err)
	}
	p := sample()
	if err := l.Check(p); err != nil {
		t.Error(err)
	}
	in := p.Inputs["base"]
	in.SHA256 = ""
	if sha, ok := l.Pinned("base", in); !ok || sha != hex64("a") {
		t.Errorf("pinned: %q %v", sha, ok)
	}
	in.Recipe = json.RawMessage(`{"suite":"sid"}`)
	if _, ok := l.Pinned("base", in); ok {
		t.Error("another recipe takes the lock's digest")
	}
	if _, ok := (*Lock)(nil).Pinned("base", in); ok {
		t.Error("a missing lock returns a digest")
	}
	p.Inputs["new"] = Input{File: "new", SHA256: "ee"}
	p.Inputs["ctr"] = Input{File: "bin/ctr", SHA256: "changed"}
	p.Inputs["base"] = in
	p.Inputs["base2"], p.Inputs["kubelet"] = p.Inputs["kubelet"], Input{}
	maps.DeleteFunc(p.Inputs, func(k string, _ Input) bool { return k == "kubelet" })
	err = l.Check(p)
	for _, want := range []string{"input new is not in the lock", "input ctr has sha256 changed, but the lock has " + hex64("c"), "input base differs from the lock", "the lock has input kubelet, which the Image does not have"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
}

// TestLockWithoutDigest checks that an entry of the lock without a digest counts as missing, and
// that an image with another manifest counts as a different input.
func TestLockWithoutDigest(t *testing.T) {
	p := sample()
	l := p.Lock()
	base := p.Inputs["base"]
	base.SHA256 = ""
	l.Inputs["base"], p.Inputs["base"] = base, base
	if err := l.Check(p); err == nil || !strings.Contains(err.Error(), "input base has no sha256 in the lock") {
		t.Errorf("not made, not locked: %v", err)
	}

	const name = "image edgebake.test/pause:1"
	p = sample()
	image := Input{Make: "image", SHA256: hex64("a"), Digest: "sha256:" + hex64("1")}
	p.Inputs[name] = image
	l = p.Lock()
	if err := l.Check(p); err != nil {
		t.Error(err)
	}
	image.Digest = "sha256:" + hex64("2")
	p.Inputs[name] = image
	err := l.Check(p)
	for _, want := range []string{name, "manifest sha256:" + hex64("2"), "the lock has sha256:" + hex64("1"), "build without --locked"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("another manifest of the same index: the error lacks %q: %v", want, err)
		}
	}
}

// TestDecodeLock checks that an invalid lock is rejected, and that the error names the field.
func TestDecodeLock(t *testing.T) {
	good := `{"version":1,"arch":"arm64","inputs":{"base":{"sha256":"` + hex64("a") + `","digest":"sha256:` + hex64("b") + `"},"old":{"make":"go"}},"rootRoom":5}`
	if _, err := DecodeLock([]byte(good + "\n")); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ from, to, want string }{
		"more behind it":       {good, good + ` {"version":1}`, "after its end"},
		"garbage behind it":    {good, good + " trailing", "after its end"},
		"not a digest":         {hex64("a"), "nonsense", `inputs["base"].sha256: "nonsense"`},
		"not one either":       {`"old":{`, `"old":{"uncompressed":"x",`, `inputs["old"].uncompressed`},
		"capitals":             {hex64("a"), hex64("A"), `inputs["base"].sha256`},
		"too short":            {hex64("a"), hex64("a")[1:], `inputs["base"].sha256`},
		"no algorithm":         {"sha256:" + hex64("b"), hex64("b"), `inputs["base"].digest`},
		"another algorithm":    {"sha256:" + hex64("b"), "sha512:" + hex64("b"), `inputs["base"].digest`},
		"a room that is none":  {`"rootRoom":5`, `"rootRoom":-5`, "rootRoom"},
		"another type":         {`"` + hex64("a") + `"`, "5", "sha256"},
		"an unknown field":     {`"rootRoom"`, `"room"`, `"room"`},
		"nothing":              {good, "", "reading the lock"},
		"a version of its own": {`"version":1`, `"version":7`, "version is 7"},
	} {
		raw := strings.Replace(good, tt.from, tt.to, 1)
		if raw == good {
			t.Fatalf("%s: nothing is replaced", name)
		}
		if _, err := DecodeLock([]byte(raw)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecodeLock(f *testing.F) {
	raw, err := sample().Lock().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`{"version":1,"inputs":{"a":{"recipe":null}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := DecodeLock(b)
		if err != nil {
			return
		}
		l.Check(sample())
		if _, err := l.Encode(); err != nil {
			t.Errorf("encoding the decoded lock: %v", err)
		}
	})
}

// TestDecode checks that a plan is either read exactly as it was written, or rejected.
func TestDecode(t *testing.T) {
	written := func(p *Plan) string {
		b, err := p.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	p := sample()
	got, err := Decode([]byte(written(p)))
	if err != nil || id(t, got) != id(t, p) || written(got) != written(p) {
		t.Fatalf("%+v, %v", got, err)
	}
	open := sample()
	open.Inputs["base"] = Input{Make: "mmdebstrap", Recipe: json.RawMessage(`{"suite": "trixie"}`)}
	if _, err := Decode([]byte(written(open))); err != nil {
		t.Errorf("an input without a digest: %v", err)
	}
	replace := func(old, new string) string { return strings.Replace(written(p), old, new, 1) }
	for what, c := range map[string]struct{ text, want string }{
		"edited":           {replace(`"name": "x"`, `"name": "y"`), "it was edited"},
		"without its id":   {replace(`"id": "`+id(t, p)+`",`, ""), "it was edited"},
		"another version":  {replace(`"version": 2`, `"version": 3`), "its version is 3, but this edgebake supports only version 2: use the edgebake that wrote it (1), or"},
		"an unknown field": {replace(`"name": "x"`, `"name": "x", "more": 1`), "unknown field"},
		"two":              {written(p) + written(p), "data after its end"},
		"cut":              {written(p)[:100], "unexpected EOF"},
		"not a digest":     {replace(hex64("b"), "B"), `inputs["kubelet"].sha256: "B" is not a SHA-256`},
		"a layer of nothing": {replace(`"input": "base"`, `"input": "x"`),
			`layers[0].input: there is no input "x"`},
		"an image without its layers": {replace(`"make": "mmdebstrap"`, `"make": "image"`), `inputs["base"]: images does not list this image`},
	} {
		if _, err := Decode([]byte(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", what, err, c.want)
		}
	}
}
