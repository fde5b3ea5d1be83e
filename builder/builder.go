// Package builder turns an Image into a golden disk image.
//
// Resolve pins every input and returns a Plan. It copies local files and overlays
// into the cache; it neither downloads nor compiles the other inputs. With
// Options.Update the cache forgets the base first. BuildEach resolves, fetches or
// makes the inputs, merges them with what package overlays renders, and writes
// the disk.
//
// The same plan gives the same bytes: none depends on the clock, on a random
// number or on a path of the host. No step needs root.
package builder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Options of a build.
type Options struct {
	// Dir is the directory of the Image document; its relative paths start
	// there.
	Dir   string
	Cache *fetch.Cache
	// Version is the running edgebake's. It is told, and decides nothing.
	Version string
	// Published is the version of our module that the running edgebake was
	// fetched in by `go install`, empty where it was not.
	Published string
	// Lock, where there is one, pins inputs. Locked rejects every input the
	// lock does not have.
	Lock   *plan.Lock
	Locked bool
	// RootRoom is the room for a root that machines in the field have; a larger
	// one gives a warning. 0: not known.
	RootRoom int64
	// Update makes a base anew instead of taking the one in the cache: the
	// archive may have newer packages by now. Lock must be nil.
	Update bool
	// Base is an exported base, used instead of making it.
	Base string
	// Output is the image to write, .raw or .raw.zst. Force replaces it.
	Output string
	Force  bool
	// Sign, where set, signs the image: its golden digest and image.json.
	Sign func(golden string, imageInfo []byte) (string, error)
	// Events tells what is going on. It is called from several goroutines,
	// one at a time.
	Events func(Event)
	// ShowsDetails says that Events prints what called programs say, so that an
	// error need not say it again.
	ShowsDetails bool
}

// Event is one step's news.
type Event struct {
	// Arch is the architecture of the image that is worked on.
	Arch string `json:"arch,omitempty"`
	// Step names what is worked on: "base", "kubelet", "write".
	Step string `json:"step"`
	// State is start, progress, log, detail, warning or done.
	State string `json:"state"`
	Text  string `json:"text,omitempty"`
	// Done and Total are bytes; Total is 0 where it is not known.
	Done  int64 `json:"done,omitempty"`
	Total int64 `json:"total,omitempty"`
	// Seconds the step took, when done.
	Seconds float64 `json:"seconds,omitempty"`
}

// States of an Event.
const (
	StateStart    = "start"
	StateProgress = "progress"
	StateLog      = "log"
	StateDetail   = "detail" // a line of a program that was called
	StateWarning  = "warning"
	StateDone     = "done"
)

// build is one image on its way.
type build struct {
	Options
	img   *configs.Image
	begun time.Time // for the report's timings only
	date  time.Time
	plan  *plan.Plan
	// pinned are the container images to take on board.
	pinned []images.Pinned
	files  []tree.Layer // what Image.files makes
	// base is the tree of the base, where checkBase has looked into it.
	base struct {
		sha   string
		nodes []tree.Node
	}
	// given is the tar of Options.Base, uncompressed, once it is found to be the base
	// that the plan has.
	given string
	// cni is the network configuration that the user brings, and plugins what
	// it calls; nil where there is none.
	cni     []byte
	plugins []string
	origins map[string]origin   // of inputs and layers, by name
	makes   map[string]makeFunc // how inputs without bytes get them
	// checkNames asks the archive for what a base is made of.
	checkNames func(context.Context) error
	mu         sync.Mutex // guards Events, plan.Inputs, steps and kept
	steps      []StepTime
	kept       error // a LeftoverError
}

// LeftoverError is what a build that was interrupted or has failed could not
// remove.
type LeftoverError struct{ Err error }

func (e *LeftoverError) Error() string { return e.Err.Error() }
func (e *LeftoverError) Unwrap() error { return e.Err }

// keep notes what could not be removed.
func (b *build) keep(err error) {
	if err == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.kept = errors.Join(b.kept, &LeftoverError{err})
}

// makeFunc brings an input's bytes into the cache.
type makeFunc func(ctx context.Context, step *step) (sha string, err error)

func newBuild(ctx context.Context, img *configs.Image, o Options) (*build, error) {
	if err := img.Validate().Err(); err != nil {
		return nil, err
	}
	b := &build{Options: o, img: img, begun: now(), date: img.SourceTime(), origins: map[string]origin{}, makes: map[string]makeFunc{}}
	if o.Cache != nil {
		o.Cache.Until(ctx)
		if o.Locked {
			o.Cache.HashAll()
		}
		b.watchCache()
	}
	return b, nil
}

// watchCache has damaged inputs told of as this build's from now on.
func (b *build) watchCache() {
	b.Cache.OnDamage(func(sha string) {
		b.event(Event{Step: "cache", State: StateWarning, Text: fmt.Sprintf("cached input %.12s was damaged and is fetched or made again", sha)})
	})
}

// path is a path of the Image document, seen from here.
func (b *build) path(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(b.Dir, p)
}

func (b *build) event(e Event) {
	if b.Events == nil {
		return
	}
	e.Arch = b.img.Arch
	b.mu.Lock()
	defer b.mu.Unlock()
	b.Events(e)
}

// step reports on one part of the work.
type step struct {
	b     *build
	name  string
	start time.Time
}

// StepTime is how long a step took, for the report's timings. It is the one
// thing that differs between two runs.
type StepTime struct {
	Step string `json:"step"`
	// Start is when it began, in seconds since the build did.
	Start   float64 `json:"start"`
	Seconds float64 `json:"seconds"`
}

func (b *build) step(name, text string) *step {
	b.event(Event{Step: name, State: StateStart, Text: text})
	return &step{b: b, name: name, start: now()}
}

// now is for durations in reports and progress only; no byte of an image
// depends on it.
func now() time.Time { return time.Now() }

func (s *step) log(line string) {
	s.b.event(Event{Step: s.name, State: StateLog, Text: line})
}

// detail is a line of a program that was called.
func (s *step) detail(line string) {
	s.b.event(Event{Step: s.name, State: StateDetail, Text: line})
}

func (s *step) warn(format string, args ...any) {
	s.b.event(Event{Step: s.name, State: StateWarning, Text: fmt.Sprintf(format, args...)})
}

func (s *step) progress(done, total int64) {
	s.b.event(Event{Step: s.name, State: StateProgress, Done: done, Total: max(total, 0)})
}

func (s *step) done() {
	t := now().Sub(s.start).Seconds()
	s.b.mu.Lock()
	s.b.steps = append(s.b.steps, StepTime{s.name, s.start.Sub(s.b.begun).Seconds(), t})
	s.b.mu.Unlock()
	s.b.event(Event{Step: s.name, State: StateDone, Seconds: t})
}

// Write lets child processes' output become details.
func (s *step) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		if line = strings.TrimSpace(line); line != "" {
			s.detail(line)
		}
	}
	return len(p), nil
}

// importNamed brings a file that the Image names into the cache.
func (b *build) importNamed(ctx context.Context, path, want string) (string, error) {
	sha, err := b.importFile(ctx, b.path(path), want)
	return sha, notThere(err)
}

// importFile brings a local file into the cache. A file that has not changed
// since (same inode, size and change time) is not read again, unless the build is
// locked.
func (b *build) importFile(ctx context.Context, path, want string) (string, error) {
	if want != "" && b.Cache.Has(want) {
		return want, nil
	}
	if fi, err := os.Stat(path); err == nil && !fi.Mode().IsRegular() {
		return "", fmt.Errorf("%s is not a file", path) // a named pipe would hold the build forever
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sha, err := b.Cache.ImportFile(ctx, f, b.Locked)
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", path, err)
	}
	if want != "" && sha != want {
		size, err := b.Cache.Size(sha)
		if err != nil {
			return "", err
		}
		return "", fmt.Errorf("reading %s: %w; put the file there that is meant, or correct its sha256", path, &fetch.DigestError{Want: want, Got: sha, Size: size})
	}
	return sha, nil
}

// canonical is the JSON a digest is made over.
func canonical(v any) (json.RawMessage, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, errors.Join(errors.New("encoding the plan"), err)
	}
	return b, nil
}
