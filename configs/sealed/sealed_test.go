package sealed

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"
	"golang.org/x/crypto/ssh"
)

func write(t *testing.T, name, text string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestSealOpen(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	pub, err := ssh.NewPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	keys, err := Recipients([]string{id.Recipient().String(), write(t, "team", "# ops\n\n"+string(ssh.MarshalAuthorizedKey(pub)))})
	if err != nil || len(keys) != 2 {
		t.Fatal(keys, err)
	}
	text, err := Seal([]byte("a secret"), keys)
	if err != nil || !Is(text) || strings.Contains(string(text), "a secret") {
		t.Fatalf("%s %v", text, err)
	}
	for _, file := range []string{write(t, "age", "# key\n"+id.String()+"\n"), write(t, "ssh", string(pem.EncodeToMemory(block)))} {
		identity, err := ReadIdentity(file)
		if err != nil {
			t.Fatal(err)
		}
		if plain, err := identity.Open("x", text); err != nil || string(plain) != "a secret" {
			t.Error(string(plain), err)
		}
		if _, err := identity.Open("x", text[:len(text)/2]); err == nil {
			t.Error("a truncated file was decrypted")
		}
	}
	other, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	identity, err := ReadIdentity(write(t, "other", other.String()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := identity.Open("x", text); err == nil || !strings.Contains(err.Error(), "does not decrypt it; it was encrypted to another key or passphrase") {
		t.Error(err)
	}
	if _, err := (Identity{}).Open("x", text); err == nil || !strings.Contains(err.Error(), "--identity") {
		t.Error(err)
	}
}

// TestBadKeys checks that a text that is not a key is rejected, and that the error does not quote a
// secret key.
func TestBadKeys(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{id.String(), "age1abc", "ssh-ed25519 AAAA", "/not/there", write(t, "none", "# nobody\n"), write(t, "secret", id.String()+"\n")} {
		_, err := Recipients([]string{name})
		if err == nil || strings.Contains(err.Error(), id.String()[20:]) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, text := range map[string]string{
		"id":   "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\n-----END OPENSSH PRIVATE KEY-----\n",
		"line": "kubeadm join 192.0.2.1:6443 --token abcdef.0123456789abcdef\n",
	} {
		file := write(t, name, text)
		want := map[string]string{
			"id":   ": it is a secret key: give the public one, the file that ends in .pub",
			"line": ": kubeadm join 192.0.2... is not a public key of age or ssh",
		}[name]
		if _, err := Recipients([]string{file}); err == nil || !strings.HasPrefix(err.Error(), "reading the recipients of "+file+want) {
			t.Error(err)
		}
	}
	for _, file := range []string{"/not/there", write(t, "pub", id.Recipient().String()), write(t, "pem", "-----BEGIN X-----\n")} {
		if _, err := ReadIdentity(file); err == nil {
			t.Error(file)
		}
	}
}

// TestPassphraseThatIsABurden checks that a file with a high work factor is rejected.
func TestPassphraseThatIsABurden(t *testing.T) {
	// Raise the work factor in the header of the file.
	r, err := age.NewScryptRecipient("pp")
	if err != nil {
		t.Fatal(err)
	}
	r.SetWorkFactor(10)
	var b bytes.Buffer
	w, err := age.Encrypt(&b, r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	id, err := Passphrase("pp")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := id.Open("x", b.Bytes()); err != nil || string(text) != "x" {
		t.Errorf("%q %v", text, err)
	}
	first, rest, _ := bytes.Cut(b.Bytes(), []byte(" 10\n"))
	bomb := bytes.Join([][]byte{first, rest}, []byte(" 21\n"))
	if _, err := id.Open("x", bomb); err == nil || !strings.Contains(err.Error(), "more than 2^20 steps of work") {
		t.Errorf("%v", err)
	}
}
