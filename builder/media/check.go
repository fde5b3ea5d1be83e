package media

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/edgebake/edgebake/builder/disk/ext4"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/tree"
	"github.com/edgebake/edgebake/overlays/node"
)

// root looks at the files that an image begins with: those of ROOT-A, and
// those of DATA below /var.
type root struct{ system, data *ext4.Reader }

// root opens the image's file systems. It is nil for a disk that a machine
// has used: what lies there is the machine's, and its first boot knows which.
func (m *image) root() (node.Root, error) {
	open := func(label string) (*ext4.Reader, error) {
		p, err := m.partition(label)
		if err != nil {
			return nil, err
		}
		r, err := ext4.Open(m.section(p))
		if err != nil {
			return nil, fmt.Errorf("reading partition %s: %w: the image is damaged; copy or build it again", label, err)
		}
		return r, nil
	}
	system, err := open(ondisk.LabelRootA)
	if err != nil {
		return nil, err
	}
	data, err := open(ondisk.LabelData)
	if err != nil {
		return nil, err
	}
	r := root{system, data}
	if _, err := r.Lstat(ondisk.StateFile); err == nil || system.Info().NeedsRecovery || data.Info().NeedsRecovery {
		return nil, nil
	}
	return r, nil
}

// place finds the file system of a path.
func (r root) place(p string) (*ext4.Reader, string) {
	if rest, ok := strings.CutPrefix(p, "/var/"); ok {
		return r.data, rest
	}
	return r.system, strings.TrimPrefix(p, "/")
}

func (r root) Lstat(p string) (node.Found, error) {
	fsys, name := r.place(p)
	n, err := fsys.Stat(name)
	if err != nil {
		return node.Found{}, err
	}
	f := node.Found{Link: n.Target}
	switch n.Mode & tree.ModeType {
	case tree.ModeDir:
		f.Mode = fs.ModeDir
	case tree.ModeSymlink:
		f.Mode = fs.ModeSymlink
	case tree.ModeRegular:
	default:
		f.Mode = fs.ModeIrregular
	}
	return f, nil
}

func (r root) ReadFile(p string) ([]byte, error) {
	fsys, name := r.place(p)
	return fsys.ReadFile(name)
}

// serves says everything that the site wants and the image has not.
func (m *image) serves(s Site) error {
	var errs []error
	_, site := s.Files[ondisk.SlotSite]
	_, inventory := s.Files[ondisk.SlotInventory]
	if err := oneSite(site, inventory); err != nil {
		errs = append(errs, err)
	}
	if s.Doc == nil {
		for _, p := range node.CheckWants(m.info, node.Wants{Arch: s.Arch, NodeTypes: s.NodeTypes, Organizations: s.Organizations, YurthubArgs: s.YurthubArgs}) {
			errs = append(errs, p)
		}
	} else {
		files, err := m.root()
		if err != nil {
			return err
		}
		for _, p := range node.CheckSite(node.Image{Info: m.info, Root: files, Strict: true}, s.Doc, s.Files[ondisk.SlotIgnition]) {
			errs = append(errs, p)
		}
	}
	if err := m.reads(s.Version); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
