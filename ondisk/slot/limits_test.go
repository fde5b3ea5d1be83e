package slot

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/disktest"
)

// TestWhatIsReadCanBeScrubbed checks slots with files from people and their computers: Scrub
// removes the token and keeps all files that fit.
func TestWhatIsReadCanBeScrubbed(t *testing.T) {
	all := slices.Sorted(maps.Keys(sample().Files))
	all = slices.DeleteFunc(all, func(name string) bool { return strings.HasPrefix(name, "pki/") })
	without := func(prefix string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(name string) bool { return strings.HasPrefix(name, prefix) })
	}
	for name, test := range map[string]struct {
		make func(l *laptop)
		info ondisk.SlotInfo
		kept []string // remaining files, in order
	}{
		"a name with a leading blank": {
			make: func(l *laptop) { l.put("files/ notes.txt", "hi") },
			kept: append([]string{"config.ign", "files/ notes.txt"}, all[1:]...),
		},
		"directories as deep as they may be": {
			make: func(l *laptop) {
				d := "::files"
				for i := 1; i < maxDepth; i++ {
					d += fmt.Sprint("/", i)
					disktest.Oracle(l.t, "mmd", "-i", l.img, d)
				}
				l.put(strings.TrimPrefix(d, "::")+"/f", "hi")
			},
			kept: slices.Insert(slices.Clone(all), 1, "files/1/2/3/4/5/6/7/f"),
		},
		"a text report without a line end": {
			make: func(l *laptop) { l.put("report.txt", strings.Repeat("x", ReportTextSize)) },
			kept: all,
		},
		"a JSON report of exactly the room": {
			make: func(l *laptop) {
				f, err := os.OpenFile(l.img, os.O_RDWR, 0)
				if err == nil {
					err = errors.Join(WriteReport(f, Report{Text: []byte("ok"), JSON: bytes.Repeat([]byte("x"), ReportJSONSize)}), f.Close())
				}
				if err != nil {
					l.t.Fatal(err)
				}
			},
			kept: all,
		},
		"as many bytes as there may be": {
			make: func(l *laptop) {
				total := 0
				for _, b := range sample().Files {
					total += len(b)
				}
				l.put("files/big", strings.Repeat("y", maxFiles-total))
			},
			kept: slices.Insert(slices.Clone(all), 1, "files/big"),
		},
		"an Ignition config that would grow": {
			make: func(l *laptop) {
				l.put("config.ign", `{"ignition":{"version":"3.4.0"},"storage":{"files":[{"path":"/big","contents":{"source":"data:,`+token+strings.Repeat("a", 12<<20)+`"}}]}}`)
			},
			kept: all,
		},
		"another formatter's smaller clusters": {
			make: func(l *laptop) {
				disktest.Oracle(l.t, "mkfs.fat", "-F", "16", "-s", "1", l.img)
				for name, b := range sample().Files {
					if !strings.HasPrefix(name, "files/") {
						if strings.HasPrefix(name, "pki/") {
							disktest.Oracle(l.t, "mmd", "-i", l.img, "::pki")
						}
						l.put(name, string(b))
					}
				}
				many := l.dir + "/files"
				if err := os.Mkdir(many, 0o755); err != nil {
					l.t.Fatal(err)
				}
				for i := range 740 {
					if err := os.WriteFile(fmt.Sprintf("%s/f%d", many, i), make([]byte, 20481), 0o644); err != nil {
						l.t.Fatal(err)
					}
				}
				disktest.Oracle(l.t, "mcopy", "-s", "-i", l.img, many, "::")
			},
			kept: without("files/"),
		},
		"directories that take more on a disk of larger sectors": {
			make: func(l *laptop) {
				c := sample()
				for i := range 1500 {
					c.Files[fmt.Sprintf("files/%d/f", i)] = nil
				}
				if err := os.WriteFile(l.img, mustMake(l.t, c), 0o644); err != nil {
					l.t.Fatal(err)
				}
			},
			info: ondisk.SlotInfo{SectorSize: 4096},
			kept: without("files/"),
		},
		"a name that no system writes": {
			make: func(l *laptop) { rename(l, "files/QQ.TXT", "QQ      TXT", "Q?      TXT") },
			kept: all,
		},
		"two files of one name": {
			make: func(l *laptop) {
				l.put("files/RR.TXT", "first")
				rename(l, "files/QQ.TXT", "QQ      TXT", "rr      TXT")
			},
			kept: append(slices.Clone(all[:1]), "files/RR.TXT", all[1], all[2]),
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLaptop(t, mustMake(t, sample()))
			test.make(l)
			if _, err := l.read(); err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(l.img)
			if err != nil {
				t.Fatal(err)
			}
			d := newDevice(b)
			test.info.Version = 1
			if err := Scrub(d, test.info, []byte("public: true\n"), token); err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(d.durable, []byte(token)) {
				t.Error("the token is still there")
			}
			got, err := Read(bytes.NewReader(d.durable))
			if err != nil {
				t.Fatal(err)
			}
			if kept := slices.Sorted(maps.Keys(got.Files)); !slices.Equal(kept, slices.Sorted(slices.Values(test.kept))) {
				t.Errorf("%d files are kept: %q", len(kept), kept[:min(len(kept), 9)])
			}
		})
	}
}

// rename writes the file name into the slot, and then replaces its short name, from, with to.
func rename(l *laptop, name, from, to string) {
	l.t.Helper()
	l.put(name, "hi")
	b, err := os.ReadFile(l.img)
	if err != nil {
		l.t.Fatal(err)
	}
	if bytes.Count(b, []byte(from)) != 1 {
		l.t.Fatalf("%s does not occur exactly once", name)
	}
	if err := os.WriteFile(l.img, bytes.Replace(b, []byte(from), []byte(to), 1), 0o644); err != nil {
		l.t.Fatal(err)
	}
}

// TestReportsOfExactlyTheRoom checks that reports of the maximum size are read back unchanged.
func TestReportsOfExactlyTheRoom(t *testing.T) {
	want := Report{Text: bytes.Repeat([]byte("t"), ReportTextSize), JSON: bytes.Repeat([]byte("j"), ReportJSONSize)}
	d := newDevice(mustMake(t, sample()))
	if err := WriteReport(d, want); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		c, err := Read(bytes.NewReader(d.durable))
		if err != nil || !bytes.Equal(c.Report.Text, want.Text) || !bytes.Equal(c.Report.JSON, want.JSON) {
			t.Fatalf("%d and %d bytes, %v", len(c.Report.Text), len(c.Report.JSON), err)
		}
		if err := Rewrite(d, *c); err != nil {
			t.Fatal(err)
		}
	}
}

// TestWhatCannotBeReadIsNotMade makes slots at each limit and above it.
func TestWhatCannotBeReadIsNotMade(t *testing.T) {
	for name, c := range map[string]Contents{
		"directories":                      {Files: spread(2500)},
		"directories, with larger sectors": {Files: spread(1500), Info: ondisk.SlotInfo{SectorSize: 4096}},
		"a directory's name":               {Files: map[string][]byte{"files/a:b/c": nil}},
		"an edgebake.json too large":       {Info: ondisk.SlotInfo{Plan: strings.Repeat("p", maxInfo)}},
		"a newer edgebake.json":            {Info: ondisk.SlotInfo{Version: 7}},
	} {
		if _, err := Make(c); err == nil {
			t.Errorf("%s: a slot with these files was made", name)
		} else if strings.Contains(err.Error(), "format the stick") || len(err.Error()) > 500 {
			t.Errorf("%s: %v", name, err)
		}
	}
	full := spread(100)
	full[ondisk.SlotIgnition] = nil
	for i := range maxEntries - countEntries(full) {
		full[fmt.Sprintf("files/%d", i+100)] = nil
	}
	for name, c := range map[string]Contents{
		"directories":  {Files: spread(1900)},
		"files":        {Files: full, Signature: []byte("s")},
		"larger files": {Files: map[string][]byte{"config.ign": make([]byte, maxFiles)}, Signature: make([]byte, maxSignature)},
	} {
		if _, err := Read(bytes.NewReader(mustMake(t, c))); err != nil && !errors.Is(err, ErrNoSite) {
			t.Errorf("%s: %v", name, err)
		}
	}
	full["files/one-more"] = nil
	if _, err := Make(Contents{Files: full}); err == nil || !strings.Contains(err.Error(), "4097 files and directories are too many") {
		t.Errorf("one file more: %v", err)
	}
}

// spread returns one file in each of n directories.
func spread(n int) map[string][]byte {
	files := map[string][]byte{}
	for i := range n {
		files[fmt.Sprintf("files/d%04d/file-with-a-long-name.conf", i)] = []byte("x")
	}
	return files
}
