package main

import "github.com/spf13/cobra"

// Endings of the files that commands take.
var (
	imageEndings    = []string{"raw", "zst"}
	documentEndings = []string{"yaml", "yml"}
	tableEndings    = []string{"csv", "tsv"}
)

// complete offers a flag's values.
func complete(c *cobra.Command, flag string, values ...string) {
	// It fails for a flag that is not there, which would show at once.
	_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// completeFiles offers files: the n-th argument has one of the n-th endings,
// those after the last one the last's.
func completeFiles(endings ...[]string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		return endings[min(len(args), len(endings)-1)], cobra.ShellCompDirectiveFilterFileExt
	}
}
