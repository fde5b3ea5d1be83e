package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/clustercmd"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/cmd/internal/flagvalue"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
	// exitInterrupted is the exit code that shells report for a program ended by Ctrl-C.
	exitInterrupted = 130
)

// streams are the standard streams of a command.
type streams = console.Streams

// unfinished is the error after an interrupt. Its text describes the state that was left.
type unfinished struct{ error }

// run is the whole program without signal handling and os.Exit.
func run(ctx context.Context, args []string, s streams) int {
	s.In = console.Input(ctx, s.In)
	out := &console.Results{Writer: s.Out}
	s = s.Printable(out)
	root := newRoot(s)
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	if out.Lost != nil && (err == nil || errors.Is(err, out.Lost)) {
		lost := out.Lost // report lost output only if there is no other error
		if e := (*fs.PathError)(nil); errors.As(lost, &e) {
			lost = e.Err
		}
		err = fmt.Errorf("done, but the result could not be printed: writing to standard output: %w", lost)
	}
	var usage cli.UsageError
	var left unfinished
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &left):
		fmt.Fprintf(s.Err, "edgebake: %v\n", left)
		return exitInterrupted
	case ctx.Err() != nil:
		fmt.Fprintf(s.Err, "edgebake: %s\n", interrupted(c, err))
		return exitInterrupted
	}
	code := exitFailed
	if errors.As(err, &usage) {
		code = exitUsage
	}
	printErrors(s.Err, err)
	return code
}

// printErrors prints one line for each error.
func printErrors(w io.Writer, err error) {
	for _, e := range joined.Errors(err) {
		if u, ok := e.(cli.UsageError); ok {
			printErrors(w, u.Unwrap())
		} else if problems, ok := e.(configs.Problems); ok {
			fmt.Fprintln(w, problems.Error()) // no prefix, so that editors can jump to the position
		} else {
			fmt.Fprintf(w, "edgebake: %v\n", e)
		}
	}
}

// interrupted describes the state after an interrupt. Some commands undo their work; for the
// others, err describes the part that is complete.
func interrupted(c *cobra.Command, err error) string {
	if kept := (*builder.LeftoverError)(nil); errors.As(err, &kept) {
		return "interrupted; this was left behind: " + kept.Error()
	}
	switch path := c.CommandPath(); {
	case path == "edgebake build", path == "edgebake stamp" && !c.Flags().Changed("each") && !c.Flags().Changed("slots"):
		return "interrupted; nothing was left behind"
	case path == "edgebake boot", path == "edgebake cluster listen", path == "edgebake cluster status" && c.Flags().Changed("watch"):
		return "interrupted" // these commands run until they are interrupted
	case path == "edgebake push":
		return "interrupted; parts that have arrived stay in the registry: the same command resumes"
	}
	text := strings.TrimSuffix(strings.TrimSuffix(err.Error(), context.Canceled.Error()), ": ")
	if text == "" {
		return "interrupted before the command finished"
	}
	return "interrupted before the command finished: " + text
}

func newRoot(s streams) *cobra.Command {
	s.Talk = new(console.Talk)
	root := &cobra.Command{
		Use:   "edgebake",
		Short: "Bake bootable disk images for Kubernetes edge nodes",
		Long: `Edgebake bakes an Image document into a golden disk image that contains nothing
site-specific, and stamps a Site document onto copies of it. A machine that boots
such a copy joins the site's cluster by itself.

Four commands check something: validate a document, verify the bytes of an image or a
disk, preflight whether the machines of a Site can join, and cluster verify whether a
running cluster has everything that its nodes need.

--output (-o) names the file or directory to write, or the format (text, json or
yaml) for commands that print something. The exit code is 0 for success,
1 for a failure, 2 for a wrong command line and 130 after Ctrl-C.`,
		Example: `  edgebake init                                           # writes image.yaml and site.yaml
  edgebake build image.yaml                               # bakes the golden image
  edgebake stamp my-edge.raw site.yaml --output shop.raw  # writes a copy for one site
  edgebake boot shop.raw                                  # tries it in QEMU`,
		Version:       version.OfSource(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	f := root.PersistentFlags()
	f.BoolVarP(&s.Talk.Quiet, "quiet", "q", false, "print results, warnings and errors only")
	f.BoolVarP(&s.Talk.Verbose, "verbose", "v", false, "also print the output of the programs that edgebake calls")
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error {
		if f := c.Flags().Lookup("output"); f != nil && f.Value.String() == "-" && !slices.Contains(writesToStdout, c.CommandPath()) {
			return cli.Usage(fmt.Errorf("--output -: %s cannot write to standard output: name a file or directory", c.CommandPath()))
		}
		if s.Talk.Quiet && s.Talk.Verbose {
			return cli.Usage(errors.New("--quiet and --verbose exclude each other"))
		}
		return nil
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if words := c.Flags().Args(); c.HasSubCommands() && len(words) > 0 {
			return cli.Subcommand(c, words) // the flag belongs to a misspelled command
		}
		return cli.Usage(fmt.Errorf("%w%s; see %s --help", flagvalue.Explain(err), nearFlag(c, err), c.CommandPath()))
	})
	addCommands(root, s)
	return cli.Group(root)
}

// addCommands adds all commands, in the groups in which help lists them.
func addCommands(root *cobra.Command, s streams) {
	for _, g := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"build", "Build images:", []*cobra.Command{newInit(s), newValidate(s), newPlan(s), newImages(s), newBuild(s), newPush(s), newPull(s)}},
		{"stamp", "Stamp and flash:", []*cobra.Command{newStamp(s), newUnstamp(s), newSite(s), newInventory(s), newFlash(s), newInstaller(s), newDevices(s)}},
		{"cluster", "Clusters:", []*cobra.Command{clustercmd.New(s), clustercmd.NewPreflight(s)}},
		{"inspect", "Inspect and try:", []*cobra.Command{newInspect(s), newVerify(s), newReport(s), newDiff(s), newUpdate(s), newRender(s), newBoot(s)}},
		{"other", "Other:", []*cobra.Command{newSchema(s), newExplain(s), newCacheCommand(s), newVersion(s), newMan(s)}},
	} {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
		for _, c := range g.commands {
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	root.SetHelpCommandGroupID("other")
	root.SetCompletionCommandGroupID("other")
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "completion":
			cli.Group(c)
		case "help":
			c.Args = func(_ *cobra.Command, args []string) error {
				found, rest, err := root.Find(args)
				if err != nil || len(rest) > 0 {
					return cli.Subcommand(found, rest)
				}
				return nil
			}
		}
	}
}

// writesToStdout lists the commands for which --output - means standard output.
var writesToStdout = []string{"edgebake report", "edgebake inventory import", "edgebake cluster token mint"}

// nearFlag suggests an existing flag that is similar to an unknown one.
func nearFlag(c *cobra.Command, err error) string {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return ""
	}
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, "--"+f.Name)
		}
	})
	return strict.DidYouMean("--"+unknown.GetSpecifiedName(), names)
}
