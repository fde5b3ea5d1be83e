package slot

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/vincent-petithory/dataurl"

	"github.com/edgebake/edgebake/ondisk"
)

// TestScrubOfEveryEncoding has the token in config.ign and in a file, written
// in all the ways that an Ignition config may carry it.
func TestScrubOfEveryEncoding(t *testing.T) {
	zip := func(s string) string {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		io.WriteString(z, s)
		z.Close()
		return b.String()
	}
	percent := func(s, form string) string {
		var b strings.Builder
		for i := range len(s) {
			fmt.Fprintf(&b, form, s[i])
		}
		return b.String()
	}
	std := func(s string) string { return "data:;base64," + base64.StdEncoding.EncodeToString([]byte(s)) }
	sources := map[string]string{
		"percent":       "data:," + percent(token, "%%%02x"),
		"some percent":  "data:,a%20" + token[:3] + percent(token[3:9], "%%%02X") + token[9:],
		"compressed":    std(zip("x " + token + " y")),
		"packed base64": std(zip(base64.StdEncoding.EncodeToString([]byte("kubeconfig: " + token)))),
		"hexadecimal":   "data:,%20" + fmt.Sprintf("%x", token),
	}
	for n := range 5 {
		sources[fmt.Sprintf("base64 behind %d bytes", n)] = std(strings.Repeat("~", n) + token + "~~")
	}
	for name, source := range sources {
		t.Run(name, func(t *testing.T) {
			c := sample()
			doc := fmt.Sprintf(`{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/a","mode":384,"contents":{"source":%q,"verification":{"hash":"sha512-00"}}},{"path":"/b","contents":{"source":"data:,b","verification":{"hash":"sha512-11"}}}]}}`, source)
			c.Files["config.ign"] = []byte(doc)
			c.Files["files/note"] = []byte(source)
			d := newDevice(mustMake(t, c))
			if err := Scrub(d, ondisk.SlotInfo{Version: 1}, []byte("public\n"), token); err != nil {
				t.Fatal(err)
			}
			got, err := Read(bytes.NewReader(d.durable))
			if err != nil {
				t.Fatal(err)
			}
			var ign struct {
				Storage struct {
					Files []struct {
						Path     string
						Mode     int
						Contents struct {
							Source       string
							Verification struct{ Hash string }
						}
					}
				}
			}
			if err := json.Unmarshal(got.Files["config.ign"], &ign); err != nil || len(ign.Storage.Files) != 2 {
				t.Fatalf("%v: %s", err, got.Files["config.ign"])
			}
			if a, b := ign.Storage.Files[0], ign.Storage.Files[1]; a.Mode != 384 || a.Contents.Verification.Hash != "" || b.Contents.Source != "data:,b" || b.Contents.Verification.Hash != "sha512-11" {
				t.Errorf("%+v", ign)
			}
			u, err := dataurl.DecodeString(ign.Storage.Files[0].Contents.Source)
			if err != nil {
				t.Fatal(err)
			}
			seen := string(u.Data)
			if z, err := gzip.NewReader(strings.NewReader(seen)); err == nil {
				b, err := io.ReadAll(z)
				if err != nil {
					t.Fatal(err)
				}
				seen = string(b)
			}
			if b, err := base64.StdEncoding.DecodeString(seen); err == nil {
				seen += string(b)
			}
			for _, part := range []string{token, token[7:], fmt.Sprintf("%x", token), token[2:20]} {
				if strings.Contains(seen, part) {
					t.Errorf("%q is there still: %q", part, seen)
				}
			}
		})
	}
}

// TestNothingElseIsHidden: a config without the token stays as it is, byte for
// byte; what is not a config is hidden as a text.
func TestNothingElseIsHidden(t *testing.T) {
	doc := `{ "ignition": {"version":"3.5.0"}, "storage":{"files":[{"path":"/a","contents":{"source":"data:;base64,aGVsbG8="}}]} }`
	if got := newHider([]string{token, ""}).ignition([]byte(doc)); string(got) != doc {
		t.Errorf("%s", got)
	}
	for n := range 3 { // in a text of any kind
		text := base64.URLEncoding.EncodeToString([]byte(strings.Repeat("~", n) + token + "?"))
		b, err := base64.URLEncoding.DecodeString(string(newHider([]string{token}).text([]byte(text))))
		if err != nil || bytes.Contains(b, []byte(token[1:len(token)-1])) {
			t.Errorf("%q, %v", b, err)
		}
	}
	if got := newHider([]string{token}).ignition([]byte("no JSON " + token)); strings.Contains(string(got), token) {
		t.Errorf("%s", got)
	}
}
