package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/signing"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/spf13/cobra"
)

func newSite(s streams) *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:   "site",
		Short: "Prepare Sites for USB sticks",
		Long: `Site prepares Site documents for USB sticks. A machine accepts the Sites that its
Image allows (sites.removable).`,
		Example: `  edgebake site sign site.yaml --key office.key`,
	}, newSiteSign(s))
}

func newSiteSign(s streams) *cobra.Command {
	var o signFlags
	c := &cobra.Command{
		Use:               "sign SITE|INVENTORY --key KEY",
		ValidArgsFunction: cli.CompleteFiles(documents.Extensions),
		Short:             "Sign a Site or Inventory for a USB stick",
		Long: `Sign writes the files of a USB stick named EDGEBAKE: the Site or Inventory, its
Ignition config, and one signature over all of them (` + ondisk.SlotSignature + `). A machine
accepts the whole stick if its Image names the public key (sites.keys). It rejects a
Site with an older signature than the last Site that it accepted.

A Site must name its machine (match), as each Site of an Inventory does. Otherwise
every machine with that key in its Image would accept it. --any-machine allows this,
for a Site with a template as its nodeName.

KEY is a minisign secret key: minisign -G -s office.key -p office.pub makes a
pair. The password of an encrypted key is read from the environment variable
` + signing.PasswordVariable + `, else from the terminal, else from standard input.

The files hold the join token: treat them and the stick as secrets.`,
		Example: `  edgebake site sign site.yaml --key office.key
  edgebake site sign site.yaml --key office.key --output EDGEBAKE   # where the stick is mounted`,
		Args: cli.Args(1, 1, "a Site or Inventory document"),
		RunE: func(c *cobra.Command, a []string) error {
			if o.key == "" {
				return cli.Usage(errors.New("edgebake site sign requires a key: --key FILE; see edgebake site sign --help"))
			}
			return o.sign(s, a[0])
		},
	}
	f := c.Flags()
	cli.FileFlag(c, &o.key, "key", "minisign secret key to sign with")
	cli.DirFlag(c, &o.output, "output", "", "write to this directory, for example the stick (default: the Site's name with -stick)")
	f.BoolVar(&o.anyMachine, "any-machine", false, "sign a Site without match; every machine whose Image names the key accepts it")
	f.BoolVar(&o.force, "force", false, "replace existing files")
	o.Stamped(c)
	cli.TakesDocument(s, c, 0, nil)
	return c
}

// signFlags are the flags of site sign.
type signFlags struct {
	cli.DocumentFlags
	key, output       string
	force, anyMachine bool
}

// sign signs a Site or Inventory and writes it to a directory.
func (o *signFlags) sign(s streams, name string) error {
	key, keyErr := signing.OpenKey(o.key, name == "-")
	site, err := o.Reader(s).Sites(name)
	if err == nil {
		err = o.checkMatch(name, site)
	}
	if err := errors.Join(err, keyErr); err != nil {
		return err
	}
	signed, dir := name, o.output
	if name == "-" {
		signed = "standard input"
	}
	if dir == "" {
		if name == "-" {
			return cli.Usage(errors.New("a Site from standard input has no name: name a directory to write to with --output DIR"))
		}
		base := filepath.Base(name)
		dir = strings.TrimSuffix(base, filepath.Ext(base)) + "-stick"
	}
	stick, err := signing.NewStick(site)
	if err != nil {
		return fmt.Errorf("signing %s: %w", name, err)
	}
	if err := stick.Check(dir, o.force, name, o.Ignition, o.key); err != nil {
		return err
	}
	secret, err := key.Unlock(askPassword(s))
	if err != nil {
		return err
	}
	if err := stick.Write(dir, secret, time.Now()); err != nil {
		return err
	}
	s.Note("signed %s with key %X: %s\n", signed, secret.ID(), filepath.Join(dir, ondisk.SlotSignature))
	s.Note("Next: copy the contents of %s/ to a FAT stick named %s\n", strings.TrimSuffix(dir, "/"), ondisk.LabelSlot)
	return nil
}

// checkMatch rejects a Site without match, unless --any-machine allows it.
func (o *signFlags) checkMatch(name string, site media.Site) error {
	switch {
	case site.Doc == nil && o.anyMachine:
		return cli.Usage(fmt.Errorf("%s is an Inventory, whose Sites name their machines (match): leave out --any-machine", configs.FileName(name)))
	case site.Doc == nil:
		return nil
	case o.anyMachine && !site.Doc.Match.IsZero():
		return cli.Usage(fmt.Errorf("%s names its machine (match): leave out --any-machine, or remove match", configs.FileName(name)))
	case !o.anyMachine && site.Doc.Match.IsZero():
		return fmt.Errorf("signing %s: the Site does not name its machine, so every machine whose Image names the key would accept it\n"+
			"add match: {serial: ...} (or macs, uuid, assetTag) to the Site; or, if every machine may accept it, --any-machine", configs.FileName(name))
	}
	return nil
}

// askPassword asks for a key's password at the terminal, or reads it from standard input if there
// is no terminal. There is no flag for the password, because other users of the
// computer can read command lines.
func askPassword(s streams) func(name string) (string, error) {
	return func(name string) (string, error) {
		if ask := s.AskHidden(); ask != nil {
			return ask(fmt.Sprintf("Password of %s: ", name))
		}
		b, err := io.ReadAll(io.LimitReader(s.In, signing.MaxKey))
		line, _, _ := strings.Cut(string(b), "\n")
		if line = strings.TrimSuffix(line, "\r"); err == nil && line == "" {
			err = fmt.Errorf("the password is empty: pass it in %s, or on standard input", signing.PasswordVariable)
		}
		return line, err
	}
}

// keyFlag declares --key.
func keyFlag(c *cobra.Command, names *[]string) {
	c.Flags().StringArrayVar(names, "key", nil, "minisign public `key`, a file or the key itself, that must have signed the image; repeatable")
	_ = c.MarkFlagFilename("key", "pub")
}
