package reports

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/ondisk"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

func state(node, result string, phases ...ondisk.PhaseState) ondisk.State {
	return ondisk.State{Version: 1, Node: node, Result: result, Phases: phases}
}

var identity = &Identity{Path: "/secret", Key: configs.NewSecret("k3k3k3k3k3k3k3k3k3k3k3k3k3")}

// fileOf returns the path of a machine's report.
func fileOf(dir, node string) string { return filepath.Join(dir, subdir, node+suffix) }

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// send posts a body as a machine does, and returns the status and the answer.
func send(t *testing.T, h http.Handler, path string, body []byte) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, bytes.NewReader(body)))
	text, err := io.ReadAll(w.Body)
	if err != nil {
		t.Fatal(err)
	}
	return w.Code, string(text)
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestReceive checks that the last report of each machine is kept, even after a restart, and that
// News is called only for changes.
func TestReceive(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	var news []Summary
	s.News = func(n Summary) { news = append(news, n) }
	h := s.Receiver(identity, func() time.Time { return noon })
	done := ondisk.PhaseState{Name: "network", Status: ondisk.PhaseDone}
	waits := ondisk.PhaseState{Name: "join", Status: ondisk.PhaseRunning, Waiting: "an API server to answer"}
	fails := ondisk.PhaseState{Name: "join", Status: ondisk.PhaseFailed, Error: "the token has expired", Fix: "stamp a new one"}
	for _, st := range []ondisk.State{
		state("shop-1", ondisk.ResultRunning, done, waits), state("shop-1", ondisk.ResultRunning, done, waits),
		state("shop-2", ondisk.ResultDone, done), state("shop-1", ondisk.ResultFailed, done, fails),
	} {
		if code, text := send(t, h, "/secret", encode(t, st)); code != http.StatusNoContent {
			t.Errorf("%s %s: %d %s", st.Node, st.Result, code, text)
		}
	}
	if len(news) != 3 {
		t.Errorf("news: %+v", news)
	}
	want := Summary{Node: "shop-1", Result: "failed", Phase: "join", Step: 2, Steps: 2, Reason: "the token has expired", Fix: "stamp a new one", Received: noon}
	for _, s := range []*Store{s, open(t, dir)} {
		if all := s.All(); len(all) != 2 || all[0] != want || all[1].Node != "shop-2" || all[1].Phase != "network" {
			t.Errorf("%+v", all)
		}
	}
}

// TestReceiveRejects checks that requests that first boot would not send are rejected, and leave no
// file.
func TestReceiveRejects(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	h := s.Receiver(identity, func() time.Time { return noon })
	long := state("shop-1", ondisk.ResultRunning, ondisk.PhaseState{Error: strings.Repeat("x", MaxReport)})
	for _, c := range []struct {
		name, path string
		body       []byte
		code       int
		want       string
	}{
		{"another path", "/", encode(t, state("shop-1", "done")), 404, ""},
		{"the path's beginning", "/secret/x", encode(t, state("shop-1", "done")), 404, ""},
		{"no JSON", "/secret", []byte("{"), 400, "not a report"},
		{"another JSON", "/secret", []byte(`["a"]`), 400, "not a report"},
		{"no name", "/secret", encode(t, state("", "done")), 400, "cannot be empty"},
		{"another machine's own URL", clusterdoc.ReportPath(identity.Key, "shop-2"), encode(t, state("shop-1", "done")), 403, "this is the URL of shop-2"},
		{"its own URL by another key", clusterdoc.ReportPath(configs.NewSecret(strings.Repeat("x", 26)), "shop-1"), encode(t, state("shop-1", "done")), 404, ""},
		{"another name with its proof", "/shop-2/" + filepath.Base(clusterdoc.ReportPath(identity.Key, "shop-1")), encode(t, state("shop-2", "done")), 404, ""},
		{"a path as name", "/secret", encode(t, state("../../etc/cron.d/x", "done")), 400, "cannot name a node"},
		{"a hidden file", "/secret", encode(t, state(".ssh", "done")), 400, "cannot name a node"},
		{"a long name", "/secret", encode(t, state(strings.Repeat("a", 64), "done")), 400, "has at most 63"},
		{"a name too long for a file", "/secret", encode(t, state(strings.Repeat("a", 253), "done")), 400, "has at most 63"},
		{"a name with an empty part", "/secret", encode(t, state("shop..1", "done")), 400, "cannot name a node"},
		{"a result of its own", "/secret", encode(t, state("shop-1", "<b>")), 400, "want running"},
		{"many phases", "/secret", encode(t, state("shop-1", "done", make([]ondisk.PhaseState, maxPhases+1)...)), 400, "at most"},
		{"too long", "/secret", encode(t, long), 413, "too large"},
	} {
		if code, text := send(t, h, c.path, c.body); code != c.code || !strings.Contains(text, c.want) {
			t.Errorf("%s: %d %s", c.name, code, text)
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/secret", nil))
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("reading the receiver: %d", w.Code)
	}
	if files, err := os.ReadDir(filepath.Join(dir, subdir)); err != nil || len(files) != 0 {
		t.Errorf("left behind: %v %v", files, err)
	}
}

// TestFull checks that known machines can still report when there is no space for another machine.
func TestFull(t *testing.T) {
	s := open(t, t.TempDir())
	for i := range maxCommon {
		s.all[fmt.Sprintf("n%d", i)] = Report{Ready: true, Received: noon}
	}
	h := s.Receiver(identity, func() time.Time { return noon })
	if code, text := send(t, h, "/secret", encode(t, state("another", "done"))); code != http.StatusInsufficientStorage || !strings.Contains(text, "report.key") {
		t.Errorf("%d %s", code, text)
	}
	if code, text := send(t, h, "/secret", encode(t, state("n7", "done"))); code != http.StatusNoContent {
		t.Errorf("%d %s", code, text)
	}
}

// TestDiskFull checks that the receiver returns an error if it cannot write, and keeps the
// machine's last report.
func TestDiskFull(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	h := s.Receiver(identity, func() time.Time { return noon })
	send(t, h, "/secret", encode(t, state("shop-1", "running")))
	if err := os.Rename(dir, dir+".gone"); err != nil {
		t.Fatal(err)
	}
	defer os.Rename(dir+".gone", dir)
	if code, text := send(t, h, "/secret", encode(t, state("shop-1", "done"))); code != http.StatusInternalServerError || strings.Contains(text, dir) {
		t.Errorf("%d %s", code, text)
	}
	if all := s.All(); len(all) != 1 || all[0].Result != "running" {
		t.Errorf("%+v", all)
	}
}

// TestIdentity checks that an identity is made once with the given names, and that another name
// requires another identity.
func TestIdentity(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "reports")
	if _, err := LoadIdentity(filepath.Join(dir, "new"), nil, noon); err == nil || !strings.Contains(err.Error(), "--name is required") {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); err == nil {
		t.Error("a directory was made for a receiver without a name")
	}
	if _, err := Open(filepath.Join(dir, "new")); err == nil || !strings.Contains(err.Error(), "name the --dir of `edgebake cluster listen`") {
		t.Error(err)
	}
	if _, err := LoadIdentity(dir, nil, noon); err == nil || !strings.Contains(err.Error(), "--name") {
		t.Errorf("without a name: %v", err)
	}
	a, err := LoadIdentity(dir, []string{"reports.example", "192.0.2.7"}, noon)
	if err != nil {
		t.Fatal(err)
	}
	b, err := LoadIdentity(dir, []string{"192.0.2.7"}, noon.Add(time.Hour))
	if err != nil || a.PEM != b.PEM || a.Path != b.Path || len(a.Path) < 20 {
		t.Errorf("the second LoadIdentity returned another identity: %v, paths %s and %s", err, a.Path, b.Path)
	}
	if _, err := LoadIdentity(dir, []string{"other.example"}, noon); err == nil || !strings.Contains(err.Error(), "reports.example, 192.0.2.7") {
		t.Errorf("another name: %v", err)
	}
	if fi, err := os.Stat(filepath.Join(dir, keyFile)); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the key: %v %v", fi.Mode(), err)
	}
	// If making an identity is interrupted between the key and the certificate, both are made again.
	if err := os.Remove(filepath.Join(dir, certFile)); err != nil {
		t.Fatal(err)
	}
	if c, err := LoadIdentity(dir, []string{"reports.example"}, noon); err != nil || c.PEM == a.PEM {
		t.Errorf("after an interruption: %v", err)
	}
	// A directory from a version without a URL for each machine lacks the secret for these URLs, which
	// is then added.
	if err := os.Remove(filepath.Join(dir, secretFile)); err != nil {
		t.Fatal(err)
	}
	d, err := LoadIdentity(dir, nil, noon)
	if err != nil || len(d.Key.Reveal()) < 20 || d.Key == a.Key {
		t.Errorf("without a key for URLs: %v", err)
	}
	if e, err := LoadIdentity(dir, nil, noon); err != nil || e.Key != d.Key {
		t.Errorf("the key changed: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, secretFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadIdentity(dir, nil, noon); err == nil || !strings.Contains(err.Error(), "truncated") {
		t.Errorf("an empty key: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, secretFile), []byte(d.Key.Reveal()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, keyFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadIdentity(dir, nil, noon); err == nil || !strings.Contains(err.Error(), certFile) {
		t.Errorf("without its key: %v", err)
	}
}

// TestPage checks that the page shows reports as text, and rejects requests with another host name.
func TestPage(t *testing.T) {
	s := open(t, t.TempDir())
	evil := state("shop-1", ondisk.ResultFailed, ondisk.PhaseState{Name: "<i>join", Status: ondisk.PhaseFailed, Error: "<script>alert(1)</script>\x1b[2J", Fix: `"><img src=x onerror=x>`})
	if err := s.Add(Report{State: evil, Received: noon}); err != nil {
		t.Fatal(err)
	}
	get := func(host, path string) (int, string) {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, path, nil)
		r.Host = host
		s.Page(func() time.Time { return noon.Add(90 * time.Second) }).ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
	code, text := get("127.0.0.1:8444", "/")
	if code != http.StatusOK || strings.Contains(text, "<script") || strings.Contains(text, "<img") || strings.Contains(text, "<i>") || strings.Contains(text, "\x1b") {
		t.Errorf("%d\n%s", code, text)
	}
	for _, want := range []string{`data-node="shop-1"`, "&lt;script&gt;alert(1)", "1 min ago", "1/1 &lt;i&gt;join"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q:\n%s", want, text)
		}
	}
	if code, _ := get("[::1]:8444", "/reports.json"); code != http.StatusOK {
		t.Errorf("JSON: %d", code)
	}
	for _, host := range []string{"attacker.example", "attacker.example:8444", ""} {
		if code, text := get(host, "/"); code != http.StatusMisdirectedRequest || strings.Contains(text, "shop-1") {
			t.Errorf("%s: %d", host, code)
		}
	}
}

// TestPageOrder checks that names are sorted in natural order, and that the page says so if nothing
// needs attention.
func TestPageOrder(t *testing.T) {
	told := func(node, result string) Summary { return Summary{Node: node, Result: result, Received: noon} }
	v := view([]Summary{told("shop-10", ondisk.ResultDone), told("shop-4", ondisk.ResultDone), told("shop-004b", ondisk.ResultDone), told("office", ondisk.ResultDone)}, noon)
	var names []string
	for _, r := range v.Rows {
		names = append(names, r.Node)
	}
	if got := strings.Join(names, " "); got != "office shop-4 shop-004b shop-10" || v.Calm != "all machines have joined." {
		t.Errorf("%s: %s", got, v.Calm)
	}
	if v := view([]Summary{told("a", ondisk.ResultDone), told("b", ondisk.ResultWaiting)}, noon); v.Calm != "" {
		t.Errorf("one waits: %s", v.Calm)
	}
	if v := view(nil, noon); v.Calm != "" {
		t.Errorf("nobody has reported: %s", v.Calm)
	}
}

// TestFilesOfOthers checks that files in the directory that are not reports are ignored.
func TestFilesOfOthers(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.json": "{", "b.json": `{"state":{"node":"c","result":"done"}}`, "notes.txt": "x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if all := open(t, dir).All(); len(all) != 0 {
		t.Errorf("%+v", all)
	}
	if _, err := Read(filepath.Join(dir, "a.json")); !errors.As(err, new(*os.PathError)) {
		t.Errorf("a file in place of the directory: %v", err)
	}
}

// TestInventedMachines checks that invented machines use only a limited space, so that real ones
// can still report. Anyone who knows the common URL can send a report of an invented machine.
func TestInventedMachines(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	at := noon
	s.now(t, Report{State: state("real", ondisk.ResultRunning), From: "192.0.2.9:1", Received: at})
	s.now(t, Report{State: state("ready", ondisk.ResultDone), From: "198.51.100.7:1", Received: at})
	s.now(t, Report{State: state("ready", ondisk.ResultRunning), From: "198.51.100.7:1", Received: at})
	for i := range maxOfSender { // as if they had been sent
		s.all[fmt.Sprintf("n%d", i)] = Report{State: state(fmt.Sprintf("n%d", i), ondisk.ResultRunning), From: "198.51.100.7:9", Received: at.Add(time.Duration(i+1) * time.Second)}
	}
	s.now(t, Report{State: state("new", ondisk.ResultRunning), From: "198.51.100.7:9", Received: at.Add(time.Hour)})
	if _, there := s.all["n0"]; there {
		t.Error("the sender's oldest machine was not dropped")
	}
	for _, name := range []string{"real", "ready", "new", "n1"} {
		if _, there := s.all[name]; !there {
			t.Errorf("%s is gone", name)
		}
	}
	for i := len(s.all); i < maxCommon; i++ {
		s.all[fmt.Sprintf("m%d", i)] = Report{State: state("m", ondisk.ResultRunning), From: fmt.Sprintf("10.0.%d.%d:1", i/250, i%250), Received: at.Add(2 * time.Hour)}
	}
	s.now(t, Report{State: state("another", ondisk.ResultRunning), From: "192.0.2.8:1", Received: at.Add(3 * time.Hour)})
	if _, there := s.all["real"]; there || len(s.all) != maxCommon {
		t.Errorf("the oldest machine that was never Ready was not dropped, or there are %d machines", len(s.all))
	}
	if _, err := os.Stat(fileOf(dir, "real")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of the dropped machine still exists: %v", err)
	}
	if _, there := s.all["ready"]; !there || !open(t, dir).all["ready"].Ready {
		t.Error("a machine that was Ready was dropped")
	}
}

// TestReportsOfBefore checks reports of an earlier version, which have no field ready. Invented
// machines must not displace a machine that was Ready.
func TestReportsOfBefore(t *testing.T) {
	dir := t.TempDir()
	text := `{"received": "2026-11-20T12:00:00Z", "from": "192.0.2.9:1", "state": {"version": 1, "node": "shop-1", "result": "done"}}`
	if err := os.WriteFile(filepath.Join(dir, "shop-1"+suffix), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	s.bytes += maxBytes // as if other reports had been sent
	if err := s.Add(Report{State: state("invented", ondisk.ResultRunning), Received: s.all["shop-1"].Received}); !errors.Is(err, ErrFull) || s.all["shop-1"].State.Node == "" {
		t.Errorf("a machine that was Ready was dropped: %v", err)
	}
}

func (s *Store) now(t *testing.T, r Report) {
	t.Helper()
	if err := s.Add(r); err != nil {
		t.Fatal(err)
	}
}

// TestRoom checks that only the displayed fields of a report are kept, and that all reports
// together have a limit.
func TestRoom(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	long := strings.Repeat("<", 1900)
	var phases []ondisk.PhaseState
	for range maxPhases {
		phases = append(phases, ondisk.PhaseState{Name: long, Doc: long, Status: ondisk.PhaseFailed, Error: long, Fix: long})
	}
	st := state("shop-1", ondisk.ResultFailed, phases...)
	st.Plan, st.NodeType, st.Notes = long, long, []string{long, long, long}
	s.now(t, Report{State: st, Received: noon})
	fi, err := os.Stat(fileOf(dir, "shop-1"))
	if err != nil || fi.Size() > 24<<10 || s.bytes != int(fi.Size()) {
		t.Errorf("%v %v, counted %d", fi.Size(), err, s.bytes)
	}
	if all := s.All(); len(all) != 1 || all[0].Reason != long || all[0].Fix != long || all[0].Steps != maxPhases {
		t.Errorf("%.300v", all)
	}
	s.all["gone"] = Report{State: state("gone", ondisk.ResultRunning), size: maxCommonBytes}
	s.bytes += maxCommonBytes
	s.now(t, Report{State: state("shop-2", ondisk.ResultRunning), Received: noon})
	if len(s.all) != 2 || s.bytes > maxBytes {
		t.Errorf("%d machines of %d bytes", len(s.all), s.bytes)
	}
	s.all["old"] = Report{State: state("old", ondisk.ResultDone), Ready: true, size: maxCommonBytes}
	s.bytes += maxCommonBytes
	if err := s.Add(Report{State: state("shop-3", ondisk.ResultRunning)}); !errors.Is(err, ErrCommon) {
		t.Errorf("when the limit is reached: %v", err)
	}
	own := Report{State: state("shop-4", ondisk.ResultRunning), Own: true, Received: noon}
	if err := s.Add(own); err != nil {
		t.Errorf("a machine with its own URL: %v", err)
	}
	s.all["old"] = Report{State: state("old", ondisk.ResultDone), Ready: true, Own: true, Received: noon, size: maxBytes}
	s.bytes += maxBytes
	own.State.Node = "shop-5"
	if err := s.Add(own); !errors.Is(err, ErrFull) {
		t.Errorf("when the limit is reached: %v", err)
	}
}

// TestOwnURL checks that invented machines that claim to be Ready can neither displace a machine
// with its own URL nor report in its name, even after a restart.
func TestOwnURL(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	at := noon
	h := s.Receiver(identity, func() time.Time { return at })
	const invented = 12
	for i := range invented {
		if code, text := send(t, h, "/secret", encode(t, state(fmt.Sprintf("invented-%d", i), ondisk.ResultDone))); code != http.StatusNoContent {
			t.Fatalf("%d %s", code, text)
		}
	}
	for i := invented; i < MaxNodes; i++ { // as if sent from many addresses to an earlier version, which had no limit for the common URL
		s.all[fmt.Sprintf("invented-%d", i)] = Report{State: state("invented", ondisk.ResultDone), Ready: true, Received: at}
	}
	if code, text := send(t, h, "/secret", encode(t, state("by-hand", ondisk.ResultRunning))); code != http.StatusInsufficientStorage || !strings.Contains(text, "report.key") {
		t.Errorf("the common URL has no limit: %d %s", code, text)
	}
	own := clusterdoc.ReportPath(identity.Key, "shop-1")
	waits := ondisk.PhaseState{Name: "join", Status: ondisk.PhaseRunning, Waiting: "an API server to answer"}
	if code, text := send(t, h, own, encode(t, state("shop-1", ondisk.ResultRunning, waits))); code != http.StatusNoContent {
		t.Fatalf("a machine with its own URL was rejected: %d %s", code, text)
	}
	if len(s.all) != MaxNodes {
		t.Errorf("%d machines", len(s.all))
	}
	s = open(t, dir)
	h = s.Receiver(identity, func() time.Time { return at })
	if code, text := send(t, h, "/secret", encode(t, state("shop-1", ondisk.ResultDone))); code != http.StatusForbidden || !strings.Contains(text, "its own URL") {
		t.Errorf("the common URL accepted a report in the name of shop-1: %d %s", code, text)
	}
	if all := s.All(); len(all) != invented || all[len(all)-1].Reason != waits.Waiting { // invented-0 was removed to make room for shop-1
		t.Errorf("%d machines: %+v", len(all), all[len(all)-1])
	}
	// A machine that has reported to the common URL gets its own URL. It does not count as Ready,
	// because its earlier reports may be invented.
	if code, text := send(t, h, clusterdoc.ReportPath(identity.Key, "invented-7"), encode(t, state("invented-7", ondisk.ResultRunning))); code != http.StatusNoContent || s.all["invented-7"].Ready {
		t.Errorf("%d %s, %+v", code, text, s.all["invented-7"])
	}
	// A machine that was Ready is removed too if it has sent no report for a month (expiry).
	for i := range maxCommon {
		s.all[fmt.Sprintf("old-%d", i)] = Report{State: state("old", ondisk.ResultDone), Ready: true, Received: at}
	}
	at = at.Add(expiry + time.Hour)
	if code, text := send(t, h, "/secret", encode(t, state("by-hand", ondisk.ResultRunning))); code != http.StatusNoContent {
		t.Errorf("a month later: %d %s", code, text)
	}
}

// TestDirectoryOfReports checks that a machine's name cannot collide with another file in the
// receiver's directory, and that an earlier version's reports are moved.
func TestDirectoryOfReports(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const minted = `{"version": 1, "name": "shops"}`
	write("mint.json", minted)
	old := encode(t, Report{Received: noon, State: state("shop-1", ondisk.ResultDone)})
	write("shop-1.json", string(old))
	if seen, err := Read(dir); err != nil || len(seen.All()) != 1 {
		t.Errorf("before they move: %v, %v", seen.All(), err)
	}
	s := open(t, dir)
	s.now(t, Report{State: state("mint", ondisk.ResultRunning), Received: noon})
	if b, err := os.ReadFile(filepath.Join(dir, "mint.json")); err != nil || string(b) != minted {
		t.Errorf("mint.json is %s %v", b, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "shop-1.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old report still exists: %v", err)
	}
	s.now(t, Report{State: state("shop-1", ondisk.ResultFailed), Received: noon.Add(time.Hour)})
	write("shop-1.json", string(old)) // a restored copy
	for range 2 {
		if all := open(t, dir).All(); len(all) != 2 || all[0].Node != "mint" || all[1].Result != ondisk.ResultFailed {
			t.Errorf("%+v", all)
		}
	}
}
