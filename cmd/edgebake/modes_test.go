package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// TestStampModes checks that each flag of stamp has an effect in at least one mode, and that modes
// list only existing flags.
func TestStampModes(t *testing.T) {
	stamp := newStamp(streams{In: strings.NewReader(""), Out: os.Stdout, Err: os.Stderr})
	var known []string
	for _, m := range stampModes() {
		for _, name := range m.flags {
			if stamp.Flags().Lookup(name) == nil {
				t.Errorf("mode %s: there is no flag --%s", m.name, name)
			}
		}
		known = append(known, m.flags...)
	}
	stamp.Flags().VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(known, f.Name) {
			t.Errorf("--%s has no effect in any mode", f.Name)
		}
	})
}
