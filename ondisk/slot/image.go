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

// An image may be signed. The minisign signature covers the golden digest and the digest of
// image.json. It is in the slot's edgebake.json, which the golden digest does not cover. Stamping,
// flashing and scrubbing keep it.

var (
	// ErrImageUnsigned means that an image has no signature.
	ErrImageUnsigned = errors.New("the image has no signature: build it with --sign KEY")
	// ErrIndexUnsigned means that an index of chunks has no signature, for example because a signed
	// raw image was compressed later.
	ErrIndexUnsigned = errors.New("the image's chunk index has no signature: build the image as .raw.zst with --sign KEY")
)

// ImageMessage returns the message that is signed for an image.
func ImageMessage(golden string, imageInfo []byte) []byte {
	return fmt.Appendf(nil, "edgebake image 1\ngolden %s\n%s %x\n", golden, ondisk.ESPImageInfo, sha256.Sum256(imageInfo))
}

// SignImage returns the signature of an image. when is the date of the signature; for reproducible
// builds it is the image's source date.
func SignImage(golden string, imageInfo []byte, key minisign.PrivateKey, when time.Time) (string, error) {
	return sign(ImageMessage(golden, imageInfo), "edgebake image", key, when)
}

// IndexMessage returns the message that is signed for an index of chunks. The index itself contains
// the golden digest and image.json.
func IndexMessage(body []byte) []byte {
	return fmt.Appendf(nil, "edgebake index 1\n%x\n", sha256.Sum256(body))
}

// SignIndex returns the signature of an encoded index of chunks (chunk.Index).
func SignIndex(body []byte, key minisign.PrivateKey, when time.Time) (string, error) {
	return sign(IndexMessage(body), "edgebake index", key, when)
}

// sign returns the signature of a message. what describes the message in the comments of the
// signature.
func sign(message []byte, what string, key minisign.PrivateKey, when time.Time) (string, error) {
	r := minisign.NewReader(bytes.NewReader(message))
	if _, err := io.Copy(io.Discard, r); err != nil {
		return "", fmt.Errorf("signing: %w", err)
	}
	return string(r.SignWithComments(key, timestamp+strconv.FormatInt(when.Unix(), 10)+"\t"+what,
		fmt.Sprintf("signature of an %s by key %X", what, key.ID()))), nil
}

// VerifyImage returns the ID, in hexadecimal, of the minisign public key with which the image was
// signed. It does not compute the golden digest of the image.
func VerifyImage(info ondisk.SlotInfo, imageInfo []byte, keys []string) (string, error) {
	if info.Signature == "" {
		return "", ErrImageUnsigned
	}
	return verify(ImageMessage(info.Golden, imageInfo), info.Signature, keys, "image", "image.json or the golden digest")
}

// VerifyIndex returns the ID, in hexadecimal, of the public key with which an encoded index of
// chunks was signed.
func VerifyIndex(body []byte, signature string, keys []string) (string, error) {
	if signature == "" {
		return "", ErrIndexUnsigned
	}
	return verify(IndexMessage(body), signature, keys, "chunk index", "the index")
}

// verify returns the ID, in hexadecimal, of the public key with which a message was signed. In
// errors, what names the signed object, and contents the parts that the message covers.
func verify(message []byte, signature string, keys []string, what, contents string) (string, error) {
	var s minisign.Signature
	if err := s.UnmarshalText([]byte(signature)); err != nil {
		return "", fmt.Errorf("the %s's signature is damaged: use a copy of the golden image, or build it again", what)
	}
	var ids []string
	for _, text := range keys {
		var key minisign.PublicKey
		if err := key.UnmarshalText([]byte(text)); err != nil {
			return "", fmt.Errorf("reading key %s: it is not a minisign public key", text)
		}
		ids = append(ids, fmt.Sprintf("%X", key.ID()))
		if minisign.Verify(key, message, []byte(signature)) {
			return fmt.Sprintf("%X", key.ID()), nil
		}
	}
	for _, id := range ids {
		if id == fmt.Sprintf("%X", s.KeyID) {
			return "", fmt.Errorf("the %s's signature by key %s does not match: %s was changed since, or another key has the same ID: do not use the image", what, id, contents)
		}
	}
	return "", fmt.Errorf("the %s is signed by key %X, expected %s: another person built it, or the key was replaced", what, s.KeyID, strings.Join(ids, " or "))
}
