package media

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// root reads the files of a built image: the files on ROOT-A, and the files on DATA, which the
// machine mounts on /var.
type root struct{ system, data *ext4.Reader }

// openRoot opens the image's file systems. It returns nil for a disk that a machine has booted,
// whose files have changed: only firstboot on that machine can check them.
func (m *Image) openRoot() (siteconf.Root, error) {
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
	return &rootCache{root: r, found: map[string]lookupResult{}, files: map[string]readResult{}}, nil
}

// rootCache caches lookups in root, which thousands of Sites repeat. It is safe for concurrent use.
type rootCache struct {
	root
	mu    sync.Mutex
	found map[string]lookupResult
	files map[string]readResult
}

type lookupResult struct {
	siteconf.FileInfo
	err error
}

type readResult struct {
	b   []byte
	err error
}

func (s *rootCache) Lstat(p string) (siteconf.FileInfo, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.found[p]
	if !ok {
		f.FileInfo, f.err = s.root.Lstat(p)
		s.found[p] = f
	}
	return f.FileInfo, f.err
}

func (s *rootCache) ReadFile(p string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.files[p]
	if !ok {
		f.b, f.err = s.root.ReadFile(p)
		s.files[p] = f
	}
	return f.b, f.err
}

// place returns the file system that contains the path p, and the path in that file system.
func (r root) place(p string) (*ext4.Reader, string) {
	if rest, ok := strings.CutPrefix(p, "/var/"); ok {
		return r.data, rest
	}
	return r.system, strings.TrimPrefix(p, "/")
}

func (r root) Lstat(p string) (siteconf.FileInfo, error) {
	fsys, name := r.place(p)
	n, err := fsys.Stat(name)
	if err != nil {
		return siteconf.FileInfo{}, err
	}
	f := siteconf.FileInfo{Link: n.Target}
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

// serves checks that the image supports the Site, or every Site of an Inventory. It returns
// problems of the documents separately from other errors.
func (m *Image) serves(s Site) (configs.Problems, error) {
	var errs []error
	if err := oneSite(s.Doc != nil, s.Inventory != nil); err != nil {
		return nil, err
	}
	if s.Inventory != nil && len(m.info.InventoryVersions) == 0 {
		errs = append(errs, errors.New("the image's first boot does not support Inventories: build the image with this edgebake, or stamp one Site onto each copy (edgebake stamp --each)"))
	}
	probs, err := m.problems(s)
	if err != nil {
		return nil, err
	}
	if err := m.reads(s.version()); err != nil {
		errs = append(errs, err)
	}
	return probs, errors.Join(errs...)
}

// problems checks each Site against the image.
func (m *Image) problems(s Site) (configs.Problems, error) {
	files, err := m.system()
	if err != nil {
		return nil, err
	}
	check := func(site *configs.Site, spreadIsDefault bool) configs.Problems {
		probs := siteconf.CheckSite(siteconf.Image{Info: m.info, Root: files, Strict: true}, site, s.Files[ondisk.SlotIgnition])
		return append(probs, m.unknownFields(site, spreadIsDefault)...)
	}
	return append(s.TokensElsewhere(), s.each(check)...), nil
}

// each calls check for each Site and returns the problems. If s.Source is set, they contain their
// places in the document.
func (s Site) each(check func(site *configs.Site, spreadIsDefault bool) configs.Problems) configs.Problems {
	if s.Doc != nil {
		return s.Source.site(check(s.Doc, s.Doc.SpreadSeconds == s.DefaultSpread))
	}
	var probs []configs.Problems
	if s.Inventory != nil {
		for i := range s.Inventory.Sites {
			probs = append(probs, check(&s.Inventory.Sites[i].Site, !s.Inventory.WritesSpread(i)))
		}
	}
	return s.Source.inventory(probs)
}

// TokensElsewhere reports bootstrap tokens in other files of the slot. The machine does not remove
// these tokens after the join.
func (s Site) TokensElsewhere() configs.Problems {
	return s.each(func(site *configs.Site, _ bool) (probs configs.Problems) {
		token := site.Credentials.Token
		for _, name := range slices.Sorted(maps.Keys(s.Files)) {
			found, called := false, name
			switch {
			case name == ondisk.SlotIgnition:
				found, called = ignition.Holds(s.Files[name], token), cmp.Or(s.Source.Ignition, name)
			case strings.HasPrefix(name, ondisk.SlotFilesDir+"/") && !token.IsZero():
				found = bytes.Contains(s.Files[name], []byte(token.Reveal()))
			}
			if found {
				probs.Add("credentials.token", "is also in %s, where it is not wiped after the join: remove it there, and give programs on the node their own credentials", called)
			}
		}
		return probs
	})
}

// unknownFields reports fields that the image's first boot would reject.
func (m *Image) unknownFields(site *configs.Site, spreadIsDefault bool) (probs configs.Problems) {
	if m.info.SiteFields == nil {
		return nil // an older image does not list its fields
	}
	for _, f := range site.FieldsBeyond(m.info.SiteFields) {
		if f != configs.SpreadField || !spreadIsDefault {
			probs = append(probs, configs.Problem{Path: f, Msg: "this image's first boot does not support the field: remove it, or build the image again with this edgebake"})
		}
	}
	return probs
}

// site adds places in the document to the problems of a Site.
func (r SiteSource) site(probs configs.Problems) configs.Problems {
	own, ignition := r.split(probs)
	if r.Name != "" {
		own = configs.LocateSite(r.Name, r.Data, own)
	}
	return append(own, ignition...)
}

// inventory adds places in the document to the problems of each Site. It reports problems of the
// shared Ignition config once.
func (r SiteSource) inventory(sites []configs.Problems) configs.Problems {
	own := make([]configs.Problems, len(sites))
	var shared configs.Problems
	for i, probs := range sites {
		var ignition configs.Problems
		own[i], ignition = r.split(probs)
		for _, p := range ignition {
			if !slices.Contains(shared, p) {
				shared = append(shared, p)
			}
		}
	}
	return append(configs.LocateInventory(r.Name, r.Data, own), shared...)
}

// split separates problems of a Site from problems of its Ignition config. The latter get the name
// of the config's file.
func (r SiteSource) split(probs configs.Problems) (own, ignition configs.Problems) {
	for _, p := range probs {
		if p.File == "" {
			own = append(own, p)
			continue
		}
		if r.Ignition != "" {
			p.File = r.Ignition
		}
		ignition = append(ignition, p)
	}
	return own, ignition
}

// stamping adds the failed action and the image to an error.
func (m *Image) stamping(err error) error {
	return withAction("stamping image "+m.path+", nothing was written", err)
}

// withAction adds the failed action to an error. It leaves problems of documents unchanged, because
// editors expect them to begin with their place.
func withAction(what string, err error) error {
	return joined.Each(err, func(e error) error {
		if probs, ok := e.(configs.Problems); ok && probs[0].File != "" {
			return e
		}
		return fmt.Errorf("%s: %w", what, e)
	})
}
