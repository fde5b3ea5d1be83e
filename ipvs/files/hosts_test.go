package files

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk"
)

func TestHosts(t *testing.T) {
	const name = "apiserver.cluster.local"
	vip := netip.MustParseAddr("10.103.97.2")
	const ours = "10.103.97.2 apiserver.cluster.local # ipvscare\n"
	for _, tt := range []struct {
		name, in, want string
		addr           netip.Addr
	}{
		{"empty", "", ours, vip},
		{"appended", "127.0.0.1 localhost\n", "127.0.0.1 localhost\n" + ours, vip},
		{"no newline at the end", "127.0.0.1 localhost", "127.0.0.1 localhost\n" + ours, vip},
		{"kept", "# a\n" + ours + "\n::1 x\n", "# a\n" + ours + "\n::1 x\n", vip},
		{"another address before", "10.103.97.9 apiserver.cluster.local # ipvscare\n::1 x\n", ours + "::1 x\n", vip},
		{"doubled", ours + "::1 x\n" + ours, ours + "::1 x\n", vip},
		{"somebody else's says the same", "10.103.97.2\tapiserver.cluster.local apiserver # lvscare\n", "10.103.97.2\tapiserver.cluster.local apiserver # lvscare\n", vip},
		{"somebody else's says otherwise", "::1 x\n10.0.0.1 apiserver.cluster.local\n", "::1 x\n" + ours + "10.0.0.1 apiserver.cluster.local\n", vip},
		{"the same name in another case", "10.0.0.1 APISERVER.cluster.local\n", ours + "10.0.0.1 APISERVER.cluster.local\n", vip},
		{"another name that ends alike", "10.0.0.1 my-apiserver.cluster.local\n", "10.0.0.1 my-apiserver.cluster.local\n" + ours, vip},
		{"commented out", "#10.0.0.1 apiserver.cluster.local\n", "#10.0.0.1 apiserver.cluster.local\n" + ours, vip},
		{"Windows line ends", "127.0.0.1 localhost\r\n", "127.0.0.1 localhost\r\n" + ours, vip},
		{"removed", "::1 x\n" + ours + "# end", "::1 x\n# end", netip.Addr{}},
		{"somebody else's is not removed", "10.103.97.2 apiserver.cluster.local\n", "10.103.97.2 apiserver.cluster.local\n", netip.Addr{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := string(HostsLine{name, false, tt.addr}.applyTo([]byte(tt.in)))
			if got != tt.want {
				t.Errorf("got\n%s\nwant\n%s", got, tt.want)
			}
			if again := string(HostsLine{name, false, tt.addr}.applyTo([]byte(got))); again != got {
				t.Errorf("a second time it is\n%s", again)
			}
		})
	}
}

// TestHostsDualStack checks that a name has a line for each family, and each line is maintained and
// removed independently.
func TestHostsDualStack(t *testing.T) {
	const name = "apiserver.cluster.local"
	four, six := netip.MustParseAddr("10.103.97.2"), netip.MustParseAddr("fd00:97::2")
	text := []byte("::1 x\n10.0.0.1 " + name + "\nfd00::1 " + name + "\n")
	foreign := string(text)
	for range 2 {
		text = LineFor(name, six).applyTo(LineFor(name, four).applyTo(text))
		if got, want := string(text), "::1 x\n10.103.97.2 "+name+" # ipvscare\n10.0.0.1 "+name+"\nfd00:97::2 "+name+" # ipvscare\nfd00::1 "+name+"\n"; got != want {
			t.Fatalf("got\n%s\nwant\n%s", got, want)
		}
	}
	if got, want := string(NoLineFor(name, four).applyTo(text)), "::1 x\n10.0.0.1 "+name+"\nfd00:97::2 "+name+" # ipvscare\nfd00::1 "+name+"\n"; got != want {
		t.Errorf("without the IPv4 line\n%s\nwant\n%s", got, want)
	}
	if got := string(NoLineFor(name, six).applyTo(NoLineFor(name, four).applyTo(text))); got != foreign {
		t.Errorf("without ours\n%s", got)
	}
}

func TestKeepHosts(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(file, []byte("::1 x\n"), 0o640); err != nil {
		t.Fatal(err)
	}
	vip := netip.MustParseAddr("10.103.97.2")
	for i, want := range []bool{true, false} {
		if changed, err := KeepHosts(t.Context(), file, "", LineFor("a.b", vip)); changed != want || err != nil {
			t.Errorf("call %d: %v, %v", i, changed, err)
		}
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("%v %v", st.Mode(), err)
	}
	entries, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v %v", entries, err)
	}
}

func FuzzHosts(f *testing.F) {
	f.Add([]byte("10.0.0.1 a.b # ipvscare\n\n10.0.0.2 a.b"))
	f.Fuzz(func(t *testing.T, in []byte) {
		vip := netip.MustParseAddr("10.103.97.2")
		once := LineFor("a.b", vip).applyTo(in)
		if string(LineFor("a.b", vip).applyTo(once)) != string(once) {
			t.Fatalf("%q becomes %q, which is not stable", in, once)
		}
	})
}

// TestKeepHostsWithoutALock checks that the lock is not taken if the file has the line already.
func TestKeepHostsWithoutALock(t *testing.T) {
	run, file := filepath.Join(t.TempDir(), "run"), filepath.Join(t.TempDir(), "hosts")
	line := LineFor("apiserver.cluster.local", netip.MustParseAddr("10.103.97.2"))
	if changed, err := KeepHosts(t.Context(), file, run, line); err != nil || !changed {
		t.Fatalf("%v, %v", changed, err)
	}
	unlock, err := Lock(t.Context(), filepath.Join(run, filepath.Base(ondisk.HostsLock)), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ended, cancel := context.WithCancel(t.Context())
	cancel() // waiting for the lock fails
	if changed, err := KeepHosts(ended, file, run, line); err != nil || changed {
		t.Errorf("nothing had to change: %v, %v", changed, err)
	}
	if _, err := KeepHosts(ended, file, run, NoLineFor(line.name, line.addr)); !errors.Is(err, context.Canceled) {
		t.Errorf("a change without the lock: %v", err)
	}
}
