package images

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
)

// ListedImage is an image to include. It comes from a field of the Image ("images[2]"), or from a
// manifest ("manifests/app.yaml:12: Deployment web").
type ListedImage struct {
	configs.ContainerImage
	Name            imageref.Ref // Ref parsed; zero if Ref is invalid
	Field, Manifest string
}

// Listing is the result of List.
type Listing struct {
	Images []ListedImage
	// Mentions lists references in manifests that no pod of the manifests runs.
	Mentions []Reference
	// PassedOver lists custom resources without a pod template, such as "Prometheus main
	// (app.yaml:3)". Their operators may start images that the manifests do not name.
	PassedOver []string
	// Notes lists warnings about images that nodes may lack.
	Notes configs.Problems
}

// List returns all images that an Image needs: the listed images, the images that its manifests
// run, the sandbox and, if yurthub is a static pod, yurthub. If the field images lists an image,
// its source there takes precedence. Paths are relative to dir. If List returns an error, the
// Listing contains the images that could be read.
func List(img *configs.Image, dir string) (Listing, error) {
	var l Listing
	have := map[imageref.Ref]bool{}
	var errs []error
	named := func(i configs.ContainerImage, field string) (ListedImage, bool) {
		r, err := imageref.Parse(i.Ref)
		if err != nil {
			errs = append(errs, &configs.FieldError{Path: field, Err: err})
		}
		return ListedImage{ContainerImage: i, Name: r, Field: field}, err == nil
	}
	add := func(w ListedImage) {
		if !have[w.Name] {
			have[w.Name] = true
			l.Images = append(l.Images, w)
		}
	}
	for n, i := range img.Images {
		w, ok := named(i, fmt.Sprintf("images[%d]", n))
		l.Images = append(l.Images, w)
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
	m, err := fromManifests(dir, img.ImagesFrom)
	errs = append(errs, err)
	ignored := ignoring(img.ImagesIgnore)
	for _, f := range m.run {
		if !ignored.matches(f) {
			add(ListedImage{ContainerImage: configs.ContainerImage{Ref: f.Ref.String()}, Name: f.Ref, Manifest: f.Where})
		}
	}
	for _, f := range m.mentions {
		if !ignored.matches(f) && !have[f.Ref] {
			l.Mentions = append(l.Mentions, f)
		}
	}
	l.PassedOver = m.passedOver
	l.Notes = append(l.Notes, l.MentionNotes()...)
	l.Notes = append(l.Notes, ignored.unused()...)
	l.Notes = append(l.Notes, l.missingNotes(img)...)
	return l, errors.Join(errs...)
}

// missingNotes returns warnings about images that every node needs but that are not listed.
func (l *Listing) missingNotes(img *configs.Image) (notes configs.Problems) {
	v := img.Kubernetes.Version
	switch {
	case v == "":
		return nil // an incomplete Image
	case len(l.Images) == 0 && len(img.ImagesFrom) == 0:
		notes.Add("", "the image contains no container images, so a node needs a registry for its first pod: for nodes without one, name the pause image in containerd.sandbox, and list the images that every node runs in images, e.g. kube-proxy:%s (`edgebake init --kubeconfig FILE` does both)", v)
		return notes
	}
	if img.Containerd.Sandbox == "" {
		notes.Add("", "containerd.sandbox names no pause image, so containerd pulls its default pause image before a node's first pod starts; for nodes without a registry, add a pause image to images and name it in containerd.sandbox")
	}
	if !slices.ContainsFunc(l.Images, func(w ListedImage) bool { return strings.HasSuffix("/"+w.Name.Path, "/kube-proxy") }) {
		notes.Add("", "the image contains no kube-proxy, so nodes pull it if the cluster runs it: add its image (kube-proxy:%s) to images", v)
	}
	return notes
}

// MentionNotes returns the warnings about Mentions, which Notes also contains.
func (l *Listing) MentionNotes() (notes configs.Problems) {
	for n, f := range l.Mentions {
		if n == maxMentionNotes {
			notes.Add("", "%d more images were found in manifests, but not baked: `edgebake images` lists them", len(l.Mentions)-n)
			return notes
		}
		notes.Add("", "%s: %s was found but not baked: add it to images, or to imagesIgnore", f.Where, f.Ref)
	}
	return notes
}

// maxMentionNotes is the largest number of warnings about Mentions.
const maxMentionNotes = 20

// ignoreList contains the patterns of imagesIgnore, and records which of them matched.
type ignoreList struct {
	patterns []string
	used     []bool
}

func ignoring(patterns []string) *ignoreList {
	return &ignoreList{patterns, make([]bool, len(patterns))}
}

// matches reports whether a pattern matches the full reference, or the reference as the manifest
// writes it.
func (l *ignoreList) matches(f Reference) bool {
	found := false
	for n, p := range l.patterns {
		for _, s := range []string{f.Ref.String(), f.Text} {
			if ok, _ := path.Match(p, s); ok {
				found, l.used[n] = true, true
			}
		}
	}
	return found
}

func (l *ignoreList) unused() (notes configs.Problems) {
	for n, p := range l.patterns {
		if !l.used[n] {
			notes.Add(fmt.Sprintf("imagesIgnore[%d]", n), "%q matches no image in the manifests of imagesFrom: remove it, or correct it", p)
		}
	}
	return notes
}

// fromManifests reads the Kubernetes manifests that match globs, relative to dir. It is an error if
// a glob matches no file, or if its files mention no image, because a failed kubectl leaves an
// empty file.
func fromManifests(dir string, globs []string) (manifestImages, error) {
	var files []string
	from := map[string]int{}                // file → index of the first glob that matches it
	matched := make([][]string, len(globs)) // the files that each glob matches
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
	var all manifestImages
	useful := map[string]bool{} // files that mention images or have an error
	for _, name := range files {
		raw, err := readFile(name)
		if err != nil {
			errs = append(errs, globError(from[name], fmt.Errorf("%w; correct the pattern, or that file", err)))
			useful[name] = true
			continue
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			rel = name
		}
		m, err := scanManifests(rel, raw)
		errs = append(errs, err)
		useful[name] = len(m.run)+len(m.mentions) > 0 || err != nil
		all.run = append(all.run, m.run...)
		all.mentions = append(all.mentions, m.mentions...)
		all.passedOver = append(all.passedOver, m.passedOver...)
	}
	for at, names := range matched {
		if len(names) > 0 && !slices.ContainsFunc(names, func(n string) bool { return useful[n] }) {
			errs = append(errs, globError(at, fmt.Errorf("%q: no matching file has a manifest that runs a container image; correct the file, or remove the pattern", globs[at])))
		}
	}
	all.run, all.mentions = byRef(all.run), firstOfEach(all.mentions)
	return all, errors.Join(errs...)
}

// byRef sorts by reference and removes duplicates.
func byRef(found []Reference) []Reference {
	slices.SortStableFunc(found, func(a, b Reference) int { return cmp.Compare(a.Ref.String(), b.Ref.String()) })
	return slices.CompactFunc(found, func(a, b Reference) bool { return a.Ref == b.Ref })
}

// firstOfEach removes duplicate references. It keeps the order of files and lines.
func firstOfEach(found []Reference) []Reference {
	seen := map[imageref.Ref]bool{}
	return slices.DeleteFunc(found, func(f Reference) bool {
		again := seen[f.Ref]
		seen[f.Ref] = true
		return again
	})
}

// globError adds the field imagesFrom[at] to an error.
func globError(at int, err error) error {
	return &configs.FieldError{Path: fmt.Sprintf("imagesFrom[%d]", at), Err: err}
}
