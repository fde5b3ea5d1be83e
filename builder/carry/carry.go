// Package carry pushes golden images to container registries as OCI artifacts, and pulls them.
//
// An artifact is a manifest, a config blob and the compressed image (.raw.zst), cut into a few
// large parts of complete frames. The config blob contains the image's golden digest, its
// signature, image.json and its frame table. With it, a reader can verify the signature before it
// downloads the image, and hash frames during the download.
//
// Invariants:
//
//   - The same image gives the same artifact, byte for byte.
//   - The manifest is pushed last: a tag always points to a complete, verified image, either the
//     previous one or the new one.
//   - A file gets its name only after its golden digest was verified.
//   - A failed pull repeats at most one part, and a failed push at most two. Parts that the registry
//     has are not sent, and an interrupted download continues with the next part, even in another
//     run.
//   - An image with a Site in it is neither pushed nor pulled.
package carry

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/registry"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/artifact"
)

// PartSize is the largest size of a part in bytes. It is small enough that sending one part again
// costs little, and large enough that an image has few parts.
const PartSize = 128 << 20

// Options configures the access to a registry.
type Options struct {
	// Insecure allows plain HTTP, and certificates that cannot be verified.
	Insecure bool
	// AuthFile is a docker config.json. If it is empty, the user's own file is used.
	AuthFile string
	// Stall is how long the registry may send nothing before a request fails; 0 means 30 s.
	Stall time.Duration
	// RetryWait is the pause before the first retry; 0 means 1 s.
	RetryWait time.Duration
	// Progress, if set, is called during a step with the bytes done so far.
	Progress func(step string, done, total int64)
	// Warn, if set, is called with the cause of a delay.
	Warn     func(text string)
	partSize int64 // 0 means PartSize
}

func (o *Options) warn(format string, a ...any) {
	if o.Warn != nil {
		o.Warn(fmt.Sprintf(format, a...))
	}
}

func (o *Options) progress(step string, done, total int64) {
	if o.Progress != nil {
		o.Progress(step, done, total)
	}
}

// config is the content of the config blob.
type config struct {
	Version int `json:"version"`
	media.Descriptor
	// Stored is the size of the compressed image in bytes. Table contains the bytes of the image
	// after its last frame.
	Stored int64  `json:"stored"`
	Table  []byte `json:"table"`
}

const configVersion = 1

func digestOf(b []byte) imageref.Digest {
	sum := sha256.Sum256(b)
	return imageref.DigestOf(sum[:])
}

func encode(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encoding a %T: %w", v, err)
	}
	return b, nil
}

// readManifest decodes a manifest. A response that is not a JSON object does not come from a
// registry.
func readManifest(b []byte) (*artifact.Manifest, error) {
	if !bytes.HasPrefix(bytes.TrimSpace(b), []byte("{")) {
		return nil, registry.ErrNoManifest
	}
	return artifact.Read(b)
}

// readConfig decodes the config blob and checks it against the manifest.
func readConfig(b []byte, m *artifact.Manifest) (*config, error) {
	var c config
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("the image's config is damaged: %w: push the image again", err)
	}
	if c.Version < 1 {
		return nil, errors.New("the image's config is damaged: it has no version: push the image again")
	}
	if c.Version > configVersion {
		return nil, fmt.Errorf("a newer edgebake pushed this image: the config has version %d, but this edgebake supports only version %d: use the edgebake that pushed it, or a newer one", c.Version, configVersion)
	}
	if sum := m.Stored(); sum != c.Stored || c.Stored > artifact.MaxStored || int64(len(c.Table)) >= c.Stored {
		return nil, fmt.Errorf("the parts have %d bytes, but the config lists %d: push the image again", m.Stored(), c.Stored)
	}
	return &c, nil
}

// words returns the flags and phrases that errors of push and pull contain as a fix.
func words(lacks string) registry.Words {
	return registry.Words{
		Login:    "log in to the registry, or name a file with credentials (--auth-file)",
		AuthFile: "--auth-file",
		Insecure: "add --insecure",
		Lacks:    lacks,
	}
}

// explain adds a fix to an error of the registry.
func explain(err error, lacks string) error {
	var answered *registry.Error
	if errors.As(err, &answered) || errors.Is(err, registry.ErrAuthFile) || errors.Is(err, registry.ErrNoManifest) {
		if fix := registry.Fix(err, words(lacks)); fix != "" {
			return fmt.Errorf("%w; %s", err, fix)
		}
	}
	return err
}
