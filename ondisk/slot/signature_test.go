package slot

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
)

var signedOn = time.Date(2026, 11, 5, 12, 0, 0, 0, time.UTC)

func newKey(t testing.TB) (minisign.PublicKey, minisign.PrivateKey) {
	t.Helper()
	public, secret, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return public, secret
}

func signedSite(t testing.TB, secret minisign.PrivateKey) *Contents {
	t.Helper()
	c := &Contents{Files: map[string][]byte{"site.yaml": []byte("a"), "config.ign": []byte("b"), "files/x": []byte("c"), "files/y": nil}}
	var err error
	if c.Signature, err = Sign(c.Files, secret, signedOn); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestSignature checks that a signature covers all files, their names and the signature's date.
func TestSignature(t *testing.T) {
	public, secret := newKey(t)
	other, _ := newKey(t)
	text := secret.Public().(minisign.PublicKey).String()
	for _, test := range []struct {
		name   string
		keys   []string
		change func(*Contents)
		want   string // part of the error
	}{
		{"good", []string{text}, func(*Contents) {}, ""},
		{"one of two keys", []string{other.String(), text}, func(*Contents) {}, ""},
		{"Windows line ends", []string{text}, func(c *Contents) { c.Signature = bytes.ReplaceAll(c.Signature, []byte("\n"), []byte("\r\n")) }, ""},
		{"no signature", []string{text}, func(c *Contents) { c.Signature = nil }, "no signature (site.minisig)"},
		{"no keys", nil, func(*Contents) {}, "the Image names no key (sites.keys)"},
		{"another key", []string{other.String()}, func(*Contents) {}, "the Image names " + strings.ToUpper(strconv.FormatUint(other.ID(), 16))},
		{"changed", []string{text}, func(c *Contents) { c.Files["site.yaml"] = []byte("A") }, "does not match: a file was changed"},
		{"swapped", []string{text}, func(c *Contents) {
			c.Files["site.yaml"], c.Files["config.ign"] = c.Files["config.ign"], c.Files["site.yaml"]
		}, "does not match"},
		{"added", []string{text}, func(c *Contents) { c.Files["files/z"] = nil }, "does not match"},
		{"left out", []string{text}, func(c *Contents) { delete(c.Files, "config.ign") }, "does not match"},
		{"an empty one left out", []string{text}, func(c *Contents) { delete(c.Files, "files/y") }, "does not match"},
		{"renamed", []string{text}, func(c *Contents) { c.Files["files/z"] = c.Files["files/y"]; delete(c.Files, "files/y") }, "does not match"},
		{"a later date", []string{text}, func(c *Contents) {
			c.Signature = bytes.Replace(c.Signature, []byte("timestamp:1"), []byte("timestamp:2"), 1)
		}, "does not match"},
		{"a signature of another program", []string{text}, func(c *Contents) { c.Signature = minisign.Sign(secret, []byte("anything")) }, "does not match"},
		{"no date", []string{text}, func(c *Contents) {
			c.Signature = minisign.SignWithComments(secret, Digests(c.Files), "hello", "x")
		}, "the signature has no date"},
		{"two dates", []string{text}, func(c *Contents) {
			c.Signature = minisign.SignWithComments(secret, Digests(c.Files), "timestamp:5\ttimestamp:6", "x")
		}, "the signature has no date"},
		{"a date before all", []string{text}, func(c *Contents) {
			c.Signature = minisign.SignWithComments(secret, Digests(c.Files), "timestamp:-5", "x")
		}, "the signature has no date"},
		{"no signature at all", []string{text}, func(c *Contents) { c.Signature = []byte("hello") }, "is not a minisign signature"},
		{"empty", []string{text}, func(c *Contents) { c.Signature = []byte{} }, "is not a minisign signature"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := signedSite(t, secret)
			test.change(c)
			when, err := c.Verify(test.keys)
			switch {
			case test.want == "" && (err != nil || !when.Equal(signedOn)):
				t.Errorf("got %v, %v", when, err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want) || !when.IsZero()):
				t.Errorf("got %v, %v", when, err)
			}
		})
	}
	// Sign with another key that has the same ID.
	forged := &Contents{Files: signedSite(t, secret).Files}
	_, evil := newKey(t)
	b, err := Sign(forged.Files, evil, signedOn)
	if err != nil {
		t.Fatal(err)
	}
	var s minisign.Signature
	if err := s.UnmarshalText(b); err != nil {
		t.Fatal(err)
	}
	s.KeyID = public.ID()
	if forged.Signature, err = s.MarshalText(); err != nil {
		t.Fatal(err)
	}
	if _, err := forged.Verify([]string{text}); err == nil {
		t.Error("another key's signature was accepted")
	}
}

// TestDigestsAreUnambiguous checks that no two sets of files have the same list, whatever their
// names.
func TestDigestsAreUnambiguous(t *testing.T) {
	one := map[string][]byte{"files/a": []byte("1"), "files/b": []byte("2")}
	list := string(Digests(one))
	lines := strings.SplitAfter(list, "\n")
	// joined is one file, whose name contains the text between the names of two files.
	joined := map[string][]byte{"files/a " + lines[2][len("7 files/a "):] + "7 files/b": []byte("2")}
	if string(Digests(joined)) == list {
		t.Error("two files and one file have the same digest list")
	}
}

// TestSlotKeepsASignature checks that a slot keeps a signature and a scrubbed slot has none, and
// that a signature that is too large does not hide the Site.
func TestSlotKeepsASignature(t *testing.T) {
	public, secret := newKey(t)
	c := signedSite(t, secret)
	got, err := Read(bytes.NewReader(mustMake(t, *c)))
	if err != nil || !bytes.Equal(got.Signature, c.Signature) || !maps.EqualFunc(got.Files, c.Files, bytes.Equal) {
		t.Fatalf("got %+v, %v", got, err)
	}
	if _, err := got.Verify([]string{public.String()}); err != nil {
		t.Error(err)
	}
	d := newDevice(mustMake(t, *c))
	if err := Scrub(d, ondisk.SlotInfo{Version: 1}, []byte("a"), "secret"); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(bytes.NewReader(d.durable)); err != nil || got.Signature != nil {
		t.Errorf("%v, %q", err, got.Signature)
	}
	c.Signature = make([]byte, maxSignature+1)
	got, err = Read(bytes.NewReader(mustMake(t, *c)))
	if err != nil || got.Signature == nil || len(got.Signature) > 0 {
		t.Errorf("got %+v, %v", got, err)
	}
}

// TestTheRealMinisign verifies edgebake's signatures with minisign, and minisign's with edgebake.
func TestTheRealMinisign(t *testing.T) {
	tool := desk.NeedProgram(t, "minisign", "minisign")
	dir := t.TempDir()
	mini := func(args ...string) {
		t.Helper()
		cmd := exec.Command(tool, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("minisign %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	read := func(name string) []byte {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	write := func(name string, b []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	mini("-G", "-W", "-s", "office.key", "-p", "office.pub")
	public := strings.TrimSpace(strings.Split(string(read("office.pub")), "\n")[1])
	var secret minisign.PrivateKey
	if err := secret.UnmarshalText(bytes.TrimSpace(read("office.key"))); err != nil {
		t.Fatal(err)
	}
	c := signedSite(t, secret)
	write("list", Digests(c.Files))
	write("list.minisig", c.Signature)
	mini("-V", "-p", "office.pub", "-m", "list")
	if _, err := c.Verify([]string{public}); err != nil {
		t.Error(err)
	}
	before := time.Now().Add(-time.Minute)
	for _, form := range [][]string{nil, {"-l"}} {
		mini(append([]string{"-S", "-s", "office.key", "-m", "list"}, form...)...)
		c.Signature = read("list.minisig")
		when, err := c.Verify([]string{public})
		if err != nil || when.Before(before) || when.After(time.Now().Add(time.Minute)) {
			t.Errorf("minisign -S %v: %v, %v", form, when, err)
		}
		c.Signature[len(c.Signature)/2] ^= 1
		if _, err := c.Verify([]string{public}); err == nil {
			t.Error("a damaged signature was accepted")
		}
	}
}

// FuzzVerify checks that only the original signature is accepted, with the original date.
func FuzzVerify(f *testing.F) {
	public, secret := newKey(f)
	c := signedSite(f, secret)
	good := c.Signature
	f.Add(good)
	f.Add([]byte("untrusted comment: \n\ntrusted comment: timestamp:1\n\n"))
	f.Add(minisign.SignWithComments(secret, Digests(c.Files), "timestamp:0x5", "x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &Contents{Files: c.Files, Signature: b}
		when, err := c.Verify([]string{public.String()})
		if err == nil && !when.Equal(signedOn) {
			t.Errorf("%q was signed on %v", b, when)
		}
		if err != nil && !when.IsZero() {
			t.Errorf("%v with %v", when, err)
		}
	})
}
