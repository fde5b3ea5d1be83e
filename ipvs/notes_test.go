package ipvs

import (
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ipvs/files"
	"github.com/edgebake/edgebake/ondisk"
)

// ours returns ipvscare's lines in the hosts file as "address name".
func (w *world) ours() string {
	b, _ := os.ReadFile(w.hosts)
	var lines []string
	for line := range strings.Lines(string(b)) {
		if line, ok := strings.CutSuffix(line, " "+files.HostsMark+"\n"); ok {
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, ", ")
}

// TestHostChanges checks that the line of a virtual server's former name is removed, even if an
// earlier process left it.
func TestHostChanges(t *testing.T) {
	t.Parallel()
	server := func(last byte, host string) Server {
		s := testServer(t, last)
		s.Host, s.Masters = host, []Master{{"127.0.0.1", 1}}
		return s
	}
	for _, tt := range []struct {
		name          string
		before, after []Server
		want          string
	}{
		{"another name", []Server{server(1, "old")}, []Server{server(1, "new")}, "10.103.97.1 new"},
		{"no name", []Server{server(1, "old")}, []Server{server(1, "")}, ""},
		{"a first name", []Server{server(1, "")}, []Server{server(1, "new")}, "10.103.97.1 new"},
		{"another spelling", []Server{server(1, "name")}, []Server{server(1, "Name")}, "10.103.97.1 Name"},
		{"swapped", []Server{server(1, "a"), server(2, "b")}, []Server{server(1, "b"), server(2, "a")}, "10.103.97.1 b, 10.103.97.2 a"},
		{"handed on", []Server{server(1, "a"), server(2, "b")}, []Server{server(1, "c"), server(2, "a")}, "10.103.97.1 c, 10.103.97.2 a"},
		{"another virtual address", []Server{server(1, "a")}, []Server{server(2, "a")}, "10.103.97.2 a"},
		{"one of two", []Server{server(1, "a"), server(2, "b")}, []Server{server(2, "b")}, "10.103.97.2 b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for how, change := range map[string]func(w *world){
				"while it runs": func(w *world) {
					if err := w.daemon.replace(w.ctx, tt.after); err != nil {
						t.Fatal(err)
					}
				},
				"over a restart": func(w *world) {
					w.stop()
					w.start(tt.after...)
				},
			} {
				t.Run(how, func(t *testing.T) {
					t.Parallel()
					w := newWorld(t, 0)
					w.start(tt.before...)
					var named []string
					for _, s := range tt.before {
						if s.Host != "" {
							named = append(named, s.VIP.Addr().String()+" "+s.Host)
						}
					}
					w.eventually("the names before", func() bool { return w.ours() == strings.Join(named, ", ") })
					change(w)
					w.eventually("the names after", func() bool { return w.ours() == tt.want })
					want := make(map[string]string)
					for _, s := range tt.after {
						want[s.VIP.String()] = strings.ToLower(s.Host)
						if s.Host != "" && w.said("removed the line of "+s.Host+" from") > 0 {
							t.Errorf("the line of %s was missing for a while", s.Host)
						}
					}
					w.eventually("the notes have the new names", func() bool {
						got := make(map[string]string)
						for vip, names := range readNotes(w.run) {
							got[vip.String()] = strings.ToLower(strings.Join(names, " "))
						}
						return maps.Equal(got, want)
					})
					w.stop()
					if err := Clean(t.Context(), w.kernel, Leftovers{Noted: true, HostsFile: w.hosts, RunDir: w.run}, w.log); err != nil {
						t.Fatal(err)
					}
					if left := w.ours(); left != "" {
						t.Errorf("clean leaves %s", left)
					}
				})
			}
		})
	}
}

// TestNewNameIsNotFormer checks that a group that has not yet received its new name does not treat
// it as a former one, whose line it would remove.
func TestNewNameIsNotFormer(t *testing.T) {
	servers := []Server{testServer(t, 1), testServer(t, 2)}
	servers[0].Host, servers[1].Host = "c", "a" // before: a, b
	d := NewDaemon(Options{})
	d.configure(servers)
	d.names[servers[1].VIP] = []string{"b", "a"}
	if remove, leave := d.formerNames(servers[1].VIP, "b"); len(remove)+len(leave) > 0 {
		t.Errorf("removed: %q, left: %q", remove, leave)
	}
}

// TestHostChangesWhileHostsIsLocked checks that the note keeps a former name until its line is
// removed.
func TestHostChangesWhileHostsIsLocked(t *testing.T) {
	w := newWorld(t, 0)
	s := testServer(t, 1)
	s.Host, s.Masters = "old", []Master{{"127.0.0.1", 1}}
	w.start(s)
	w.eventually("the old name", func() bool { return w.ours() == "10.103.97.1 old" })
	unlock, err := files.Lock(t.Context(), filepath.Join(w.run, filepath.Base(ondisk.HostsLock)), patience)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"new", "newer"} {
		s.Host = host
		if err := w.daemon.replace(w.ctx, []Server{s}); err != nil {
			t.Fatal(err)
		}
		if names := readNotes(w.run)[s.VIP]; !slices.Contains(names, "old") || !slices.Contains(names, host) {
			t.Errorf("noted: %q", names)
		}
	}
	w.stop()
	unlock()
	if names := readNotes(w.run)[s.VIP]; !slices.Equal(names, []string{"old", "new", "newer"}) || w.ours() != "10.103.97.1 old" {
		t.Errorf("noted: %q; the hosts file: %s", names, w.ours())
	}
	// Clean with flags, which do not name the former host.
	if err := Clean(t.Context(), w.kernel, Leftovers{Servers: []Server{s}, HostsFile: w.hosts, RunDir: w.run}, w.log); err != nil {
		t.Fatal(err)
	}
	if left := w.ours(); left != "" || len(readNotes(w.run)) > 0 {
		t.Errorf("clean leaves %s, noted: %v", left, readNotes(w.run))
	}
}

// TestCleanKeepsTheNoteOfARemainingLine checks that the note stays if Clean could not remove the
// lines of the hosts file, so that a second Clean removes them.
func TestCleanKeepsTheNoteOfARemainingLine(t *testing.T) {
	w := newWorld(t, 0)
	s := testServer(t, 1)
	d := NewDaemon(Options{RunDir: w.run, HostsFile: w.hosts})
	if err := os.MkdirAll(w.run, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.addNote(s); err != nil {
		t.Fatal(err)
	}
	// A directory cannot be read as a hosts file.
	if err := Clean(t.Context(), w.kernel, Leftovers{Noted: true, HostsFile: t.TempDir(), RunDir: w.run}, w.log); err == nil {
		t.Fatal("Clean accepted a directory as hosts file")
	}
	if names := readNotes(w.run)[s.VIP]; !slices.Equal(names, []string{s.Host}) {
		t.Errorf("noted: %q", names)
	}
}

// TestHostChangesOverABoot checks the hosts file after a boot, when the notes are gone. Only lines
// with the virtual address, or with the address of one of its API servers, belong to this daemon.
func TestHostChangesOverABoot(t *testing.T) {
	const text = "127.0.0.1 localhost\n10.103.97.1 old # ipvscare\n127.0.0.9 older # ipvscare\n10.103.97.1 port # ipvscare\n10.103.97.2 other # ipvscare\n10.103.97.1 manual\n"
	const others = "10.103.97.1 port # ipvscare\n10.103.97.2 other # ipvscare\n10.103.97.1 manual\n"
	w := newWorld(t, 0)
	if err := os.WriteFile(w.hosts, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	// Another daemon maintains the same address with another port.
	if err := os.MkdirAll(w.run, 0o700); err != nil {
		t.Fatal(err)
	}
	second := netip.MustParseAddrPort("10.103.97.1:7443")
	unlock, err := files.Lock(t.Context(), lockPath(w.run, second), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if err := os.WriteFile(filepath.Join(w.run, second.String()), []byte("port"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := testServer(t, 1)
	s.Host, s.Masters = "new", []Master{{"127.0.0.9", 1}}
	w.start(s)
	read := func() string {
		b, _ := os.ReadFile(w.hosts)
		return string(b)
	}
	w.eventually("the old names are gone", func() bool {
		return read() == "127.0.0.1 localhost\n"+others+"10.103.97.1 new # ipvscare\n"
	})
	w.stop()
	if err := os.WriteFile(w.hosts, []byte(strings.Replace(read(), " new ", " newer ", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	// Clean does the same for a virtual server given by flags.
	if err := Clean(t.Context(), w.kernel, Leftovers{Servers: []Server{s}, HostsFile: w.hosts, RunDir: w.run}, w.log); err != nil {
		t.Fatal(err)
	}
	if got, want := read(), "127.0.0.1 localhost\n"+others; got != want {
		t.Errorf("after clean:\n%s\nwant:\n%s", got, want)
	}
}
