package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/node"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

func newValidate(s streams) *cobra.Command {
	var secrets secretFlags
	var output string
	c := &cobra.Command{
		Use:               "validate [FILE...]",
		ValidArgsFunction: completeFiles(documentEndings),
		Short:             "Check Image, Site, Inventory and Cluster documents",
		Long: `Validate checks documents of any kind and prints every problem as
FILE:LINE:COLUMN: FIELD: what is wrong. Nothing is fetched or written. Of a
Cluster the documents of kubeadm that follow it and its manifests are checked
too.`,
		Example: `  edgebake validate image.yaml site.yaml
  edgebake validate -f image.yaml`,
		Args: args(1, -1, "at least one document"),
		RunE: func(c *cobra.Command, files []string) error {
			var all configs.Problems
			for _, name := range files {
				err := validateFile(s, name, secrets)
				if err == nil && output == "text" {
					s.note("%s: ok\n", configs.FileName(name))
				}
				for _, e := range builder.SplitErrors(err) {
					var p configs.Problems
					if !errors.As(e, &p) {
						p = configs.Problems{{Msg: e.Error()}}
					}
					all = append(all, p...)
				}
			}
			if output == "text" {
				return all.Err()
			}
			found := []problem{}
			for _, p := range all {
				found = append(found, problem{p.File, p.Line, p.Col, p.Path, p.Msg})
			}
			err := printAs(s, output, map[string]any{"problems": found}, nil)
			if err == nil && len(found) > 0 {
				err = errors.New(configs.Count(len(found), "problem"))
			}
			return err
		},
	}
	outputFlag(c, &output)
	secrets.flags(c)
	takesDocument(s, c, 0, true)
	return c
}

// problem is a configs.Problem in JSON.
type problem struct {
	File    string `json:"file,omitempty"`
	Line    int    `json:"line,omitempty"`
	Column  int    `json:"column,omitempty"`
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

func validateFile(s streams, name string, secrets secretFlags) error {
	data, err := secrets.readDocument(s, name)
	if err != nil {
		return err
	}
	doc, err := configs.Read(name, data)
	if err != nil {
		return err
	}
	switch doc.Kind {
	case configs.KindSite, configs.KindInventory:
		_, err := sitesOf(s, name, data, doc, "", secrets)
		return err
	case configs.KindImage:
		return validateImage(s, name, data, doc)
	case configs.KindCluster:
		c, _, err := readCluster(doc)
		if err == nil {
			printWarnings(s, c)
		}
		return err
	}
	return doc.WrongKind("")
}

// validateImage looks at an Image as each of its architectures needs it.
func validateImage(s streams, name string, data []byte, doc *configs.Document) error {
	images, err := doc.Images()
	if err != nil {
		return err
	}
	warnOfDates(s, name, data, images[0])
	read := document{name: name, data: data}
	var errs []error
	var told []string
	for _, img := range images {
		warnings, err := builder.LookForFiles(img, dirOf(name))
		errs = append(errs, read.explain(err), checkTemplates(name, data, img))
		for _, w := range warnings {
			if !slices.Contains(told, w) {
				told = append(told, w)
				s.warn(configs.Problems{imageWarning(name, data, w)})
			}
		}
	}
	return builder.JoinDistinct(errs...)
}

// imageWarning finds the place of the field that a warning begins with, if it does.
func imageWarning(name string, data []byte, text string) configs.Problem {
	p := configs.Problem{File: name, Msg: text}
	if field, msg, ok := strings.Cut(text, ": "); ok && !strings.ContainsAny(field, " :/") {
		if line, col := configs.Locate(name, data, field); line > 0 {
			p.Line, p.Col, p.Path, p.Msg = line, col, field, msg
		}
	}
	return p
}

// warnOfDates says so where the image's date is one on which nobody can stamp it by
// this computer's clock, or its notBefore one on which nobody can sign a Site: either may
// be wrong, and building takes minutes.
func warnOfDates(s streams, name string, data []byte, img *configs.Image) {
	warn := func(path, msg string) {
		line, col := configs.Locate(name, data, path)
		fmt.Fprintf(s.Err, "%s (warning)\n", configs.Problem{File: name, Line: line, Col: col, Path: path, Msg: msg})
	}
	if first, _ := (ondisk.ImageInfo{SourceDate: img.SourceTime().Unix()}).StampDates(); first.After(time.Now()) {
		warn("sourceDate", fmt.Sprintf("%s is in the future by this computer's clock, and until then the image can be stamped with --undated only: set it to the current date, or set the clock", img.SourceDate))
	}
	if img.Sites.NotBeforeTime().After(time.Now()) {
		warn("sites.notBefore", fmt.Sprintf("%s is in the future by this computer's clock, and until then no signed Site counts: set it to the current date, or set the clock", img.Sites.NotBefore))
	}
}

// checkTemplates renders the templates that lie in files of their own; those
// in the document are checked with it. A file that is not there is the
// build's business.
func checkTemplates(name string, data []byte, img *configs.Image) error {
	var all configs.Problems
	for i, f := range img.Files {
		if !f.Template || f.Source == "" {
			continue
		}
		p := f.Source
		if !filepath.IsAbs(p) {
			p = filepath.Join(dirOf(name), p)
		}
		text, err := os.ReadFile(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			_, err = img.RenderFile(string(text))
		}
		if err != nil {
			field := fmt.Sprintf("files[%d].source", i)
			line, col := configs.Locate(name, data, field)
			all = append(all, configs.Problem{File: name, Line: line, Col: col, Path: field, Msg: fmt.Sprintf("%s: %v", f.Source, err)})
		}
	}
	return all.Err()
}

// readCluster is a Cluster with the files of Kubernetes objects that it names. What
// is wrong with these is told beside what is wrong with it.
func readCluster(doc *configs.Document) (*clusterdoc.File, []manifest.File, error) {
	c, err := clusterdoc.Read(doc)
	var all configs.Problems
	if err != nil && !errors.As(err, &all) {
		return nil, nil, err
	}
	told := all
	var manifests []manifest.File
	for i, m := range c.Manifests {
		field := fmt.Sprintf("manifests[%d]", i)
		if slices.ContainsFunc(told, func(p configs.Problem) bool { return p.Path == field }) {
			continue
		}
		p := besideDocument(c.File, m)
		text, err := os.ReadFile(p)
		if err != nil {
			line, col := configs.Locate(c.File, c.Text, field)
			all = append(all, configs.Problem{File: c.File, Line: line, Col: col, Path: field, Msg: err.Error()})
			continue
		}
		all = append(all, manifest.Check(p, text)...)
		manifests = append(manifests, manifest.File{Name: m, Text: string(text)})
	}
	return c, manifests, all.Err()
}

// siteIgnition reads the files that a Site names: the certificate goes into it, the
// Ignition config is returned, unless another one is given.
func siteIgnition(s streams, name string, data []byte, site *configs.Site, ignitionFlag string) (user []byte, err error) {
	// All that is wrong with the files it names, not the first of them.
	caErr := inlineCA(name, data, site)
	p := ignitionFlag
	if p == "" && site.IgnitionFile != "" {
		p = besideDocument(name, site.IgnitionFile)
	}
	if p != "" {
		user, err = os.ReadFile(p)
		switch {
		case err != nil && ignitionFlag != "":
			return nil, errors.Join(caErr, fmt.Errorf("--ignition: %w", err))
		case err != nil:
			line, col := configs.Locate(name, data, "ignitionFile")
			return nil, errors.Join(caErr, configs.Problems{{File: name, Line: line, Col: col, Path: "ignitionFile", Msg: err.Error()}})
		}
		// Judged here under the name that the person knows it by; on the node
		// it is config.ign.
		_, warnings, problems := ignition.Parse(p, user)
		if problems != nil {
			return nil, errors.Join(caErr, problems)
		}
		s.warn(warnings)
	}
	return user, caErr
}

// renderSite renders a Site for no machine in particular, together with its
// Ignition config.
func renderSite(name string, site *configs.Site, user []byte) ([]byte, error) {
	rendered, err := node.Render(site, node.Machine{}, user)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return rendered, nil
}

// besideDocument is a path that a document names.
func besideDocument(name, p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(dirOf(name), p)
}

// inlineCA puts the certificate that caFile names into the Site: on the node
// there is no such file.
func inlineCA(name string, data []byte, site *configs.Site) error {
	if site.CAFile == "" {
		return nil
	}
	pem, err := os.ReadFile(besideDocument(name, site.CAFile))
	if err == nil {
		site.CACert, site.CAFile = string(pem), ""
		probs := site.Validate()
		if len(probs) == 0 {
			return nil
		}
		err = errors.New(probs[0].Msg) // the Site itself was valid
	}
	line, col := configs.Locate(name, data, "caFile")
	return configs.Problems{{File: name, Line: line, Col: col, Path: "caFile", Msg: err.Error()}}
}

func newRender(s streams) *cobra.Command {
	var ignition bool
	var secrets secretFlags
	c := &cobra.Command{
		Use:               "render SITE",
		ValidArgsFunction: completeFiles(documentEndings),
		Short:             "Print a Site as an Ignition config",
		Long: `Render prints a Site's operating-system settings (network, users, files) as an
Ignition v3 config, as first boot applies them; the same Site serves Flatcar
or Fedora CoreOS that way. The node's name is left out where it depends on the
machine. The output holds the Site's passwords and keys, but never its
join token.`,
		Example: `  edgebake render --ignition site.yaml`,
		Args:    args(1, 1, "one Site document"),
		RunE: func(c *cobra.Command, a []string) error {
			if !ignition {
				return usageError{errors.New("render requires --ignition, the only form")}
			}
			data, err := secrets.readDocument(s, a[0])
			if err != nil {
				return err
			}
			site, err := configs.ParseSite(a[0], data)
			if err != nil {
				return err
			}
			user, err := siteIgnition(s, a[0], data, site, "")
			if err != nil {
				return err
			}
			out, err := renderSite(a[0], site, user)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(s.bytes(), strings.TrimRight(string(out), "\n"))
			return err
		},
	}
	c.Flags().BoolVar(&ignition, "ignition", false, "print an Ignition v3 config")
	secrets.identityFlag(c)
	takesDocument(s, c, 0, false)
	return c
}

func newVersion(s streams) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print the version of edgebake",
		Example: `  edgebake version --output json`,
		Args:    args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			v := struct {
				Version  string   `json:"version"`
				Go       string   `json:"go"`
				Platform string   `json:"platform"`
				Reads    []string `json:"reads"`
			}{version.OfSource(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH, []string{configs.APIVersion}}
			if info, ok := debug.ReadBuildInfo(); ok {
				v.Go = info.GoVersion
			}
			return printAs(s, output, v, func() {
				fmt.Fprintf(s.Out, "edgebake %s (%s, %s), reads %s\n", v.Version, v.Go, v.Platform, strings.Join(v.Reads, ", "))
			})
		},
	}
	outputFlag(c, &output)
	return c
}

func outputFlag(c *cobra.Command, output *string) {
	*output = "text"
	c.Flags().VarP((*outputForm)(output), "output", "o", "form of the output: text, json or yaml")
	complete(c, "output", "text", "json", "yaml")
}

// outputForm is rejected before any work is done.
type outputForm string

func (o *outputForm) String() string { return string(*o) }
func (o *outputForm) Type() string   { return "string" }

func (o *outputForm) Set(s string) error {
	if s != "text" && s != "json" && s != "yaml" {
		return errors.New("text, json or yaml")
	}
	*o = outputForm(s)
	return nil
}

// printAs prints v as JSON or YAML, or calls text.
func printAs(s streams, output string, v any, asText func()) error {
	if output == "text" {
		asText()
		return nil
	}
	if list := reflect.ValueOf(v); list.Kind() == reflect.Slice && list.IsNil() {
		v = []any{} // a list of nothing, not null
	}
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	return printJSON(s, output, text.Bytes())
}

// printJSON prints JSON as it is, or as YAML.
func printJSON(s streams, output string, text []byte) error {
	if output != "yaml" {
		_, err := s.json().Write(text)
		return err
	}
	out, err := yaml.JSONToYAML(text)
	if err == nil {
		_, err = s.Out.Write(out)
	}
	return err
}
