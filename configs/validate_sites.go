package configs

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/configs/ondisk"
)

// secretKeySize is the size of a minisign secret key; a public one has 42
// bytes.
const secretKeySize = 158

func (s *Sites) validate(probs *Problems) {
	if s.Removable == ondisk.SitesSigned && len(s.Keys) == 0 {
		probs.missing("sites.keys", "is required with removable: signed: add the public key of whoever signs Sites (minisign -G makes a pair)")
	}
	if s.Removable == ondisk.SitesNever && len(s.Keys) > 0 {
		probs.add("sites.keys", "has no effect with removable: never: remove it, or set removable: signed")
	}
	var seen []minisign.PublicKey
	for n, text := range s.Keys {
		p := fmt.Sprintf("sites.keys[%d]", n)
		key, problem := siteKey(text)
		if problem != "" {
			probs.add(p, "%s", problem)
			continue
		}
		if slices.ContainsFunc(seen, func(k minisign.PublicKey) bool { return k.Equal(key) }) {
			probs.add(p, "key %X is listed twice", key.ID())
		}
		seen = append(seen, key)
	}
}

// siteKey parses a minisign public key, or says what is wrong with it. It
// never quotes what may be a secret key.
func siteKey(text string) (key minisign.PublicKey, problem string) {
	const want = "want a minisign public key, the second line of its file (RW...)"
	if strings.ContainsAny(text, "\r\n") || strings.HasPrefix(text, "untrusted comment:") {
		return key, want + ", without the comment above it"
	}
	raw, err := base64.StdEncoding.Strict().DecodeString(text)
	switch {
	case err == nil && len(raw) == secretKeySize:
		return key, "is a secret key, which belongs to whoever signs alone: " + want
	case strings.HasSuffix(text, ".pub"):
		return key, fmt.Sprintf("%q is a file's name: %s", shorten(text), want)
	}
	if err := key.UnmarshalText([]byte(text)); err != nil || key.String() != text {
		return key, "is not a minisign public key: " + want
	}
	return key, ""
}
