package carry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/artifact"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// Reader reads ranges of an image in a registry, as machines do for an update. It verifies nothing.
type Reader struct {
	ctx  context.Context
	repo *repo
	m    *artifact.Manifest
}

// OpenReader opens the image to which a reference points.
func OpenReader(ctx context.Context, ref imageref.Ref, o Options) (*Reader, error) {
	r := &Reader{ctx: ctx}
	var err error
	if r.repo, err = openRepo(ctx, ref, transport.PullScope, &o); err == nil {
		r.m, _, err = r.repo.manifest(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", ref, explain(err, lacks))
	}
	return r, nil
}

// Size returns the size of the compressed image in bytes.
func (r *Reader) Size() int64 { return r.m.Stored() }

// ReadAt reads a range of the compressed image.
func (r *Reader) ReadAt(b []byte, off int64) (n int, err error) {
	for _, x := range r.m.Ranges(off, int64(len(b))) {
		got, err := r.part(b[n:n+int(x.To-x.Off)], r.m.Layers[x.Part], x.Off)
		if n += got; err != nil {
			return n, fmt.Errorf("reading %s: %w", r.repo.ref, explain(err, lacks))
		}
	}
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// errNoRanges means that the registry ignores the requested range and sends the whole blob.
var errNoRanges = errors.New("the registry does not support range requests, so machines cannot be updated from it: use another registry, or a web server")

// part reads a range of one part.
func (r *Reader) part(b []byte, d artifact.Descriptor, off int64) (n int, err error) {
	err = r.repo.again(r.ctx, d.Digest, "", func() error {
		header := http.Header{"Range": {fmt.Sprintf("bytes=%d-%d", off+int64(n), off+int64(len(b))-1)}}
		resp, err := r.repo.request(r.ctx, http.MethodGet, r.repo.url("/blobs/"+string(d.Digest)), header, nil, 0, http.StatusPartialContent, http.StatusOK)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return transfer.Final(errNoRanges)
		}
		if want := fmt.Sprintf("bytes %d-%d/%d", off+int64(n), off+int64(len(b))-1, d.Size); resp.Header.Get("Content-Range") != want {
			return transfer.Final(fmt.Errorf("the registry returned the range %q, expected %q", resp.Header.Get("Content-Range"), want))
		}
		got, err := io.ReadFull(resp.Body, b[n:])
		n += got
		return err
	})
	return n, err
}
