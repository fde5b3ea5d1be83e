package slot

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
)

// TestImageSignature checks that a signature is valid only for its golden digest and image.json.
func TestImageSignature(t *testing.T) {
	public, secret := newKey(t)
	other, _ := newKey(t)
	doc := []byte(`{"name":"x"}`)
	sig, err := SignImage("aa", doc, secret, signedOn)
	if err != nil {
		t.Fatal(err)
	}
	again, err := SignImage("aa", doc, secret, signedOn)
	if err != nil || again != sig {
		t.Errorf("signing twice gives different signatures: %v", err)
	}
	site, err := Sign(map[string][]byte{"site.yaml": doc}, secret, signedOn)
	if err != nil {
		t.Fatal(err)
	}
	good := ondisk.SlotInfo{Golden: "aa", Signature: sig}
	for name, tc := range map[string]struct {
		change func(*ondisk.SlotInfo)
		doc    string
		keys   []string
		want   string
	}{
		"good":            {nil, string(doc), []string{public.String()}, ""},
		"one of two keys": {nil, string(doc), []string{other.String(), public.String()}, ""},
		"golden":          {func(i *ondisk.SlotInfo) { i.Golden = "ab" }, string(doc), []string{public.String()}, "does not match"},
		"image.json":      {nil, `{"name":"y"}`, []string{public.String()}, "does not match"},
		"another key":     {nil, string(doc), []string{other.String()}, "another person built it"},
		"no key":          {nil, string(doc), nil, "another person built it"},
		"not a key":       {nil, string(doc), []string{"RWx"}, "not a minisign public key"},
		"unsigned":        {func(i *ondisk.SlotInfo) { i.Signature = "" }, string(doc), []string{public.String()}, "--sign KEY"},
		"damaged":         {func(i *ondisk.SlotInfo) { i.Signature = "hello" }, string(doc), []string{public.String()}, "damaged"},
		"of a Site":       {func(i *ondisk.SlotInfo) { i.Signature = string(site) }, string(doc), []string{public.String()}, "does not match"},
		"another comment": {func(i *ondisk.SlotInfo) {
			i.Signature = strings.Replace(sig, "edgebake image\n", "edgebake limage\n", 1)
		}, string(doc), []string{public.String()}, ""},
	} {
		info := good
		if tc.change != nil {
			tc.change(&info)
		}
		_, err := VerifyImage(info, []byte(tc.doc), tc.keys)
		if name == "another comment" {
			tc.want = "does not match" // the signature also covers the trusted comment
			if !strings.Contains(info.Signature, "limage") {
				t.Fatal("nothing was changed")
			}
		}
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := VerifyImage(ondisk.SlotInfo{}, doc, nil); !errors.Is(err, ErrImageUnsigned) {
		t.Errorf("got %v", err)
	}
	// Errors about an index name it instead of the image.
	indexSig, err := SignIndex(doc, secret, signedOn)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		signature, body string
		keys            []string
		want            string
	}{
		{indexSig, string(doc), []string{public.String()}, ""},
		{"", string(doc), []string{public.String()}, "the image's chunk index has no signature"},
		{"hello", string(doc), []string{public.String()}, "the chunk index's signature is damaged"},
		{indexSig, "changed", []string{public.String()}, "does not match: the index was changed since"},
		{sig, string(doc), []string{public.String()}, "the chunk index's signature by key"},
		{indexSig, string(doc), []string{other.String()}, "the chunk index is signed by key"},
	} {
		if _, err := VerifyIndex([]byte(tc.body), tc.signature, tc.keys); (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: %v", tc.want, err)
		}
	}
	// Scrubbing keeps the signature, for which a slot has space.
	img, err := Make(Contents{Info: good, Files: map[string][]byte{"site.yaml": []byte("token: x")}})
	if err != nil {
		t.Fatal(err)
	}
	d := newDevice(img)
	if err := Scrub(d, ondisk.SlotInfo{}, []byte("token: none"), "x"); err != nil {
		t.Fatal(err)
	}
	if info, err := ReadInfo(d); err != nil || info.Signature != sig {
		t.Errorf("after scrubbing: %q, %v", info.Signature, err)
	}
	// minisign accepts the signature as well.
	tool := desk.NeedProgram(t, "minisign", "minisign")
	dir := t.TempDir()
	for name, b := range map[string]string{"m": string(ImageMessage("aa", doc)), "m.minisig": sig} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(tool, "-V", "-P", public.String(), "-m", filepath.Join(dir, "m")).CombinedOutput(); err != nil {
		t.Errorf("minisign: %v: %s", err, out)
	}
}
