package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// idle are flags that have no effect in the way that a command is used. They are
// rejected: who gives one expects what it does. --force is never one of them: it
// permits, and asks for nothing.
type idle struct {
	flags   []string
	purpose string // what they are for, and the fix
}

// rejectIdle rejects the idle flags that were given, all of them at once.
func rejectIdle(c *cobra.Command, all ...idle) error {
	var errs []error
	for _, i := range all {
		var names []string
		c.Flags().Visit(func(f *pflag.Flag) {
			if slices.Contains(i.flags, f.Name) && asks(f) {
				names = append(names, "--"+f.Name)
			}
		})
		if len(names) == 0 {
			continue
		}
		list, are := names[0], "is"
		if last := len(names) - 1; last > 0 {
			list, are = strings.Join(names[:last], ", ")+" and "+names[last], "are"
		}
		errs = append(errs, fmt.Errorf("%s %s for %s", list, are, i.purpose))
	}
	if len(errs) == 0 {
		return nil
	}
	return usageError{errors.Join(errs...)}
}

// asks reports whether a flag that was given asks for something: a script's empty
// variable does not.
func asks(f *pflag.Flag) bool { return !slices.Contains([]string{"", "false", "[]"}, f.Value.String()) }
