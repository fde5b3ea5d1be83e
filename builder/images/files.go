package images

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs/imageref"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// bundle is a directory or a tar file that contains images.
type bundle struct {
	label string // for messages
	// file opens a file by its slash-separated name. It returns fs.ErrNotExist if the file is
	// missing.
	file  func(name string) (io.ReadCloser, error)
	close func() error
}

func openLayout(dir string) (source, error) {
	root, err := os.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("OCI layout %s not found: create it, or correct the field layout (a path relative to the Image's file)", dir)
	}
	if err != nil {
		return nil, fmt.Errorf("opening OCI layout %s: %w", dir, err)
	}
	if _, err := root.Stat("index.json"); errors.Is(err, fs.ErrNotExist) {
		root.Close()
		return nil, fmt.Errorf("%s is not an OCI layout: it has no index.json; name the directory that has it", dir)
	}
	return openOCI(&bundle{
		label: "OCI layout " + dir,
		file: func(name string) (io.ReadCloser, error) {
			// Opening a named pipe would block forever.
			if fi, err := root.Stat(filepath.FromSlash(name)); err == nil && !fi.Mode().IsRegular() {
				return nil, fmt.Errorf("%s is not a file", name)
			}
			f, err := root.Open(filepath.FromSlash(name))
			if err != nil {
				return nil, err
			}
			return f, nil
		},
		close: root.Close,
	})
}

// openArchive opens a tar file of an OCI layout or from `docker save`. The file may be compressed
// with gzip or zstd.
func openArchive(ctx context.Context, c *fetch.Cache, name string, o *Options) (source, error) {
	switch fi, err := os.Stat(name); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("archive %s not found: create it, or correct the field archive (a path relative to the Image's file)", name)
	case err == nil && fi.IsDir():
		return nil, fmt.Errorf("image archive %s is a directory; if that is an OCI layout, name it as layout", name)
	case err == nil && !fi.Mode().IsRegular():
		return nil, fmt.Errorf("image archive %s is not a file; write the archive to a file", name)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("opening image archive: %w", err)
	}
	src, err := openTar(ctx, c, f, name, sizeLimit{layer: imageLayers * o.maxLayer()})
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("opening image archive %s: %w", name, err)
	}
	return src, nil
}

func openTar(ctx context.Context, c *fetch.Cache, f fileAt, name string, limit sizeLimit) (source, error) {
	var magic [sniffLen]byte
	if _, err := f.ReadAt(magic[:], 0); err != nil && err != io.EOF {
		return nil, err
	}
	file := f
	size := int64(0)
	if compression := sniff(magic[:]); compression != "" {
		// Seeking requires an uncompressed archive. The cache's key is the archive's digest, so
		// that a changed archive is uncompressed again.
		h := sha256.New()
		if _, err := io.Copy(h, contextReader{ctx, io.NewSectionReader(f, 0, 1<<62)}); err != nil {
			return nil, err
		}
		packed := hex.EncodeToString(h.Sum(nil))
		sha, err := c.Make(ctx, "image archive, uncompressed 2\n"+packed, func(ctx context.Context, w io.Writer) error {
			// The file is read a second time here, and may have changed meanwhile.
			again := sha256.New()
			in := io.TeeReader(contextReader{ctx, io.NewSectionReader(f, 0, 1<<62)}, again)
			r, err := decompress(in, compression, maxWindow)
			if err == nil {
				defer r.Close()
				_, err = io.Copy(w, &limitedReader{r: r, limit: limit})
			}
			if err == nil {
				_, err = io.Copy(io.Discard, in) // read the rest, after the compressed data
			}
			if err == nil && hex.EncodeToString(again.Sum(nil)) != packed {
				return errors.New("the file changes while it is read: find the program that writes to it")
			}
			if err != nil && !errors.Is(err, context.Canceled) && !errors.As(err, new(*LimitError)) && !fetch.NoSpace(err) {
				return fmt.Errorf("uncompressing: %w; the archive is truncated or damaged: copy or make it again", err)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		if file, err = os.Open(c.BlobPath(sha)); err != nil {
			return nil, err
		}
		f.Close()
	}
	st, err := file.Stat()
	if err != nil {
		return nil, err
	}
	size = st.Size()
	b, names, err := tarBundle(file, size)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	b.close = file.Close
	var src source
	switch {
	// An archive may contain the documents of both formats. Read it as OCI, where blobs have
	// digests.
	case names["oci-layout"] && names["index.json"]:
		b.label = "OCI archive " + name
		src, err = openOCI(b)
	case names["manifest.json"]:
		b.label = "docker archive " + name
		src, err = openDocker(b)
	default:
		err = errors.New("the archive has neither oci-layout nor manifest.json: it is truncated, or not an image archive; make it with `docker save` or `skopeo copy … oci-archive:`")
	}
	return src, err
}

type fileAt interface {
	io.ReaderAt
	io.Closer
	Stat() (os.FileInfo, error)
}

// maxArchiveFiles limits the number of files in an archive. Real archives have far fewer.
const maxArchiveFiles = 1 << 17

// tarBundle indexes a tar file by name. It follows symbolic links: old versions of `docker save`
// wrote them for layers that several images use.
func tarBundle(r io.ReaderAt, size int64) (*bundle, map[string]bool, error) {
	type span struct{ off, size int64 }
	spans := map[string]span{}
	links := map[string]string{}
	names := map[string]bool{}
	sr := io.NewSectionReader(r, 0, size)
	tr := tar.NewReader(sr)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, nil, fmt.Errorf("reading the tar after byte %d: %w; the archive is truncated, damaged, or not a tar: copy or make it again", position(sr), err)
		}
		name := path.Clean(h.Name)
		if len(spans)+len(links) > maxArchiveFiles {
			return nil, nil, fmt.Errorf("the archive has more than %d files; name an archive of images", maxArchiveFiles)
		}
		switch h.Typeflag {
		case tar.TypeReg:
			spans[name] = span{position(sr), h.Size}
			names[name] = true
		case tar.TypeSymlink:
			links[name] = path.Join(path.Dir(name), h.Linkname)
		case tar.TypeLink:
			links[name] = path.Clean(h.Linkname)
		}
	}
	return &bundle{file: func(name string) (io.ReadCloser, error) {
		if to, ok := links[name]; ok {
			name = to
		}
		s, ok := spans[name]
		if !ok {
			return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
		}
		return io.NopCloser(io.NewSectionReader(r, s.off, s.size)), nil
	}}, names, nil
}

// readFile reads a regular file that a document names. It does not open a named pipe, which would
// block forever.
func readFile(name string) ([]byte, error) {
	if fi, err := os.Stat(name); err == nil && !fi.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file", name)
	}
	return os.ReadFile(name)
}

// stream opens a file of the bundle and calls take with it.
func (b *bundle) stream(name string, take func(io.Reader) error) error {
	f, err := b.file(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return take(f)
}

func (b *bundle) read(name string) ([]byte, error) {
	f, err := b.file(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxDoc))
}

// ociFiles is an OCI image layout.
type ociFiles struct {
	*bundle
	index manifestDoc
}

// These annotations of an index contain the name of an image. In OCI's annotation, the value is a
// full reference or only a tag.
const (
	annotationRefName   = "org.opencontainers.image.ref.name"
	annotationImageName = "io.containerd.image.name"
)

func openOCI(b *bundle) (source, error) {
	raw, err := b.read("index.json")
	if err == nil {
		var doc manifestDoc
		if doc, err = parseDoc[manifestDoc](raw); err == nil {
			return &ociFiles{b, doc}, nil
		}
	}
	return nil, errors.Join(fmt.Errorf("reading index.json of %s: %w; the file is damaged, make the layout again", b.label, err), b.close())
}

func (f *ociFiles) name() string { return f.label }
func (f *ociFiles) Close() error { return f.close() }

func (f *ociFiles) root(_ context.Context, ref imageref.Ref) (Descriptor, error) {
	var found []ocispec.Descriptor
	for _, d := range f.index.Manifests {
		if isCalled(d, ref) {
			found = append(found, d)
		}
	}
	// If the layout contains one image, it matches if it has no name or if the reference is Sole.
	if m := f.index.Manifests; len(found) == 0 && len(m) == 1 && (isSole(ref) || givenName(m[0]) == "") {
		found = m
	}
	if len(found) == 0 {
		return Descriptor{}, f.missingError(ref)
	}
	for _, d := range found[1:] {
		if d.Digest != found[0].Digest {
			return Descriptor{}, fmt.Errorf("the layout has two different images of that name, %s and %s; pin one by its digest", found[0].Digest, d.Digest)
		}
	}
	return listed("manifest", found[0], ref, f)
}

// isSole reports whether a reference means the only image of a layout or archive.
func isSole(ref imageref.Ref) bool { return ref.Repo()+":"+ref.Tag == Sole }

// givenName returns the name that an index's entry has in its annotations, or "".
func givenName(d ocispec.Descriptor) string {
	return cmp.Or(d.Annotations[annotationImageName], d.Annotations[annotationRefName])
}

// isCalled reports whether an index's entry has the digest or the name of a reference.
func isCalled(d ocispec.Descriptor, ref imageref.Ref) bool {
	if ref.Digest != "" && string(d.Digest) == string(ref.Digest) {
		return true
	}
	full, tag := d.Annotations[annotationImageName], d.Annotations[annotationRefName]
	return ref.Tag != "" && (sameRef(full, ref) || sameRef(tag, ref) || full == "" && tag == ref.Tag)
}

// missingError returns the error for a reference that the layout does not contain. It lists the
// images in the layout.
func (f *ociFiles) missingError(ref imageref.Ref) error {
	var each []string
	names := map[string]bool{}
	for _, d := range f.index.Manifests {
		each = append(each, strings.TrimSpace(givenName(d)+" "+string(d.Digest)))
		if givenName(d) == "" || ref.Tag == "" {
			names[string(d.Digest)] = true
			continue
		}
		for _, n := range []string{d.Annotations[annotationImageName], d.Annotations[annotationRefName]} {
			if n != "" {
				names[fullName(n)] = true
			}
		}
	}
	switch {
	case isSole(ref) && ref.Digest != "":
		return fmt.Errorf("the layout has no image %s, only %s; correct the digest", ref.Digest, orNone(each))
	case isSole(ref):
		return fmt.Errorf("the layout must contain one image but has %d: %s; select one by digest", len(each), orNone(each))
	case len(names) == 0:
		return errors.New("the layout contains no image with a name; make it again")
	}
	return fmt.Errorf("the layout has no image of that name, only %s; use one of these as ref, or give the image that name (%s in index.json)",
		orNone(slices.Sorted(maps.Keys(names))), annotationRefName)
}

func orNone(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// fullName returns a name in full, such as docker.io/library/app:1 for app:1. It does not change a
// digest or a tag without a name.
func fullName(name string) string {
	if _, err := imageref.ParseDigest(name); err == nil || !strings.ContainsAny(name, "/:") {
		return name
	}
	if r, err := imageref.Parse(name); err == nil && r.Tag != "" && r.Digest == "" {
		return r.Repo() + ":" + r.Tag
	}
	return name
}

// sameRef reports whether name and ref are the same reference.
func sameRef(name string, ref imageref.Ref) bool {
	if !strings.ContainsAny(name, "/:") {
		return false // name is a tag without a name
	}
	r, err := imageref.Parse(name)
	return err == nil && r.Repo() == ref.Repo() && r.Tag == ref.Tag
}

func (f *ociFiles) fetch(_ context.Context, _ imageref.Ref, d Descriptor, take func(io.Reader) error) error {
	return f.stream("blobs/sha256/"+d.Digest.Hex(), take)
}

// dockerFiles is an archive from `docker save`, which has layers and configs but no manifests. It
// makes the same manifests as containerd does when it imports the archive. Therefore, their digests
// match those on a node.
type dockerFiles struct {
	*bundle
	images []dockerImage

	mu sync.Mutex
	// names maps digests in the generated manifests to file names.
	names     map[imageref.Digest]string
	manifests map[imageref.Digest][]byte
}

type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func openDocker(b *bundle) (source, error) {
	raw, err := b.read("manifest.json")
	if err != nil {
		return nil, err
	}
	images, err := parseDoc[[]dockerImage](raw)
	if err != nil {
		return nil, fmt.Errorf("reading manifest.json: %w; the file is damaged, make the archive again", err)
	}
	return &dockerFiles{bundle: b, images: images, names: map[imageref.Digest]string{}, manifests: map[imageref.Digest][]byte{}}, nil
}

func (f *dockerFiles) name() string { return f.label }
func (f *dockerFiles) Close() error { return f.close() }

func (f *dockerFiles) root(ctx context.Context, ref imageref.Ref) (Descriptor, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.find(ctx, ref)
}

func (f *dockerFiles) find(ctx context.Context, ref imageref.Ref) (Descriptor, error) {
	var have []string
	for _, img := range f.images {
		match := len(f.images) == 1 && (len(img.RepoTags) == 0 || isSole(ref))
		for _, tag := range img.RepoTags {
			have = append(have, fullName(tag))
			match = match || sameRef(tag, ref)
		}
		if match {
			return f.manifest(ctx, img)
		}
	}
	slices.Sort(have)
	if isSole(ref) {
		return Descriptor{}, fmt.Errorf("the archive must contain one image but has %d: %s; save only one", len(f.images), orNone(have))
	}
	if len(have) == 0 {
		return Descriptor{}, errors.New("the archive contains no image with a name; tag the image before docker save")
	}
	return Descriptor{}, fmt.Errorf("the archive has no image of that name, only %s; use one of these as ref, or give the image that tag before docker save", orNone(have))
}

func (f *dockerFiles) manifest(ctx context.Context, img dockerImage) (Descriptor, error) {
	config, err := f.descriptorOf(ctx, path.Clean(img.Config), dockerConfig)
	if err != nil {
		return Descriptor{}, err
	}
	layers := []Descriptor{}
	for _, name := range img.Layers {
		d, err := f.descriptorOf(ctx, path.Clean(name), "")
		if err != nil {
			return Descriptor{}, err
		}
		layers = append(layers, d)
	}
	raw, err := json.Marshal(struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Config        Descriptor   `json:"config"`
		Layers        []Descriptor `json:"layers"`
	}{2, dockerManifest, config, layers})
	if err != nil {
		return Descriptor{}, err
	}
	sum := sha256.Sum256(raw)
	d := Descriptor{MediaType: dockerManifest, Digest: imageref.DigestOf(sum[:]), Size: int64(len(raw))}
	f.manifests[d.Digest] = raw
	return d, nil
}

// descriptorOf computes the digest of a file. For a layer, it finds the media type from the first
// bytes.
func (f *dockerFiles) descriptorOf(ctx context.Context, name, mediaType string) (Descriptor, error) {
	r, err := f.file(name)
	if err != nil {
		return Descriptor{}, fmt.Errorf("file %s, which manifest.json lists: %w", name, err)
	}
	defer r.Close()
	br := bufio.NewReaderSize(r, 1<<20)
	if mediaType == "" {
		magic, err := br.Peek(sniffLen)
		if err != nil && err != io.EOF {
			return Descriptor{}, err
		}
		mediaType = dockerLayer
		if c := sniff(magic); c != "" {
			mediaType += "." + c
		}
	}
	h := sha256.New()
	n, err := io.Copy(h, contextReader{ctx, br})
	if err != nil {
		return Descriptor{}, err
	}
	d := Descriptor{MediaType: mediaType, Digest: imageref.DigestOf(h.Sum(nil)), Size: n}
	f.names[d.Digest] = name
	return d, nil
}

func (f *dockerFiles) fetch(ctx context.Context, ref imageref.Ref, d Descriptor, take func(io.Reader) error) error {
	manifest, name, err := f.blob(ctx, ref, d)
	switch {
	case err != nil:
		return err
	case manifest != nil:
		return take(bytes.NewReader(manifest))
	}
	return f.stream(name, take)
}

// blob returns a generated manifest or, for any other blob, the name of its file.
func (f *dockerFiles) blob(ctx context.Context, ref imageref.Ref, d Descriptor) (manifest []byte, name string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if raw, ok := f.manifests[d.Digest]; ok {
		return raw, "", nil
	}
	if f.names[d.Digest] == "" {
		// Another process may have resolved the image: find it in the archive first.
		if _, err := f.find(ctx, ref); err != nil {
			return nil, "", err
		}
	}
	if raw, ok := f.manifests[d.Digest]; ok {
		return raw, "", nil
	}
	name, ok := f.names[d.Digest]
	if !ok {
		return nil, "", errors.New("the blob is no longer in the archive, which was changed: run the command again")
	}
	return nil, name, nil
}
