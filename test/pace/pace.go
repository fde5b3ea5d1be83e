// Package pace skips long tests that would not end within the time of a run. A machine may be five
// times slower than an idle one, and a run that is killed in the middle of a test loses all of its
// results.
//
// A run with a time limit, such as .ci/run, sets two variables. Without them, every test runs,
// however long it takes.
package pace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

const (
	// Until is the time at which the run must have ended, in seconds since 1970.
	Until = "EDGEBAKE_UNTIL"
	// Record is the name of a file with the times of this run's tests. A line has "ran", the name,
	// the seconds on an idle machine, and the seconds here. For a skipped test it has "left"
	// instead of "ran", and the estimated seconds.
	Record = "EDGEBAKE_PACE"
)

// Takes declares the duration of a test on an idle machine with two processors. If the times of the
// tests before it show that it cannot end in time here, it is skipped with a message, which .ci/run
// repeats at its end.
func Takes(t testing.TB, quiet time.Duration) {
	t.Helper()
	if testing.Short() {
		t.Skipf("skipped with -short: it takes %v on a quiet machine", quiet)
	}
	takes(t, quiet)
}

func takes(t testing.TB, quiet time.Duration) {
	t.Helper()
	until, limited, err := limit()
	if err != nil {
		t.Fatal(err)
	}
	if !limited {
		return
	}
	file := os.Getenv(Record)
	before, err := read(file)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	need, left := time.Duration(before.factor()*float64(quiet)), until.Sub(start)
	if need > left {
		if err := add(file, "left", t.Name(), quiet, need); err != nil {
			t.Fatal(err)
		}
		t.Skipf("LEFT OUT, NOT TESTED: it would take about %v on this machine, and %v are left; `make e2e` runs it without a limit",
			need.Round(time.Second), left.Round(time.Second))
	}
	record(t, file, quiet, start)
}

// Took records the time that other work has taken here, and the time that it takes on an idle
// machine. Later calls of Takes use it.
func Took(name string, quiet, here time.Duration) error {
	if _, limited, err := limit(); err != nil || !limited {
		return err
	}
	return add(os.Getenv(Record), "ran", name, quiet, here)
}

func record(t testing.TB, file string, quiet time.Duration, start time.Time) {
	t.Cleanup(func() {
		if t.Skipped() || t.Failed() {
			return
		}
		if err := add(file, "ran", t.Name(), quiet, time.Since(start)); err != nil {
			t.Error(err)
		}
	})
}

// limit returns the time at which the run must end. The bool is false if there is no limit.
func limit() (time.Time, bool, error) {
	s := os.Getenv(Until)
	if s == "" {
		return time.Time{}, false, nil
	}
	sec, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}, false, fmt.Errorf("%s is %q: want seconds since 1970", Until, s)
	}
	if os.Getenv(Record) == "" {
		return time.Time{}, false, fmt.Errorf("%s is set, but %s is not: set it to the file that records the times of the tests", Until, Record)
	}
	return time.Unix(sec, 0), true, nil
}

// took has the sums of the times of all tests that have run.
type took struct{ quiet, here time.Duration }

// factor returns how many times longer tests take here than on an idle machine. It is at least 1,
// because the next test may be slow even if the tests so far were fast.
func (t took) factor() float64 {
	if t.quiet <= 0 {
		return 1
	}
	return max(1, float64(t.here)/float64(t.quiet))
}

func read(file string) (took, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return took{}, nil
	}
	if err != nil {
		return took{}, err
	}
	var sum took
	for n, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if len(f) != 4 {
			return took{}, fmt.Errorf("%s:%d: want 4 words, there are %d", file, n+1, len(f))
		}
		quiet, err1 := strconv.ParseFloat(f[2], 64)
		here, err2 := strconv.ParseFloat(f[3], 64)
		if err := errors.Join(err1, err2); err != nil {
			return took{}, fmt.Errorf("%s:%d: %w", file, n+1, err)
		}
		if f[0] == "ran" {
			sum.quiet += time.Duration(quiet * float64(time.Second))
			sum.here += time.Duration(here * float64(time.Second))
		}
	}
	return sum, nil
}

func add(file, what, name string, quiet, here time.Duration) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%s %s %.0f %.0f\n", what, name, quiet.Seconds(), here.Seconds())
	return errors.Join(err, f.Close())
}
