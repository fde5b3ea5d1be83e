package slot

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/vincent-petithory/dataurl"
)

// HideInIgnition is an Ignition config with stars in place of secrets, as
// Scrub leaves it.
func HideInIgnition(config []byte, secrets ...string) []byte {
	return newHider(secrets).ignition(config)
}

// hider puts stars in place of secrets, in whatever form they are written:
// plain, percent-encoded, as JSON escapes, hexadecimal, or inside Base64 that
// begins before them and ends behind them.
type hider struct {
	words  []*regexp.Regexp // plain, percent-encoded, escaped
	coded  [][]byte         // the part of a Base64 text that the secret alone determines
	number [][]byte         // hexadecimal
}

func newHider(secrets []string) *hider {
	h := &hider{}
	for _, s := range secrets {
		if s == "" {
			continue
		}
		var p strings.Builder
		for i := range len(s) {
			// One byte, in all its forms.
			fmt.Fprintf(&p, `(?:%s|%%(?i:%02x)|\\u00(?i:%02x))`, regexp.QuoteMeta(s[i:i+1]), s[i], s[i])
		}
		h.words = append(h.words, regexp.MustCompile(p.String()))
		h.number = append(h.number, []byte(hex.EncodeToString([]byte(s))), []byte(strings.ToUpper(hex.EncodeToString([]byte(s)))))
		for before := range 3 { // bytes that share the first group with it
			for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
				text := e.EncodeToString(append(make([]byte, before), s...))
				from := (before*8 + 5) / 6
				to := (before + len(s)) * 8 / 6
				if to-from >= 8 { // fewer characters occur by chance
					h.coded = append(h.coded, []byte(text[from:to]))
				}
			}
		}
	}
	return h
}

// text hides the secrets in b, which is as long afterwards.
func (h *hider) text(b []byte) []byte {
	for _, w := range h.words {
		b = w.ReplaceAllFunc(b, func(found []byte) []byte { return bytes.Repeat([]byte("*"), len(found)) })
	}
	for _, c := range h.coded {
		b = bytes.ReplaceAll(b, c, bytes.Repeat([]byte("A"), len(c)))
	}
	for _, n := range h.number {
		b = bytes.ReplaceAll(b, n, bytes.Repeat([]byte("0"), len(n)))
	}
	return b
}

// ignition hides the secrets in an Ignition config, also in contents that are
// compressed. What is not JSON is hidden as a text.
func (h *hider) ignition(b []byte) []byte {
	var doc any
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if d.Decode(&doc) == nil && h.walk(doc) {
		var out bytes.Buffer
		e := json.NewEncoder(&out)
		e.SetEscapeHTML(false) // it is longer
		if err := e.Encode(doc); err == nil {
			b = bytes.TrimSuffix(out.Bytes(), []byte("\n"))
		}
	}
	return h.text(b)
}

// walk hides secrets in the resources below v, and reports whether it did.
func (h *hider) walk(v any) bool {
	did := false
	switch v := v.(type) {
	case map[string]any:
		if source, ok := v["source"].(string); ok && strings.HasPrefix(source, "data:") {
			if hidden, ok := h.resource(source); ok {
				v["source"], did = hidden, true
				delete(v, "verification") // a hash of what was there
			}
		}
		for _, x := range v {
			did = h.walk(x) || did
		}
	case []any:
		for _, x := range v {
			did = h.walk(x) || did
		}
	}
	return did
}

// resource hides the secrets in the contents of a data: URL, and reports
// whether there were any.
func (h *hider) resource(source string) (string, bool) {
	u, err := dataurl.DecodeString(source)
	if err != nil {
		return "", false
	}
	data, packed := u.Data, false
	if z, err := gzip.NewReader(bytes.NewReader(data)); err == nil {
		if plain, err := io.ReadAll(io.LimitReader(z, 4*maxFiles)); err == nil {
			data, packed = plain, true
		}
	}
	hidden := h.text(data)
	if bytes.Equal(hidden, data) {
		return "", false
	}
	if u.Encoding == dataurl.EncodingASCII && !packed {
		// Base64 is longer.
		same := string(h.text([]byte(source)))
		if u, err := dataurl.DecodeString(same); err == nil && bytes.Equal(u.Data, hidden) {
			return same, true
		}
	}
	if packed {
		var out bytes.Buffer
		z := gzip.NewWriter(&out)
		_, err := z.Write(hidden)
		if err == nil {
			err = z.Close()
		}
		if err != nil {
			return "data:,", true // better nothing than the secret
		}
		hidden = out.Bytes()
	}
	return "data:;base64," + base64.StdEncoding.EncodeToString(hidden), true
}
