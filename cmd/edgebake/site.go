package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"aead.dev/minisign"
	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/spf13/cobra"
)

// passwordVariable holds the password of an encrypted key, where nobody is
// there to type it.
const passwordVariable = "EDGEBAKE_KEY_PASSWORD"

func newSite(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "site",
		Short: "Prepare Sites for USB sticks",
		Long: `Site prepares Site documents for USB sticks. A machine takes what its Image
allows (sites.removable).`,
		Example: `  edgebake site sign site.yaml --key office.key`,
		Args:    subcommand,
		RunE:    func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newSiteSign(s))
	return c
}

func newSiteSign(s streams) *cobra.Command {
	var o signOptions
	c := &cobra.Command{
		Use:               "sign SITE|INVENTORY --key KEY",
		ValidArgsFunction: completeFiles(documentEndings),
		Short:             "Sign a Site or Inventory for a USB stick",
		Long: `Sign writes what a USB stick named EDGEBAKE needs, the Site or Inventory and its Ignition
config, and one signature over all of it (` + ondisk.SlotSignature + `). A machine takes such a
stick whole if its Image names the public key (sites.keys). It takes no Site
that was signed before the last one it took.

A Site must say which machine it is for (match), as each Site of an Inventory does:
any machine with that key in its Image would take it otherwise. --any-machine is for
one that all of them may take, with a template as its nodeName.

KEY is a minisign secret key: minisign -G -s office.key -p office.pub makes a
pair. The password of an encrypted key is read from the environment variable
` + passwordVariable + `, else from the terminal, else from standard input.

The files hold the join token: treat them and the stick as secrets.`,
		Example: `  edgebake site sign site.yaml --key office.key
  edgebake site sign site.yaml --key office.key --output EDGEBAKE   # where the stick is mounted`,
		Args: args(1, 1, "a Site or Inventory document"),
		RunE: func(c *cobra.Command, a []string) error {
			if o.key == "" {
				return usageError{errors.New("edgebake site sign requires a key: --key FILE; see edgebake site sign --help")}
			}
			o.now = time.Now()
			done, err := signSite(s, a[0], o)
			if err != nil {
				return err
			}
			signed := a[0]
			if signed == "-" {
				signed = "standard input"
			}
			s.note("signed %s with key %X: %s\n", signed, done.key, filepath.Join(done.dir, ondisk.SlotSignature))
			s.note("Next: copy the contents of %s/ to a FAT stick named %s\n", strings.TrimSuffix(done.dir, "/"), ondisk.LabelSlot)
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&o.key, "key", "", "minisign secret key to sign with")
	_ = c.MarkFlagFilename("key")
	f.StringVar(&o.ignition, "ignition", "", "Ignition v3 config to put beside the Site (default: the Site's ignitionFile)")
	f.StringVarP(&o.output, "output", "o", "", "write to this directory, for example the stick (default: the Site's name with -stick)")
	_ = c.MarkFlagDirname("output")
	f.BoolVar(&o.anyMachine, "any-machine", false, "sign a Site without match, which every machine takes whose Image names the key")
	f.BoolVar(&o.force, "force", false, "replace files that are there")
	o.secrets.flags(c)
	takesDocument(s, c, 0, false)
	return c
}

type signOptions struct {
	key, ignition, output string
	secrets               secretFlags
	force, anyMachine     bool
	now                   time.Time
}

type signed struct {
	dir string
	key uint64
}

// signSite writes a signed Site to a directory.
func signSite(s streams, name string, o signOptions) (done signed, err error) {
	file, keyErr := openKey(o.key, name == "-")
	site, err := readSites(s, name, o.ignition, o.secrets)
	if err == nil {
		err = checkMeant(name, site, o.anyMachine)
	}
	if err := errors.Join(err, keyErr); err != nil {
		return done, err
	}
	done.dir = o.output
	if done.dir == "" {
		if name == "-" {
			return done, usageError{errors.New("a Site from standard input has no name: say where to write with --output DIR")}
		}
		base := filepath.Base(name)
		done.dir = strings.TrimSuffix(base, filepath.Ext(base)) + "-stick"
	}
	// What first boot would read of it is what is signed.
	files, err := site.SlotFiles()
	if err != nil {
		return done, err
	}
	img, err := slot.Make(slot.Contents{Files: files})
	if err != nil {
		return done, fmt.Errorf("signing %s: %w", name, err)
	}
	c, err := slot.Read(bytes.NewReader(img))
	if err != nil {
		return done, fmt.Errorf("signing %s: %w", name, err)
	}
	if err := checkStick(done.dir, c.Files, o.force, name, o.ignition, o.key); err != nil {
		return done, err
	}
	key, err := file.unlock(s)
	if err != nil {
		return done, err
	}
	done.key = key.ID()
	if c.Signature, err = slot.Sign(c.Files, key, o.now); err != nil {
		return done, err
	}
	return done, writeStick(done.dir, c, site.Inventory)
}

// checkMeant rejects a Site for which nobody has said what machine may take it.
func checkMeant(name string, site media.Site, anyMachine bool) error {
	switch {
	case site.Doc == nil && anyMachine:
		return usageError{fmt.Errorf("%s is an Inventory, whose Sites say which machines they are for: leave out --any-machine", configs.FileName(name))}
	case site.Doc == nil:
		return nil
	case anyMachine && !site.Doc.Match.IsZero():
		return usageError{fmt.Errorf("%s says which machine it is for (match): leave out --any-machine, or remove match", configs.FileName(name))}
	case !anyMachine && site.Doc.Match.IsZero():
		return fmt.Errorf("signing %s: it does not say which machine it is for, so every machine whose Image names the key would take it\n"+
			"add match: {serial: ...} (or macs, uuid, assetTag) to the Site; or, if every machine may take it, --any-machine", configs.FileName(name))
	}
	return nil
}

// checkStick rejects a directory in which first boot would find something else
// than the site, or in which the site would replace something.
func checkStick(dir string, files map[string][]byte, force bool, inputs ...string) error {
	var problems []error
	ours := []string{ondisk.SlotSite, ondisk.SlotInventory, ondisk.SlotIgnition, ondisk.SlotFilesDir, ondisk.SlotPKIDir, ondisk.SlotSignature}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("writing a signed Site to %s: %w", dir, err)
	}
	for _, e := range entries {
		name := strings.ToLower(e.Name())
		if !slices.Contains(ours, name) {
			continue // first boot does not read it
		}
		_, written := files[name]
		at := filepath.Join(dir, e.Name())
		switch {
		case !written && name != ondisk.SlotSignature:
			problems = append(problems, fmt.Errorf("%s is not part of this Site, so the signature would not match: remove it, or name another directory", at))
		case isOneOf(at, inputs):
			problems = append(problems, fmt.Errorf("%s would be replaced by what is made of it: name another directory", at))
		case !force:
			problems = append(problems, fmt.Errorf("%s exists already: --force replaces it", at))
		}
	}
	return errors.Join(problems...)
}

// notInput rejects an output that is, or will be, one file with what the command
// reads or writes besides: that would be lost, also where --force replaces outputs.
func notInput(flag, output, what, name string) error {
	if name != "" && sameFile(output, name) {
		return fmt.Errorf("%s %s: it is %s: name another file", flag, output, what)
	}
	return nil
}

// sameFile reports whether two names are, or will be, those of one file.
func sameFile(a, b string) bool {
	return isOneOf(a, []string{b}) || withoutLinks(a) == withoutLinks(b)
}

// withoutLinks is the name of a file, which may not be there yet, without links.
func withoutLinks(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		return filepath.Clean(path)
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		return real
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if err != nil {
		return abs
	}
	return filepath.Join(dir, filepath.Base(abs))
}

// isOneOf reports whether a file is one of those named.
func isOneOf(at string, names []string) bool {
	fi, err := os.Stat(at)
	return err == nil && slices.ContainsFunc(names, func(name string) bool {
		other, err := os.Stat(name)
		return err == nil && os.SameFile(fi, other)
	})
}

// writeStick writes the files of a site, the signature last.
func writeStick(dir string, c *slot.Contents, inventory *configs.Inventory) error {
	undo, err := file.MakeDir(dir, 0o700)
	if err != nil {
		return fmt.Errorf("writing a signed Site: %w", err)
	}
	defer undo()
	// A file that is there is replaced by one that only its owner may read, and
	// sticks are pulled out.
	write := func(name string, b []byte) error {
		return stickError(dir, name, file.Replace(filepath.Join(dir, name), b))
	}
	for name, b := range c.Files {
		if err := write(name, b); err != nil {
			return err
		}
	}
	if err := makeClaims(dir, inventory); err != nil {
		return stickError(dir, ondisk.SlotClaims, err)
	}
	return write(ondisk.SlotSignature, c.Signature)
}

// stickError is an error of writing a file, by the name that it was to have.
func stickError(dir, name string, err error) error {
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		err = e.Err
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("writing %s: %w", filepath.Join(dir, name), disk.Explain(err, dir))
}

// makeClaims makes the file in which machines note which site of an inventory
// they have taken. One that is there keeps what is noted in it, and gets the room
// that it lacks. No signature covers it.
func makeClaims(dir string, inventory *configs.Inventory) error {
	if inventory == nil {
		return nil
	}
	name, empty := filepath.Join(dir, ondisk.SlotClaims), slot.ClaimsFile(len(inventory.Sites))
	if fi, err := os.Stat(name); err == nil && fi.Size() >= int64(len(empty)) {
		return nil // another user's, perhaps
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	fi, err := f.Stat()
	if err == nil {
		_, err = f.Write(empty[min(fi.Size(), int64(len(empty))):])
	}
	return errors.Join(err, f.Sync(), f.Close())
}

// maxKey is more than any key file has.
const maxKey = 4 << 10

// readKey reads a file of one key.
func readKey(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("reading the key: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxKey))
	if err != nil {
		return nil, fmt.Errorf("reading the key %s: %w", name, err)
	}
	return bytes.TrimSpace(text), nil
}

// keyFile is the file of a minisign secret key.
type keyFile struct {
	name      string
	encrypted []byte // what it has, where it has a password
	key       minisign.PrivateKey
}

// openKey finds what is wrong with the file as far as it can be told without its
// password. stdinTaken: standard input is the document.
func openKey(name string, stdinTaken bool) (k keyFile, err error) {
	k.name = name
	text, err := readKey(name)
	if err != nil {
		return k, err
	}
	if new(minisign.PublicKey).UnmarshalText(text) == nil {
		return k, fmt.Errorf("reading the key %s: it is a public key: name the secret key (minisign -G -s FILE)", name)
	}
	if minisign.IsEncrypted(text) {
		k.encrypted = text
		if _, ok := os.LookupEnv(passwordVariable); !ok && stdinTaken {
			return k, fmt.Errorf("reading the key %s: it has a password, and standard input is the document: put the password into %s", name, passwordVariable)
		}
		return k, nil
	}
	if err := k.key.UnmarshalText(text); err != nil {
		return k, fmt.Errorf("reading the key %s: it is not a minisign secret key: minisign -G -s FILE makes one", name)
	}
	return k, checkPair(name, k.key)
}

// unlock asks for the password where there is one, once nothing else is wrong.
func (k *keyFile) unlock(s streams) (minisign.PrivateKey, error) {
	if k.encrypted == nil {
		return k.key, nil
	}
	password, err := readPassword(s, k.name)
	if err != nil {
		return k.key, err
	}
	if k.key, err = minisign.DecryptKey(password, k.encrypted); err != nil {
		return k.key, fmt.Errorf("reading the key %s: the password is wrong, or the file is damaged", k.name)
	}
	return k.key, checkPair(k.name, k.key)
}

// checkPair rejects a key that signs what its own public key does not verify,
// as a damaged one does.
func checkPair(name string, key minisign.PrivateKey) error {
	public, ok := key.Public().(minisign.PublicKey)
	if !ok || !minisign.Verify(public, []byte(name), minisign.Sign(key, []byte(name))) {
		return fmt.Errorf("reading the key %s: the file is damaged: its halves do not match", name)
	}
	return nil
}

// readPassword never takes it from the command line, which every user of the
// computer sees.
func readPassword(s streams, name string) (string, error) {
	if p, ok := os.LookupEnv(passwordVariable); ok {
		return p, nil
	}
	if f, ok := s.terminal(); ok {
		password, err := s.askHidden(fmt.Sprintf("Password of %s: ", name), f)
		if err != nil {
			return "", fmt.Errorf("reading the password of %s: %w", name, err)
		}
		return password, nil
	}
	b, err := io.ReadAll(io.LimitReader(s.In, maxKey))
	line, _, _ := strings.Cut(string(b), "\n")
	if line = strings.TrimSuffix(line, "\r"); err == nil && line == "" {
		err = fmt.Errorf("there is none: put it into %s, or onto standard input", passwordVariable)
	}
	if err != nil {
		return "", fmt.Errorf("reading the password of %s: %w", name, err)
	}
	return line, nil
}
