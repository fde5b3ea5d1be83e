package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/overlays/node"
	"github.com/spf13/cobra"
)

// Where a Site's secrets come from, besides the Site: never the command line,
// which every user of a computer can read.
const (
	tokenVariable      = "EDGEBAKE_TOKEN"
	identityVariable   = "EDGEBAKE_AGE_IDENTITY"   // path of a file
	passphraseVariable = "EDGEBAKE_AGE_PASSPHRASE" // of a document encrypted with one
)

// secretFlags say where a document's secrets come from.
type secretFlags struct {
	tokenFile string
	identity  string
}

func (f *secretFlags) flags(c *cobra.Command) {
	c.Flags().StringVar(&f.tokenFile, "token-file", "", "read the bootstrap token from this file, - for standard input (default $"+tokenVariable+", for Sites without one)")
	_ = c.MarkFlagFilename("token-file")
	f.identityFlag(c)
}

func (f *secretFlags) identityFlag(c *cobra.Command) {
	c.Flags().StringVar(&f.identity, "identity", "", "age identity file that decrypts encrypted documents (default $"+identityVariable+")")
	_ = c.MarkFlagFilename("identity")
}

// maxSecret is more than any token or identity file has.
const maxSecret = 64 << 10

// token is the bootstrap token given beside the document called name; forced
// says that it replaces the document's own.
func (f *secretFlags) token(s streams, name string) (token configs.Secret, forced bool, err error) {
	switch {
	case f.tokenFile == "-" && name == "-":
		return token, false, usageError{errors.New("the document and the token cannot both come from standard input")}
	case f.tokenFile != "":
		text, err := readSecret(s, f.tokenFile)
		if err != nil {
			return token, false, fmt.Errorf("reading the token: %w", err)
		}
		if text == "" {
			return token, false, fmt.Errorf("reading the token from %s: it is empty: put one there, e.g. with kubeadm token create", f.tokenFile)
		}
		return configs.NewSecret(text), true, nil
	}
	return configs.NewSecret(strings.TrimSpace(os.Getenv(tokenVariable))), false, nil
}

// readSecret reads one line.
func readSecret(s streams, name string) (string, error) {
	in := s.In
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

// readDocument reads a document, decrypted if it is encrypted with age.
func (f *secretFlags) readDocument(s streams, name string) ([]byte, error) {
	data, err := readInput(s, name)
	if err != nil {
		return nil, err
	}
	switch {
	case sealed.Is(data):
		return f.decrypt(s, name, data)
	case sopsFile.Match(data) && bytes.Contains(data, []byte("ENC[")):
		return nil, fmt.Errorf("%s is encrypted by SOPS: pipe it in decrypted: sops --decrypt %s | edgebake … -", name, name)
	}
	return data, nil
}

// sopsFile finds what SOPS writes into every document of its own.
var sopsFile = regexp.MustCompile(`(?m)^"?sops"?:`)

func (f *secretFlags) decrypt(s streams, name string, data []byte) ([]byte, error) {
	id, err := f.openWith(s, name)
	if err != nil {
		return nil, err
	}
	plain, err := id.Open(name, data)
	if err == nil && len(plain) > maxDocument {
		err = fmt.Errorf("%s has more than %s decrypted: want a YAML document", name, configs.HumanSize(maxDocument))
	}
	return plain, err
}

// openWith is what opens the encrypted document called name: an identity file,
// else a passphrase.
func (f *secretFlags) openWith(s streams, name string) (sealed.Identity, error) {
	if file := cmp.Or(f.identity, os.Getenv(identityVariable)); file != "" {
		return sealed.ReadIdentity(file)
	}
	pass, err := passphrase(s, name)
	if err != nil {
		return sealed.Identity{}, err
	}
	return sealed.Passphrase(pass)
}

// passphrase asks for the one that a document is encrypted with.
func passphrase(s streams, name string) (string, error) {
	if p := os.Getenv(passphraseVariable); p != "" {
		return p, nil
	}
	f, ok := s.terminal()
	if name == "-" || !ok {
		return "", fmt.Errorf("opening %s: it is encrypted: name an age identity file (--identity or $%s), or put the passphrase into $%s", name, identityVariable, passphraseVariable)
	}
	pass, err := s.askHidden(fmt.Sprintf("Passphrase of %s: ", name), f)
	if err != nil {
		return "", fmt.Errorf("reading the passphrase of %s: %w", name, err)
	}
	return pass, nil
}

// readSites reads a Site, or an Inventory, and what goes into the slot with it.
func readSites(s streams, name, ignition string, secrets secretFlags) (media.Site, error) {
	data, err := secrets.readDocument(s, name)
	if err != nil {
		return media.Site{}, err
	}
	doc, err := configs.Read(name, data)
	if err != nil {
		return media.Site{}, err
	}
	return sitesOf(s, name, data, doc, ignition, secrets)
}

// sitesOf is readSites of a document that was read.
func sitesOf(s streams, name string, data []byte, doc *configs.Document, ignition string, secrets secretFlags) (media.Site, error) {
	token, forced, err := secrets.token(s, name)
	if err != nil {
		return media.Site{}, err
	}
	if doc.Kind == configs.KindInventory {
		inv, err := doc.Inventory(token, forced)
		if err != nil {
			return media.Site{}, orToken(err)
		}
		s.warn(configs.LocateInventory(name, data, inv.Warnings()))
		lost := make([]configs.Problems, len(inv.Sites))
		for i := range inv.Sites {
			lost[i] = inv.Sites[i].Site.Unreachable()
		}
		if probs := configs.LocateInventory(name, data, lost); probs != nil {
			return media.Site{}, probs
		}
		return inventoryFiles(s, name, data, inv, ignition)
	}
	site, err := doc.Site(token, forced)
	if err != nil {
		return media.Site{}, orToken(err)
	}
	s.warn(configs.LocateSite(name, data, site.Warnings()))
	if probs := site.Unreachable(); probs != nil && ignition == "" {
		return media.Site{}, configs.LocateSite(name, data, probs)
	}
	return siteFiles(s, name, data, site, ignition)
}

// notRead rejects an output that is one of the files which a Site or Inventory is read
// from: --force is for what an earlier run has made.
func (f *secretFlags) notRead(flag, output string, read media.Read) error {
	return errors.Join(
		notInput(flag, output, "the document", read.Name),
		notInput(flag, output, "the Ignition config", read.Ignition),
		notInput(flag, output, "the file of --token-file", f.tokenFile),
		notInput(flag, output, "the age identity file", cmp.Or(f.identity, os.Getenv(identityVariable))))
}

// orToken tells whoever keeps the token elsewhere how to give it.
func orToken(err error) error {
	if errors.Is(err, configs.ErrGivenToken) {
		return fmt.Errorf("%w; it comes from --token-file or $%s", err, tokenVariable)
	}
	probs, ok := err.(configs.Problems)
	if !ok {
		return err
	}
	for i, p := range probs {
		if strings.HasSuffix(p.Path, "credentials.token") && p.Missing {
			probs[i].Msg += "; write it there, or give it with --token-file FILE or $" + tokenVariable
		}
	}
	return probs
}

func siteFiles(s streams, name string, data []byte, site *configs.Site, ignition string) (media.Site, error) {
	out := media.Site{Doc: site, Files: map[string][]byte{}, Read: origin(name, data, ignition, site.IgnitionFile)}
	user, err := siteIgnition(s, name, data, site, ignition)
	if err != nil {
		return out, err
	}
	// What first boot would reject is rejected here, where somebody sees it.
	if _, err := renderSite(name, site, user); err != nil {
		return out, err
	}
	if user != nil {
		out.Files[ondisk.SlotIgnition] = user
	}
	// On the node the config lies in the slot.
	site.IgnitionFile = ""
	return out, nil
}

// origin is what a Site or Inventory came from: ignition is the config that the
// command names, or file the one that the Site does.
func origin(name string, data []byte, ignition, file string) media.Read {
	if ignition == "" && file != "" {
		ignition = besideDocument(name, file)
	}
	return media.Read{Name: name, Data: data, Ignition: ignition}
}

// inventoryFiles is an Inventory and what goes into the slot with it.
func inventoryFiles(s streams, name string, data []byte, inv *configs.Inventory, ignition string) (media.Site, error) {
	out := media.Site{Inventory: inv, Files: map[string][]byte{}, Read: origin(name, data, ignition, "")}
	user, err := finishInventory(s, name, data, inv, ignition)
	if err != nil {
		return out, err
	}
	if user != nil {
		out.Files[ondisk.SlotIgnition] = user
	}
	return out, nil
}

// finishInventory puts the files that an Inventory names into it, and renders
// each site for no machine in particular, together with the Ignition config
// that all get, if one is given.
func finishInventory(s streams, name string, data []byte, inv *configs.Inventory, ignitionFlag string) (user []byte, err error) {
	err = inv.InlineFiles(func(field, p string) (string, error) {
		b, err := os.ReadFile(besideDocument(name, p))
		if err != nil {
			line, col := configs.Locate(name, data, field)
			return "", configs.Problems{{File: name, Line: line, Col: col, Path: field, Msg: err.Error()}}
		}
		return string(b), nil
	})
	if err != nil {
		return nil, err
	}
	if ignitionFlag != "" {
		if user, err = os.ReadFile(ignitionFlag); err != nil {
			return nil, fmt.Errorf("--ignition: %w", err)
		}
		_, warnings, problems := ignition.Parse(ignitionFlag, user)
		if problems != nil {
			return nil, problems
		}
		s.warn(warnings)
	}
	var probs configs.Problems
	for i := range inv.Sites {
		_, err := node.Config(&inv.Sites[i].Site, node.Machine{}, user)
		for _, err := range []error{err, fitsSlot(&inv.Sites[i].Site)} {
			if err == nil {
				continue
			}
			field := fmt.Sprintf("sites[%d]", i)
			line, col := configs.Locate(name, data, field)
			probs = append(probs, configs.Problem{File: name, Line: line, Col: col, Path: field, Msg: err.Error()})
		}
	}
	return user, probs.Err()
}

// fitsSlot rejects a site of an Inventory that its machine could not put into
// its own slot: what defaults give it is in the Inventory once, and then in it.
func fitsSlot(site *configs.Site) error {
	b, err := configs.EncodeSlot(site)
	if err != nil {
		return err
	}
	if limit := slot.SizeLimit(ondisk.SlotSite); int64(len(b)) > limit {
		return fmt.Errorf("has %d bytes with what defaults give it, and a slot has room for a Site of at most %d bytes: take large contents out of its ignition, or out of the one in defaults, and put them into the Image (files, overlays), or give all machines one Ignition config with --ignition", len(b), limit)
	}
	return nil
}

// eachSite returns the Sites of an Inventory, each for a slot of its own.
func eachSite(doc media.Site) (out []media.Named) {
	spread := configs.DefaultSpread(len(doc.Inventory.Sites))
	for i := range doc.Inventory.Sites {
		s := &doc.Inventory.Sites[i]
		out = append(out, media.Named{Name: s.Name, Site: media.Site{Doc: &s.Site, Files: doc.Files, DefaultSpread: spread}})
	}
	return out
}
