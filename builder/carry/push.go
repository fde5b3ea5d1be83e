package carry

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/artifact"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sync/errgroup"
)

// Pushed is the result of Push.
type Pushed struct {
	// Digest is the manifest's digest: REPOSITORY@Digest always means this image.
	Digest string
	Golden string
	// Parts is the number of parts, and Had the number of parts that the registry already had.
	Parts, Had int
	// Stored is the size of the compressed image in bytes. Sent is the part of it that was sent.
	Stored, Sent int64
}

// Push uploads a golden image to a registry and verifies it during the upload. It sets the tag only
// after both have succeeded.
func Push(ctx context.Context, path string, ref imageref.Ref, o Options) (*Pushed, error) {
	if ref.Digest != "" {
		return nil, fmt.Errorf("pushing to %s: the digest is known only after the push: name a tag, as in %s:1.2.3", ref, ref.Repo())
	}
	g, err := media.Open(path)
	if err != nil {
		return nil, err
	}
	defer g.Close()
	// Lock the image, so that it cannot be stamped while it is sent.
	if err := g.LockShared(); err != nil {
		return nil, err
	}
	desc, err := g.Descriptor()
	if err != nil {
		return nil, fmt.Errorf("pushing image %s: %w", path, err)
	}
	// Log in before compressing, which takes long.
	r, err := openRepo(ctx, ref, transport.PushScope, &o)
	if err != nil {
		return nil, fmt.Errorf("pushing to %s: %w", ref, explain(err, ""))
	}
	packed := g
	if g.Frames() == nil {
		f, err := g.PackFile(ctx, func(done, total int64) { o.progress("compress", done, total) })
		if err != nil {
			return nil, fmt.Errorf("compressing image %s: %w", path, err)
		}
		defer f.Close()
		if packed, err = media.OpenFile(f, path); err != nil {
			return nil, err
		}
		defer packed.Close()
	}
	p := &push{repo: r, g: packed, desc: desc, here: map[imageref.Digest]bool{}, result: &Pushed{Golden: desc.Golden, Stored: packed.Stored()}}
	if err := p.run(ctx); err != nil {
		return nil, err
	}
	return p.result, nil
}

// push is the state of one Push.
type push struct {
	repo   *repo
	g      *media.Image
	desc   media.Descriptor
	result *Pushed
	begun  chan struct{} // closed when the first part can be sent

	mu sync.Mutex
	// here contains the digests of the blobs that were sent or are being sent. Equal parts are sent
	// only once.
	here map[imageref.Digest]bool
	done int64
}

// sideBySide is the number of parts that are sent at the same time: while the registry hashes one,
// it receives another.
const sideBySide = 2

// part is a piece of the compressed image that consists of complete frames.
type part struct {
	artifact.Descriptor
	from int64
}

func (p *push) run(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	// Start to verify only when the first part can be sent, and leave one processor unused while
	// parts are sent. Otherwise, sending would wait for a processor.
	sent := make(chan struct{})
	p.begun = make(chan struct{})
	g.Go(func() error {
		select {
		case <-p.begun:
		case <-gctx.Done():
			return gctx.Err()
		}
		return p.g.Verify(gctx, nil, sent)
	})
	var m *artifact.Manifest
	g.Go(func() (err error) {
		defer close(sent)
		m, err = p.blobs(gctx)
		if err != nil && gctx.Err() == nil {
			err = fmt.Errorf("pushing to %s: %w", p.repo.ref, explain(err, ""))
		}
		return err
	})
	if err := g.Wait(); err != nil {
		return err
	}
	b, err := encode(m)
	if err == nil {
		err = p.repo.again(ctx, "", "", func() error {
			resp, err := p.repo.request(ctx, http.MethodPut, p.repo.url("/manifests/"+p.repo.ref.Tag), http.Header{"Content-Type": {artifact.ManifestType}},
				strings.NewReader(string(b)), int64(len(b)), http.StatusCreated, http.StatusOK, http.StatusAccepted)
			if err == nil {
				resp.Body.Close()
			}
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("pushing to %s: sending the manifest: %w", p.repo.ref, explain(err, ""))
	}
	p.result.Digest = string(digestOf(b))
	p.repo.o.progress("push", p.result.Stored, p.result.Stored)
	return nil
}

// blobs sends all blobs that the registry does not have, and returns the manifest.
func (p *push) blobs(ctx context.Context) (*artifact.Manifest, error) {
	m := &artifact.Manifest{SchemaVersion: 2, MediaType: artifact.ManifestType, ArtifactType: artifact.Type, Annotations: p.annotations()}
	parts := p.cut()
	stem := m.Annotations[titleKey]
	c := config{Version: configVersion, Descriptor: p.desc, Stored: p.g.Stored()}
	ends := p.g.Frames()
	c.Table = make([]byte, p.g.Stored()-ends[len(ends)-1])
	if _, err := p.g.File().ReadAt(c.Table, ends[len(ends)-1]); err != nil {
		return nil, err
	}
	raw, err := encode(c)
	if err != nil {
		return nil, err
	}
	if err := p.parts(ctx, parts); err != nil {
		return nil, err
	}
	for i, part := range parts {
		// Programs that save blobs as files use the titles as file names. Concatenated in this
		// order, the files are the image.
		part.Annotations = map[string]string{titleKey: fmt.Sprintf("%s.raw.zst.%03d", stem, i)}
		m.Layers = append(m.Layers, part.Descriptor)
	}
	p.result.Parts = len(parts)
	m.Config = artifact.Descriptor{MediaType: artifact.ConfigType, Digest: digestOf(raw), Size: int64(len(raw))}
	if err := p.blob(ctx, m.Config, io.NewSectionReader(strings.NewReader(string(raw)), 0, int64(len(raw)))); err != nil {
		return nil, fmt.Errorf("sending the config: %w", err)
	}
	return m, nil
}

// parts sends the parts and sets their digests.
func (p *push) parts(ctx context.Context, parts []part) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(sideBySide)
	digests := p.digests(ctx, parts)
	for i := range parts {
		sum, ok := <-digests
		if !ok {
			break // canceled: the group has the error
		}
		g.Go(func() error {
			if sum.err != nil {
				return sum.err
			}
			d := &parts[i].Descriptor
			d.Digest = sum.digest
			if err := p.blob(ctx, *d, io.NewSectionReader(p.g.File(), parts[i].from, d.Size)); err != nil {
				return fmt.Errorf("sending part %d of %d: %w", i+1, len(parts), err)
			}
			return nil
		})
	}
	return g.Wait()
}

// digestResult is the digest of a part, or an error.
type digestResult struct {
	digest imageref.Digest
	err    error
}

// digests hashes the parts in order, each while the preceding one is sent.
func (p *push) digests(ctx context.Context, parts []part) <-chan digestResult {
	out := make(chan digestResult, 1)
	go func() {
		for i, part := range parts {
			h := sha256.New()
			_, err := io.Copy(h, io.NewSectionReader(p.g.File(), part.from, part.Size))
			if i == 0 {
				close(p.begun)
			}
			select {
			case out <- digestResult{imageref.DigestOf(h.Sum(nil)), err}:
			case <-ctx.Done():
			}
			if err != nil || ctx.Err() != nil {
				close(out)
				return
			}
		}
	}()
	return out
}

const titleKey = "org.opencontainers.image.title"

// annotations returns the manifest's annotations, which registries display.
func (p *push) annotations() map[string]string {
	i := p.g.Info()
	return map[string]string{
		titleKey:                               filepath.Base(i.Name),
		"org.opencontainers.image.created":     time.Unix(i.SourceDate, 0).UTC().Format(time.RFC3339),
		"org.opencontainers.image.description": fmt.Sprintf("edgebake image for %s, Kubernetes %s, containerd %s", i.Arch, i.Kubernetes, i.Containerd),
	}
}

// cut divides the image into parts of complete frames. The last part includes the frame table.
func (p *push) cut() []part {
	size := p.repo.o.partSize
	if size == 0 {
		size = PartSize
	}
	var parts []part
	from, end := int64(0), int64(0)
	add := func() {
		if end > from {
			parts = append(parts, part{artifact.Descriptor{MediaType: artifact.PartType, Size: end - from}, from})
			from = end
		}
	}
	for _, e := range p.g.Frames() {
		if e-from > size {
			add()
		}
		end = e
	}
	end = p.g.Stored()
	add()
	return parts
}

// blob sends a blob, unless the registry has it.
func (p *push) blob(ctx context.Context, d artifact.Descriptor, content *io.SectionReader) error {
	if p.known(d.Digest) {
		p.sent(d.Size)
		return nil
	}
	there, err := p.repo.has(ctx, d)
	if err != nil {
		return err
	}
	if there {
		if d.MediaType == artifact.PartType {
			p.count(func(r *Pushed) { r.Had++ })
			p.sent(d.Size)
		}
		return nil
	}
	u := &upload{p: p, d: d, content: content}
	if err := p.repo.again(ctx, "", "sending it again", func() error { return u.try(ctx) }); err != nil {
		return err
	}
	p.count(func(r *Pushed) { r.Sent += d.Size })
	return nil
}

// known reports whether a blob is already sent or being sent, and otherwise records that it is
// being sent. If sending it fails, the whole push fails.
func (p *push) known(digest imageref.Digest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.here[digest]
	p.here[digest] = true
	return before
}

// count changes the result of Push.
func (p *push) count(change func(*Pushed)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(p.result)
}

// sent adds n bytes to the progress. It never reports that everything is done: run does, after the
// image is verified and tagged.
func (p *push) sent(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	p.repo.o.progress("push", min(p.done, p.result.Stored-1), p.result.Stored)
}

// upload is the upload of one blob, whose content is sent in one request.
type upload struct {
	p       *push
	d       artifact.Descriptor
	content *io.SectionReader
	begun   bool
	counted int64 // bytes already reported as progress
}

func (u *upload) try(ctx context.Context) error {
	if u.begun { // perhaps only the response was lost
		if there, err := u.p.repo.has(ctx, u.d); err != nil || there {
			return err
		}
	}
	u.begun = true
	resp, err := u.p.repo.request(ctx, http.MethodPost, u.p.repo.url("/blobs/uploads/"), nil, nil, 0, http.StatusAccepted)
	if err != nil {
		return err
	}
	resp.Body.Close()
	where, err := at(resp)
	if err != nil {
		return transfer.Final(err)
	}
	if where, err = u.send(ctx, where); err != nil {
		return err
	}
	return u.finish(ctx, where)
}

// send sends the content and returns the URL for the next request.
func (u *upload) send(ctx context.Context, where string) (string, error) {
	header := http.Header{"Content-Type": {"application/octet-stream"}}
	body := &countingReader{r: io.NewSectionReader(u.content, 0, u.d.Size), count: u.count}
	err := transfer.Send(ctx, body, u.p.repo.stall, func(ctx context.Context, body io.Reader) error {
		resp, err := u.p.repo.request(ctx, http.MethodPatch, where, header, body, u.d.Size, http.StatusAccepted, http.StatusNoContent, http.StatusCreated)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if where, err = at(resp); err != nil {
			return transfer.Final(err)
		}
		return nil
	})
	return where, err
}

// count reports the progress since its last call.
func (u *upload) count(at int64) {
	if u.d.MediaType == artifact.PartType && at > u.counted {
		u.p.sent(at - u.counted)
		u.counted = at
	}
}

// finish makes the registry verify the digest and store the blob.
func (u *upload) finish(ctx context.Context, where string) error {
	to, err := url.Parse(where)
	if err != nil {
		return transfer.Final(err)
	}
	q := to.Query()
	q.Set("digest", string(u.d.Digest))
	to.RawQuery = q.Encode()
	resp, err := u.p.repo.request(ctx, http.MethodPut, to.String(), nil, http.NoBody, 0, http.StatusCreated, http.StatusNoContent)
	if err != nil {
		return err
	}
	resp.Body.Close()
	return nil
}

// countingReader is a request body that reports how much of it was sent.
type countingReader struct {
	r     io.Reader
	count func(at int64)
	at    int64
}

func (c *countingReader) Read(p []byte) (int, error) {
	c.count(c.at) // the bytes of the previous read were sent
	n, err := c.r.Read(p)
	c.at += int64(n)
	return n, err
}
