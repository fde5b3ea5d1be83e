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

// SchemaDir contains the schemas to which the first line of the documents
// refers, for editors.
const SchemaDir = ".edgebake"

// Document is a starting document, or a file that one of them refers to (Blanks
// is nil).
type Document struct {
	Kind string
	Text []byte
	// Blanks are texts that init writes with less information: a file with such
	// a text was not edited. The first one lacks exactly the requested values.
	Blanks [][]byte
	Perm   fs.FileMode
	Asked  bool // flags set values in it, so keeping an existing file would be wrong
}

// Documents returns an Image and a Site; imageAsked and siteAsked report
// whether flags set values in them.
func (in *Input) Documents(imageAsked, siteAsked bool) []Document {
	blank := new(Input)
	image := Document{"image", in.Image(), [][]byte{blank.Image(), ClusterImage()}, 0o666, imageAsked}
	return []Document{image, {"site", in.Site(), [][]byte{blank.Site()}, 0o600, siteAsked}} // it contains a token, now or later
}

// ClusterDocuments returns a Cluster and the Image of its machines.
func ClusterDocuments(sshKey string) []Document {
	return []Document{
		{"cluster", Cluster(sshKey), [][]byte{Cluster("")}, 0o666, sshKey != ""},
		{"image", ClusterImage(), [][]byte{new(Input).Image()}, 0o666, false},
	}
}

func (d *Document) schema() string { return filepath.Join(SchemaDir, d.Kind+".schema.json") }

// head returns the line that refers to the schema.
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
	// Kept is set if the existing file is kept; Text is then its content.
	Kept bool
	// Unedited is set if the existing file was written by init and not edited:
	// it is replaced.
	Unedited bool
	// Lacks lists the requested values that a kept file does not have.
	Lacks []string
}

// Plan decides which files to write: missing and unedited ones, and with force
// all. It creates the directory; undo removes it while it is empty.
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

// lacked returns the values that are in text, but neither in the first of
// blanks nor in old. Indices of lists are ignored.
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

// value is a scalar of a document with its field.
type value struct{ field, text string }

// String omits the secret half of a token.
func (v value) String() string {
	if id, _, ok := strings.Cut(v.text, "."); ok && v.field == "credentials.token" {
		return v.field + ": " + id + ".***"
	}
	return v.field + ": " + v.text
}

// values returns the scalars of a text; none if it is not YAML.
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

// Write writes the files that are not kept, and the schemas of all.
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
