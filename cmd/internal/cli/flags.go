package cli

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// ImageExtensions are the file name extensions of images.
var ImageExtensions = []string{"raw", "zst"}

// FileFlag declares a flag that names a file. Completion offers files with these extensions.
func FileFlag(c *cobra.Command, to *string, name, usage string, endings ...string) {
	pathFlag(c, to, name, usage)
	_ = c.MarkFlagFilename(name, endings...)
}

// DirFlag declares a flag that names a directory.
func DirFlag(c *cobra.Command, to *string, name, value, usage string) {
	*to = value
	pathFlag(c, to, name, usage)
	_ = c.MarkFlagDirname(name)
}

// pathFlag declares a flag that names a file or directory.
func pathFlag(c *cobra.Command, to *string, name, usage string) {
	if name == "output" {
		c.Flags().VarP((*outputPath)(to), name, "o", usage)
		return
	}
	c.Flags().StringVar(to, name, *to, usage)
}

// outputPath is the path of an output. It rejects the names of output formats, which are the values
// of -o in other commands.
type outputPath string

func (p *outputPath) String() string { return string(*p) }
func (p *outputPath) Type() string   { return "string" }

func (p *outputPath) Set(s string) error {
	if slices.Contains([]string{"json", "yaml", "text", "table", "wide", "name"}, s) {
		return fmt.Errorf("this command expects a path, not an output format; for a file or directory named %s, write ./%[1]s", s)
	}
	*p = outputPath(s)
	return nil
}

// Complete sets the values that completion offers for a flag.
func Complete(c *cobra.Command, flag string, values ...string) {
	// This fails only if the flag does not exist.
	_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// CompleteFiles completes operands with files: the n-th operand with the n-th list of extensions,
// and all further operands with the last list.
func CompleteFiles(endings ...[]string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if strings.HasPrefix(word, "/dev/") {
			return nil, cobra.ShellCompDirectiveDefault // disks have no extension
		}
		return endings[min(len(args), len(endings)-1)], cobra.ShellCompDirectiveFilterFileExt
	}
}

// Span is the duration in a flag: in Go's syntax, or in days (30d) or weeks (2w).
type Span time.Duration

// String returns the duration in Go's syntax, without units that are zero. For zero it returns "0",
// which --help does not show as a default.
func (a *Span) String() string {
	if *a == 0 {
		return "0"
	}
	return strings.Replace(strings.Replace(time.Duration(*a).String(), "m0s", "m", 1), "h0m", "h", 1)
}

// Type returns the type that help shows.
func (a *Span) Type() string { return "duration" }

// Set parses s.
func (a *Span) Set(s string) error {
	const day = 24 * time.Hour
	for unit, size := range map[string]time.Duration{"d": day, "w": 7 * day} {
		if n, err := strconv.ParseUint(strings.TrimSuffix(s, unit), 10, 16); err == nil && strings.HasSuffix(s, unit) {
			*a = Span(time.Duration(n) * size)
			return nil
		}
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return errors.New("want a time span, e.g. 30d, 2w or 12h")
	}
	if d < 0 {
		return errors.New("must not be negative; want a time span, e.g. 30d, 2w or 12h")
	}
	*a = Span(d)
	return nil
}

// Together postpones the errors of c's flags that have edgebake's own types. The returned function
// reports all of them; without Together, pflag reports only the first one.
func Together(c *cobra.Command) func() error {
	var errs []error
	c.Flags().VisitAll(func(f *pflag.Flag) {
		t := reflect.TypeOf(f.Value)
		if t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if t.PkgPath() != reflect.TypeFor[pflag.Flag]().PkgPath() {
			f.Value = &lateValue{f.Value, f.Name, c, &errs}
		}
	})
	return func() error { return errors.Join(errs...) }
}

// lateValue is the value of a flag whose errors are reported later.
type lateValue struct {
	pflag.Value
	name    string
	command *cobra.Command
	errs    *[]error
}

func (v *lateValue) Set(text string) error {
	if err := v.Value.Set(text); err != nil {
		*v.errs = append(*v.errs, Usage(fmt.Errorf("invalid argument %q for %q flag: %w; see %s --help", text, "--"+v.name, err, v.command.CommandPath())))
	}
	return nil
}

// Unused lists flags that have no effect in the current use of a command, and are therefore
// rejected. --force is never listed, because it only permits something.
type Unused struct {
	Flags   []string
	Purpose string // the end of the message: what the flags apply to, and the fix
}

// RejectUnused rejects all unused flags that are set, in one error.
func RejectUnused(c *cobra.Command, all ...Unused) error {
	var errs []error
	for _, u := range all {
		var names []string
		c.Flags().Visit(func(f *pflag.Flag) {
			// An empty value, for example of an unset variable in a script, requests nothing.
			if slices.Contains(u.Flags, f.Name) && !slices.Contains([]string{"", "false", "[]"}, f.Value.String()) {
				names = append(names, "--"+f.Name)
			}
		})
		if len(names) == 0 {
			continue
		}
		list, apply := names[0], "applies"
		if last := len(names) - 1; last > 0 {
			list, apply = strings.Join(names[:last], ", ")+" and "+names[last], "apply"
		}
		errs = append(errs, fmt.Errorf("%s %s only to %s", list, apply, u.Purpose))
	}
	if len(errs) == 0 {
		return nil
	}
	return Usage(errors.Join(errs...))
}

// ClusterFlags select a running cluster.
type ClusterFlags struct{ Kubeconfig, Context string }

// Declare declares the flags. usage is the help of --kubeconfig.
func (k *ClusterFlags) Declare(c *cobra.Command, usage string) {
	FileFlag(c, &k.Kubeconfig, "kubeconfig", usage)
	c.Flags().StringVar(&k.Context, "context", "", "context in the kubeconfig (default: its current context)")
}

// Open opens the cluster that the flags select.
func (k *ClusterFlags) Open() (*cluster.Client, error) { return cluster.Open(k.Kubeconfig, k.Context) }

// DocumentFlags are the flags of commands that read documents.
type DocumentFlags struct{ TokenFile, Identity, Ignition string }

// Secrets declares --token-file and --identity.
func (d *DocumentFlags) Secrets(c *cobra.Command) {
	FileFlag(c, &d.TokenFile, "token-file", "read the bootstrap token from this file, - for standard input (default $"+documents.TokenVariable+", for Sites without one)")
	d.IdentityFlag(c)
}

// IdentityFlag declares --identity.
func (d *DocumentFlags) IdentityFlag(c *cobra.Command) {
	FileFlag(c, &d.Identity, "identity", "age identity file that decrypts encrypted documents (default $"+documents.IdentityVariable+")")
}

// Stamped declares the flags of commands that write a Site into a slot or onto a stick.
func (d *DocumentFlags) Stamped(c *cobra.Command) {
	d.Secrets(c)
	c.Flags().StringVar(&d.Ignition, "ignition", "", "Ignition v3 config to put beside the Site (default: the Site's ignitionFile)")
}

// Reader returns a reader of documents that uses the flags.
func (d *DocumentFlags) Reader(s console.Streams) *documents.Reader {
	return &documents.Reader{
		Stdin: s.In, AskHidden: s.AskHidden(), Warn: s.WarnAll, Now: time.Now(),
		TokenFile: d.TokenFile, Identity: d.Identity, Ignition: d.Ignition,
	}
}

// NotInput rejects an output file that is also an input of the Site or Inventory, even with
// --force.
func (d *DocumentFlags) NotInput(flag, output string, read media.SiteSource) error {
	return errors.Join(
		file.NotInput(flag, output, "the document", read.Name),
		file.NotInput(flag, output, "the Ignition config", read.Ignition),
		file.NotInput(flag, output, "the file of --token-file", d.TokenFile),
		file.NotInput(flag, output, "the age identity file", (&documents.Reader{Identity: d.Identity}).IdentityFile()))
}

// DefaultImage is the file name of the Image that commands use if none is named.
const DefaultImage = "image.yaml"

// DefaultDocuments finds the documents for a command line that names none.
type DefaultDocuments struct {
	what string
	find func() []string
}

// ImageHere finds the Image in the current directory, for commands that need an Image.
func ImageHere() *DefaultDocuments {
	return &DefaultDocuments{DefaultImage, func() []string {
		if _, err := os.Stat(DefaultImage); err != nil {
			return nil
		}
		return []string{DefaultImage}
	}}
}

// AllHere finds all documents in the current directory, for `edgebake validate`.
func AllHere() *DefaultDocuments {
	return &DefaultDocuments{"YAML file with an edgebake document", sync.OnceValue(func() []string {
		names, err := documents.In(".")
		if err != nil {
			return []string{"."} // validate reports why the directory cannot be read
		}
		return names
	})}
}

// TakesDocument lets -f name the document instead of operand n, counted from 0. Without operand and
// -f, the command uses the documents found by here; if here is nil, a document is required.
func TakesDocument(s console.Streams, c *cobra.Command, n int, here *DefaultDocuments) {
	var files []string
	usage := "the document, if it is not given as an operand"
	if here != nil {
		usage = fmt.Sprintf("the document, if it is not given as an operand (default: the %s in the current directory)", here.what)
	}
	c.Flags().StringArrayVarP(&files, "filename", "f", nil, usage)
	_ = c.MarkFlagFilename("filename", documents.Extensions...)
	whole := func(a []string) []string {
		a = append(slices.Clone(a), files...)
		if here != nil && len(a) == n {
			a = append(a, here.find()...)
		}
		return a
	}
	check, run := c.Args, c.RunE
	c.Args = func(c *cobra.Command, a []string) error {
		if here != nil && len(whole(a)) == 0 {
			return Usage(fmt.Errorf("%s requires a document, and the current directory has no %s; edgebake init writes one", c.CommandPath(), here.what))
		}
		if f := c.Flags().Lookup("token-file"); f != nil && f.Value.String() == "-" && slices.Contains(whole(a), "-") {
			return Usage(errors.New("the document and the token cannot both come from standard input"))
		}
		return check(c, whole(a))
	}
	c.RunE = func(c *cobra.Command, a []string) error {
		all := whole(a)
		if given := len(a) + len(files); given < len(all) {
			s.Hint("edgebake: using %s\n", strings.Join(all[given:], ", "))
		}
		return run(c, all)
	}
}

// Args checks the number of operands. what describes the required operands.
func Args(low, high int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < low || high >= 0 && len(args) > high {
			return Usage(fmt.Errorf("%s requires %s; see %s --help", c.CommandPath(), what, c.CommandPath()))
		}
		return nil
	}
}

// NoArgs rejects all operands.
func NoArgs(c *cobra.Command, a []string) error { return Args(0, 0, "no arguments")(c, a) }
