// Package bench has the code that the benchmarks in its subdirectories share: the number of runs,
// and the load of the computer.
package bench

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Runs returns the number of runs of each subject: the value of EDGEBAKE_BENCH_RUNS or, if it is
// not set, the argument.
func Runs(b *testing.B, unset int) int {
	b.Helper()
	s := os.Getenv("EDGEBAKE_BENCH_RUNS")
	if s == "" {
		return unset
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		b.Fatalf("EDGEBAKE_BENCH_RUNS=%q: want a number of at least 1", s)
	}
	return n
}

// Median returns the median of x: the upper one of an even number of values, and 0 if there are
// none.
func Median(x []float64) float64 {
	if len(x) == 0 {
		return 0
	}
	x = slices.Sorted(slices.Values(x))
	return x[len(x)/2]
}

// Load returns the computer's load average over 1, 5 and 15 minutes, or "" if it is unknown.
func Load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	fields := strings.Fields(string(text))
	return strings.Join(fields[:min(3, len(fields))], " ")
}
