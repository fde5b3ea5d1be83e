package pace

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// run reports whether a test ran that takes quiet on an idle computer, when the time limit was left
// away.
func run(t *testing.T, quiet, left time.Duration) (ran bool) {
	t.Helper()
	t.Setenv(Until, strconv.FormatInt(time.Now().Add(left).Unix(), 10))
	t.Run("one", func(t *testing.T) {
		takes(t, quiet)
		ran = true
	})
	return ran
}

func TestTakes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pace")
	t.Setenv(Record, file)
	for _, c := range []struct {
		name        string
		before      string
		quiet, left time.Duration
		want        bool
	}{
		{"the first, with time", "", time.Minute, 2 * time.Minute, true},
		{"the first, without", "", 2 * time.Minute, time.Minute, false},
		{"after one that took three times as long", "ran TestA 100 300\n", time.Minute, 2 * time.Minute, false},
		{"the same, with time for it", "ran TestA 100 300\n", time.Minute, 4 * time.Minute, true},
		{"after a quick one", "ran TestA 100 10\n", 2 * time.Minute, time.Minute, false},
		{"one that was left out says nothing of speed", "left TestA 100 900\n", time.Minute, 2 * time.Minute, true},
		{"the time is over", "", time.Second, -time.Minute, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := os.WriteFile(file, []byte(c.before), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := run(t, c.quiet, c.left); got != c.want {
				t.Errorf("the test ran: %v, want %v", got, c.want)
			}
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			verb := map[bool]string{true: "ran", false: "left"}[c.want]
			if added := strings.TrimPrefix(string(b), c.before); !strings.HasPrefix(added, verb+" "+t.Name()+"/one ") {
				t.Errorf("the record says %q", added)
			}
		})
	}
}

func TestTook(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pace")
	t.Setenv(Record, file)
	t.Setenv(Until, "")
	if err := Took("boot", time.Minute, time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("it is recorded without a limit")
	}
	t.Setenv(Until, "1")
	if err := Took("boot", time.Minute, 3*time.Minute); err != nil {
		t.Fatal(err)
	}
	if got, err := read(file); err != nil || got.factor() != 3 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestNoLimit(t *testing.T) {
	t.Setenv(Until, "")
	t.Setenv(Record, "")
	takes(t, 1000*time.Hour)
}

func TestLimitRead(t *testing.T) {
	t.Setenv(Until, "soon")
	if _, _, err := limit(); err == nil || !strings.Contains(err.Error(), "want seconds since 1970") {
		t.Error(err)
	}
	t.Setenv(Until, "1")
	t.Setenv(Record, "")
	if _, _, err := limit(); err == nil || !strings.Contains(err.Error(), Record+" is not") {
		t.Error(err)
	}
	torn := filepath.Join(t.TempDir(), "pace")
	if err := os.WriteFile(torn, []byte("ran TestA 10 20\nran TestB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := read(torn); err == nil || !strings.Contains(err.Error(), "pace:2: want 4 words") {
		t.Error(err)
	}
}
