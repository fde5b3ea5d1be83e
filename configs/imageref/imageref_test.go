package imageref

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// TestRefsTravelAsText checks that references and digests are encoded as the text that they were
// parsed from, and that decoding rejects invalid text. Therefore, readers of a plan or manifest
// need no checks.
func TestRefsTravelAsText(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0a", 32)
	type pinned struct {
		Ref    Ref    `json:"ref"`
		Digest Digest `json:"digest"`
	}
	for _, ref := range []string{"docker.io/library/pause:3.10", "host:5000/x/y@" + digest, "host:5000/x/y:1@" + digest} {
		text := `{"ref":"` + ref + `","digest":"` + digest + `"}`
		var p pinned
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			t.Fatal(err)
		}
		if got, err := json.Marshal(p); err != nil || string(got) != text {
			t.Errorf("%s, %v; want %s", got, err, text)
		}
		if p.Digest.Hex() != strings.Repeat("0a", 32) {
			t.Errorf("hex %s", p.Digest.Hex())
		}
	}
	for _, text := range []string{"", digest[7:], digest + "0", "sha256:../../etc/passwd", strings.ToUpper(digest), strings.Replace(digest, "256", "512", 1)} {
		var bad *DigestError
		if err := json.Unmarshal([]byte(`{"digest":"`+text+`"}`), new(pinned)); !errors.As(err, &bad) || bad.Text != text {
			t.Errorf("%q: %v", text, err)
		}
		if err := json.Unmarshal([]byte(`{"ref":"x@`+text+`"}`), new(pinned)); err == nil {
			t.Errorf("a reference with the digest %q was accepted", text)
		}
	}
}
