// Package reports receives the reports of first boot (report.url of a Site), keeps the last report
// of each machine, and shows them.
//
// A Site written by `edgebake cluster sites` has its own URL, which accepts only its machine's
// name. Sites written by hand share the common URL. Anyone who knows that URL can send a report
// about any machine that has not used its own URL, so these reports may use only a part of the
// space. The size of every report is limited. A report is stored as data and shown as text, and
// never causes an action.
package reports

import (
	"bytes"
	"cmp"
	"crypto/hmac"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
)

// Limits of the reports that are kept.
const (
	MaxReport = 128 << 10 // bytes of one report; a real one has about 4 KiB
	MaxNodes  = 10_000
	maxText   = 2000 // characters of one text in a report
	maxName   = 64   // characters of a phase's name
	maxPhases = 64
	maxBytes  = 64 << 20 // of all reports
	// maxCommon and maxCommonBytes limit the reports sent to the common URL.
	maxCommon, maxCommonBytes = MaxNodes / 2, maxBytes / 2
	// maxOfSender limits the machines that one address can report to the common URL. It is high
	// because all machines behind a site's router share one address.
	maxOfSender = MaxNodes / 4
	// expiry is how long a machine that was Ready is kept without another report. It applies only
	// if space is needed.
	expiry = 30 * 24 * time.Hour
)

// Report is the last report of one machine.
type Report struct {
	// Received is when the report was received, by the receiver's clock. From is the sender's
	// address, which may be a router's.
	Received time.Time    `json:"received"`
	From     string       `json:"from"`
	State    ondisk.State `json:"state"`
	// Ready is set if the machine has ever reported the result done.
	Ready bool `json:"ready,omitempty"`
	// Own is set if the report was sent to the machine's own URL.
	Own bool `json:"own,omitempty"`

	size int // of the report's file, in bytes
}

// Summary is a short form of a report: the phase of first boot, and its reason.
type Summary struct {
	Node     string    `json:"node"`
	Result   string    `json:"result"` // as in ondisk.State
	Phase    string    `json:"phase,omitempty"`
	Step     int       `json:"step"` // number of the phase, counted from 1; 0 if there is none
	Steps    int       `json:"steps"`
	Reason   string    `json:"reason,omitempty"`
	Fix      string    `json:"fix,omitempty"`
	Received time.Time `json:"received"`
}

// Summary returns the short form of a report. Its phase is the one that failed, waits or runs,
// otherwise the last one.
func (r *Report) Summary() Summary {
	s := &r.State
	t := Summary{Node: s.Node, Result: s.Result, Steps: len(s.Phases), Received: r.Received}
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

// Store keeps the last report of each machine in a directory.
type Store struct {
	// News, if not nil, is called with each report that differs from the last one.
	News func(Summary)

	dir   string
	mu    sync.Mutex
	all   map[string]Report
	bytes int // of all files together
}

// Reports are in a subdirectory of the receiver's directory.
const (
	subdir = "machines"
	suffix = ".json"
)

// Open opens the reports in the receiver's directory for adding. Earlier versions stored reports
// next to the receiver's key; Open moves those to the subdirectory.
func Open(dir string) (*Store, error) {
	if err := os.Mkdir(filepath.Join(dir, subdir), 0o700); errors.Is(err, fs.ErrNotExist) {
		return Read(dir) // Read returns the error
	} else if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("opening the reports: %w", err)
	}
	old, err := load(dir)
	if err != nil {
		return nil, err
	}
	for name := range old {
		from, to := filepath.Join(dir, name+suffix), filepath.Join(dir, subdir, name+suffix)
		_, err := os.Lstat(to)
		if err == nil {
			err = os.Remove(from) // there is a newer report
		} else {
			err = os.Rename(from, to)
		}
		if err != nil {
			return nil, fmt.Errorf("moving a report to %s: %w", filepath.Join(dir, subdir), err)
		}
	}
	return Read(dir)
}

// Read reads the reports in the receiver's directory, to show them.
func Read(dir string) (*Store, error) {
	if _, err := os.ReadDir(dir); err != nil {
		return nil, fmt.Errorf("opening the reports: %w; name the --dir of `edgebake cluster listen`", err)
	}
	s := &Store{dir: filepath.Join(dir, subdir)}
	var err error
	if s.all, err = load(dir); err != nil {
		return nil, err
	}
	now, err := load(s.dir)
	if err != nil {
		return nil, err
	}
	maps.Copy(s.all, now)
	for _, r := range s.all {
		s.bytes += r.size
	}
	return s, nil
}

// load reads the reports in one directory. Other files are ignored.
func load(dir string) (map[string]Report, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*"+suffix))
	if err != nil {
		return nil, fmt.Errorf("opening the reports: %w", err)
	}
	all := map[string]Report{}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), suffix)
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, fmt.Errorf("reading a report: %w", err)
		}
		var r Report
		if json.Unmarshal(b, &r) == nil && r.State.Node == name && check(&r.State) == nil && len(all) < MaxNodes {
			r.size = len(b)
			r.Ready = r.Ready || r.State.Result == ondisk.ResultDone // the file may have been written before Report had the field Ready
			all[name] = r
		}
	}
	return all, nil
}

// fixOwnURLs is the fix if machines without URLs of their own reach a limit.
const fixOwnURLs = "set report.key in the Cluster, and stamp the Sites of `edgebake cluster sites`"

// Errors of Add: there is no space for a report, or it was sent to the wrong URL.
var (
	ErrFull   = fmt.Errorf("the limit of %d machines or %s of reports is reached; remove the files of machines that no longer exist", MaxNodes, bytesize.MiB(maxBytes))
	ErrCommon = fmt.Errorf("the receiver's common URL is full (%d machines or %s), all of them Ready in the last %d days: %s", maxCommon, bytesize.MiB(maxCommonBytes), expiry/(24*time.Hour), fixOwnURLs)
	ErrSender = fmt.Errorf("%d machines already report from this IP address, all of them Ready in the last %d days: %s", maxOfSender, expiry/(24*time.Hour), fixOwnURLs)
	ErrOwn    = errors.New("this machine reports to the common URL now, but has reported to its own URL before: stamp the Site of `edgebake cluster sites` again, or remove the file of its report on the receiver")
)

// Add replaces the stored report of the machine that the report names.
func (s *Store) Add(r Report) error {
	if err := check(&r.State); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before, known := s.all[r.State.Node]
	if before.Own && !r.Own {
		return ErrOwn
	}
	// A machine that was Ready before still counts as Ready only if both reports used the same kind
	// of URL: only its own URL proves that it is the same machine.
	r.Ready = before.Ready && before.Own == r.Own || r.State.Result == ondisk.ResultDone
	b, err := encodeReport(r)
	if err != nil {
		return err
	}
	r.size = len(b)
	if err := s.room(r); err != nil {
		return err
	}
	// Without sync: if the file is lost, the machine will report again.
	if err := file.Swap(filepath.Join(s.dir, r.State.Node+suffix), b); err != nil {
		return fmt.Errorf("storing the report of %s: %w", r.State.Node, err)
	}
	s.bytes += r.size - before.size
	s.all[r.State.Node] = r
	now, was := r.Summary(), before.Summary()
	was.Received = now.Received
	if s.News != nil && (!known || now != was) {
		s.News(now)
	}
	return nil
}

// encodeReport returns the contents of a report's file. HTML's special characters are not escaped,
// because that would enlarge the file.
func encodeReport(r Report) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	err := e.Encode(r)
	return b.Bytes(), err
}

// room frees space for a report. It removes reports of machines that were never Ready or have been
// silent for long, oldest first. A report to a machine's own URL may also displace any report to
// the common URL.
func (s *Store) room(r Report) error {
	before, known := s.all[r.State.Node]
	weak := func(o Report) bool { return !o.Ready || r.Received.Sub(o.Received) > expiry }
	weakCommon := func(o Report) bool { return !o.Own && weak(o) }
	if !r.Own {
		if err := s.commonRoom(r, known, weakCommon); err != nil {
			return err
		}
	}
	for !known && len(s.all) >= MaxNodes || s.bytes-before.size+r.size > maxBytes {
		switch {
		case s.evict(r.State.Node, weakCommon) != nil:
		case r.Own && s.evict(r.State.Node, func(o Report) bool { return !o.Own }) != nil:
		case r.Own && s.evict(r.State.Node, weak) != nil:
		default:
			return ErrFull
		}
	}
	return nil
}

// commonRoom frees space for a report to the common URL. It removes only other reports to the
// common URL.
func (s *Store) commonRoom(r Report, known bool, weak func(Report) bool) error {
	name, from := r.State.Node, senderOf(r.From)
	reports, bytes, ofSender := 0, 0, 0
	for other, o := range s.all {
		if other == name || o.Own {
			continue
		}
		reports++
		bytes += o.size
		if senderOf(o.From) == from {
			ofSender++
		}
	}
	if !known && ofSender >= maxOfSender {
		gone := s.evict(name, func(o Report) bool { return weak(o) && senderOf(o.From) == from })
		if gone == nil {
			return ErrSender
		}
		reports, bytes = reports-1, bytes-gone.size
	}
	for !known && reports >= maxCommon || bytes+r.size > maxCommonBytes {
		gone := s.evict(name, weak)
		if gone == nil {
			return ErrCommon
		}
		reports, bytes = reports-1, bytes-gone.size
	}
	return nil
}

// evict removes and returns the oldest report that the function which selects, except the report of
// the machine but. It returns nil if there is none.
func (s *Store) evict(but string, which func(Report) bool) *Report {
	oldest := ""
	for name, o := range s.all {
		if name == but || !which(o) {
			continue
		}
		if first := s.all[oldest].Received; oldest == "" || o.Received.Before(first) || o.Received.Equal(first) && name < oldest {
			oldest = name
		}
	}
	if oldest == "" {
		return nil
	}
	_ = os.Remove(filepath.Join(s.dir, oldest+suffix)) // a file that cannot be removed is read again at the next start
	gone := s.all[oldest]
	s.bytes -= gone.size
	delete(s.all, oldest)
	return &gone
}

// check rejects states that first boot cannot have sent, and removes control characters from texts.
func check(s *ondisk.State) error {
	if err := forms.CheckNodeName(s.Node); err != nil { // the name is also used as a file name
		return fmt.Errorf("node: %w", err)
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

// shown returns a state with only the fields that Summary uses, in printable text of limited
// length.
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

// All returns the short form of all reports, sorted by name.
func (s *Store) All() []Summary {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Summary
	for _, name := range slices.Sorted(maps.Keys(s.all)) {
		r := s.all[name]
		out = append(out, r.Summary())
	}
	return out
}

// Receiver returns the handler for the machines' own URLs, which are derived from the key, and for
// the common URL.
func (s *Store) Receiver(id *Identity, now func() time.Time) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+id.Path, func(w http.ResponseWriter, r *http.Request) {
		s.receive(w, r, now(), "")
	})
	mux.HandleFunc("POST /{node}/{mac}", func(w http.ResponseWriter, r *http.Request) {
		node := r.PathValue("node")
		if !hmac.Equal([]byte(r.URL.Path), []byte(clusterdoc.ReportPath(id.Key, node))) {
			http.NotFound(w, r)
			return
		}
		s.receive(w, r, now(), node)
	})
	return mux
}

// receive adds the report in a request. node is the machine whose own URL received it; empty: the
// common URL.
func (s *Store) receive(w http.ResponseWriter, r *http.Request, now time.Time, node string) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxReport))
	if err != nil {
		http.Error(w, fmt.Sprintf("reading the report: %v", err), http.StatusRequestEntityTooLarge)
		return
	}
	got := Report{Received: now.UTC().Truncate(time.Second), From: r.RemoteAddr, Own: node != ""}
	if err := json.Unmarshal(body, &got.State); err != nil {
		http.Error(w, "not a report of first boot", http.StatusBadRequest)
		return
	}
	if got.Own && got.State.Node != node {
		http.Error(w, fmt.Sprintf("node %.40q: this is the URL of %s", got.State.Node, node), http.StatusForbidden)
		return
	}
	switch err := s.Add(got); {
	case errors.Is(err, ErrFull) || errors.Is(err, ErrCommon) || errors.Is(err, ErrSender):
		http.Error(w, err.Error(), http.StatusInsufficientStorage)
	case errors.Is(err, ErrOwn):
		http.Error(w, err.Error(), http.StatusForbidden)
	case errors.As(err, new(*os.PathError)) || errors.As(err, new(*os.LinkError)):
		http.Error(w, "the report could not be stored", http.StatusInternalServerError)
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadRequest)
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}
