package configs

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"time"

	"aead.dev/minisign"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/ondisk"
)

// secretKeySize is the size of a minisign secret key in bytes. A public key has 42 bytes.
const secretKeySize = 158

// NotBeforeTime returns NotBefore as a time, or the zero time if it is not set. The Image must be
// valid.
func (s *Sites) NotBeforeTime() time.Time {
	if s.NotBefore == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, s.NotBefore)
	if err != nil {
		panic("BUG: NotBeforeTime of an Image that was not validated: " + err.Error())
	}
	return t.UTC()
}

func (i *Image) validateSites(probs *Problems) {
	s := &i.Sites
	i.validateNotBefore(probs)
	if s.Removable == ondisk.SitesSigned && len(s.Keys) == 0 {
		probs.AddMissing("sites.keys", "is required with removable: signed: add the public key that verifies Sites (minisign -G makes a pair)")
	}
	if s.Removable == ondisk.SitesNever && len(s.Keys) > 0 {
		probs.Add("sites.keys", "has no effect with removable: never: remove it, or set removable: signed")
	}
	validateKeys(probs, "sites.keys", s.Keys)
	validateKeys(probs, "updates.keys", i.Updates.Keys)
}

// validateKeys validates a list of minisign public keys.
func validateKeys(probs *Problems, path string, keys []string) {
	var seen []minisign.PublicKey
	for n, text := range keys {
		p := fmt.Sprintf("%s[%d]", path, n)
		key, problem := publicKey(text)
		if problem != "" {
			probs.Add(p, "%s", problem)
			continue
		}
		if slices.ContainsFunc(seen, func(k minisign.PublicKey) bool { return k.Equal(key) }) {
			probs.Add(p, "key %X is listed twice", key.ID())
		}
		seen = append(seen, key)
	}
}

func (i *Image) validateNotBefore(probs *Problems) {
	const path = "sites.notBefore"
	if i.Sites.NotBefore == "" {
		return
	}
	if len(i.Sites.Keys) == 0 {
		probs.Add(path, "has no effect without sites.keys: it is about signed Sites")
	}
	t, err := time.Parse(time.RFC3339, i.Sites.NotBefore)
	if err != nil || t.Unix() <= 0 {
		probs.Add(path, "%q is not a date, e.g. 2026-11-30T00:00:00Z", strict.Shorten(i.Sites.NotBefore))
		return
	}
	made, err := time.Parse(time.RFC3339, i.SourceDate)
	if err != nil {
		return // reported elsewhere
	}
	if _, last := (ondisk.ImageInfo{SourceDate: made.Unix()}).StampDates(); t.After(last) {
		probs.Add(path, "is after %s, the last date of a signature that this image accepts", last.Format(time.RFC3339))
	}
}

// publicKey parses a minisign public key. problem describes what is wrong, or is "". It never
// quotes the text, which may be a secret key.
func publicKey(text string) (key minisign.PublicKey, problem string) {
	const want = "want a minisign public key, the second line of its file (RW...)"
	if strings.ContainsAny(text, "\r\n") || strings.HasPrefix(text, "untrusted comment:") {
		return key, want + ", without the comment above it"
	}
	raw, err := base64.StdEncoding.Strict().DecodeString(text)
	switch {
	case err == nil && len(raw) == secretKeySize:
		return key, "is a secret key, which only the person who signs may have: " + want
	case strings.HasSuffix(text, ".pub"):
		return key, fmt.Sprintf("%q is a file's name: %s", strict.Shorten(text), want)
	}
	if err := key.UnmarshalText([]byte(text)); err != nil || key.String() != text {
		return key, "is not a minisign public key: want the second line of its file (RW...)"
	}
	return key, ""
}
