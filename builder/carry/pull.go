package carry

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"path/filepath"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/artifact"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// PullOptions configures Pull.
type PullOptions struct {
	Options
	// Keys are minisign public keys. Unless the list is empty, one of them must have signed the
	// image. Pull checks this before the download.
	Keys []string
	// Force replaces an existing output.
	Force bool
}

// Pulled is the result of Pull.
type Pulled struct {
	Digest string // digest of the manifest
	Golden string
	Key    string // ID of the key that signed the image, or ""
	// Stored is the size of the compressed image in bytes. Had is the part of it that an earlier
	// run had already fetched.
	Stored, Had int64
}

// InterruptedError is the progress of a failed pull. The next pull continues from there.
type InterruptedError struct {
	Done, Total int64
	Partial     string
}

func (e *InterruptedError) Error() string {
	return fmt.Sprintf("%s of %s are in %s; run the same command again to continue", bytesize.MiB(e.Done), bytesize.MiB(e.Total), e.Partial)
}

const lacks = "the registry lacks a part of the image: push the image again"

// Pull downloads an image into a .raw.zst or .raw file and verifies it. The file appears only when
// it is complete. After an interrupted or failed download, a hidden file in the same directory
// keeps the data; after a failed verification, Pull removes the data.
func Pull(ctx context.Context, ref imageref.Ref, output string, o PullOptions) (*Pulled, error) {
	failed := func(err error) error { return fmt.Errorf("pulling %s: %w", ref, explain(err, lacks)) }
	p := &pull{o: &o, ref: ref}
	// Check the output before contacting the registry.
	out, err := file.Continue(output, 0o666, o.Force)
	if err != nil {
		return nil, err
	}
	p.out = out
	defer func() {
		if p.chunks != nil {
			p.chunks.Close()
		}
	}()
	keep := func() error {
		// An empty file is not worth keeping.
		if st, err := out.Stat(); err == nil && st.Size() == 0 {
			out.Discard()
			return nil
		}
		return out.Keep()
	}
	if err := p.announce(ctx); err != nil {
		keep()
		return nil, failed(err)
	}
	var raw *file.Output
	if !media.IsCompressed(output) {
		if raw, err = file.Create(output, 0o666, o.Force); err != nil {
			keep()
			return nil, err
		}
		defer raw.Discard()
	}
	if err := p.download(ctx, raw); err != nil {
		st, statErr := out.Stat()
		if keep(); statErr != nil || st.Size() == 0 {
			return nil, failed(err)
		}
		if ctx.Err() != nil {
			return nil, &InterruptedError{Done: st.Size(), Total: p.config.Stored, Partial: out.Temp()}
		}
		return nil, fmt.Errorf("%w; the downloaded data is kept: run the same command again to continue", failed(err))
	}
	if err := p.verify(ctx); err != nil {
		if ctx.Err() != nil {
			keep()
			return nil, &InterruptedError{Done: p.config.Stored, Total: p.config.Stored, Partial: out.Temp()}
		}
		out.Discard()
		return nil, failed(err)
	}
	if raw == nil {
		return p.result, out.Commit()
	}
	if err := raw.Commit(); err != nil {
		keep()
		return nil, err
	}
	out.Discard()
	return p.result, nil
}

// pull is the state of one Pull.
type pull struct {
	o      *PullOptions
	ref    imageref.Ref
	repo   *repo
	out    *file.Output
	m      *artifact.Manifest
	config *config
	chunks *media.Chunks
	result *Pulled

	whole int64 // bytes at the beginning of the file that are complete parts
	done  int64 // bytes of the image in the file
	// damaged is the error of a damaged frame in an image that was completely downloaded.
	damaged error
}

// announce fetches the manifest and the config, and verifies the signature.
func (p *pull) announce(ctx context.Context) error {
	var err error
	if p.repo, err = openRepo(ctx, p.ref, transport.PullScope, &p.o.Options); err != nil {
		return err
	}
	var b []byte
	if p.m, b, err = p.repo.manifest(ctx); err != nil {
		return err
	}
	p.result = &Pulled{Digest: string(digestOf(b))}
	if b, err = p.repo.document(ctx, "/blobs/"+string(p.m.Config.Digest), p.m.Config.Digest, "*/*", p.m.Config.Size); err != nil {
		return fmt.Errorf("fetching the config: %w", err)
	}
	if p.config, err = readConfig(b, p.m); err != nil {
		return err
	}
	p.result.Golden, p.result.Stored = p.config.Golden, p.config.Stored
	if len(p.o.Keys) > 0 {
		if p.result.Key, err = p.config.SignedBy(p.o.Keys); err != nil {
			return fmt.Errorf("%w: nothing was downloaded", err)
		}
	}
	return nil
}

// download fetches all parts and hashes their chunks during the download. After a failure, the file
// contains only complete parts.
func (p *pull) download(ctx context.Context, raw *file.Output) error {
	st, err := p.out.Stat()
	if err != nil {
		return err
	}
	if p.whole = st.Size(); p.whole > p.config.Stored {
		p.whole = p.config.Stored
		if err := p.out.Truncate(p.whole); err != nil {
			return err
		}
	}
	if err := file.CheckSpace(filepath.Dir(p.out.Temp()), p.config.Stored-p.whole, "the image"); err != nil {
		return err
	}
	if p.chunks, err = media.NewChunks(p.out.File, p.config.Stored, p.config.Table); err != nil {
		return fmt.Errorf("the image's config is damaged: %w: push the image again", err)
	}
	if raw != nil {
		if err := raw.Truncate(p.chunks.Size()); err != nil {
			return file.Explain(err, filepath.Dir(p.out.Temp()))
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	h := newHasher(p.chunks, raw, filepath.Dir(p.out.Temp()), cancel)
	defer h.stop()
	from := int64(0)
	for i, l := range p.m.Layers {
		if err := p.part(ctx, h, l, from); err != nil {
			if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
				err = cause
			}
			h.stop()
			return errors.Join(fmt.Errorf("part %d of %d: %w", i+1, len(p.m.Layers), err), p.out.Truncate(p.whole))
		}
		from += l.Size
	}
	p.damaged = h.wait()
	return context.Cause(ctx)
}

// partDownload is the state of one part's download.
type partDownload struct {
	artifact.Descriptor
	from int64 // offset of the part in the image
	have int64
	h    hash.Hash
}

// part fetches one part, unless the file already contains it.
func (p *pull) part(ctx context.Context, hashing *hasher, d artifact.Descriptor, from int64) error {
	f := &partDownload{Descriptor: d, from: from, h: sha256.New()}
	if p.whole >= from+d.Size {
		if err := p.rehash(ctx, hashing, f); err != nil {
			return err
		}
		if imageref.DigestOf(f.h.Sum(nil)) == d.Digest {
			p.result.Had += d.Size
			return nil
		}
		p.o.warn("a part of %s that was fetched earlier is damaged, or belongs to another image: fetching it again", p.ref)
	}
	err := p.repo.again(ctx, d.Digest, "fetching that part again", func() error {
		if err := p.drop(hashing, f); err != nil {
			return transfer.Final(err)
		}
		return p.fetch(ctx, hashing, f)
	})
	if err == nil {
		p.whole = from + d.Size
	}
	return err
}

// rehash hashes a part that an earlier run has fetched.
func (p *pull) rehash(ctx context.Context, hashing *hasher, f *partDownload) error {
	buf := make([]byte, 1<<20)
	for f.have < f.Size {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := p.out.ReadAt(buf[:min(int64(len(buf)), f.Size-f.have)], f.from+f.have)
		if n == 0 {
			return fmt.Errorf("reading %s: %w", p.out.Temp(), err)
		}
		p.took(hashing, f, buf[:n])
	}
	return nil
}

// took hashes and counts new bytes of a part.
func (p *pull) took(hashing *hasher, f *partDownload, b []byte) {
	f.h.Write(b)
	f.have += int64(len(b))
	p.done += int64(len(b))
	hashing.ready(f.from + f.have)
	p.o.progress("pull", p.done, p.config.Stored)
}

// drop removes a part and everything after it from the file.
func (p *pull) drop(hashing *hasher, f *partDownload) error {
	if err := p.out.Truncate(f.from); err != nil {
		return err
	}
	p.whole = f.from
	hashing.rewind(f.from)
	p.done -= f.have
	f.have = 0
	f.h.Reset()
	return nil
}

// fetch downloads a part and compares its digest.
func (p *pull) fetch(ctx context.Context, hashing *hasher, f *partDownload) error {
	resp, err := p.repo.request(ctx, http.MethodGet, p.repo.url("/blobs/"+string(f.Digest)), nil, nil, 0, http.StatusOK)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := p.save(hashing, f, resp.Body); err != nil {
		return err
	}
	got := imageref.DigestOf(f.h.Sum(nil))
	if got == f.Digest {
		return nil
	}
	if err := p.drop(hashing, f); err != nil {
		return transfer.Final(err)
	}
	return transfer.Final(fmt.Errorf("%s sent bytes that do not match digest %s (they have %s): the blob is damaged, or was changed in transit: push the image again", p.ref.Domain, f.Digest, got))
}

// save writes the response body to the file.
func (p *pull) save(hashing *hasher, f *partDownload, body io.Reader) error {
	buf := make([]byte, 256<<10)
	for f.have < f.Size {
		n, err := body.Read(buf[:min(int64(len(buf)), f.Size-f.have)])
		if n > 0 {
			if _, err := p.out.WriteAt(buf[:n], f.from+f.have); err != nil {
				return transfer.Final(fmt.Errorf("writing %s: %w", p.out.Temp(), file.Explain(err, filepath.Dir(p.out.Temp()))))
			}
			p.took(hashing, f, buf[:n])
			p.out.WriteBehind(f.from + f.have)
		}
		if err == io.EOF && f.have < f.Size {
			err = io.ErrUnexpectedEOF
		}
		if err != nil && f.have < f.Size {
			return err
		}
	}
	return nil
}

// verify checks that the downloaded image matches its config and has the right golden digest.
func (p *pull) verify(ctx context.Context) error {
	if p.damaged != nil {
		return fmt.Errorf("%w: push the image again", p.damaged)
	}
	g, err := media.OpenFile(p.out.File, p.ref.String())
	if err != nil {
		return err
	}
	defer g.Close()
	desc, err := g.Descriptor()
	if err != nil {
		return err
	}
	if desc.Golden != p.config.Golden || desc.Signature != p.config.Signature || string(desc.ImageInfo) != string(p.config.ImageInfo) {
		return errors.New("the image does not match its config: do not use it, and ask the person who pushed it")
	}
	return g.VerifyChunks(ctx, p.chunks)
}

// rawDisk is the uncompressed output. A failed write cancels the pull.
type rawDisk struct {
	f      *os.File
	dir    string
	cancel context.CancelCauseFunc
}

func (r rawDisk) WriteAt(b []byte, off int64) (int, error) {
	n, err := r.f.WriteAt(b, off)
	if err != nil {
		r.cancel(fmt.Errorf("writing the image: %w", file.Explain(err, r.dir)))
	}
	return n, err
}
