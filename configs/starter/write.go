package starter

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/file"
)

// SchemaDir has the schemas that the first lines of the documents name for editors.
const SchemaDir = ".edgebake"

// Document is a document to start from, or a file that one of them reads (Blank is nil).
type Document struct {
	Kind  string
	Text  []byte
	Blank []byte // the text where nothing is known
	Perm  fs.FileMode
	Asked bool // flags fill it in, so keeping an edited file would be wrong
}

// Documents are an Image and a Site; imageAsked and siteAsked report whether flags fill
// them in.
func (in *Input) Documents(imageAsked, siteAsked bool) []Document {
	blank := new(Input)
	return []Document{
		{"image", in.Image(), blank.Image(), 0o666, imageAsked},
		{"site", in.Site(), blank.Site(), 0o600, siteAsked}, // it has or gets a token
	}
}

func (d *Document) schema() string { return filepath.Join(SchemaDir, d.Kind+".schema.json") }

// head is the line that names the schema.
func (d *Document) head() string {
	if d.Blank == nil {
		return ""
	}
	return "# yaml-language-server: $schema=" + d.schema() + "\n"
}

// keeps reports whether the file of a document stays as it is: somebody has edited it, or
// it has this text already. An error means that it must not be replaced.
func (d *Document) keeps(name string, force, unfinished bool) (bool, error) {
	old, err := os.ReadFile(name)
	rest := bytes.TrimPrefix(old, []byte(d.head()))
	switch {
	case errors.Is(err, fs.ErrNotExist), force:
		return false, file.Check(name, true)
	case err != nil:
		return false, err
	case !unfinished && bytes.Equal(rest, d.Text):
		return true, nil
	case d.Blank != nil && bytes.Equal(rest, d.Blank):
		return false, file.Check(name, true)
	case d.Asked && !bytes.Equal(rest, d.Text):
		return true, fmt.Errorf("%s was edited: --force replaces it", name)
	}
	return true, nil
}

// Written is a file of Write.
type Written struct {
	Name string
	Kept bool
}

// Write writes documents to start from, and their schemas. Edited files are kept. If finish
// is set, it completes the documents once nothing is known to be wrong.
func Write(dir string, all []Document, force bool, finish func() ([]Document, error)) ([]Written, error) {
	undo, err := file.MakeDirectory(filepath.Join(dir, SchemaDir))
	if err != nil {
		return nil, err
	}
	defer undo()
	var errs []error
	kept := map[string]bool{}
	for _, d := range all {
		keeps, err := d.keeps(filepath.Join(dir, d.Kind+".yaml"), force, finish != nil)
		errs, kept[d.Kind] = append(errs, err), keeps
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if finish != nil {
		if all, err = finish(); err != nil {
			return nil, err
		}
	}
	var out []Written
	for _, d := range all {
		if d.Blank != nil {
			schema, err := configs.Schema(d.Kind)
			if err == nil {
				err = file.Write(filepath.Join(dir, d.schema()), schema, 0o666)
			}
			if err != nil {
				return out, err
			}
		}
		name := filepath.Join(dir, d.Kind+".yaml")
		if !kept[d.Kind] {
			if err := file.Write(name, append([]byte(d.head()), d.Text...), d.Perm); err != nil {
				return out, err
			}
		}
		out = append(out, Written{name, kept[d.Kind]})
	}
	return out, nil
}
