// Package reports receives the reports of first boot (report.url of a Site),
// keeps the last one of each machine, and shows them all.
//
// Anybody who knows the receiver's address can send a report about any machine.
// Therefore the size of a report is limited, it is kept as data and shown as
// text, and it never causes an action.
package reports

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/file"
)

// Bounds of what is kept.
const (
	MaxReport = 128 << 10 // bytes of one report; a real one has about 4 KiB
	MaxNodes  = 10_000
	maxText   = 2000 // letters of one text in it
	maxName   = 64   // letters of a phase's name
	maxPhases = 64
	maxBytes  = 64 << 20 // of all that is kept
	// maxOfSender are the machines that one address reports: a site's router stands for
	// all behind it.
	maxOfSender = MaxNodes / 4
)

// Report is the last word of one machine.
type Report struct {
	// Received is when it came, by the receiver's clock; From is the address it
	// came from, which a router may have changed.
	Received time.Time    `json:"received"`
	From     string       `json:"from"`
	State    ondisk.State `json:"state"`
	// Ready: the machine has reported that it is done, now or before.
	Ready bool `json:"ready,omitempty"`

	size int // of its file
}

// Told is a report in short: where first boot is, and what it says of that.
type Told struct {
	Node     string    `json:"node"`
	Result   string    `json:"result"` // as in ondisk.State
	Phase    string    `json:"phase,omitempty"`
	Step     int       `json:"step"` // of the phase, from 1; 0: none
	Steps    int       `json:"steps"`
	Reason   string    `json:"reason,omitempty"`
	Fix      string    `json:"fix,omitempty"`
	Received time.Time `json:"received"`
}

// Tell shortens a report: the phase that failed, waits or runs, else the last.
func (r *Report) Tell() Told {
	s := &r.State
	t := Told{Node: s.Node, Result: s.Result, Steps: len(s.Phases), Received: r.Received}
	for i, p := range s.Phases {
		if t.Phase, t.Step = p.Name, i+1; p.Status != ondisk.PhaseDone {
			t.Reason, t.Fix = cmp.Or(p.Error, p.Waiting), p.Fix
			break
		}
	}
	if t.Reason == "" {
		t.Reason = strings.Join(s.Notes, "; ")
	}
	return t
}

// Store keeps the last report of each machine, in a directory of files.
type Store struct {
	// News, where set, is called with each report that says something new.
	News func(Told)

	dir   string
	mu    sync.Mutex
	all   map[string]Report
	bytes int // of all files
}

// nodeName is what Kubernetes accepts as a Node's name, and a file's name here.
var nodeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

const suffix = ".json"

// Open reads what the directory has. Files that are not reports are left alone.
func Open(dir string) (*Store, error) {
	if _, err := os.ReadDir(dir); err != nil {
		return nil, fmt.Errorf("opening the reports: %w: `edgebake cluster listen` keeps them in its --dir", err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"+suffix))
	if err != nil {
		return nil, fmt.Errorf("opening the reports: %w", err)
	}
	s := &Store{dir: dir, all: map[string]Report{}}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), suffix)
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, fmt.Errorf("reading a report: %w", err)
		}
		var r Report
		if json.Unmarshal(b, &r) == nil && r.State.Node == name && check(&r.State) == nil && len(s.all) < MaxNodes {
			r.size = len(b)
			r.Ready = r.Ready || r.State.Result == ondisk.ResultDone // its file may be older than the field
			s.all[name] = r
			s.bytes += r.size
		}
	}
	return s, nil
}

// ErrFull says that there is no room for another machine.
var ErrFull = fmt.Errorf("there are reports of %d machines, or %d MiB, already, all of machines that were Ready: remove files of machines that are gone", MaxNodes, maxBytes>>20)

// ErrSender says that one address has reported as many machines as it may.
var ErrSender = fmt.Errorf("there are reports of %d machines from this address already, all of machines that were Ready: remove files of machines that are gone", maxOfSender)

// Add keeps a report in place of the machine's former one.
func (s *Store) Add(r Report) error {
	if err := check(&r.State); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before, known := s.all[r.State.Node]
	r.Ready = before.Ready || r.State.Result == ondisk.ResultDone
	b, err := encodeReport(r)
	if err != nil {
		return err
	}
	r.size = len(b)
	if err := s.room(r, known); err != nil {
		return err
	}
	// No sync: a machine reports again.
	if err := file.Swap(filepath.Join(s.dir, r.State.Node+suffix), b); err != nil {
		return fmt.Errorf("keeping the report of %s: %w", r.State.Node, err)
	}
	s.bytes += r.size - s.all[r.State.Node].size
	s.all[r.State.Node] = r
	now, was := r.Tell(), before.Tell()
	was.Received = now.Received
	if s.News != nil && (!known || now != was) {
		s.News(now)
	}
	return nil
}

// encodeReport is a report's file. What HTML takes for markup stays one byte.
func encodeReport(r Report) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(r)
	return b.Bytes(), err
}

// room makes room for a report, where it must at the cost of machines that have never
// been Ready, the oldest first: whoever has one Site can invent machines, and they must
// not keep real ones out. Those of the sender itself go first.
func (s *Store) room(r Report, known bool) error {
	from := senderOf(r.From)
	ofSender := 0
	for _, o := range s.all {
		if !known && senderOf(o.From) == from {
			ofSender++
		}
	}
	if ofSender >= maxOfSender && !s.evict(r.State.Node, func(o Report) bool { return senderOf(o.From) == from }) {
		return ErrSender
	}
	full := func() bool {
		return !known && len(s.all) >= MaxNodes || s.bytes-s.all[r.State.Node].size+r.size > maxBytes
	}
	for full() {
		if !s.evict(r.State.Node, func(Report) bool { return true }) {
			return ErrFull
		}
	}
	return nil
}

// evict removes the oldest report of another machine that has never been Ready.
func (s *Store) evict(but string, which func(Report) bool) bool {
	oldest := ""
	for name, o := range s.all {
		if name == but || o.Ready || !which(o) {
			continue
		}
		if first := s.all[oldest].Received; oldest == "" || o.Received.Before(first) || o.Received.Equal(first) && name < oldest {
			oldest = name
		}
	}
	if oldest == "" {
		return false
	}
	_ = os.Remove(filepath.Join(s.dir, oldest+suffix)) // what stays is read at the next start
	s.bytes -= s.all[oldest].size
	delete(s.all, oldest)
	return true
}

// check rejects what first boot does not send, and takes what terminals obey
// out of the rest.
func check(s *ondisk.State) error {
	if !nodeName.MatchString(s.Node) {
		return fmt.Errorf("node %.40q: want the name of a Node", s.Node)
	}
	switch s.Result {
	case ondisk.ResultRunning, ondisk.ResultWaiting, ondisk.ResultDone, ondisk.ResultFailed:
	default:
		return fmt.Errorf("result %.40q: want running, waiting, done or failed", s.Result)
	}
	if len(s.Phases) > maxPhases || len(s.Notes) > maxPhases {
		return fmt.Errorf("%d phases and %d notes: want at most %d", len(s.Phases), len(s.Notes), maxPhases)
	}
	*s = shown(s)
	return nil
}

// shown is what Tell needs of a state, and nothing else of what was sent.
func shown(s *ondisk.State) ondisk.State {
	out := ondisk.State{Version: s.Version, Node: s.Node, Result: s.Result}
	told := false
	for _, p := range s.Phases {
		kept := ondisk.PhaseState{Name: plainTo(maxName, p.Name), Status: plainTo(maxName, p.Status)}
		if p.Status != ondisk.PhaseDone && !told {
			told = true
			kept.Waiting, kept.Error, kept.Fix = plain(p.Waiting), plain(p.Error), plain(p.Fix)
		}
		out.Phases = append(out.Phases, kept)
	}
	left := maxText
	for _, n := range s.Notes {
		if n = plainTo(left, n); n != "" {
			out.Notes = append(out.Notes, n)
			left = max(0, left-len([]rune(n)))
		}
		if left == 0 {
			break
		}
	}
	return out
}

// All is the last word of each machine, by name.
func (s *Store) All() []Told {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Told
	for _, name := range slices.Sorted(maps.Keys(s.all)) {
		r := s.all[name]
		out = append(out, r.Tell())
	}
	return out
}

// Receiver takes reports that are sent to the path; all else it does not know.
func (s *Store) Receiver(path string, now func() time.Time) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxReport))
		if err != nil {
			http.Error(w, fmt.Sprintf("reading the report: %v", err), http.StatusRequestEntityTooLarge)
			return
		}
		got := Report{Received: now().UTC().Truncate(time.Second), From: r.RemoteAddr}
		if err := json.Unmarshal(body, &got.State); err != nil {
			http.Error(w, "not a report of first boot", http.StatusBadRequest)
			return
		}
		switch err := s.Add(got); {
		case errors.Is(err, ErrFull) || errors.Is(err, ErrSender):
			http.Error(w, err.Error(), http.StatusInsufficientStorage)
		case errors.As(err, new(*os.PathError)) || errors.As(err, new(*os.LinkError)):
			http.Error(w, "the report could not be kept", http.StatusInternalServerError)
		case err != nil:
			http.Error(w, err.Error(), http.StatusBadRequest)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	})
	return mux
}
