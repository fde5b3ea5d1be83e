package images

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Archives is the alternative to Bake for runtimes whose store edgebake cannot write. It returns
// one OCI archive for each image, in ondisk.ImportImageDir, and their index for firstboot. The
// archives share no blobs, so firstboot can remove each after importing it. Fetch must have stored
// the images with Options.KeepLayers.
func Archives(ctx context.Context, c *fetch.Cache, pinned []Pinned, o Options) (*Result, error) {
	if err := checkSandbox(pinned, o.Sandbox); err != nil {
		return nil, fmt.Errorf("preparing image archives: %w", err)
	}
	dir := strings.TrimPrefix(ondisk.ImportImageDir, "/")
	r := &Result{}
	index := ondisk.ImportIndex{Version: ondisk.ImportIndexVersion}
	t := treeList{date: o.SourceDate}
	elements := strings.Split(dir, "/")
	for i := range elements {
		t.dir(strings.Join(elements[:i+1], "/"), 0o755)
	}
	for n := range pinned {
		p := &pinned[n]
		data, err := archive(ctx, c, p)
		if err != nil {
			return nil, fmt.Errorf("image %s: making its archive: %w", p.Ref, err)
		}
		ref := p.Ref.String()
		names := []string{p.Ref.Repo() + "@" + string(p.named().Digest)}
		if p.Direct {
			names = append(names, p.Ref.Repo()+"@"+string(p.Target.Digest))
		}
		name := fmt.Sprintf("%03d-%s.tar", n, fileName(ref))
		t.file(dir+"/"+name, 0o644, data)
		var size int64
		for _, l := range p.Layers {
			size += l.Size
		}
		index.Archives = append(index.Archives, ondisk.ImportArchive{
			File: name, Ref: ref, Digest: string(p.named().Digest), Size: data.Size, SHA256: data.Blob,
			Platform: "linux/" + o.Arch,
			Names:    names,
			Labels:   map[string]string{store.LabelManaged: "managed", store.LabelPinned: "pinned", store.LabelBaked: "true"},
		})
		r.Images = append(r.Images, ondisk.ImageRef{Ref: ref, Digest: string(p.Target.Digest), Size: size})
		r.Report.Images = append(r.Report.Images, ImageReport{Ref: ref, Digest: string(p.Target.Digest), Size: data.Size, Layers: len(p.Layers)})
		r.Report.Size += data.Size
		r.Report.Layers += len(p.Layers)
	}
	raw, err := json.MarshalIndent(index, "", "  ")
	if err != nil {
		return nil, err
	}
	t.file(dir+"/"+ondisk.ImportIndexFile, 0o644, tree.Bytes(append(raw, '\n')))
	r.Nodes = t.nodes
	return r, nil
}

// fileName converts a reference to a file name.
func fileName(ref string) string {
	s := strings.Map(func(r rune) rune {
		if r == '/' || r == ':' || r == '@' {
			return '_'
		}
		return r
	}, ref)
	return s[:min(len(s), 200)]
}

// archive makes an OCI archive of one image for one platform.
func archive(ctx context.Context, c *fetch.Cache, p *Pinned) (tree.Content, error) {
	annotated := p.named()
	annotated.Annotations = map[string]string{annotationImageName: p.Ref.String(), annotationRefName: p.Ref.String()}
	index, err := json.Marshal(struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Manifests     []Descriptor `json:"manifests"`
	}{2, "application/vnd.oci.image.index.v1+json", []Descriptor{annotated}})
	if err != nil {
		return tree.Content{}, err
	}
	var blobs []Descriptor
	for what, d := range p.stored(true) {
		if err := checkCached(c, d); err != nil {
			return tree.Content{}, fmt.Errorf("%s %s: %w", what, d.Digest, err)
		}
		blobs = append(blobs, d)
	}
	key, err := json.Marshal(struct {
		Kind  string
		Index string
		Blobs []Descriptor
	}{"oci archive 2", string(index), blobs})
	if err != nil {
		return tree.Content{}, err
	}
	sha, err := c.Make(ctx, string(key), func(ctx context.Context, w io.Writer) error {
		tw := tar.NewWriter(w)
		small := func(name string, data []byte) error {
			err := tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data)), Typeflag: tar.TypeReg})
			if err != nil {
				return err
			}
			_, err = tw.Write(data)
			return err
		}
		if err := small("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
			return err
		}
		if err := small("index.json", index); err != nil {
			return err
		}
		done := map[imageref.Digest]bool{}
		for _, d := range blobs {
			if done[d.Digest] {
				continue
			}
			done[d.Digest] = true
			if err := addBlob(ctx, tw, c, d); err != nil {
				return err
			}
		}
		return tw.Close()
	})
	if err != nil {
		return tree.Content{}, err
	}
	f, err := c.OpenBlob(sha)
	if err != nil {
		return tree.Content{}, err
	}
	defer f.Close()
	size, err := sizeOf(f)
	return tree.Content{Blob: sha, Size: size}, err
}

func sizeOf(f io.ReaderAt) (int64, error) {
	s, ok := f.(interface {
		Seek(int64, int) (int64, error)
	})
	if !ok {
		return 0, errors.New("finding the size of a blob: its reader cannot seek")
	}
	return s.Seek(0, io.SeekEnd)
}

func addBlob(ctx context.Context, tw *tar.Writer, c *fetch.Cache, d Descriptor) error {
	sha := d.Digest.Hex()
	f, err := c.OpenBlob(sha)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := tw.WriteHeader(&tar.Header{Name: "blobs/sha256/" + sha, Mode: 0o644, Size: d.Size, Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	_, err = io.Copy(tw, contextReader{ctx, io.NewSectionReader(f, 0, d.Size)})
	return err
}
