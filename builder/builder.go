// Package builder turns an Image into a golden disk image.
//
// Resolve pins every input and returns a Plan. It copies local files and overlays into the cache,
// but neither downloads nor compiles other inputs. With Options.Update, it first forgets the cached
// Debian base, so that the build makes a new one. BuildEach fetches or makes the inputs of a plan,
// merges them with the files of package overlays, and writes the disk. If a Job has no plan,
// BuildEach first resolves its Image.
//
// The same plan always gives the same bytes: they do not depend on the clock, on random numbers or
// on paths of the build computer. No step needs root.
package builder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Options configures a build.
type Options struct {
	// Dir is the directory of the Image document or of the plan's file. Relative paths in the
	// document are relative to it.
	Dir   string
	Cache *fetch.Cache
	// Version is the version of the running edgebake. It is also the version of edgebake's own
	// programs that are compiled from the module proxy, unless Published is set.
	Version string
	// Published is the module version if edgebake was compiled by `go install`, or "".
	Published string
	// Lock, if not nil, contains pinned inputs. Locked rejects every input that is not in the lock
	// or in the plan.
	Lock   *plan.Lock
	Locked bool
	// RootRoom is the size of the root partitions of machines in the field, in bytes; 0 means
	// unknown. The build warns if the new root is larger.
	RootRoom int64
	// Update makes a new base even if the cache has one, since the archive may have newer packages.
	// Lock must be nil.
	Update bool
	// Base is the file of an exported base to use instead of making one.
	Base string
	// Output is the image to write: .raw or .raw.zst. Force replaces an existing file.
	Output string
	Force  bool
	// Sign, if set, signs the image: its golden digest and image.json.
	Sign func(golden string, imageInfo []byte) (string, error)
	// SignIndex, if set, signs the index of a compressed image's chunks.
	SignIndex func(body []byte) (string, error)
	// Events receives the progress. Several goroutines call it, but never at the same time.
	Events func(Event)
	// ShowsDetails means that Events prints the output of programs, so errors do not repeat it.
	ShowsDetails bool
}

// Event is the progress of a step.
type Event struct {
	// Arch is the architecture of the image.
	Arch string `json:"arch,omitempty"`
	// Step is the name of the step: "base", "kubelet", "write".
	Step string `json:"step"`
	// State is start, progress, log, detail, warning or done.
	State string `json:"state"`
	Text  string `json:"text,omitempty"`
	// Done and Total are in bytes. A Total of 0 is unknown.
	Done  int64 `json:"done,omitempty"`
	Total int64 `json:"total,omitempty"`
	// Seconds is the duration of a step that is done.
	Seconds float64 `json:"seconds,omitempty"`
}

// States of an Event.
const (
	StateStart    = "start"
	StateProgress = "progress"
	StateLog      = "log"
	StateDetail   = "detail" // a line of a program's output
	StateWarning  = "warning"
	StateDone     = "done"
)

// buildEnv is the state of one image's build. Its methods report events and timings, and read local
// files.
type buildEnv struct {
	Options
	arch  string
	begun time.Time  // for the report's timings only
	mu    sync.Mutex // guards Events, steps and kept
	steps []StepTime
	kept  error // a LeftoverError
}

func newBuildEnv(ctx context.Context, arch string, o Options) *buildEnv {
	r := &buildEnv{Options: o, arch: arch, begun: now()}
	if o.Cache != nil {
		o.Cache.Until(ctx)
		if o.Locked {
			o.Cache.HashAll()
		}
		r.watchCache()
	}
	return r
}

// LeftoverError lists the files that an interrupted or failed build could not remove.
type LeftoverError struct{ Err error }

func (e *LeftoverError) Error() string { return e.Err.Error() }
func (e *LeftoverError) Unwrap() error { return e.Err }

// keep records an error about files that could not be removed, as a LeftoverError.
func (r *buildEnv) keep(err error) {
	if err == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept = errors.Join(r.kept, &LeftoverError{err})
}

// watchCache reports damaged files in the cache as warnings of this build.
func (r *buildEnv) watchCache() {
	r.Cache.OnDamage(func(sha string) {
		r.event(Event{Step: "cache", State: StateWarning, Text: fmt.Sprintf("cached input %.12s was damaged and is fetched or made again", sha)})
	})
}

// path resolves a path of the Image document, which is relative to the document's directory.
func (r *buildEnv) path(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(r.Dir, p)
}

func (r *buildEnv) event(e Event) {
	if r.Events == nil {
		return
	}
	e.Arch = r.arch
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Events(e)
}

// step reports the progress of one part of a build.
type step struct {
	r     *buildEnv
	name  string
	start time.Time
}

// StepTime is the duration of a step, for the report. Reports of two builds of a plan differ only
// in these times.
type StepTime struct {
	Step string `json:"step"`
	// Start is the time since the start of the build, in seconds.
	Start   float64 `json:"start"`
	Seconds float64 `json:"seconds"`
}

func (r *buildEnv) startStep(name, text string) *step {
	r.event(Event{Step: name, State: StateStart, Text: text})
	return &step{r: r, name: name, start: now()}
}

// now returns the time for durations in reports and progress. No byte of an image depends on it.
func now() time.Time { return time.Now() }

func (s *step) log(line string) {
	s.r.event(Event{Step: s.name, State: StateLog, Text: line})
}

// detail reports a line of a program's output.
func (s *step) detail(line string) {
	s.r.event(Event{Step: s.name, State: StateDetail, Text: line})
}

func (s *step) warn(format string, args ...any) {
	s.r.event(Event{Step: s.name, State: StateWarning, Text: fmt.Sprintf(format, args...)})
}

func (s *step) progress(done, total int64) {
	s.r.event(Event{Step: s.name, State: StateProgress, Done: done, Total: max(total, 0)})
}

func (s *step) done() {
	t := now().Sub(s.start).Seconds()
	s.r.mu.Lock()
	s.r.steps = append(s.r.steps, StepTime{s.name, s.start.Sub(s.r.begun).Seconds(), t})
	s.r.mu.Unlock()
	s.r.event(Event{Step: s.name, State: StateDone, Seconds: t})
}

// Write reports the output of child processes as details.
func (s *step) Write(p []byte) (int, error) {
	for line := range strings.Lines(string(p)) {
		if line = strings.TrimSpace(line); line != "" {
			s.detail(line)
		}
	}
	return len(p), nil
}

// importNamed imports a file named by the Image into the cache. The error for a missing file says
// where relative paths start.
func (r *buildEnv) importNamed(ctx context.Context, path, want string) (string, error) {
	sha, err := r.importFile(ctx, r.path(path), want)
	return sha, notThere(err)
}

// importFile imports a local file into the cache. An unchanged file (same inode, size and
// change time) is not read again, unless the build is locked.
func (r *buildEnv) importFile(ctx context.Context, path, want string) (string, error) {
	if want != "" && r.Cache.Has(want) {
		return want, nil
	}
	if fi, err := os.Stat(path); err == nil && !fi.Mode().IsRegular() {
		return "", fmt.Errorf("%s is not a file", path) // opening a named pipe would block forever
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sha, err := r.Cache.ImportFile(ctx, f, r.Locked)
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", path, err)
	}
	if want != "" && sha != want {
		size, err := r.Cache.Size(sha)
		if err != nil {
			return "", err
		}
		return "", fmt.Errorf("reading %s: %w; restore the file, or correct its sha256", path, &fetch.DigestError{Want: want, Got: sha, Size: size})
	}
	return sha, nil
}

// packDir packs a directory that the Image names as a tar file in the cache.
func (r *buildEnv) packDir(ctx context.Context, dir string, date time.Time) (string, error) {
	return r.Cache.Import(ctx, func(ctx context.Context, w io.Writer) error {
		return tree.PackDir(ctx, w, r.path(dir), date)
	})
}

// canonical encodes v as JSON. Equal values give equal bytes.
func canonical(v any) (json.RawMessage, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encoding as JSON: %w", err)
	}
	return b, nil
}
