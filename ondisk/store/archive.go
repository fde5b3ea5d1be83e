package store

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// archiveBlobs is the directory of blobs in an OCI archive.
const archiveBlobs = "blobs/sha256/"

// VerifyArchive checks an OCI archive of one platform (image store mode import): containerd on the
// node must not reject it. Each blob must have its digest. index.json and all manifests, configs
// and layers must exist, with the sizes in their descriptors.
func VerifyArchive(r io.ReaderAt, size int64) error {
	blobs, err := archiveFiles(r, size)
	if err != nil {
		return err
	}
	index, ok := blobs["index.json"]
	if !ok {
		return errors.New("there is no index.json")
	}
	var errs []error
	var follow func(doc *io.SectionReader, what string, depth int)
	check := func(d ocispec.Descriptor, what string) *io.SectionReader {
		blob := blobs[string(d.Digest)]
		switch {
		case blob == nil:
			errs = append(errs, fmt.Errorf("%s %s is missing", what, d.Digest))
		case blob.Size() != d.Size:
			errs = append(errs, fmt.Errorf("%s %s has %d bytes, but its descriptor says %d", what, d.Digest, blob.Size(), d.Size))
		}
		return blob
	}
	follow = func(doc *io.SectionReader, what string, depth int) {
		var m struct {
			Manifests []ocispec.Descriptor `json:"manifests"`
			Config    *ocispec.Descriptor  `json:"config"`
			Layers    []ocispec.Descriptor `json:"layers"`
		}
		if err := json.NewDecoder(io.LimitReader(doc, 8<<20)).Decode(&m); err != nil {
			errs = append(errs, fmt.Errorf("reading %s: %w", what, err))
			return
		}
		for _, d := range m.Manifests {
			// An index may also list manifests of other platforms, which are not in the archive.
			if depth > 0 && blobs[string(d.Digest)] == nil {
				continue
			}
			if blob := check(d, "manifest"); blob != nil && depth < maxIndexes {
				follow(blob, "manifest "+string(d.Digest), depth+1)
			}
		}
		if m.Config != nil {
			check(*m.Config, "config")
		}
		for _, l := range m.Layers {
			check(l, "layer")
		}
	}
	follow(index, "index.json", 0)
	return errors.Join(errs...)
}

// maxIndexes is the maximum nesting of indexes.
const maxIndexes = 8

// archiveFiles returns index.json, by name, and the blobs of an archive, by digest.
func archiveFiles(r io.ReaderAt, size int64) (map[string]*io.SectionReader, error) {
	found := map[string]*io.SectionReader{}
	sr := io.NewSectionReader(r, 0, size)
	tr := tar.NewReader(sr)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
		at, err := sr.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, err
		}
		content := io.NewSectionReader(r, at, h.Size)
		if h.Name == "index.json" {
			found[h.Name] = content
		}
		name, ok := strings.CutPrefix(h.Name, archiveBlobs)
		if !ok || name == "" {
			continue
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, tr); err != nil {
			return nil, err
		}
		if got := hex.EncodeToString(sum.Sum(nil)); got != name {
			return nil, fmt.Errorf("blob sha256:%s has digest sha256:%s", name, got)
		}
		found["sha256:"+name] = content
	}
}
