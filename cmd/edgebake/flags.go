package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// imageEndings are the file name extensions of images.
var imageEndings = []string{"raw", "zst"}

// fileFlag declares a flag that names a file. Completion offers files with these extensions.
func fileFlag(c *cobra.Command, to *string, name, usage string, endings ...string) {
	pathFlag(c, to, name, usage)
	_ = c.MarkFlagFilename(name, endings...)
}

// dirFlag declares a flag that names a directory.
func dirFlag(c *cobra.Command, to *string, name, value, usage string) {
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

// complete sets the values that completion offers for a flag.
func complete(c *cobra.Command, flag string, values ...string) {
	// This fails only if the flag does not exist.
	_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

// completeFiles offers files for operands: for the n-th operand those with the n-th extensions, for
// further operands those with the last ones.
func completeFiles(endings ...[]string) cobra.CompletionFunc {
	return func(_ *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if strings.HasPrefix(word, "/dev/") {
			return nil, cobra.ShellCompDirectiveDefault // disks have no extension
		}
		return endings[min(len(args), len(endings)-1)], cobra.ShellCompDirectiveFilterFileExt
	}
}

// span is the duration in a flag: in Go's syntax, in days (30d) or in weeks (2w).
type span time.Duration

// String returns the duration in Go's syntax, without units that are zero. It returns "0" for zero,
// which help omits.
func (a *span) String() string {
	if *a == 0 {
		return "0"
	}
	return strings.Replace(strings.Replace(time.Duration(*a).String(), "m0s", "m", 1), "h0m", "h", 1)
}

func (a *span) Type() string { return "duration" }

func (a *span) Set(s string) error {
	const day = 24 * time.Hour
	for unit, size := range map[string]time.Duration{"d": day, "w": 7 * day} {
		if n, err := strconv.ParseUint(strings.TrimSuffix(s, unit), 10, 16); err == nil && strings.HasSuffix(s, unit) {
			*a = span(time.Duration(n) * size)
			return nil
		}
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return errors.New("want a time span, e.g. 30d, 2w or 12h")
	}
	*a = span(d)
	return nil
}

// unused lists flags that have no effect in the current use of a command. They are rejected,
// because a person who sets a flag expects an effect. --force is never listed, because it only
// permits something.
type unused struct {
	flags   []string
	purpose string // what the flags are for, and the fix for a message
}

// rejectUnused rejects all unused flags that are set, in one error.
func rejectUnused(c *cobra.Command, all ...unused) error {
	var errs []error
	for _, u := range all {
		var names []string
		c.Flags().Visit(func(f *pflag.Flag) {
			// An empty value, for example of a variable in a script, requests nothing.
			if slices.Contains(u.flags, f.Name) && !slices.Contains([]string{"", "false", "[]"}, f.Value.String()) {
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
		errs = append(errs, fmt.Errorf("%s %s for %s", list, are, u.purpose))
	}
	if len(errs) == 0 {
		return nil
	}
	return usageError{errors.Join(errs...)}
}

// cacheFlag declares --cache.
func cacheFlag(f *pflag.FlagSet, dir *string) {
	f.StringVar(dir, "cache", "", "directory of fetched and made inputs (default $EDGEBAKE_CACHE, else edgebake in the user's cache directory)")
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

const kubeconfigUsage = "kubeconfig of the cluster (default $KUBECONFIG, else ~/.kube/config)"

// clusterFlags select a running cluster.
type clusterFlags struct{ kubeconfig, context string }

func (k *clusterFlags) declare(c *cobra.Command, usage string) {
	fileFlag(c, &k.kubeconfig, "kubeconfig", usage)
	c.Flags().StringVar(&k.context, "context", "", "context in the kubeconfig (default: its current context)")
}

func (k *clusterFlags) open() (*cluster.Client, error) { return cluster.Open(k.kubeconfig, k.context) }

// onCluster declares the flags of a command for a running cluster, and makes f the command's
// function.
func onCluster(c *cobra.Command, f func(ctx context.Context, client *cluster.Client, args []string) error) *cobra.Command {
	k := new(clusterFlags)
	k.declare(c, kubeconfigUsage)
	if c.Args == nil {
		c.Args = noArgs
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		client, err := k.open()
		if err != nil {
			return err
		}
		return f(c.Context(), client, args)
	}
	return c
}

// documentFlags are the flags of commands that read documents.
type documentFlags struct{ tokenFile, identity, ignition string }

func (d *documentFlags) secrets(c *cobra.Command) {
	fileFlag(c, &d.tokenFile, "token-file", "read the bootstrap token from this file, - for standard input (default $"+documents.TokenVariable+", for Sites without one)")
	d.identityFlag(c)
}

func (d *documentFlags) identityFlag(c *cobra.Command) {
	fileFlag(c, &d.identity, "identity", "age identity file that decrypts encrypted documents (default $"+documents.IdentityVariable+")")
}

// stamped declares the flags of commands that write a Site to a slot or a stick.
func (d *documentFlags) stamped(c *cobra.Command) {
	d.secrets(c)
	c.Flags().StringVar(&d.ignition, "ignition", "", "Ignition v3 config to put beside the Site (default: the Site's ignitionFile)")
}

func undatedFlag(c *cobra.Command, undated *bool) {
	c.Flags().BoolVar(undated, "undated", false, "do not record the time of stamping in the slot, if this computer's clock cannot be trusted")
}

func (d *documentFlags) reader(s streams) *documents.Reader {
	return &documents.Reader{
		Stdin: s.In, AskHidden: s.AskHidden(), Warn: s.WarnAll, Now: time.Now(),
		TokenFile: d.tokenFile, Identity: d.identity, Ignition: d.ignition,
	}
}

// notInput rejects an output file that is also an input of the Site or Inventory. --force does not
// permit that.
func (d *documentFlags) notInput(flag, output string, read media.Read) error {
	return errors.Join(
		file.NotInput(flag, output, "the document", read.Name),
		file.NotInput(flag, output, "the Ignition config", read.Ignition),
		file.NotInput(flag, output, "the file of --token-file", d.tokenFile),
		file.NotInput(flag, output, "the age identity file", (&documents.Reader{Identity: d.identity}).IdentityFile()))
}

const defaultImage = "image.yaml"

// defaultDocuments finds the documents for a command line that names none.
type defaultDocuments struct {
	what string
	find func() []string
}

// imageHere finds the Image in the current directory. It is the default of commands that need an
// Image.
func imageHere() *defaultDocuments {
	return &defaultDocuments{defaultImage, func() []string {
		if _, err := os.Stat(defaultImage); err != nil {
			return nil
		}
		return []string{defaultImage}
	}}
}

// allHere finds all documents in the current directory. They are the default of `edgebake
// validate`.
func allHere() *defaultDocuments {
	return &defaultDocuments{"YAML file with an edgebake document", sync.OnceValue(func() []string {
		names, err := documents.In(".")
		if err != nil {
			return []string{"."} // validate reports why the directory cannot be read
		}
		return names
	})}
}

// takesDocument adds -f, as in kubectl, as another way to name the document in operand n. If
// neither is given, the command uses the documents that here finds; if here is nil, a document is
// required.
func takesDocument(s streams, c *cobra.Command, n int, here *defaultDocuments) {
	var files []string
	usage := "the document, if it is not given as an operand"
	if here != nil {
		usage = fmt.Sprintf("the document, if it is not given as an operand (default: the %s in the current directory)", here.what)
	}
	c.Flags().StringArrayVarP(&files, "filename", "f", nil, usage)
	_ = c.MarkFlagFilename("filename", documents.Endings...)
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
			return usageError{fmt.Errorf("%s requires a document, and the current directory has no %s; edgebake init writes one", c.CommandPath(), here.what)}
		}
		if f := c.Flags().Lookup("token-file"); f != nil && f.Value.String() == "-" && slices.Contains(whole(a), "-") {
			return usageError{errors.New("the document and the token cannot both come from standard input")}
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

// args checks the number of operands. what describes the required operands.
func args(low, high int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < low || high >= 0 && len(args) > high {
			return usageError{fmt.Errorf("%s requires %s; see %s --help", c.CommandPath(), what, c.CommandPath())}
		}
		return nil
	}
}

func noArgs(c *cobra.Command, a []string) error { return args(0, 0, "no arguments")(c, a) }

// isImageName reports whether a file has the name of a disk image.
func isImageName(name string) bool {
	return strings.HasSuffix(name, ".raw") || strings.HasSuffix(name, ".raw.zst")
}

// imageFirst rejects operands in the wrong order, because they could overwrite the image.
func imageFirst(c *cobra.Command, a []string) error {
	if len(a) == 2 && isImageName(a[1]) && !isImageName(a[0]) {
		return usageError{fmt.Errorf("%s is an image, and the image comes first: %s %s %s", a[1], c.CommandPath(), a[1], a[0])}
	}
	if len(a) == 2 && c.Name() == "flash" && slices.Contains(documents.Endings, strings.TrimPrefix(filepath.Ext(a[1]), ".")) {
		return usageError{fmt.Errorf("%s is a document and not a disk: %s %s /dev/sdX --site %[1]s", a[1], c.CommandPath(), a[0])}
	}
	return nil
}
