package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
	// exitInterrupted is what shells say of a program that Ctrl-C has ended.
	exitInterrupted = 130
)

// usageError is a command line that cannot be carried out.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// run is the whole program but for signals and the exit.
func run(ctx context.Context, args []string, s streams) int {
	s.In = &input{ctx, s.In}
	out := &results{Writer: s.Out}
	s = s.printable(out)
	root := newRoot(s)
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	said := s.Err
	var usage usageError
	var left unfinished
	if out.lost != nil && errors.Is(err, out.lost) {
		err = nil // nothing else failed
	}
	switch {
	case err == nil && out.lost == nil:
		return exitOK
	case err == nil:
		err = out.lost
		if e := (*fs.PathError)(nil); errors.As(err, &e) {
			err = e.Err
		}
		err = fmt.Errorf("done, but the result could not be printed: writing to standard output: %w", err)
	case errors.As(err, &left):
		fmt.Fprintf(said, "edgebake: %v\n", left)
		return exitInterrupted
	case ctx.Err() != nil:
		fmt.Fprintf(said, "edgebake: %s\n", interrupted(c, err))
		return exitInterrupted
	case errors.As(err, &usage):
		for _, e := range builder.SplitErrors(err) {
			if u, ok := e.(usageError); ok {
				e = u.error
			}
			for _, e := range builder.SplitErrors(e) {
				fmt.Fprintf(said, "edgebake: %v\n", e)
			}
		}
		return exitUsage
	}
	for _, e := range builder.SplitErrors(err) {
		if problems, ok := e.(configs.Problems); ok {
			// One a line and nothing before it, for editors to jump to.
			fmt.Fprintln(said, problems.Error())
		} else {
			fmt.Fprintf(said, "edgebake: %v\n", e)
		}
	}
	return exitFailed
}

// interrupted says what an interrupt left. Only some commands take back what
// they have begun; of the others the error says how far they came.
func interrupted(c *cobra.Command, err error) string {
	if kept := (*builder.LeftoverError)(nil); errors.As(err, &kept) {
		return "interrupted; this was left behind: " + kept.Error()
	}
	switch path := c.CommandPath(); {
	case path == "edgebake build", path == "edgebake stamp" && !c.Flags().Changed("each") && !c.Flags().Changed("slots"):
		return "interrupted; nothing was left behind"
	case path == "edgebake boot", path == "edgebake cluster listen", path == "edgebake cluster status" && c.Flags().Changed("watch"):
		return "interrupted" // as it is meant to end
	case path == "edgebake push":
		return "interrupted; parts that have arrived stay in the registry: the same command resumes"
	}
	text := strings.TrimSuffix(strings.TrimSuffix(err.Error(), context.Canceled.Error()), ": ")
	if text == "" {
		return "interrupted before it was done"
	}
	return "interrupted before it was done: " + text
}

func newRoot(s streams) *cobra.Command {
	s.talk = new(talk)
	root := &cobra.Command{
		Use:   "edgebake",
		Short: "Bake bootable disk images for Kubernetes edge nodes",
		Long: `Edgebake bakes an Image document into a golden disk image that contains nothing
site-specific, and stamps a Site document onto copies of it. A machine that boots
such a copy joins the site's cluster by itself.

Four commands check something: validate a document, verify the bytes of an image or a
disk, preflight whether the machines of a Site can join, and cluster verify what a
living cluster lacks for its nodes.

--output (-o) says where to write for commands that write something, and the form
(text, json or yaml) for commands that print something. The exit code is 0 for success,
1 for a failure, 2 for a wrong command line and 130 after Ctrl-C.`,
		Example: `  edgebake init                                           # writes image.yaml and site.yaml
  edgebake build image.yaml                               # bakes the golden image
  edgebake stamp my-edge.raw site.yaml --output shop.raw  # writes a copy for one site
  edgebake boot shop.raw                                  # tries it in QEMU`,
		Version:       version.OfSource(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          subcommand,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	f := root.PersistentFlags()
	f.BoolVarP(&s.talk.quiet, "quiet", "q", false, "print results, warnings and errors only")
	f.BoolVarP(&s.talk.verbose, "verbose", "v", false, "also print the output of the programs that edgebake calls")
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error {
		if f := c.Flags().Lookup("output"); f != nil && f.Value.String() == "-" && !slices.Contains(writesToStdout, c.CommandPath()) {
			return usageError{fmt.Errorf("--output -: %s cannot write to standard output: name a file or directory", c.CommandPath())}
		}
		if s.talk.quiet && s.talk.verbose {
			return usageError{errors.New("--quiet and --verbose exclude each other")}
		}
		return nil
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if words := c.Flags().Args(); c.HasSubCommands() && len(words) > 0 {
			return subcommand(c, words) // a flag of a command that is misspelt
		}
		return usageError{fmt.Errorf("%w%s; see %s --help", err, nearFlag(c, err), c.CommandPath())}
	})
	for _, g := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"build", "Build images:", []*cobra.Command{newInit(s), newValidate(s), newPlan(s), newImages(s), newBuild(s), newPush(s), newPull(s)}},
		{"stamp", "Stamp and flash:", []*cobra.Command{newStamp(s), newUnstamp(s), newSite(s), newInventory(s), newFlash(s), newInstaller(s), newDevices(s)}},
		{"cluster", "Clusters:", []*cobra.Command{newCluster(s), newPreflight(s)}},
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
			c.Args, c.RunE = subcommand, func(c *cobra.Command, _ []string) error { return c.Help() }
		case "help":
			c.Args = func(_ *cobra.Command, args []string) error {
				found, rest, err := root.Find(args)
				if err != nil || len(rest) > 0 {
					return subcommand(found, rest)
				}
				return nil
			}
		}
	}
	return root
}

// writesToStdout are the commands whose --output - is standard output.
var writesToStdout = []string{"edgebake report", "edgebake inventory import", "edgebake cluster token mint"}

// subcommand rejects words that are not a command below c.
func subcommand(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := ""
	c.SuggestionsMinimumDistance = 2
	if near := c.SuggestionsFor(args[0]); len(near) > 0 {
		hint = fmt.Sprintf("; did you mean %q?", near[0])
	}
	return usageError{fmt.Errorf("unknown command %q%s; %s --help lists them", args[0], hint, c.CommandPath())}
}

// nearFlag suggests a flag for one that does not exist.
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
	return configs.DidYouMean("--"+unknown.GetSpecifiedName(), names)
}

// args checks the number of arguments and says which are wanted.
func args(low, high int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < low || high >= 0 && len(args) > high {
			if meant := lastIsFlags(c, args); meant != "" {
				return usageError{fmt.Errorf("%s is one operand too many; did you mean %q?", args[len(args)-1], meant)}
			}
			return usageError{fmt.Errorf("%s requires %s; see %s --help", c.CommandPath(), what, c.CommandPath())}
		}
		return nil
	}
}

// takesDocument lets -f name the document that is operand n, as with kubectl. An Image's
// is image.yaml in the current directory where nothing names it.
func takesDocument(s streams, c *cobra.Command, n int, image bool) {
	var files []string
	usage := "the document (instead of the operand)"
	if image {
		usage = "the document (instead of the operand; default " + defaultImage + ")"
	}
	c.Flags().StringArrayVarP(&files, "filename", "f", nil, usage)
	_ = c.MarkFlagFilename("filename", documentEndings...)
	whole := func(a []string) []string {
		a = append(slices.Clone(a), files...)
		if _, err := os.Stat(defaultImage); image && len(a) == n && err == nil {
			a = append(a, defaultImage)
		}
		return a
	}
	check, run := c.Args, c.RunE
	c.Args = func(c *cobra.Command, a []string) error {
		if image && len(whole(a)) == 0 {
			return usageError{fmt.Errorf("%s requires a document, and there is no %s here; edgebake init writes one", c.CommandPath(), defaultImage)}
		}
		return check(c, whole(a))
	}
	c.RunE = func(c *cobra.Command, a []string) error {
		all := whole(a)
		if len(a)+len(files) < len(all) {
			s.hint("edgebake: using %s\n", defaultImage)
		}
		return run(c, all)
	}
}

const defaultImage = "image.yaml"

const cacheUsage = "directory of fetched and made inputs (default $EDGEBAKE_CACHE, else edgebake in the user's cache directory)"

// cacheFlag adds --cache.
func cacheFlag(c *cobra.Command, dir *string) {
	c.Flags().StringVar(dir, "cache", "", cacheUsage)
}

func openCache(dir string) (*fetch.Cache, error) {
	if dir == "" {
		var err error
		if dir, err = fetch.DefaultDir(); err != nil {
			return nil, err
		}
	}
	return fetch.Open(dir)
}

// dirOf is where a document's relative paths start; "-" is standard input,
// whose paths start in the current directory.
func dirOf(name string) string {
	if name == "-" {
		return "."
	}
	return filepath.Dir(name)
}

// maxDocument is more than any Image or Site has, and less than any disk image.
const maxDocument = 32 << 20

func readInput(s streams, name string) ([]byte, error) {
	if name == "-" {
		data, err := io.ReadAll(io.LimitReader(s.In, maxDocument+1))
		if len(data) > maxDocument {
			return nil, fmt.Errorf("standard input has more than %s: want a YAML document", configs.HumanSize(maxDocument))
		}
		return data, err
	}
	if fi, err := os.Stat(name); err == nil && fi.Size() > maxDocument {
		fix := "name the YAML file"
		if slices.Contains(slices.Concat(documentEndings, tableEndings), strings.TrimPrefix(filepath.Ext(name), ".")) {
			fix = "split it"
		}
		return nil, fmt.Errorf("%s has %s, a document has at most %s: %s", name, configs.HumanSize(fi.Size()), configs.HumanSize(maxDocument), fix)
	}
	data, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) && slices.Contains([]string{".yaml", ".yml"}, filepath.Ext(name)) {
		err = fmt.Errorf("%w; `edgebake init` writes an image.yaml and a site.yaml to start from, with --cluster a cluster.yaml", err)
	}
	if len(data) == ondisk.SlotSize {
		if _, bad := slot.ReadInfo(bytes.NewReader(data)); bad == nil {
			return nil, fmt.Errorf("%s is %s", name, media.ASlot)
		}
	}
	return data, err
}
