package apply

import (
	"fmt"
	"io/fs"

	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Baked is the system as it would be without applied configs. Sites are checked against it, as
// stamping checks them against an image.
type Baked struct {
	t   Target
	old manifest
	acc *accounts
}

// NewBaked reads the system and the manifest of the applied config.
func NewBaked(t Target) (*Baked, error) {
	old, err := t.load()
	if err != nil {
		return nil, err
	}
	acc, err := t.readAccounts()
	if err != nil {
		return nil, fmt.Errorf("reading the accounts: %w", err)
	}
	acc.takeBack(types.Passwd{}, old)
	return &Baked{t, old, acc}, nil
}

// Lstat describes the file at p, or its original if a config has replaced it.
func (b *Baked) Lstat(p string) (siteconf.FileInfo, error) {
	m, ours := b.old.Paths[p]
	if ours && !m.Original {
		return siteconf.FileInfo{}, fs.ErrNotExist
	}
	if ours {
		if k, ok, err := b.t.keptMeta(p); err != nil || ok {
			return siteconf.FileInfo{Mode: fs.FileMode(k.Mode), Link: k.Link}, err
		}
	}
	st, err := b.t.root().Lstat(p)
	if err != nil || st.Theirs {
		return siteconf.FileInfo{}, fs.ErrNotExist // a user's file is ignored, because Apply would move it aside
	}
	return siteconf.FileInfo{Mode: st.Mode(), Link: st.Link}, nil
}

// ReadFile reads a file that no config names; account files are returned without the changes of
// configs.
func (b *Baked) ReadFile(p string) ([]byte, error) {
	if tab := b.acc.db[p]; tab != nil && tab.there {
		return tab.bytes(), nil
	}
	data, _, err := b.t.root().ReadFile(p)
	return data, err
}
