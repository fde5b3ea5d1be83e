package mint

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// SitesOptions are the options of WriteSites.
type SitesOptions struct {
	Output    string // directory for the Sites; empty: sites/ in the minted directory
	Inventory string // file for one Inventory of all workers, written instead of their Sites
	Identity  sealed.Identity
	Bootstrap time.Duration // how long etcd may start empty; 0: as recorded in the directory
	Requests  Requests
	Snapshot  string // file of the snapshot that Requests.ContinueFrom starts with
	Force     bool   // replace existing files
	Now       time.Time
}

// WrittenSites is the result of WriteSites.
type WrittenSites struct {
	Dir             string
	Sites           []NodeSite            // control-plane nodes first; nil: no Sites were written
	Expiring        []ExpiringCertificate // certificates of the minted directory that expire soon
	Renewed         []string              // workers that got new tokens
	ForeignSnapshot bool                  // the snapshot does not contain the cluster's CA
	Former          []FormerSite
}

// FormerSite is a file with the Site of a node that is no longer in the Cluster. The Site contains
// a token.
type FormerSite struct{ File, Node string }

// WriteSites writes the Site of each node of the cluster minted into dir. The result is never nil:
// with an error, it lists, for example, the workers whose tokens were already renewed.
func WriteSites(dir string, o SitesOptions) (*WrittenSites, error) {
	w := new(WrittenSites)
	record, err := Load(dir)
	if err != nil {
		return w, err
	}
	if err := o.checkNames(record.Fixed.Masters); err != nil {
		return w, err
	}
	if w.Expiring, err = ExpiringCertificates(dir, o.Now); err != nil {
		return w, err
	}
	if o.Bootstrap > 0 {
		if w.Renewed, err = RenewTokens(dir, o.Identity, o.Now); err != nil {
			return w, err
		}
	}
	workers, nodeErr := Sites(dir, o.Identity, o.Now)
	if o.Inventory != "" {
		if nodeErr != nil {
			return w, nodeErr
		}
		if err := writeInventory(o.Inventory, workers, o.Force); err != nil {
			return w, err
		}
		w.Sites = workers
		return w, nil
	}
	masters, err := o.masters(dir, w, record.RequestTime(o.Now))
	if err != nil {
		return w, err
	}
	sites := append(masters, workers...)
	w.Dir = cmp.Or(o.Output, filepath.Join(dir, "sites"))
	files, err := changedSites(w.Dir, record.Fixed.Name, sites, o.Force)
	if err == nil {
		err = o.commit(dir, w.Dir, files)
	}
	if err != nil {
		return w, errors.Join(err, nodeErr)
	}
	w.Sites, w.Former = sites, formerSites(w.Dir, record)
	// Control-plane nodes get their Sites even if a worker's token has expired.
	return w, nodeErr
}

// checkNames checks --absent, --continue-from and --restore against the control-plane nodes.
func (o *SitesOptions) checkNames(masters []ControlPlaneNode) error {
	var names []string
	for _, m := range masters {
		names = append(names, m.Name)
	}
	var errs []error
	check := func(flag, name string) {
		if name != "" && !slices.Contains(names, name) {
			errs = append(errs, fmt.Errorf("--%s %s: the cluster has no such control-plane node; it has %s", flag, name, strings.Join(names, ", ")))
		}
	}
	for _, name := range o.Requests.Absent {
		check("absent", name)
	}
	check("continue-from", o.Requests.ContinueFrom)
	if !slices.ContainsFunc(names, func(n string) bool { return !slices.Contains(o.Requests.Absent, n) }) {
		errs = append(errs, errors.New("--absent names every control-plane node: one must remain to start the cluster"))
	}
	if o.Snapshot != "" && o.Requests.ContinueFrom == "" {
		errs = append(errs, errors.New("--restore requires --continue-from NAME, the control-plane node that starts with the snapshot"))
	}
	return errors.Join(errs...)
}

// masters returns the Sites of the control-plane nodes, with the operator's requests.
func (o *SitesOptions) masters(dir string, w *WrittenSites, requested time.Time) ([]NodeSite, error) {
	masters, err := ControlPlaneSites(dir, o.Identity, o.Now)
	if err != nil {
		return nil, err
	}
	if o.Snapshot != "" {
		snapshot, err := ReadSnapshot(dir, o.Snapshot)
		if err != nil {
			return nil, err
		}
		o.Requests.Restore, w.ForeignSnapshot = snapshot.SHA256, !snapshot.Ours
	}
	if o.Bootstrap > 0 {
		o.Requests.Bootstrap = o.Now.Add(o.Bootstrap)
	}
	o.Requests.RequestedAt = requested
	return masters, o.Requests.Apply(masters)
}

// siteFile is a Site to be written.
type siteFile struct {
	path      string
	text      []byte
	bootstrap bool // set for a control-plane node, whose requests are recorded before the file is written
}

// begin writes the file under a temporary name; Commit renames it.
func (f *siteFile) begin(force bool) (*file.Output, error) {
	out, err := file.Create(f.path, 0o600, force)
	if err != nil {
		return nil, err
	}
	if _, err := out.Write(f.text); err != nil {
		out.Discard()
		return nil, fmt.Errorf("writing %s: %w", f.path, file.Explain(err, filepath.Dir(f.path)))
	}
	return out, nil
}

// changedSites returns the Sites whose files in the directory are missing or different.
func changedSites(dir, cluster string, sites []NodeSite, force bool) ([]siteFile, error) {
	var files []siteFile
	var errs []error
	for _, site := range sites {
		text, err := configs.EncodeSlot(site.Site)
		if err != nil {
			return nil, err
		}
		f := siteFile{filepath.Join(dir, site.Name+".yaml"), append([]byte(site.Header(cluster)), text...), site.Site.NodeType == configs.NodeControlPlane}
		errs = append(errs, site.checkSize(len(f.text)))
		old, err := os.ReadFile(f.path)
		switch {
		case err == nil && bytes.Equal(old, f.text):
			continue
		case err == nil && !force:
			errs = append(errs, fmt.Errorf("%s exists with other contents; --force replaces it", f.path))
		case err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR): // creating the directory reports that error
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w: remove it, or name another directory with --output", site.Name, err))
		}
		files = append(files, f)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return files, nil
}

// checkSize rejects a Site that is too large for a slot.
func (s *NodeSite) checkSize(size int) error {
	limit := int(slot.SizeLimit(ondisk.SlotSite))
	if size <= limit {
		return nil
	}
	fix := "shorten the machine's settings in the Cluster document"
	if keys := s.Site.Credentials.Keys; keys != nil {
		fix = fmt.Sprintf("the Cluster's packed manifests have %d KiB, and its nodes' tokens %d; remove large manifests from the Cluster, and `kubectl apply` them once the cluster runs",
			len(keys.Manifests.Reveal())>>10, len(keys.Objects.Reveal())>>10)
	}
	return fmt.Errorf("writing the Site of %s: it has %d KiB, but a slot has space for %d: %s", s.Name, size>>10, limit>>10, fix)
}

// commit writes the files. It records the requests in the minted directory before it writes a Site
// that has them.
func (o *SitesOptions) commit(minted, dir string, files []siteFile) error {
	undo, err := file.MakeDir(dir, 0o700)
	if err != nil {
		return fmt.Errorf("writing Sites: %w", err)
	}
	defer undo()
	var outputs []*file.Output
	defer func() {
		for _, f := range outputs {
			f.Discard()
		}
	}()
	for _, f := range files {
		if !f.bootstrap {
			continue
		}
		begun, err := f.begin(o.Force)
		if err != nil {
			return err
		}
		outputs = append(outputs, begun)
	}
	if o.Requests.ContinueFrom != "" {
		if err := saveRequestTime(minted, o.Requests.RequestedAt); err != nil {
			return err
		}
	}
	if o.Bootstrap > 0 {
		if _, err := allowBootstrap(minted, o.Now, o.Requests.Bootstrap); err != nil {
			return err
		}
	}
	for _, f := range outputs {
		if err := f.Commit(); err != nil {
			return err
		}
	}
	for _, f := range files {
		if f.bootstrap {
			continue
		}
		begun, err := f.begin(o.Force)
		if err == nil {
			err = begun.Commit()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// formerSites finds the Sites of workers that are no longer in the Cluster.
func formerSites(dir string, record *Record) []FormerSite {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil // the directory's name is not a valid pattern
	}
	var former []FormerSite
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // a file that cannot be read was not written by edgebake
		}
		if node := headerNode(text, record.Fixed.Name); node != "" && !slices.ContainsFunc(record.Tokens, func(t Token) bool { return t.Node == node }) {
			former = append(former, FormerSite{f, node})
		}
	}
	return former
}

func writeInventory(path string, sites []NodeSite, force bool) error {
	text, err := Inventory(sites)
	if err != nil {
		return err
	}
	if err := file.Check(path, force); err != nil {
		return err
	}
	return file.Write(path, text, 0o600)
}
