// Package sealed encrypts files for age recipients (age-encryption.org) and decrypts them. It is
// the only package that imports age.
package sealed

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"filippo.io/age"
	"filippo.io/age/agessh"
	"filippo.io/age/armor"
)

// Extension is the file name extension of encrypted files.
const Extension = ".age"

// header is the beginning of every encrypted file in text format.
const header = "-----BEGIN AGE ENCRYPTED FILE-----"

// maxWork is the largest accepted work factor of a file that is encrypted with a passphrase. age
// uses 18. Each further step doubles the time and the memory, and 20 needs 1 GiB.
const maxWork = 20

// maxKeys is the largest accepted size of a file with keys, in bytes.
const maxKeys = 1 << 20

// Recipients returns the public keys for which files can be encrypted. Each name is a public key
// (age1..., ssh-ed25519 ..., ssh-rsa ...) or the path of a file with public keys. The result has
// one key in each item, without comments.
func Recipients(names []string) ([]string, error) {
	var keys []string
	for _, name := range names {
		if isKey(name) {
			keys = append(keys, strings.TrimSpace(name))
			continue
		}
		text, err := readKeys(name)
		if err != nil {
			return nil, fmt.Errorf("reading the recipient %s: %w: give a public key (age1... or ssh-ed25519 ...) or a file of them", shown(name), err)
		}
		if strings.Contains(text, "PRIVATE KEY-----") {
			return nil, fmt.Errorf("reading the recipients of %s: it is a secret key: give the public one, the file that ends in .pub", name)
		}
		n := len(keys)
		for line := range strings.Lines(text) {
			if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
				keys = append(keys, line)
			}
		}
		if len(keys) == n {
			return nil, fmt.Errorf("reading the recipients of %s: there are none", name)
		}
		if _, err := parse(keys[n:]); err != nil {
			return nil, fmt.Errorf("reading the recipients of %s: %w", name, err)
		}
	}
	if _, err := parse(keys); err != nil {
		return nil, fmt.Errorf("reading the recipients: %w", err)
	}
	return keys, nil
}

func isKey(s string) bool {
	return strings.HasPrefix(s, "age1") || strings.HasPrefix(s, "ssh-") || strings.HasPrefix(strings.ToUpper(s), "AGE-SECRET-KEY-")
}

// shown returns name for a message. It hides a secret key that was given by mistake.
func shown(name string) string {
	if strings.HasPrefix(strings.ToUpper(name), "AGE-SECRET-KEY-") {
		return "AGE-SECRET-KEY-..."
	}
	return name
}

func readKeys(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxKeys))
	return string(text), err
}

func parse(keys []string) ([]age.Recipient, error) {
	var out []age.Recipient
	for _, k := range keys {
		var r age.Recipient
		var err error
		switch {
		case strings.HasPrefix(strings.ToUpper(k), "AGE-SECRET-KEY-"):
			return nil, errors.New("AGE-SECRET-KEY-... is a secret key: give its public key (age-keygen -y prints it)")
		case strings.HasPrefix(k, "ssh-"):
			r, err = agessh.ParseRecipient(k)
		default:
			r, err = age.ParseX25519Recipient(k)
		}
		if err != nil {
			// The library's error would quote its input, which may be a secret.
			return nil, fmt.Errorf("%.20s... is not a public key of age or ssh: want one that begins with age1 or ssh-ed25519", k)
		}
		out = append(out, r)
	}
	return out, nil
}

// Seal encrypts plain for keys that Recipients returned. The result is text.
func Seal(plain []byte, keys []string) ([]byte, error) {
	recipients, err := parse(keys)
	if err != nil {
		return nil, fmt.Errorf("reading the recipients: %w", err)
	}
	var b bytes.Buffer
	a := armor.NewWriter(&b)
	w, err := age.Encrypt(a, recipients...)
	if err != nil {
		return nil, fmt.Errorf("encrypting: %w", err)
	}
	_, err = w.Write(plain)
	if err = errors.Join(err, w.Close(), a.Close()); err != nil {
		return nil, fmt.Errorf("encrypting: %w", err)
	}
	return b.Bytes(), nil
}

// Is reports whether data is encrypted.
func Is(data []byte) bool {
	return bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte(header)) || bytes.HasPrefix(data, []byte("age-encryption.org/"))
}

// Identity is a set of secret keys that decrypt files. The zero value has no keys.
type Identity struct {
	file string
	keys []age.Identity
}

// Given reports whether the identity has a key.
func (id Identity) Given() bool { return len(id.keys) > 0 }

// ReadIdentity reads secret keys from a file: the output of age-keygen, or an SSH key without a
// passphrase.
func ReadIdentity(file string) (Identity, error) {
	text, err := readKeys(file)
	if err != nil {
		return Identity{}, fmt.Errorf("reading the identity: %w", err)
	}
	if strings.HasPrefix(strings.TrimSpace(text), "-----BEGIN") {
		id, err := agessh.ParseIdentity([]byte(text))
		if err != nil {
			return Identity{}, fmt.Errorf("reading the identity %s: %w: want age-keygen's file, or an ssh key without a passphrase", file, err)
		}
		return Identity{file, []age.Identity{id}}, nil
	}
	ids, err := age.ParseIdentities(strings.NewReader(text))
	if err != nil {
		return Identity{}, fmt.Errorf("reading the identity %s: it is not a file of secret keys: want age-keygen's file, or an ssh key", file)
	}
	return Identity{file, ids}, nil
}

// Passphrase returns the Identity for files that are encrypted with a passphrase (age
// --passphrase).
func Passphrase(pass string) (Identity, error) {
	id, err := age.NewScryptIdentity(pass)
	if err != nil {
		return Identity{}, fmt.Errorf("using the passphrase: %w", err)
	}
	id.SetMaxWorkFactor(maxWork)
	return Identity{"the passphrase", []age.Identity{id}}, nil
}

// Open decrypts data. name is the name of the file for messages.
func (id Identity) Open(name string, data []byte) ([]byte, error) {
	if len(id.keys) == 0 {
		return nil, fmt.Errorf("opening %s: it is encrypted: name the secret key with --identity FILE", name)
	}
	var r io.Reader = bytes.NewReader(data)
	if !bytes.HasPrefix(data, []byte("age-encryption.org/")) {
		r = armor.NewReader(r)
	}
	plain, err := age.Decrypt(r, id.keys...)
	if err != nil {
		var none *age.NoIdentityMatchError
		if errors.As(err, &none) {
			return nil, fmt.Errorf("opening %s: %s does not decrypt it; it was encrypted to another key or passphrase", name, id.file)
		}
		if strings.Contains(err.Error(), "work factor too large") {
			return nil, fmt.Errorf("opening %s: its passphrase needs more than 2^%d steps of work, more than age uses by default: decrypt it with age, and encrypt it again", name, maxWork)
		}
		return nil, fmt.Errorf("opening %s: %w", name, err)
	}
	text, err := io.ReadAll(plain)
	if err != nil {
		return nil, fmt.Errorf("opening %s: it is truncated or damaged: %w", name, err)
	}
	return text, nil
}
