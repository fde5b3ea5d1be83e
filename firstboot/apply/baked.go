package apply

import (
	"fmt"
	"io/fs"

	"github.com/coreos/ignition/v2/config/v3_6/types"

	"github.com/edgebake/edgebake/overlays/node"
)

// Baked is the system as it would be without what was applied to it: what a
// site is held against, as stamping holds it against the image.
type Baked struct {
	t   Target
	old manifest
	acc *accounts
}

// NewBaked reads what was applied.
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

// Lstat tells what stood at a path.
func (b *Baked) Lstat(p string) (node.Found, error) {
	m, ours := b.old.Paths[p]
	if ours && !m.Original {
		return node.Found{}, fs.ErrNotExist
	}
	if ours {
		if k, ok, err := b.t.keptMeta(p); err != nil || ok {
			return node.Found{Mode: fs.FileMode(k.Mode), Link: k.Link}, err
		}
	}
	st, err := b.t.root().Lstat(p)
	if err != nil || st.Theirs {
		return node.Found{}, fs.ErrNotExist // what a user put there is moved aside
	}
	return node.Found{Mode: st.Mode(), Link: st.Link}, nil
}

// ReadFile reads a file that no config names; of the accounts, what was there.
func (b *Baked) ReadFile(p string) ([]byte, error) {
	if tab := b.acc.db[p]; tab != nil && tab.there {
		return tab.bytes(), nil
	}
	data, _, err := b.t.root().ReadFile(p)
	return data, err
}
