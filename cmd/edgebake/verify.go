package main

import (
	"errors"
	"fmt"
	"io/fs"

	"aead.dev/minisign"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/spf13/cobra"
)

func newVerify(s streams) *cobra.Command {
	var names []string
	var quick bool
	c := &cobra.Command{
		Use:               "verify IMAGE",
		ValidArgsFunction: completeFiles(imageEndings),
		Short:             "Check that an image is undamaged, and who signed it",
		Long: `Verify reads an image, or a flashed disk that has not booted yet, and compares
all of it but the slot with the golden digest. With --key it also checks that the
owner of that key signed the golden digest and image.json (build --sign). The
Site in the slot is not part of either.

Without --key it finds damage, not malice: the digest is in the image.`,
		Example: `  edgebake verify my-edge.raw.zst
  edgebake verify my-edge.raw.zst --key office.pub`,
		Args: args(1, 1, "one image"),
		RunE: func(c *cobra.Command, a []string) error {
			keys, err := publicKeys(names)
			if err != nil {
				return err
			}
			if quick && len(keys) == 0 {
				return usageError{errors.New("--signature-only requires a key: --key PUB")}
			}
			// One file, whatever becomes of its name: the signature is that of
			// the bytes that are read.
			image, err := media.OpenGolden(a[0])
			if err != nil {
				return err
			}
			defer image.Close()
			by := ""
			if len(keys) > 0 {
				if by, err = image.VerifySignature(keys); err != nil {
					return err
				}
				by = ", signed by key " + by
			}
			if quick {
				s.note("%s: not read%s\n", a[0], by)
				return nil
			}
			show := newDisplay(s, false)
			progress := steps(show)
			err = image.Verify(c.Context(), func(done, total int64) { progress("verify", done, total) }, nil)
			show.close()
			if err != nil {
				return err
			}
			s.note("%s: verified%s\n", a[0], by)
			return nil
		},
	}
	keyFlag(c, &names)
	c.Flags().BoolVar(&quick, "signature-only", false, "do not read the image, only check the signature")
	return c
}

// keyFlag adds --key.
func keyFlag(c *cobra.Command, names *[]string) {
	c.Flags().StringArrayVar(names, "key", nil, "minisign public `key`, a file or the key itself, that must have signed the image; repeatable")
	_ = c.MarkFlagFilename("key", "pub")
}

// publicKeys reads minisign public keys, each a file or the text itself.
func publicKeys(names []string) ([]string, error) {
	var keys []string
	var errs []error
	for _, name := range names {
		key, err := onePublicKey(name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		keys = append(keys, key.String())
	}
	return keys, errors.Join(errs...)
}

func onePublicKey(name string) (key minisign.PublicKey, err error) {
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
