package images

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Reference is an image reference in a manifest.
type Reference struct {
	Ref   imageref.Ref
	Text  string // as written in the manifest
	Where string // such as "manifests/app.yaml:12: Deployment web"
}

// manifestImages is the result of scanning manifests.
type manifestImages struct {
	run        []Reference // images that pods run
	mentions   []Reference // other mentioned images
	passedOver []string    // see Listing.PassedOver
}

// scan is the state of reading one file with manifests.
type scan struct {
	file string
	manifestImages
	errs []error
}

// scanManifests reads one file with manifests in YAML or JSON. It may contain several documents and
// Lists. Aliases and merge keys are resolved as in kubectl.
func scanManifests(file string, raw []byte) (manifestImages, error) {
	s := scan{file: file}
	if err := yamltree.TooDense(raw); err != nil {
		return s.manifestImages, s.unreadable(err, raw)
	}
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	for {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if err == io.EOF {
			break
		}
		if err == nil {
			if faults := yamltree.Check(&doc); len(faults) > 0 {
				err = faults[0]
			}
		}
		if err != nil {
			s.errs = append(s.errs, s.unreadable(err, raw))
			break
		}
		if len(doc.Content) == 1 {
			s.readObject(yamltree.Resolve(doc.Content[0]))
		}
	}
	return s.manifestImages, errors.Join(s.errs...)
}

func (s *scan) unreadable(err error, raw []byte) error {
	if bytes.Contains(raw, []byte("{{")) {
		return fmt.Errorf("reading manifest %s: %w (%s)", s.file, err, manifest.Unrendered)
	}
	return fmt.Errorf("reading manifest %s: %w; correct it, or exclude it from imagesFrom", s.file, err)
}

// readObject reads a Kubernetes object, or each object of a List.
func (s *scan) readObject(n *yaml.Node) {
	kind := yamltree.Text(yamltree.Get(n, "kind"))
	if items := yamltree.Get(n, "items"); strings.HasSuffix(kind, "List") {
		if items != nil {
			for _, i := range items.Content {
				s.readObject(i)
			}
		}
		return
	}
	o := object{scan: s, pods: kind == "Pod", what: strings.TrimSpace(kind + " " + yamltree.Text(yamltree.Get(yamltree.Get(n, "metadata"), "name")))}
	o.walk(n, nil, nil)
	if !o.ran && isCustom(yamltree.Text(yamltree.Get(n, "apiVersion"))) {
		s.passedOver = append(s.passedOver, fmt.Sprintf("%s (%s:%d)", o.what, s.file, n.Line))
	}
}

// isCustom reports whether an API version belongs to a custom resource.
func isCustom(apiVersion string) bool {
	group, _, ok := strings.Cut(apiVersion, "/")
	return ok && strings.Contains(group, ".") && !strings.HasSuffix(group, ".k8s.io")
}

// object is a Kubernetes object during a walk.
type object struct {
	*scan
	pods bool   // the field spec is a pod's spec
	what string // such as "Deployment web"
	ran  bool   // a pod's spec was found
}

// walk visits a value. path contains the keys that lead to it, and parent is the mapping or list
// that contains it.
func (o *object) walk(n *yaml.Node, path []string, parent *yaml.Node) {
	switch n.Kind {
	case yaml.MappingNode:
		if o.isPodSpec(n, path) {
			o.podSpec(n, path)
			return
		}
		o.split(n)
		o.fields(n, path, nil)
	case yaml.SequenceNode:
		for i, c := range n.Content {
			if i > 0 && c.Kind == yaml.ScalarNode && imageFlagName.MatchString(n.Content[i-1].Value) {
				o.mention(c, c.Value) // c is the value of the flag before it
				continue
			}
			o.walk(c, path, n)
		}
	case yaml.ScalarNode:
		o.scalar(n, path, parent)
	}
}

// fields visits the values of a mapping, except for keys in skip.
func (o *object) fields(n *yaml.Node, path, skip []string) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if key := n.Content[i].Value; !slices.Contains(skip, key) {
			o.walk(n.Content[i+1], append(path[:len(path):len(path)], key), n)
		}
	}
}

// isPodSpec reports whether a mapping is a pod's spec: either of a Pod, or of a pod template, which
// is always in a field named template.
func (o *object) isPodSpec(n *yaml.Node, path []string) bool {
	at := len(path)
	isSpec := o.pods && at == 1 && path[0] == "spec" || at >= 2 && path[at-2] == "template" && path[at-1] == "spec"
	c := yamltree.Get(n, "containers")
	return isSpec && c != nil && c.Kind == yaml.SequenceNode
}

func (o *object) podSpec(n *yaml.Node, path []string) {
	o.ran = true
	lists := []string{"initContainers", "containers", "ephemeralContainers"}
	for _, list := range lists {
		if containers := yamltree.Get(n, list); containers != nil {
			for _, c := range containers.Content {
				o.run(yamltree.Get(c, "image"))
				o.fields(c, append(path[:len(path):len(path)], list), []string{"image"})
			}
		}
	}
	if volumes := yamltree.Get(n, "volumes"); volumes != nil {
		for _, v := range volumes.Content {
			o.run(yamltree.Get(yamltree.Get(v, "image"), "reference"))
		}
	}
	o.fields(n, path, append(lists, "volumes"))
}

// run records an image that pods run or mount.
func (o *object) run(image *yaml.Node) {
	if image == nil || image.Kind != yaml.ScalarNode {
		return
	}
	where := o.where(image)
	ref, err := imageref.Parse(image.Value)
	switch {
	case err == nil:
		o.scan.run = append(o.scan.run, Reference{ref, image.Value, where})
	case strings.Contains(image.Value, "{{"):
		o.errs = append(o.errs, fmt.Errorf("%s: %q: %s", where, image.Value, manifest.Unrendered))
	default:
		o.errs = append(o.errs, fmt.Errorf("%s: %w", where, err))
	}
}

func (o *object) where(n *yaml.Node) string { return fmt.Sprintf("%s:%d: %s", o.file, n.Line, o.what) }

// mention records a string if it is an image reference with a tag or a digest.
func (o *object) mention(n *yaml.Node, text string) {
	if ref, err := imageref.Parse(text); err == nil {
		o.mentions = append(o.mentions, Reference{ref, text, o.where(n)})
	}
}

// split records an image given as the fields registry, repository and tag.
func (o *object) split(n *yaml.Node) {
	repository, tag := yamltree.Get(n, "repository"), yamltree.Text(yamltree.Get(n, "tag"))
	text := yamltree.Text(repository)
	if text == "" || tag == "" {
		return
	}
	if registry := yamltree.Text(yamltree.Get(n, "registry")); registry != "" {
		text = registry + "/" + text
	}
	o.mention(repository, text+":"+tag)
}

var (
	imageKey = regexp.MustCompile(`(^i|I|[-_]i)mages?(Name|Ref|Reference|URI|URL|Uri|Url)?$`)
	imageEnv = regexp.MustCompile(`(^|_)IMAGES?(_|$)`)
	// imageFlag matches a flag with a value, as --name=value.
	imageFlag = regexp.MustCompile(`^(--?[A-Za-z][-_.A-Za-z0-9]*)=(.+)$`)
	// imageFlagName matches the name of a flag whose value is an image.
	imageFlagName = regexp.MustCompile(`^--?([A-Za-z][-_.A-Za-z0-9]*)?[iI]mages?$`)
)

// scalar records a string that is an image reference according to its context: the value of a key
// or variable such as image, the value of a flag, or a reference that begins with the host of a
// registry.
func (o *object) scalar(n *yaml.Node, path []string, parent *yaml.Node) {
	text, key := n.Value, ""
	if len(path) > 0 {
		key = path[len(path)-1]
	}
	flag := imageFlag.FindStringSubmatch(text)
	switch {
	case imageKey.MatchString(key),
		key == "value" && imageEnv.MatchString(yamltree.Text(yamltree.Get(parent, "name"))):
		o.mention(n, text)
	case flag != nil:
		if strings.Contains(flag[2], "/") || imageFlagName.MatchString(flag[1]) {
			o.mention(n, flag[2])
		}
	case strings.ContainsAny(text, " \n"): // a document or a command line
		for _, word := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\r\n\"'`,;=()[]{}<>|&$", r) }) {
			if hasRegistry(word) {
				o.mention(n, word)
			}
		}
	case hasRegistry(text):
		o.mention(n, text)
	}
}

// hasRegistry reports whether a text begins with the host of a registry, as in
// registry.example.com/app:1 or localhost:5000/app:1.
func hasRegistry(text string) bool {
	host, _, ok := strings.Cut(text, "/")
	return ok && (strings.ContainsAny(host, ".:") || host == "localhost")
}
