package images

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/openyurt"
	"go.yaml.in/yaml/v3"
)

// Wanted is an image to take on board, and who wants it: a field of the Image
// ("images[2]"), or a manifest ("manifests/app.yaml:12: Deployment web").
type Wanted struct {
	configs.ContainerImage
	Name            configs.Ref // Ref, parsed; zero: it is invalid
	Field, Manifest string
}

// List is everything an image file wants on board: what it names itself, what
// its manifests run, the sandbox and, where yurthub is a static pod, yurthub.
// An image named in images: keeps the source given there. Notes are for the
// report. Paths are relative to dir. What could be read is listed in spite of
// an error.
func List(img *configs.Image, dir string) (list []Wanted, notes []string, err error) {
	have := map[configs.Ref]bool{}
	var errs []error
	named := func(i configs.ContainerImage, field string) (Wanted, bool) {
		r, err := configs.ParseRef(i.Ref)
		if err != nil {
			errs = append(errs, &configs.FieldError{Path: field, Err: err})
		}
		return Wanted{ContainerImage: i, Name: r, Field: field}, err == nil
	}
	add := func(w Wanted) {
		if !have[w.Name] {
			have[w.Name] = true
			list = append(list, w)
		}
	}
	for n, i := range img.Images {
		w, ok := named(i, fmt.Sprintf("images[%d]", n))
		list = append(list, w)
		have[w.Name] = have[w.Name] || ok
	}
	if s := img.Containerd.Sandbox; s != "" {
		if w, ok := named(configs.ContainerImage{Ref: s}, "containerd.sandbox"); ok {
			add(w)
		}
	}
	if y := img.Yurthub; y != nil && y.Image != nil {
		if w, ok := named(*y.Image, "yurthub.image"); ok {
			add(w)
		}
	}
	found, err := fromManifests(dir, img.ImagesFrom)
	errs = append(errs, err)
	for _, f := range found {
		add(Wanted{ContainerImage: configs.ContainerImage{Ref: f.Ref.String()}, Name: f.Ref, Manifest: f.Where})
	}
	if v := img.Kubernetes.Version; v != "" && !slices.ContainsFunc(list, func(w Wanted) bool { return strings.HasSuffix("/"+w.Name.Path, "/kube-proxy") }) {
		notes = append(notes, fmt.Sprintf("no kube-proxy on board: a cluster that runs it makes every node pull it; if yours does, add its image (kube-proxy:%s) to images:", v))
	}
	return list, notes, errors.Join(errs...)
}

// Found is an image that a manifest runs.
type Found struct {
	Ref   configs.Ref
	Where string // "manifests/app.yaml:12: Deployment web"
}

// fromManifests lists the images of the Kubernetes manifests that the globs
// match, relative to dir. A glob that matches nothing is an error, and one whose
// files run nothing: somebody expects images from it, and where kubectl fails it
// leaves an empty file.
func fromManifests(dir string, globs []string) ([]Found, error) {
	var files []string
	from := map[string]int{}                // file: its pattern
	matched := make([][]string, len(globs)) // by a pattern
	var errs []error
	for at, g := range globs {
		pattern := g
		if !filepath.IsAbs(g) {
			pattern = filepath.Join(dir, g)
		}
		names, err := filepath.Glob(pattern)
		if err != nil {
			errs = append(errs, globError(at, fmt.Errorf("%q: %w", g, err)))
		} else if len(names) == 0 {
			errs = append(errs, globError(at, fmt.Errorf("%q: no file matches; correct the pattern, or remove it", g)))
		}
		matched[at] = names
		for _, n := range names {
			if !slices.Contains(files, n) {
				files = append(files, n)
				from[n] = at
			}
		}
	}
	var found []Found
	says := map[string]bool{} // files with images in them, or with an error
	for _, name := range files {
		raw, err := readFile(name)
		if err != nil {
			errs = append(errs, globError(from[name], fmt.Errorf("%w; correct the pattern, or that file", err)))
			says[name] = true
			continue
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			rel = name
		}
		fs, err := imagesOf(rel, raw)
		found = append(found, fs...)
		errs = append(errs, err)
		says[name] = len(fs) > 0 || err != nil
	}
	for at, names := range matched {
		if len(names) > 0 && !slices.ContainsFunc(names, func(n string) bool { return says[n] }) {
			errs = append(errs, globError(at, fmt.Errorf("%q: no manifest there runs a container image; write the file again, or remove this", globs[at])))
		}
	}
	slices.SortStableFunc(found, func(a, b Found) int { return cmp.Compare(a.Ref.String(), b.Ref.String()) })
	found = slices.CompactFunc(found, func(a, b Found) bool { return a.Ref == b.Ref })
	return found, errors.Join(errs...)
}

// globError is a problem with one of the patterns.
func globError(at int, err error) error {
	return &configs.FieldError{Path: fmt.Sprintf("imagesFrom[%d]", at), Err: err}
}

// imagesOf lists the images in one file of manifests: YAML, or JSON, which is
// YAML too; several documents, and List objects. Kinds that run no pods are
// passed over.
func imagesOf(name string, raw []byte) ([]Found, error) {
	var found []Found
	var errs []error
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	for {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if err == io.EOF {
			break
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("reading manifest %s: %w; correct it, or have imagesFrom pass it over", name, err))
			break
		}
		if len(doc.Content) == 1 {
			object(name, doc.Content[0], 0, &found, &errs)
		}
	}
	return found, errors.Join(errs...)
}

// podSpecs says where each kind keeps its pod's spec.
func podSpecs() map[string][]string {
	template := []string{"spec", "template", "spec"}
	kinds := map[string][]string{
		"Pod":                   {"spec"},
		"PodTemplate":           {"template", "spec"},
		"Deployment":            template,
		"DaemonSet":             template,
		"StatefulSet":           template,
		"ReplicaSet":            template,
		"ReplicationController": template,
		"Job":                   template,
		"CronJob":               {"spec", "jobTemplate", "spec", "template", "spec"},
	}
	maps.Copy(kinds, openyurt.PodKinds())
	return kinds
}

// maxNesting bounds Lists in Lists, which YAML aliases can make endless.
const maxNesting = 3

func object(name string, n *yaml.Node, nesting int, found *[]Found, errs *[]error) {
	kind := yamltree.Text(yamltree.Get(n, "kind"))
	if strings.HasSuffix(kind, "List") {
		if nesting == maxNesting {
			*errs = append(*errs, fmt.Errorf("%s:%d: Lists in Lists, more than %d deep", name, n.Line, maxNesting))
			return
		}
		if items := yamltree.Get(n, "items"); items != nil {
			for _, i := range items.Content {
				object(name, i, nesting+1, found, errs)
			}
		}
		return
	}
	path, ok := podSpecs()[kind]
	if !ok {
		return
	}
	spec := n
	for _, p := range path {
		spec = yamltree.Get(spec, p)
	}
	what := kind + " " + yamltree.Text(yamltree.Get(yamltree.Get(n, "metadata"), "name"))
	for _, list := range []string{"initContainers", "containers", "ephemeralContainers"} {
		containers := yamltree.Get(spec, list)
		if containers == nil {
			continue
		}
		for _, c := range containers.Content {
			image := yamltree.Get(c, "image")
			if image == nil {
				continue
			}
			where := fmt.Sprintf("%s:%d: %s", name, image.Line, what)
			ref, err := configs.ParseRef(image.Value)
			if err != nil {
				*errs = append(*errs, fmt.Errorf("%s: %w", where, err))
				continue
			}
			*found = append(*found, Found{Ref: ref, Where: where})
		}
	}
}
