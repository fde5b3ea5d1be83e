package plan

import (
	"encoding/json"
	"errors"
	"maps"
	"strings"
	"testing"
)

func sample() *Plan {
	return &Plan{
		Version: Version, Name: "x", Builder: "1", Arch: "amd64", SourceDate: 1,
		Inputs: map[string]Input{
			"base":    {Make: "mmdebstrap", Recipe: json.RawMessage(`{"suite":"trixie"}`), SHA256: "aa"},
			"kubelet": {Fetch: []string{"https://one.test/kubelet"}, SHA256: "bb"},
			"ctr":     {File: "bin/ctr", SHA256: "cc"},
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
		"another mirror":    func(p *Plan) { p.Inputs["kubelet"] = Input{Fetch: []string{"https://two.test/kubelet"}, SHA256: "bb"} },
		"another directory": func(p *Plan) { p.Inputs["ctr"] = Input{File: "/else/ctr", SHA256: "cc"} },
		"another recipe":    func(p *Plan) { p.Inputs["base"] = Input{Make: "oci", SHA256: "aa"} },
	}
	for name, change := range same {
		p := sample()
		change(p)
		if id(t, p) != first {
			t.Errorf("%s changes the id", name)
		}
	}
	other := map[string]func(*Plan){
		"digest":    func(p *Plan) { p.Inputs["ctr"] = Input{SHA256: "dd"} },
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
	if sha, ok := l.Pinned("base", in); !ok || sha != "aa" {
		t.Errorf("pinned: %q %v", sha, ok)
	}
	in.Recipe = json.RawMessage(`{"suite":"sid"}`)
	if _, ok := l.Pinned("base", in); ok {
		t.Error("another recipe takes the lock's digest")
	}
	if _, ok := (*Lock)(nil).Pinned("base", in); ok {
		t.Error("no lock pins something")
	}
	p.Inputs["new"] = Input{File: "new", SHA256: "ee"}
	p.Inputs["ctr"] = Input{File: "bin/ctr", SHA256: "changed"}
	p.Inputs["base"] = in
	p.Inputs["base2"], p.Inputs["kubelet"] = p.Inputs["kubelet"], Input{}
	maps.DeleteFunc(p.Inputs, func(k string, _ Input) bool { return k == "kubelet" })
	err = l.Check(p)
	for _, want := range []string{"input new is not in the lock", "input ctr has sha256 changed, locked is cc", "input base is described otherwise", "the lock has input kubelet, the Image has not"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
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
			t.Errorf("what was read cannot be written: %v", err)
		}
	})
}
