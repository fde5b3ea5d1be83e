// Package signing reads minisign keys, and signs Sites for USB sticks.
package signing

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"aead.dev/minisign"
)

// PasswordVariable is the environment variable for the password of an encrypted key.
const PasswordVariable = "EDGEBAKE_KEY_PASSWORD"

// MaxKey is the largest accepted size of a key file or a password, in bytes.
const MaxKey = 4 << 10

func readKey(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("reading the key: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, MaxKey))
	if err != nil {
		return nil, fmt.Errorf("reading the key %s: %w", name, err)
	}
	return bytes.TrimSpace(text), nil
}

// Key is a minisign secret key from a file.
type Key struct {
	name      string
	encrypted []byte // contents of the file, if the key has a password
	key       minisign.PrivateKey
}

// OpenKey reads the file of a key and makes all checks that need no password. stdinTaken means that
// standard input is already used for the document.
func OpenKey(name string, stdinTaken bool) (k Key, err error) {
	k.name = name
	text, err := readKey(name)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: minisign -G -s %s -p PUBLICKEY makes one", err, name)
	}
	if err != nil {
		return k, err
	}
	if new(minisign.PublicKey).UnmarshalText(text) == nil {
		return k, fmt.Errorf("reading the key %s: it is a public key: name the secret key (minisign -G -s FILE)", name)
	}
	if minisign.IsEncrypted(text) {
		k.encrypted = text
		if _, ok := os.LookupEnv(PasswordVariable); !ok && stdinTaken {
			return k, fmt.Errorf("reading the key %s: it has a password, but standard input is used for the document: put the password into %s", name, PasswordVariable)
		}
		return k, nil
	}
	if err := k.key.UnmarshalText(text); err != nil {
		return k, fmt.Errorf("reading the key %s: it is not a minisign secret key: minisign -G -s FILE makes one", name)
	}
	return k, k.checkPair()
}

// Unlock decrypts a key that has a password. The password comes from PasswordVariable or from ask.
// Call Unlock after all other checks, because ask may prompt the user.
func (k *Key) Unlock(ask func(name string) (string, error)) (minisign.PrivateKey, error) {
	if k.encrypted == nil {
		return k.key, nil
	}
	password, ok := os.LookupEnv(PasswordVariable)
	var err error
	if !ok {
		if password, err = ask(k.name); err != nil {
			return k.key, fmt.Errorf("reading the password of %s: %w", k.name, err)
		}
	}
	if k.key, err = minisign.DecryptKey(password, k.encrypted); err != nil {
		return k.key, fmt.Errorf("reading the key %s: the password is wrong, or the file is damaged", k.name)
	}
	return k.key, k.checkPair()
}

// checkPair rejects a damaged key: one whose public key does not verify its signatures.
func (k *Key) checkPair() error {
	public, ok := k.key.Public().(minisign.PublicKey)
	if !ok || !minisign.Verify(public, []byte(k.name), minisign.Sign(k.key, []byte(k.name))) {
		return fmt.Errorf("reading the key %s: the file is damaged: its halves do not match", k.name)
	}
	return nil
}

// PublicKeys reads minisign public keys. Each name is a file or the key itself.
func PublicKeys(names []string) ([]string, error) {
	var keys []string
	var errs []error
	for _, name := range names {
		key, err := publicKey(name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		keys = append(keys, key.String())
	}
	return keys, errors.Join(errs...)
}

func publicKey(name string) (key minisign.PublicKey, err error) {
	if key.UnmarshalText([]byte(name)) == nil {
		return key, nil
	}
	text, err := readKey(name)
	if errors.Is(err, fs.ErrNotExist) {
		return key, fmt.Errorf("reading the key %s: it is neither a file nor a minisign public key (RW...)", name)
	}
	if err != nil {
		return key, err
	}
	if key.UnmarshalText(text) == nil {
		return key, nil
	}
	var secret minisign.PrivateKey
	if minisign.IsEncrypted(text) || secret.UnmarshalText(text) == nil {
		return key, fmt.Errorf("reading the key %s: it is a secret key: name the public key (minisign -R -s KEY -p PUB makes it again)", name)
	}
	return key, fmt.Errorf("reading the key %s: it is not a minisign public key", name)
}

// KeyIDs returns the IDs of public keys, as minisign and firstboot print them.
func KeyIDs(keys []string) []string {
	var out []string
	for _, text := range keys {
		var key minisign.PublicKey
		if key.UnmarshalText([]byte(text)) != nil {
			out = append(out, text)
			continue
		}
		out = append(out, fmt.Sprintf("%X", key.ID()))
	}
	return out
}
