package configs

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// fieldArch is the name of the field for the architecture, which may be a value or a list.
const fieldArch = "arch"

// Architectures returns the supported architectures, with the names that Go uses.
func Architectures() []string { return []string{"amd64", "arm64"} }

// ParseImages parses an Image document and returns one Image for each architecture in archs or, if
// archs is empty, in the field arch. It reports a problem that several Images have once.
func ParseImages(name string, data []byte, archs ...string) ([]*Image, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	return d.Images(archs...)
}

// Images is like ParseImages, for a document that has already been read.
func (d *Document) Images(archs ...string) ([]*Image, error) {
	doc := d.Document
	if doc.Kind != KindImage {
		return nil, doc.WrongKind(KindImage)
	}
	nodes, err := architectures(doc, archs)
	if err != nil {
		return nil, err
	}
	var images []*Image
	var all Problems
	for i, n := range nodes {
		one := doc
		if i > 0 { // decoding changes the tree, so read it again
			one, _ = strict.Read(doc.File, d.Data, documentFormat)
		}
		if n != nil {
			yamltree.Set(one.Root, fieldArch, n)
		}
		img := new(Image)
		err := one.Parse(KindImage, img, func() Problems {
			if len(images) == 0 {
				return img.Validate()
			}
			return append(img.Validate(), sharedDigests(images[0], img)...)
		})
		var probs Problems
		if err != nil && !errors.As(err, &probs) {
			return nil, err
		}
		for _, p := range probs {
			if !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
		images = append(images, img)
	}
	if err := all.First(doc.File, 0).Err(); err != nil {
		return nil, err
	}
	return images, nil
}

// sharedDigests reports a digest that is given for two different files.
func sharedDigests(a, b *Image) (probs Problems) {
	check := func(path string, a, b *FileSource) {
		if a != nil && b != nil && (a.File != b.File || a.URL != b.URL) && a.SHA256 != "" && a.SHA256 == b.SHA256 {
			probs.Add(path+".sha256", "the same digest is given for the files of two architectures; write an Image document for each architecture")
		}
	}
	check("base.tar", a.Base.Tar, b.Base.Tar)
	if a.Yurthub != nil && b.Yurthub != nil {
		check("yurthub.binary", a.Yurthub.Binary, b.Yurthub.Binary)
	}
	return probs
}

// ListedArchitectures returns the architectures in the field arch of an Image document.
func ListedArchitectures(data []byte) []string {
	doc, probs := strict.Read("", data, documentFormat)
	if probs != nil {
		return nil
	}
	switch n := yamltree.Get(doc.Root, fieldArch); {
	case n != nil && n.Kind == yaml.SequenceNode:
		var all []string
		for _, item := range n.Content {
			all = append(all, yamltree.Text(yamltree.Deref(item)))
		}
		return all
	case yamltree.Text(n) != "" && !yamltree.IsNull(n):
		return []string{n.Value}
	}
	return []string{Architectures()[0]} // the default of the field
}

// architectures returns the value of the field arch for each Image: the given architectures or, if
// there are none, those of the document. A nil value means the default. The values for given
// architectures have the position of the field in the document.
func architectures(doc *strict.Document, given []string) ([]*yaml.Node, error) {
	n := yamltree.Get(doc.Root, fieldArch)
	if len(given) > 0 {
		var nodes []*yaml.Node
		for _, a := range given {
			v := yamltree.String(a)
			if n != nil {
				v.Line, v.Column = n.Line, n.Column
			}
			nodes = append(nodes, v)
		}
		return nodes, nil
	}
	if n == nil || n.Kind != yaml.SequenceNode {
		return []*yaml.Node{n}, nil
	}
	if len(n.Content) == 0 {
		doc.Addf(n, fieldArch, "needs at least one of %s", strings.Join(Architectures(), ", "))
	}
	var nodes []*yaml.Node
	var seen []string
	for i, item := range n.Content {
		v := yamltree.Deref(item)
		path := fmt.Sprintf("%s[%d]", fieldArch, i)
		switch {
		case v.Kind != yaml.ScalarNode || yamltree.IsNull(v) || v.Value == "":
			doc.Addf(item, path, "must be one of %s", strings.Join(Architectures(), ", "))
		case slices.Contains(seen, v.Value):
			doc.Addf(item, path, "%s is listed twice", strict.Shorten(v.Value))
		}
		nodes, seen = append(nodes, v), append(seen, v.Value)
	}
	return nodes, doc.Probs.Err()
}

// archInPath is the placeholder for the architecture in fields with the tag path.
const archInPath = "{arch}"

// expandPaths replaces {arch} in paths by the architecture.
func (i *Image) expandPaths() {
	strict.Walk(i, func(f strict.Field) {
		if f.Tag.Get("path") != "" {
			f.Texts(func(_ string, v reflect.Value) { v.SetString(strings.ReplaceAll(v.String(), archInPath, i.Arch)) })
		}
	})
}

// PackagesFor returns the packages for an architecture. It removes " [ARCH]" from their items.
func (b *DebianBase) PackagesFor(arch string) []string {
	var all []string
	for _, p := range b.Packages {
		if PackageIsFor(p, arch) {
			name, _, _ := strings.Cut(p, " ")
			all = append(all, name)
		}
	}
	return all
}

// PackageIsFor reports whether an item of packages applies to an architecture.
func PackageIsFor(item, arch string) bool {
	_, only, _ := strings.Cut(item, " ")
	return only == "" || only == "["+arch+"]"
}
