package slot

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/ondisk"
)

// A Site on a stick may be signed, for machines that require it. The minisign signature covers the
// list of all files that are read from the stick, and its trusted comment, which has the date.

// ErrUnsigned means that there is no signature.
var ErrUnsigned = errors.New("no signature (" + ondisk.SlotSignature + ")")

// Digests returns the message to sign: the number of files, and for each file the length of its
// name, its name and the SHA-256 of its contents.
func Digests(files map[string][]byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "edgebake site 1\n%d files\n", len(files))
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(&b, "%d %s %x\n", len(name), name, sha256.Sum256(files[name]))
	}
	return b.Bytes()
}

// timestamp is the prefix of the date in a trusted comment, as minisign writes it.
const timestamp = "timestamp:"

// Sign returns the signature of a Site's files. when is the date of the signature.
func Sign(files map[string][]byte, key minisign.PrivateKey, when time.Time) ([]byte, error) {
	signature, err := sign(Digests(files), "edgebake site", key, when)
	return []byte(signature), err
}

// Verify checks the signature with the minisign public keys, and returns its date. Call it before
// parsing any file.
func (c *Contents) Verify(keys []string) (time.Time, error) {
	if c.Signature == nil {
		return time.Time{}, ErrUnsigned
	}
	var s minisign.Signature
	if err := s.UnmarshalText(c.Signature); err != nil {
		return time.Time{}, fmt.Errorf("%s is not a minisign signature: sign the Site again, and copy this file unchanged", ondisk.SlotSignature)
	}
	var ids []string
	tried := false
	for _, text := range keys {
		var key minisign.PublicKey
		if err := key.UnmarshalText([]byte(text)); err != nil {
			return time.Time{}, fmt.Errorf("the Image's key %s cannot be read: %w", text, err)
		}
		ids = append(ids, fmt.Sprintf("%X", key.ID()))
		if key.ID() != s.KeyID {
			continue
		}
		tried = true
		if minisign.Verify(key, Digests(c.Files), c.Signature) {
			return signedAt(s.TrustedComment)
		}
	}
	switch {
	case tried:
		return time.Time{}, fmt.Errorf("the signature by key %X does not match: a file was changed, added or removed after signing, or another key has the same ID: sign it again, and copy all written files to an empty stick", s.KeyID)
	case len(ids) == 0:
		return time.Time{}, fmt.Errorf("signed by key %X, but the Image names no key (sites.keys)", s.KeyID)
	}
	return time.Time{}, fmt.Errorf("signed by key %X, but the Image names %s (sites.keys): sign it with a key that the Image names", s.KeyID, strings.Join(ids, ", "))
}

// signedAt returns the date in a trusted comment.
func signedAt(comment string) (time.Time, error) {
	var found []string
	for part := range strings.SplitSeq(comment, "\t") {
		if at, ok := strings.CutPrefix(part, timestamp); ok {
			found = append(found, at)
		}
	}
	if len(found) == 1 {
		if n, err := strconv.ParseUint(found[0], 10, 40); err == nil && n > 0 {
			return time.Unix(int64(n), 0).UTC(), nil
		}
	}
	return time.Time{}, errors.New("the signature has no date (" + timestamp + "SECONDS in the trusted comment): sign it with edgebake site sign")
}
