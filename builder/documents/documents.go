// Package documents reads the documents that are named on the command line, and the files that they
// name: tokens, Ignition configs, certificates, manifests and templates. It reports everything that
// a build, a slot or a node would reject, with file, line and field.
package documents

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// Environment variables for secrets. Secrets must not be arguments, because every user can read a
// command line.
const (
	TokenVariable      = "EDGEBAKE_TOKEN"
	IdentityVariable   = "EDGEBAKE_AGE_IDENTITY"   // path of a file
	PassphraseVariable = "EDGEBAKE_AGE_PASSPHRASE" // passphrase of an encrypted document
)

// MaxSize is the largest size of a document in bytes. Disk images are larger.
const MaxSize = 32 << 20

// Extensions and TableExtensions are the file name extensions of documents and of tables.
var (
	Extensions      = []string{"yaml", "yml"}
	TableExtensions = []string{"csv", "tsv"}
)

// Reader reads documents.
type Reader struct {
	Stdin io.Reader // is read for the file name "-"
	// AskHidden asks a person for a passphrase. It is nil if there is no terminal.
	AskHidden func(prompt string) (string, error)
	Warn      func(configs.Problems)
	Now       time.Time
	// TokenFile is the path of a file with a bootstrap token, which replaces the one in the
	// document. Without it, a Site that has no token gets the token in TokenVariable.
	TokenFile string
	Identity  string // age identity file; "" means the file in IdentityVariable
	Ignition  string // Ignition config to use instead of the Site's ignitionFile
}

// Source is a document's file name and text.
type Source struct {
	Name string
	Data []byte
}

// Path resolves a path in the document. A relative path is relative to the directory of the
// document, or to the current directory if the document is standard input.
func (d Source) Path(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(d.Dir(), p)
}

// Dir returns the directory to which paths in the document are relative.
func (d Source) Dir() string {
	if d.Name == "-" {
		return "."
	}
	return filepath.Dir(d.Name)
}

// Problem returns a problem of a field, with the field's place in the document.
func (d Source) Problem(field, msg string) configs.Problem {
	p := configs.Problem{File: d.Name, Path: field, Msg: msg}
	p.Line, p.Col = configs.Locate(d.Name, d.Data, field)
	return p
}

// Explain adds places in the document to errors about fields.
func (d Source) Explain(err error) error {
	var out []error
	for _, e := range joined.Errors(err) {
		var field *configs.FieldError
		if errors.As(e, &field) {
			e = configs.Problems{d.Problem(field.Path, field.Err.Error())}
		}
		out = append(out, e)
	}
	return errors.Join(out...)
}

// Read reads a document or a table, but does not decode it.
func (r *Reader) Read(name string) (Source, error) {
	d := Source{Name: name}
	var err error
	if name == "-" {
		d.Data, err = io.ReadAll(io.LimitReader(r.Stdin, MaxSize+1))
		if len(d.Data) > MaxSize {
			return d, fmt.Errorf("standard input has more than %s: want a YAML document", bytesize.Human(MaxSize))
		}
		return d, err
	}
	ending := strings.TrimPrefix(filepath.Ext(name), ".")
	if fi, err := os.Stat(name); err == nil && fi.Size() > MaxSize {
		fix := "name the YAML file"
		if slices.Contains(slices.Concat(Extensions, TableExtensions), ending) {
			fix = "split the document"
		}
		return d, fmt.Errorf("%s has %s, but a document may have at most %s: %s", name, bytesize.Human(fi.Size()), bytesize.Human(MaxSize), fix)
	}
	d.Data, err = os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) && slices.Contains(Extensions, ending) {
		err = fmt.Errorf("%w; `edgebake init` writes an image.yaml and a site.yaml to start from, with --cluster a cluster.yaml", err)
	}
	if len(d.Data) == ondisk.SlotSize {
		if _, bad := slot.ReadInfo(bytes.NewReader(d.Data)); bad == nil {
			return d, fmt.Errorf("%s is %s", name, media.ASlot)
		}
	}
	return d, err
}

// These patterns recognize edgebake's documents. versionField and kindField ignore case, which
// people often get wrong.
var (
	documentStart = regexp.MustCompile(`(?m)^---`)
	versionField  = regexp.MustCompile(`(?im)^["']?apiVersion["']?\s*:\s*["']?([^\s"'#]+)`)
	kindField     = regexp.MustCompile(`(?im)^["']?kind["']?\s*:\s*["']?(?:Image|Site|Inventory|Cluster)["']?\s*(?:#.*)?$`)
	apiGroup      = regexp.MustCompile(`^([a-z0-9.-]+\.[a-z0-9-]+)/v[0-9]+(?:(?:alpha|beta)[0-9]+)?$`)
)

// isOurs reports whether a YAML text contains an edgebake document, even with a wrong version.
// Kinds such as Cluster also exist in other API groups.
func isOurs(text []byte) bool {
	return slices.ContainsFunc(documentStart.Split(string(text), -1), func(doc string) bool {
		version := ""
		if m := versionField.FindStringSubmatch(doc); m != nil {
			version = strings.ToLower(m[1])
		}
		if strings.HasPrefix(version, "edgebake") {
			return true
		}
		if !kindField.MatchString(doc) {
			return false
		}
		group := apiGroup.FindStringSubmatch(version)
		own, _, _ := strings.Cut(configs.APIVersion, "/")
		return group == nil || strict.DidYouMean(group[1], []string{own}) != ""
	})
}

// In returns the names of all documents in a directory, sorted. It includes files that cannot be
// read, but not encrypted documents.
func In(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		if !slices.Contains(Extensions, strings.TrimPrefix(filepath.Ext(name), ".")) {
			continue
		}
		fi, err := os.Stat(name)
		if err == nil && !fi.Mode().IsRegular() {
			continue
		}
		if text, err := readStart(name); err != nil || isOurs(text) {
			names = append(names, name)
		}
	}
	return names, nil
}

// readStart reads the beginning of a file, up to the largest size of a document.
func readStart(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, MaxSize))
}

// ReadDecrypted reads a document. It decrypts a document that is encrypted with age.
func (r *Reader) ReadDecrypted(name string) (Source, error) {
	d, err := r.Read(name)
	switch {
	case err != nil:
	case sealed.Is(d.Data):
		d.Data, err = r.decrypt(d)
	case sopsFile.Match(d.Data) && bytes.Contains(d.Data, []byte("ENC[")):
		err = fmt.Errorf("%s is encrypted by SOPS: pipe it in decrypted: sops --decrypt %s | edgebake … -", name, name)
	}
	return d, err
}

// sopsFile matches the field that SOPS adds to every document.
var sopsFile = regexp.MustCompile(`(?m)^"?sops"?:`)

func (r *Reader) decrypt(d Source) ([]byte, error) {
	id, err := r.identity(d.Name)
	if err != nil {
		return nil, err
	}
	plain, err := id.Open(d.Name, d.Data)
	if err == nil && len(plain) > MaxSize {
		err = fmt.Errorf("%s is larger than %s after decryption: want a YAML document", d.Name, bytesize.Human(MaxSize))
	}
	return plain, err
}

// IdentityFile returns the path of the age identity file from the flag or from the environment.
func (r *Reader) IdentityFile() string { return cmp.Or(r.Identity, os.Getenv(IdentityVariable)) }

// identity returns the key to decrypt a document: an identity file or a passphrase.
func (r *Reader) identity(name string) (sealed.Identity, error) {
	if file := r.IdentityFile(); file != "" {
		return sealed.ReadIdentity(file)
	}
	pass := os.Getenv(PassphraseVariable)
	if pass == "" {
		if name == "-" || r.AskHidden == nil {
			return sealed.Identity{}, fmt.Errorf("opening %s: it is encrypted: name an age identity file (--identity or $%s), or put the passphrase into $%s", name, IdentityVariable, PassphraseVariable)
		}
		var err error
		if pass, err = r.AskHidden(fmt.Sprintf("Passphrase of %s: ", name)); err != nil {
			return sealed.Identity{}, fmt.Errorf("reading the passphrase of %s: %w", name, err)
		}
	}
	return sealed.Passphrase(pass)
}

// maxSecret is the number of bytes after which ReadSecret stops reading.
const maxSecret = 64 << 10

// ReadSecret reads a secret from a file, or from standard input ("-"). It removes white space at
// both ends.
func (r *Reader) ReadSecret(name string) (string, error) {
	in := r.Stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return "", err
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxSecret))
	return strings.TrimSpace(strings.TrimPrefix(string(b), "\ufeff")), err
}

// token returns a bootstrap token that was given outside the document. forced means that it
// replaces the token in the document.
func (r *Reader) token() (token configs.Secret, forced bool, err error) {
	if r.TokenFile == "" {
		return configs.NewSecret(strings.TrimSpace(os.Getenv(TokenVariable))), false, nil
	}
	text, err := r.ReadSecret(r.TokenFile)
	if err != nil {
		return token, false, fmt.Errorf("reading the token: %w", err)
	}
	if text == "" {
		return token, false, fmt.Errorf("reading the token from %s: it is empty: put one there, e.g. with kubeadm token create", r.TokenFile)
	}
	return configs.NewSecret(text), true, nil
}

// explainToken adds to an error about a missing token the ways to provide one.
func explainToken(err error) error {
	if errors.Is(err, configs.ErrGivenToken) {
		return fmt.Errorf("%w; the token comes from --token-file or $%s", err, TokenVariable)
	}
	probs, ok := err.(configs.Problems)
	if !ok {
		return err
	}
	for i, p := range probs {
		if strings.HasSuffix(p.Path, "credentials.token") && p.Missing {
			probs[i].Msg += "; write it into the document, or give it with --token-file FILE or $" + TokenVariable
		}
	}
	return probs
}
