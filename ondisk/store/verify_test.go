package store

import (
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"testing"
)

// TestManifestOfAnIndex checks that of several manifests that labels of an index refer to, the
// first one in the index is verified, independently of the order of the labels.
func TestManifestOfAnIndex(t *testing.T) {
	blobs := map[string]string{} // by path
	digest := func(text string) string {
		d := fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(text)))
		blobs[BlobPath(d)] = text
		return d
	}
	other, first, second := digest(`{"layers": []}`), digest(`{"config": {"digest": "first"}}`), digest(`{"config": {"digest": "second"}}`)
	entry := func(digest string) string { return `{"digest": "` + digest + `", "platform": {"os": "linux"}}` }
	index := digest(`{"manifests": [` + strings.Join([]string{entry(other), entry(first), entry(second)}, ", ") + `]}`)
	v := &verifier{
		Files:        Files{Open: func(name string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(blobs[name])), nil }},
		blobByDigest: map[string]*Blob{first: {Digest: first}, second: {Digest: second}},
	}
	target := &Blob{Digest: index, Labels: map[string]string{LabelGCManifest + "0": other, LabelGCManifest + "1": second, LabelGCManifest + "2": first}}
	for range 50 {
		blob, doc, err := v.manifest(target)
		if err != nil || blob.Digest != first || doc.Config.Digest != "first" {
			t.Fatalf("%+v %+v %v", blob, doc, err)
		}
	}
}
