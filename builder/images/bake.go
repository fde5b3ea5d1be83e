package images

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Bake makes containerd's store from pinned images. Fetch must have stored them in the cache.
func Bake(ctx context.Context, c *fetch.Cache, pinned []Pinned, o Options) (*Result, error) {
	if err := errors.Join(CheckContainerd(o.ContainerdVersion), checkSandbox(pinned, o.Sandbox)); err != nil {
		return nil, fmt.Errorf("baking images: %w", err)
	}
	// Sort the images, so that the numbers and records in the store do not depend on their order.
	pinned = slices.Clone(pinned)
	slices.SortFunc(pinned, func(a, b Pinned) int { return strings.Compare(a.Ref.String(), b.Ref.String()) })
	b := &baker{
		cache: c, options: &o,
		snapshots: map[string]*snapshot{}, budget: newBudget(&o),
		blobs: map[imageref.Digest]*store.Blob{},
		state: store.State{Schema: store.SchemaVersion},
	}
	for i := range pinned {
		if err := b.image(ctx, &pinned[i]); err != nil {
			return nil, err
		}
	}
	return b.finish(ctx, pinned)
}

func checkSandbox(pinned []Pinned, sandbox string) error {
	if sandbox == "" {
		return nil
	}
	want, err := imageref.Parse(sandbox)
	if err != nil {
		return fmt.Errorf("sandbox image: %w", err)
	}
	for _, p := range pinned {
		if p.Ref.Repo() == want.Repo() && p.Ref.Tag == want.Tag {
			return nil
		}
	}
	return fmt.Errorf("the sandbox image %s is not among the images, so no pod could start without a registry; list it in images", want)
}

// Fetch stores all parts of pinned images in the cache. It fetches each layer once, and several at
// a time. Layers are stored uncompressed under their diffIDs, after verification. With
// Options.KeepLayers, the compressed blobs are stored too.
func Fetch(ctx context.Context, c *fetch.Cache, pinned []Pinned, o Options) error {
	sources := newSources(c, &o)
	defer sources.close()
	if err := sources.documents(ctx, pinned); err != nil {
		return err
	}
	return sources.layers(ctx, pinned)
}

// documents fetches manifests and configs that the cache lacks, which happens if another computer
// pinned the images.
func (s *sources) documents(ctx context.Context, pinned []Pinned) error {
	errs := make([]error, len(pinned))
	parallel(len(pinned), func(n int) {
		p := &pinned[n]
		for what, d := range p.stored(false) {
			if s.cache.Has(d.Digest.Hex()) {
				continue
			}
			src, err := s.get(ctx, p.Source)
			if err == nil {
				_, err = readDoc(ctx, s.cache, src, p.Ref, what, d)
			}
			if err != nil {
				errs[n] = &ImageError{p.Source, err}
				return
			}
		}
	})
	return errors.Join(errs...)
}

func (s *sources) layers(ctx context.Context, pinned []Pinned) error {
	o, keep := s.options, s.options.KeepLayers
	type job struct {
		image, layer int
	}
	var jobs []job
	seen := map[[2]string]bool{}
	for i := range pinned {
		for j, l := range pinned[i].Layers {
			if key := [2]string{pairKey(l), string(l.DiffID)}; !seen[key] {
				seen[key] = true
				jobs = append(jobs, job{i, j})
			}
		}
	}
	// Start with the largest layers: otherwise a large layer might still be transferred long after
	// all others.
	slices.SortStableFunc(jobs, func(a, b job) int {
		return int(pinned[b.image].Layers[b.layer].Size - pinned[a.image].Layers[a.layer].Size)
	})
	limits := make([]sizeLimit, len(pinned))
	for i := range limits {
		limits[i] = newSizeLimit(o)
	}
	var done atomic.Int64
	errs := make([]error, len(jobs))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var full atomic.Pointer[error]
	parallel(len(jobs), func(n int) {
		p, j := &pinned[jobs[n].image], jobs[n].layer
		if err := s.fetch(ctx, p, j, keep, limits[jobs[n].image]); err != nil {
			errs[n] = &ImageError{p.Source, err}
			switch {
			case fetch.NoSpace(err):
				full.CompareAndSwap(nil, &err)
				cancel()
			case errors.Is(err, context.Canceled):
				cancel()
			}
			// After other errors, fetch the remaining layers, so that all problems are reported
			// together.
			return
		}
		if o.Progress != nil {
			o.Progress(Progress{Ref: p.Ref.String(), Blob: p.Layers[j].Digest, Done: int(done.Add(1)), Total: len(jobs)})
		}
	})
	if err := full.Load(); err != nil {
		return *err // the other layers failed for the same reason
	}
	return errors.Join(errs...)
}

// baker collects the contents of the store.
type baker struct {
	cache     *fetch.Cache
	options   *Options
	snapshots map[string]*snapshot // chain ID → snapshot
	order     []*snapshot
	blobs     map[imageref.Digest]*store.Blob
	state     store.State
	budget    *budget
}

// image adds one image's snapshots, blobs and records.
func (b *baker) image(ctx context.Context, p *Pinned) error {
	var top *snapshot
	for i, l := range p.Layers {
		var err error
		if top, err = b.layer(ctx, l, top); err != nil {
			return &ImageError{p.Source, fmt.Errorf("image %s: unpacking layer %d of %d (%s): %w", p.Ref, i+1, len(p.Layers), l.Digest, err)}
		}
		if top.label == "" {
			top.label = p.Ref.String()
		}
	}

	config := map[string]string{}
	if top != nil {
		config[store.LabelGCSnapshot] = top.chainID
	}
	for what, d := range p.stored(b.options.KeepLayers) {
		if err := checkCached(b.cache, d); err != nil {
			return &ImageError{p.Source, fmt.Errorf("image %s: %s %s: %w", p.Ref, what, d.Digest, err)}
		}
	}
	b.blob(p.Config, config)
	manifest := map[string]string{store.LabelGCConfig: string(p.Config.Digest)}
	if b.options.KeepLayers {
		for i, l := range p.Layers {
			manifest[fmt.Sprint(store.LabelGCLayer, i)] = string(l.Digest)
			b.blob(l.Descriptor, map[string]string{store.LabelUncompressed: string(l.DiffID)})
		}
	}
	b.blob(p.Manifest, manifest)
	target := p.named()
	if target.Digest != p.Manifest.Digest {
		b.blob(target, map[string]string{store.LabelGCManifest + "0": string(p.Manifest.Digest)})
	}

	date := b.options.SourceDate
	names := store.RecordNames(p.Ref.Repo(), p.Ref.Tag, string(target.Digest), string(p.Config.Digest))
	if p.Direct { // pods may name the image by its index's digest
		names = append(names, p.Ref.Repo()+"@"+string(p.Target.Digest))
	}
	for _, name := range names {
		if slices.ContainsFunc(b.state.Images, func(i store.Image) bool { return i.Name == name }) {
			continue // another tag of the same image already has this record
		}
		b.state.Images = append(b.state.Images, store.Image{
			Name: name, MediaType: target.MediaType, Digest: string(target.Digest), Size: target.Size,
			Labels: map[string]string{
				store.LabelManaged: "managed",
				store.LabelPinned:  "pinned",
				store.LabelBaked:   "true",
			},
			Created: date, Updated: date,
		})
	}
	return nil
}

// blob adds a blob to the content store. If several images use it, it has the labels of all of
// them.
func (b *baker) blob(d Descriptor, labels map[string]string) {
	bl := b.blobs[d.Digest]
	if bl == nil {
		bl = &store.Blob{Digest: string(d.Digest), Size: d.Size, Labels: map[string]string{},
			Created: b.options.SourceDate, Updated: b.options.SourceDate}
		b.blobs[d.Digest] = bl
	}
	maps.Copy(bl.Labels, labels)
}

// layer returns the snapshot for a layer on top of parent.
func (b *baker) layer(ctx context.Context, l Layer, parent *snapshot) (*snapshot, error) {
	below := ""
	if parent != nil {
		below = parent.chainID
	}
	chainID := store.ChainID(below, string(l.DiffID))
	if s := b.snapshots[chainID]; s != nil {
		return s, nil
	}
	diff := l.DiffID.Hex()
	f, err := os.Open(b.cache.BlobPath(diff))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	s, err := applyLayer(ctx, b.cache, io.NewSectionReader(f, 0, st.Size()), diff, parent, b.options.SourceDate, b.budget)
	switch {
	case errors.Is(err, errHostile):
		return nil, fmt.Errorf("%w; the image may be malicious: do not use it", err)
	case fetch.NoSpace(err), errors.Is(err, context.Canceled):
		return nil, err
	case errors.As(err, new(*LimitError)):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%w; the image is invalid, have it built again", err)
	}
	s.chainID, s.diffID = chainID, string(l.DiffID)
	s.id = uint64(len(b.order) + 1)
	if n := s.mountLength(); n > mountOptions {
		return nil, fmt.Errorf("mounting the image's layers needs options of %d bytes, and the kernel accepts %d: have the image built with fewer layers", n, mountOptions)
	}
	b.snapshots[chainID] = s
	b.order = append(b.order, s)
	return s, nil
}

// mountLength returns the length of the mount option that lists the directories of a snapshot and
// its parents: NUMBER/fs for each, separated by colons.
func (s *snapshot) mountLength() int {
	n := 0
	for ; s != nil; s = s.parent {
		n += len(strconv.FormatUint(s.id, 10)) + len("/fs:")
	}
	return n
}

// finish writes the databases and lists the files of the store.
func (b *baker) finish(ctx context.Context, pinned []Pinned) (*Result, error) {
	date := b.options.SourceDate
	for _, s := range b.order {
		parent := ""
		labels := map[string]string{store.LabelSnapshotRef: s.chainID, store.LabelSnapshotDiff: s.diffID}
		if s.parent != nil {
			parent = s.parent.chainID
			labels[store.LabelSnapshotParent] = parent
		}
		b.state.Snapshots = append(b.state.Snapshots, store.Snapshot{
			Key: s.chainID, Parent: parent, ID: s.id, Kind: store.KindCommitted,
			// containerd increments the sequence twice for each snapshot: to prepare and to commit
			// it.
			Backend: store.BackendName(2*s.id, s.chainID),
			Size:    s.size, Inodes: s.inodes,
			Labels:  labels,
			Created: date, Updated: date,
		})
	}
	b.state.BackendSequence = uint64(len(b.order))
	b.state.MetaSequence = 2 * b.state.BackendSequence
	for _, d := range slices.Sorted(maps.Keys(b.blobs)) {
		b.state.Blobs = append(b.state.Blobs, *b.blobs[d])
	}
	b.state.Sort()

	r := &Result{}
	var err error
	if r.Nodes, err = b.nodes(ctx); err != nil {
		return nil, fmt.Errorf("baking images: %w", err)
	}
	r.Report = b.report(pinned)
	for _, i := range r.Report.Images {
		r.Images = append(r.Images, ondisk.ImageRef{Ref: i.Ref, Digest: i.Digest, Size: i.Size})
	}
	return r, nil
}

// LayerName returns the name of the tree layer that contains an image's files.
func LayerName(ref string) string { return "image " + ref }

// layerName is the tree layer of all other files of the store.
const layerName = "container images"

func (b *baker) nodes(ctx context.Context) ([]tree.Node, error) {
	t := treeList{date: b.options.SourceDate}
	snapDir := store.SnapshotterDir
	// containerd sets the same modes.
	for _, d := range []struct {
		path string
		perm uint32
	}{
		{"var", 0o755}, {"var/lib", 0o755}, {store.Root, 0o711},
		{path.Join(store.Root, store.ContentDir), 0o755},
		{path.Join(store.Root, store.ContentDir, "blobs"), 0o755},
		{path.Join(store.Root, store.ContentDir, "blobs/sha256"), 0o755},
		{path.Join(store.Root, store.ContentDir, "ingest"), 0o755},
		{path.Join(store.Root, store.MetaDir), 0o711},
		{path.Join(store.Root, snapDir), 0o700},
		{path.Join(store.Root, snapDir, "snapshots"), 0o700},
	} {
		t.dir(d.path, d.perm)
	}
	for _, digest := range slices.Sorted(maps.Keys(b.blobs)) {
		t.file(path.Join(store.Root, store.BlobPath(string(digest))), 0o444, tree.Content{Blob: digest.Hex(), Size: b.blobs[digest].Size})
	}
	for _, s := range b.order {
		dir := path.Join(store.Root, store.SnapshotDir(s.id))
		t.dir(dir, 0o700)
		t.nodes = s.nodes(dir+"/fs", LayerName(s.label), t.nodes)
		t.dir(dir+"/work", 0o711)
	}
	meta, snaps, err := b.databases(ctx)
	if err != nil {
		return nil, err
	}
	t.file(path.Join(store.Root, store.MetaDB), 0o644, meta)
	t.file(path.Join(store.Root, store.SnapshotterDB), 0o600, snaps)
	return t.nodes, nil
}

// databases writes meta.db and metadata.db to the cache.
func (b *baker) databases(ctx context.Context) (meta, snaps tree.Content, err error) {
	dir, err := b.cache.TempDir()
	if err != nil {
		return meta, snaps, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	metaPath, snapsPath := filepath.Join(dir, "meta.db"), filepath.Join(dir, "metadata.db")
	if err := b.state.Write(metaPath, snapsPath); err != nil {
		return meta, snaps, err
	}
	if meta, err = putFile(ctx, b.cache, metaPath); err != nil {
		return meta, snaps, err
	}
	snaps, err = putFile(ctx, b.cache, snapsPath)
	return meta, snaps, err
}

func putFile(ctx context.Context, c *fetch.Cache, name string) (tree.Content, error) {
	f, err := os.Open(name)
	if err != nil {
		return tree.Content{}, err
	}
	defer f.Close()
	sha, n, err := c.Put(ctx, "", f)
	return tree.Content{Blob: sha, Size: n}, err
}

// treeList collects files that belong to root.
type treeList struct {
	date  time.Time
	nodes []tree.Node
}

func (t *treeList) add(p string, i *tree.Inode) {
	i.MTime = t.date
	t.nodes = append(t.nodes, tree.Node{Path: p, Layer: layerName, Inode: i})
}

func (t *treeList) dir(p string, perm uint32) { t.add(p, &tree.Inode{Mode: tree.ModeDir | perm}) }

func (t *treeList) file(p string, perm uint32, data tree.Content) {
	t.add(p, &tree.Inode{Mode: tree.ModeRegular | perm, Data: data})
}

func (b *baker) report(pinned []Pinned) Report {
	users := map[*snapshot]int{}
	chains := make([][]*snapshot, len(pinned))
	for i, p := range pinned {
		below := ""
		for _, l := range p.Layers {
			below = store.ChainID(below, string(l.DiffID))
			s := b.snapshots[below]
			chains[i] = append(chains[i], s)
			users[s]++
		}
	}
	r := Report{Layers: len(b.order)}
	for i, p := range pinned {
		ir := ImageReport{Ref: p.Ref.String(), Digest: string(p.Target.Digest), Layers: len(p.Layers)}
		for _, s := range chains[i] {
			ir.Size += s.size
			if users[s] > 1 {
				ir.Shared += s.size
			}
		}
		r.Images = append(r.Images, ir)
	}
	for _, s := range b.order {
		r.Size += s.size
	}
	return r
}
