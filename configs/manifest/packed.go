package manifest

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/strict"
)

// File is a file of Kubernetes objects that a Cluster lists in manifests.
type File struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

// maxManifests is the largest unpacked size of all manifests in bytes, and maxManifestFiles their
// largest number.
const (
	maxManifests     = 32 << 20
	maxManifestFiles = 10_000
)

// Pack packs manifests for a Site as JSON, gzip and base64. Without compression, the
// CustomResourceDefinitions of network plugins and OpenYurt, which have hundreds of kilobytes,
// would not fit in a slot. The same files always give the same text.
func Pack(all []File) (strict.Secret, error) {
	if len(all) == 0 {
		return strict.Secret{}, nil
	}
	if len(all) > maxManifestFiles {
		return strict.Secret{}, fmt.Errorf("packing the manifests: there are %d files, at most %d are accepted; combine some", len(all), maxManifestFiles)
	}
	text, err := json.Marshal(all)
	if err != nil {
		return strict.Secret{}, fmt.Errorf("packing the manifests: %w", err)
	}
	if len(text) > maxManifests {
		return strict.Secret{}, fmt.Errorf("packing the manifests: together they have %s, at most %s are accepted", bytesize.MiB(int64(len(text))), bytesize.MiB(maxManifests))
	}
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err == nil {
		_, err = z.Write(text)
	}
	if err == nil {
		err = z.Close()
	}
	if err != nil {
		return strict.Secret{}, fmt.Errorf("packing the manifests: %w", err)
	}
	return strict.NewSecret(base64.StdEncoding.EncodeToString(b.Bytes())), nil
}

// Unpack unpacks the result of Pack.
func Unpack(packed strict.Secret) ([]File, error) {
	if packed.IsZero() {
		return nil, nil
	}
	raw, err := base64.StdEncoding.DecodeString(packed.Reveal())
	if err != nil {
		return nil, errors.New("not base64")
	}
	z, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return nil, errors.New("not gzip data")
	}
	text, err := io.ReadAll(io.LimitReader(z, maxManifests+1))
	switch {
	case err != nil:
		return nil, errors.New("damaged gzip data")
	case len(text) > maxManifests:
		return nil, fmt.Errorf("more than %s when unpacked", bytesize.MiB(maxManifests))
	}
	var all []File
	dec := json.NewDecoder(bytes.NewReader(text))
	if t, err := dec.Token(); err != nil || t != json.Delim('[') {
		return nil, errNoManifests
	}
	// Decode the files one by one: a list of empty items would need ten times as much memory as its
	// text.
	for dec.More() {
		var m File
		if err := dec.Decode(&m); err != nil {
			return nil, errNoManifests
		}
		if len(all) == maxManifestFiles {
			return nil, fmt.Errorf("more than %d files", maxManifestFiles)
		}
		all = append(all, m)
	}
	if _, err := dec.Token(); err != nil {
		return nil, errNoManifests
	}
	return all, nil
}

var errNoManifests = errors.New("not a list of manifests")

// CheckPacked reports the problems of packed manifests.
func CheckPacked(path string, packed strict.Secret, probs *strict.Problems) {
	all, err := Unpack(packed)
	if err != nil {
		probs.Add(path, "%v: write the Site again with `edgebake cluster sites`", err)
	}
	for _, m := range all {
		if len(*probs) > strict.MaxProblems {
			return // report only the first
		}
		for _, p := range Check(m.Name, []byte(m.Text)) {
			probs.Add(path, "%v", p)
		}
	}
}
