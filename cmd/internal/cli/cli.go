// Package cli has the parts that edgebake's commands share: common flags, checks of operands, and
// the error for a wrong command line.
package cli

import (
	"fmt"

	"github.com/spf13/cobra"
)

// UsageError is an error of the command line; the program exits with 2.
type UsageError struct{ error }

// Usage returns err as an error of the command line.
func Usage(err error) error { return UsageError{err} }

// Unwrap returns the wrapped error.
func (e UsageError) Unwrap() error { return e.error }

// Group makes c a command that only has subcommands. Without a subcommand, c prints its help.
func Group(c *cobra.Command, sub ...*cobra.Command) *cobra.Command {
	c.Args, c.RunE = Subcommand, func(c *cobra.Command, _ []string) error { return c.Help() }
	c.AddCommand(sub...)
	return c
}

// Subcommand rejects arguments that are not subcommands of c.
func Subcommand(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := ""
	c.SuggestionsMinimumDistance = 2
	if near := c.SuggestionsFor(args[0]); len(near) > 0 {
		hint = fmt.Sprintf("; did you mean %q?", near[0])
	}
	return Usage(fmt.Errorf("unknown command %q%s; %s --help lists the commands", args[0], hint, c.CommandPath()))
}
