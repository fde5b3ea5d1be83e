package starter

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/schema"
	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/ondisk/file"
)

// SchemaDir is the directory for the schemas. The first line of each document names its schema, for
// editors.
const SchemaDir = ".edgebake"

// Document is a file that init writes: an edgebake document or, if Blanks is nil, a file that a
// document names.
type Document struct {
	Kind string
	Text []byte
	// Blanks contains the texts that init would write with fewer known values. A file with one of
	// these texts has not been edited. The first one lacks only the requested values.
	Blanks [][]byte
	Perm   fs.FileMode
	Asked  bool // the user asked for values in it with flags, so keeping an existing file must be reported
}

// Documents returns an Image and a Site. imageAsked and siteAsked mean that the user asked for
// values in them with flags.
func (in *Input) Documents(imageAsked, siteAsked bool) []Document {
	blank := new(Input)
	image := Document{"image", in.Image(), [][]byte{blank.Image(), ClusterImage()}, 0o666, imageAsked}
	return []Document{image, {"site", in.Site(), [][]byte{blank.Site()}, 0o600, siteAsked}} // private, because it contains a token, now or later
}

// ClusterDocuments returns a Cluster and the Image of its machines.
func ClusterDocuments(sshKey string) []Document {
	return []Document{
		{"cluster", Cluster(sshKey), [][]byte{Cluster("")}, 0o666, sshKey != ""},
		{"image", ClusterImage(), [][]byte{new(Input).Image()}, 0o666, false},
	}
}

func (d *Document) schema() string { return filepath.Join(SchemaDir, d.Kind+".schema.json") }

// head returns the first line of the document, which names its schema.
func (d *Document) head() string {
	if d.Blanks == nil {
		return ""
	}
	return "# yaml-language-server: $schema=" + d.schema() + "\n"
}

// File is a document and its path.
type File struct {
	Document
	Name string
	// Kept means that an existing file is kept. Then Text is its content.
	Kept bool
	// Unedited means that init wrote the existing file and nobody has edited it. The file is
	// replaced.
	Unedited bool
	// Lacks lists the requested values that a kept file does not contain.
	Lacks []string
}

// Plan decides which files to write: those that are missing or unedited or, with force, all. It
// creates the directory. undo removes the directory if it is still empty.
func Plan(dir string, all []Document, force bool) (files []File, undo func(), err error) {
	if undo, err = file.MakeDirectory(filepath.Join(dir, SchemaDir)); err != nil {
		return nil, nil, err
	}
	var errs []error
	for _, d := range all {
		f := File{Document: d, Name: filepath.Join(dir, d.Kind+".yaml")}
		errs = append(errs, f.plan(force))
		files = append(files, f)
	}
	if err := errors.Join(errs...); err != nil {
		undo()
		return nil, nil, err
	}
	return files, undo, nil
}

func (f *File) plan(force bool) error {
	old, err := os.ReadFile(f.Name)
	rest := bytes.TrimPrefix(old, []byte(f.head()))
	is := func(text []byte) bool { return bytes.Equal(rest, text) }
	switch {
	case errors.Is(err, fs.ErrNotExist), force:
		return file.Check(f.Name, true)
	case err != nil:
		return err
	case !is(f.Text) && slices.ContainsFunc(f.Blanks, is):
		f.Unedited = true
		return file.Check(f.Name, true)
	}
	f.Kept = true
	if f.Asked && !is(f.Text) {
		f.Lacks = lacked(rest, f.Text, f.Blanks)
	}
	f.Text = rest
	return nil
}

// lacked returns the values in text that are neither in old nor in the first of blanks. It ignores
// indexes of lists.
func lacked(old, text []byte, blanks [][]byte) (lines []string) {
	has := values(old)
	if len(blanks) > 0 {
		for v := range values(blanks[0]) {
			has[v] = true
		}
	}
	for v := range values(text) {
		if !has[v] {
			lines = append(lines, v.String())
		}
	}
	slices.Sort(lines)
	return lines
}

// value is a scalar in a document, with its field.
type value struct{ field, text string }

// String leaves out the secret half of a token.
func (v value) String() string {
	if id, _, ok := strings.Cut(v.text, "."); ok && v.field == "credentials.token" {
		return v.field + ": " + id + ".***"
	}
	return v.field + ": " + v.text
}

// values returns the scalars in a YAML text. If the text is not YAML, there are none.
func values(text []byte) map[value]bool {
	found := map[value]bool{}
	var doc any
	if err := yamltree.Unmarshal(text, &doc); err != nil {
		return found
	}
	var walk func(field string, v any)
	walk = func(field string, v any) {
		switch x := v.(type) {
		case map[string]any:
			for k, v := range x {
				walk(strings.TrimPrefix(field+"."+k, "."), v)
			}
		case []any:
			for _, v := range x {
				walk(field, v)
			}
		default:
			found[value{field, fmt.Sprint(x)}] = true
		}
	}
	walk("", doc)
	return found
}

// Write writes all files that are not kept, and the schemas of all documents.
func Write(dir string, files []File) error {
	for _, f := range files {
		if f.Blanks != nil {
			text, err := schema.Read(f.Kind)
			if err == nil {
				err = file.Write(filepath.Join(dir, f.schema()), text, 0o666)
			}
			if err != nil {
				return err
			}
		}
		if !f.Kept {
			if err := file.Write(f.Name, append([]byte(f.head()), f.Text...), f.Perm); err != nil {
				return err
			}
		}
	}
	return nil
}
