package slot

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/ondisk"
)

// An image may be signed, so that nobody but its maker can have made what is on
// a disk. The signature is minisign's, over the golden digest and the digest
// of image.json, and lies in the slot's edgebake.json, which no golden digest
// covers: it travels with the image, stays when it is stamped, flashed or
// scrubbed, and holds for as long as the golden digest does.

// ErrImageUnsigned says that an image has no signature.
var ErrImageUnsigned = errors.New("the image has no signature: build it with --sign KEY")

// ImageMessage is what an image's signature is over.
func ImageMessage(golden string, imageInfo []byte) []byte {
	return fmt.Appendf(nil, "edgebake image 1\ngolden %s\n%s %x\n", golden, ondisk.ESPImageInfo, sha256.Sum256(imageInfo))
}

// SignImage returns the signature of an image. when is the image's own date:
// the same image and key give the same bytes.
func SignImage(golden string, imageInfo []byte, key minisign.PrivateKey, when time.Time) (string, error) {
	r := minisign.NewReader(bytes.NewReader(ImageMessage(golden, imageInfo)))
	if _, err := io.Copy(io.Discard, r); err != nil {
		return "", fmt.Errorf("signing the image: %w", err)
	}
	return string(r.SignWithComments(key, timestamp+strconv.FormatInt(when.Unix(), 10)+"\tedgebake image",
		fmt.Sprintf("signature of an edgebake image by key %X", key.ID()))), nil
}

// VerifyImage returns which of the keys, minisign public keys, signed the
// image. That its bytes have the golden digest is for the caller to check.
func VerifyImage(info ondisk.SlotInfo, imageInfo []byte, keys []string) (string, error) {
	if info.Signature == "" {
		return "", ErrImageUnsigned
	}
	var s minisign.Signature
	if err := s.UnmarshalText([]byte(info.Signature)); err != nil {
		return "", errors.New("the image's signature is damaged: take a copy of the golden image, or build it again")
	}
	var ids []string
	for _, text := range keys {
		var key minisign.PublicKey
		if err := key.UnmarshalText([]byte(text)); err != nil {
			return "", fmt.Errorf("reading key %s: it is not a minisign public key", text)
		}
		ids = append(ids, fmt.Sprintf("%X", key.ID()))
		if minisign.Verify(key, ImageMessage(info.Golden, imageInfo), []byte(info.Signature)) {
			return fmt.Sprintf("%X", key.ID()), nil
		}
	}
	for _, id := range ids {
		if id == fmt.Sprintf("%X", s.KeyID) {
			return "", fmt.Errorf("the image's signature by key %s does not match: image.json or the golden digest was changed since, or the key is another of that name: do not use the image", id)
		}
	}
	return "", fmt.Errorf("the image is signed by key %X, expected %s: it is somebody else's, or the key was exchanged", s.KeyID, strings.Join(ids, " or "))
}
