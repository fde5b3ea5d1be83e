package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Files gives access to the files of a store. The store may be on a disk image, in a list of nodes,
// or in a directory.
type Files struct {
	Stat    func(name string) (tree.Node, error)
	ReadDir func(name string) ([]string, error)
	Open    func(name string) (io.ReadCloser, error)
	// InUse is set if containerd may have used the store. It may then also have snapshots of
	// containers, leases, other images, and blobs that await garbage collection.
	InUse bool
}

// Summary lists the contents of a verified store.
type Summary struct {
	Images    []string `json:"images"` // as returned by State.Names
	Blobs     int      `json:"blobs"`
	Snapshots int      `json:"snapshots"`
}

// Verify checks the store below root, and returns all problems at once. root is
// "var/lib/containerd", or "lib/containerd" on a disk that is mounted at /var.
//
//   - Databases, content and snapshot directories must agree.
//   - Every blob must have its digest.
//   - Every image must be runnable, and protected from garbage collection.
//
// It cannot check unpacked files whose layers were discarded; the disk image's digest covers them.
func Verify(f Files, root string) (*Summary, error) {
	v := &verifier{Files: f, root: root}
	state, err := v.read()
	if err != nil {
		return nil, fmt.Errorf("verifying the image store: %w", err)
	}
	v.state = state
	v.blobs()
	v.snapshots()
	v.images()
	v.strays()
	switch len(v.problems) {
	case 0:
	case 1:
		return nil, fmt.Errorf("verifying the image store: %w", v.problems[0])
	default:
		return nil, problems(v.problems)
	}
	s := &Summary{Blobs: len(state.Blobs), Snapshots: len(state.Snapshots)}
	s.Images = state.Names()
	return s, nil
}

// ReadFrom reads the databases of the store below root. No other program may have them open.
func ReadFrom(f Files, root string) (*State, error) {
	return (&verifier{Files: f, root: root}).read()
}

// problems is a list of errors that is printed with one error per line.
type problems []error

func (p problems) Error() string {
	var b strings.Builder
	b.WriteString("verifying the image store:")
	for _, e := range p {
		b.WriteString("\n  " + e.Error())
	}
	return b.String()
}

func (p problems) Unwrap() []error { return p }

// Names lists the images by tag, or by digest if they have no tag. An image with two tags is listed
// twice.
func (s *State) Names() []string {
	var names []string
	tagged := map[string]bool{} // repo@digest
	for _, i := range s.Images {
		if !strings.Contains(i.Name, "@") && !strings.HasPrefix(i.Name, "sha256:") {
			names = append(names, i.Name)
			repo := i.Name[:max(0, strings.LastIndexByte(i.Name, ':'))]
			tagged[repo+"@"+i.Digest] = true
		}
	}
	for _, i := range s.Images {
		if repo, _, ok := strings.Cut(i.Name, "@"); ok && !tagged[repo+"@"+i.Digest] {
			names = append(names, i.Name)
		}
	}
	slices.Sort(names)
	return names
}

type verifier struct {
	Files
	root     string
	state    *State
	problems []error

	blobByDigest  map[string]*Blob
	snapshotByKey map[string]*Snapshot
}

func (v *verifier) bad(format string, args ...any) {
	v.problems = append(v.problems, fmt.Errorf(format, args...))
}

func (v *verifier) at(p string) string { return path.Join(v.root, p) }

// read reads both databases.
func (v *verifier) read() (*State, error) {
	meta, err := v.database(MetaDB)
	if err != nil {
		return nil, err
	}
	snaps, err := v.database(SnapshotterDB)
	if err != nil {
		return nil, err
	}
	return newState(meta, snaps)
}

func (v *verifier) database(name string) (*bucket, error) {
	r, err := v.Open(v.at(name))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	defer r.Close()
	raw, err := io.ReadAll(io.LimitReader(r, maxDatabase+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	b, err := readDatabase(bytes.NewReader(raw), int64(len(raw)))
	if err != nil {
		return nil, fmt.Errorf("reading %s: it is damaged: %w", name, err)
	}
	return b, nil
}

func (v *verifier) blobs() {
	v.blobByDigest = map[string]*Blob{}
	for i := range v.state.Blobs {
		b := &v.state.Blobs[i]
		v.blobByDigest[b.Digest] = b
		h := sha256.New()
		n, err := func() (int64, error) {
			r, err := v.Open(v.at(BlobPath(b.Digest)))
			if err != nil {
				return 0, err
			}
			defer r.Close()
			return io.Copy(h, r)
		}()
		switch got := "sha256:" + hex.EncodeToString(h.Sum(nil)); {
		case err != nil:
			v.bad("blob %s: %w", b.Digest, err)
		case n != b.Size:
			v.bad("blob %s has %d bytes, but meta.db says %d", b.Digest, n, b.Size)
		case got != b.Digest:
			v.bad("blob %s has digest %s", b.Digest, got)
		}
	}
}

func (v *verifier) snapshots() {
	v.snapshotByKey = map[string]*Snapshot{}
	ids := map[uint64]string{}
	for i := range v.state.Snapshots {
		s := &v.state.Snapshots[i]
		v.snapshotByKey[s.Key] = s
		if other, ok := ids[s.ID]; ok {
			v.bad("snapshots %s and %s share the directory %d", other, s.Key, s.ID)
		}
		ids[s.ID] = s.Key
		if s.Kind != KindCommitted && !v.InUse {
			v.bad("snapshot %s is not committed (kind %d)", s.Key, s.Kind)
		}
		fs := v.at(SnapshotDir(s.ID)) + "/fs"
		if n, err := v.Stat(fs); err != nil {
			v.bad("snapshot %s: %w", s.Key, err)
		} else if !n.IsDir() {
			v.bad("snapshot %s: %s is not a directory", s.Key, fs)
		}
	}
}

// images checks each image as containerd does when it starts a container.
func (v *verifier) images() {
	for i := range v.state.Images {
		img := &v.state.Images[i]
		baked := img.Labels[LabelBaked] != ""
		if v.InUse && !baked {
			continue // an image that is not baked may be incompletely pulled
		}
		if err := v.image(img); err != nil {
			v.bad("image %s: %w", img.Name, err)
		}
		if !baked {
			v.bad("image %s lacks the label %s", img.Name, LabelBaked)
		}
		if img.Labels[LabelManaged] != "managed" {
			v.bad("image %s lacks the label %s=managed: the kubelet would not see it", img.Name, LabelManaged)
		}
		if img.Labels[LabelPinned] != "pinned" && !v.InUse {
			v.bad("image %s is not pinned: the kubelet would delete it when the disk is full", img.Name)
		}
	}
}

// maxLayers is the maximum number of layers that overlayfs supports (OVL_MAX_STACK).
const maxLayers = 500

// manifest has the references in an index or a manifest.
type manifest struct {
	Manifests []ocispec.Descriptor `json:"manifests"`
	Config    struct {
		Digest string `json:"digest"`
	} `json:"config"`
	Layers []struct {
		Digest string `json:"digest"`
	} `json:"layers"`
}

// image checks that containerd can run an image, and that garbage collection keeps all parts of it:
// index, manifest, config, layers and snapshots.
func (v *verifier) image(img *Image) error {
	target := v.blobByDigest[img.Digest]
	if target == nil {
		return fmt.Errorf("the target %s is missing", img.Digest)
	}
	if target.Size != img.Size {
		return fmt.Errorf("the target has %d bytes, but the record says %d", target.Size, img.Size)
	}
	blob, doc, err := v.manifest(target)
	if err != nil {
		return err
	}
	if got := blob.Labels[LabelGCConfig]; got != doc.Config.Digest {
		return fmt.Errorf("manifest %s has a label for the config %q, but its config is %s: garbage collection would remove the config", blob.Digest, got, doc.Config.Digest)
	}
	if err := v.unpacked(doc.Config.Digest); err != nil {
		return err
	}
	for n, l := range doc.Layers {
		label := blob.Labels[LabelGCLayer+strconv.Itoa(n)]
		switch {
		case label == "":
		case label != l.Digest:
			return fmt.Errorf("manifest %s has a label for the layer %s, but its layer is %s", blob.Digest, label, l.Digest)
		case v.blobByDigest[label] == nil:
			return fmt.Errorf("the store has no layer %s of manifest %s", label, blob.Digest)
		}
	}
	return nil
}

// manifest returns the manifest that containerd uses: the target itself or, if that is an index,
// the first of its manifests to which a label of the index refers.
func (v *verifier) manifest(target *Blob) (*Blob, *manifest, error) {
	doc := new(manifest)
	if err := v.json(target.Digest, doc); err != nil {
		return nil, nil, err
	}
	if len(doc.Manifests) == 0 {
		return target, doc, nil
	}
	protected := map[string]bool{}
	for k, d := range target.Labels {
		if strings.HasPrefix(k, LabelGCManifest) && v.blobByDigest[d] != nil {
			protected[d] = true
		}
	}
	usable := slices.IndexFunc(doc.Manifests, func(d ocispec.Descriptor) bool { return protected[d.Digest.String()] })
	if usable < 0 {
		return nil, nil, fmt.Errorf("no label of the index %s refers to an existing manifest: garbage collection would remove it", target.Digest)
	}
	digest := doc.Manifests[usable].Digest.String()
	// If no entry names a platform, containerd considers only the first one.
	named := func(d ocispec.Descriptor) bool { return d.Platform != nil }
	if first := doc.Manifests[0].Digest.String(); !slices.ContainsFunc(doc.Manifests, named) && first != digest {
		return nil, nil, fmt.Errorf("containerd would use the first entry of the index %s, %s, which is not the manifest %s", target.Digest, first, digest)
	}
	doc = new(manifest)
	return v.blobByDigest[digest], doc, v.json(digest, doc)
}

// unpacked checks that each layer of a config has its snapshot, and that a label of the config
// protects the last snapshot.
func (v *verifier) unpacked(digest string) error {
	config := v.blobByDigest[digest]
	if config == nil {
		return fmt.Errorf("the config %s is missing", digest)
	}
	var c ocispec.Image // decoded as strictly as containerd does
	if err := v.json(config.Digest, &c); err != nil {
		return err
	}
	if len(c.RootFS.DiffIDs) > maxLayers {
		return fmt.Errorf("%d layers, but the kernel's overlayfs stacks at most %d", len(c.RootFS.DiffIDs), maxLayers)
	}
	chain := ""
	for n, diff := range c.RootFS.DiffIDs {
		parent := chain
		chain = ChainID(chain, diff.String())
		s := v.snapshotByKey[chain]
		if s == nil {
			return fmt.Errorf("layer %d is not unpacked: snapshot %s is missing", n+1, chain)
		}
		if s.Parent != parent {
			return fmt.Errorf("snapshot %s has parent %q, expected %q", chain, s.Parent, parent)
		}
		if s.Kind != KindCommitted {
			return fmt.Errorf("snapshot %s is not committed", chain)
		}
	}
	if got := config.Labels[LabelGCSnapshot]; got != chain {
		return fmt.Errorf("config %s has a label for the snapshot %q, but its layers end at %s: garbage collection would remove the layers", config.Digest, got, chain)
	}
	return nil
}

func (v *verifier) json(digest string, doc any) error {
	r, err := v.Open(v.at(BlobPath(digest)))
	if err != nil {
		return err
	}
	defer r.Close()
	raw, err := io.ReadAll(io.LimitReader(r, 8<<20))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, doc); err != nil {
		return fmt.Errorf("reading %s: %w", digest, err)
	}
	return nil
}

// strays reports snapshot directories and blobs that are in no database. They occupy space until
// containerd removes them.
func (v *verifier) strays() {
	if v.InUse {
		return
	}
	dir := v.at(SnapshotterDir + "/snapshots")
	names, err := v.ReadDir(dir)
	if err != nil {
		v.bad("%w", err)
	}
	for _, n := range names {
		known := slices.ContainsFunc(v.state.Snapshots, func(s Snapshot) bool { return strconv.FormatUint(s.ID, 10) == n })
		if !known {
			v.bad("directory %s/%s belongs to no snapshot", dir, n)
		}
	}
	dir = v.at(ContentDir + "/blobs/sha256")
	if names, err = v.ReadDir(dir); err != nil {
		v.bad("%w", err)
	}
	for _, n := range names {
		if v.blobByDigest["sha256:"+n] == nil {
			v.bad("file %s/%s belongs to no blob of meta.db", dir, n)
		}
	}
}
