package signing

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"aead.dev/minisign"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// Stick is the contents of a USB stick with a signed Site or Inventory.
type Stick struct {
	contents *slot.Contents
	machines int // number of machines in the Inventory; 0 for a Site
}

// NewStick returns the contents of a stick. They are the same files as in a slot.
func NewStick(site media.Site) (*Stick, error) {
	files, err := site.SlotFiles()
	if err != nil {
		return nil, err
	}
	img, err := slot.Make(slot.Contents{Files: files})
	if err != nil {
		return nil, err
	}
	s := new(Stick)
	if site.Inventory != nil {
		s.machines = len(site.Inventory.Sites)
	}
	s.contents, err = slot.Read(bytes.NewReader(img))
	return s, err
}

// Check rejects a directory with other files that firstboot would read. It also rejects a file that
// the stick would replace, unless force is set and the file is not one of the inputs.
func (s *Stick) Check(dir string, force bool, inputs ...string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("writing a signed Site to %s: %w", dir, err)
	}
	var problems []error
	ours := []string{ondisk.SlotSite, ondisk.SlotInventory, ondisk.SlotIgnition, ondisk.SlotFilesDir, ondisk.SlotPKIDir, ondisk.SlotSignature}
	for _, e := range entries {
		name := strings.ToLower(e.Name())
		if !slices.Contains(ours, name) {
			continue // first boot does not read this file
		}
		_, written := s.contents.Files[name]
		at := filepath.Join(dir, e.Name())
		switch {
		case !written && name != ondisk.SlotSignature:
			problems = append(problems, fmt.Errorf("%s is not part of this Site, so the signature would not match: remove it, or name another directory", at))
		case slices.ContainsFunc(inputs, func(input string) bool { return file.Same(at, input) }):
			problems = append(problems, fmt.Errorf("%s is an input, and would be replaced: name another directory", at))
		case !force:
			problems = append(problems, fmt.Errorf("%s exists already: --force replaces it", at))
		}
	}
	return errors.Join(problems...)
}

// Write signs the files and writes them to dir. It writes the signature last.
func (s *Stick) Write(dir string, key minisign.PrivateKey, now time.Time) error {
	signature, err := slot.Sign(s.contents.Files, key, now)
	if err != nil {
		return err
	}
	undo, err := file.MakeDir(dir, 0o700)
	if err != nil {
		return fmt.Errorf("writing a signed Site: %w", err)
	}
	defer undo()
	// file.Replace makes a file private to its owner. It also syncs, because a stick may be pulled
	// out at any time.
	write := func(name string, b []byte) error {
		return stickError(dir, name, file.Replace(filepath.Join(dir, name), b))
	}
	for name, b := range s.contents.Files {
		if err := write(name, b); err != nil {
			return err
		}
	}
	if err := makeClaims(dir, s.machines); err != nil {
		return stickError(dir, ondisk.SlotClaims, err)
	}
	return write(ondisk.SlotSignature, signature)
}

// stickError replaces the temporary file's name in an error by the final name.
func stickError(dir, name string, err error) error {
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		err = e.Err
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("writing %s: %w", filepath.Join(dir, name), file.Explain(err, dir))
}

// makeClaims creates the file in which machines record which Site of the Inventory they use. An
// existing file keeps its records and may only grow. The signature does not cover the file.
func makeClaims(dir string, machines int) error {
	if machines == 0 {
		return nil
	}
	name, empty := filepath.Join(dir, ondisk.SlotClaims), slot.ClaimsFile(machines)
	if fi, err := os.Stat(name); err == nil && fi.Size() >= int64(len(empty)) {
		return nil // the file is large enough; it may belong to another user
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
