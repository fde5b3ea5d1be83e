package kubeapi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/configs/yamltree"
)

// Object is a Kubernetes object and its place in a file.
type Object struct {
	// Where describes the object in messages: file, document, kind and name.
	Where string

	apiVersion, kind, namespace, name string
	json                              []byte
}

// Objects parses the objects in a YAML text, including the items of Lists. Errors contain the file
// name, but never quote the text, because it may contain secrets.
func Objects(file string, text []byte) ([]Object, error) {
	if err := yamltree.TooDense(text); err != nil {
		return nil, fmt.Errorf("reading %s: %w", file, err)
	}
	var out []Object
	dec := yaml.NewDecoder(bytes.NewReader(text))
	for n := 1; ; n++ {
		var doc yaml.Node
		var o map[string]any
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err == nil {
			yamltree.AsKubectl(&doc)
			err = yamltree.Decode(&doc, &o)
		}
		if err != nil {
			return nil, fmt.Errorf("reading %s: document %d is not YAML", file, n)
		}
		if o == nil {
			continue
		}
		if out, err = addObject(out, fmt.Sprintf("%s, document %d", file, n), o); err != nil {
			return nil, err
		}
	}
}

func addObject(out []Object, where string, o map[string]any) ([]Object, error) {
	text := func(m map[string]any, key string) string {
		s, _ := m[key].(string)
		return s
	}
	kind := text(o, "kind")
	if items, ok := o["items"].([]any); ok && strings.HasSuffix(kind, "List") {
		for i, item := range items {
			m, ok := item.(map[string]any)
			if !ok {
				return nil, fmt.Errorf("reading %s: item %d is not a Kubernetes object", where, i+1)
			}
			var err error
			if out, err = addObject(out, fmt.Sprintf("%s, item %d", where, i+1), m); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	meta, _ := o["metadata"].(map[string]any)
	b := Object{apiVersion: text(o, "apiVersion"), kind: kind, namespace: text(meta, "namespace"), name: text(meta, "name")}
	if b.apiVersion == "" || b.kind == "" || b.name == "" {
		return nil, fmt.Errorf("reading %s: apiVersion, kind or metadata.name is missing", where)
	}
	b.Where = fmt.Sprintf("%s (%s %s)", where, b.kind, b.name)
	var err error
	if b.json, err = json.Marshal(o); err != nil {
		return nil, fmt.Errorf("reading %s: it is not a Kubernetes object", b.Where)
	}
	return append(out, b), nil
}

// applyManager is the field manager of applied objects.
const applyManager = "edgebake"

// ID identifies an object within a cluster. It does not depend on the API's version.
func (o Object) ID() string {
	group, _, grouped := strings.Cut(o.apiVersion, "/")
	if !grouped {
		group = ""
	}
	return strings.Join([]string{group, o.kind, o.namespace, o.name}, "/")
}

// Applier applies objects. It caches the kinds that the API server serves.
type Applier struct {
	c     *Client
	known map[string][]resource
}

// Applier returns an Applier for one batch of objects.
func (c *Client) Applier() Applier { return Applier{c, map[string][]resource{}} }

// Apply applies an object by server-side apply. Callers may retry after an error: a kind, a
// namespace or a webhook that the object needs may appear later.
func (a Applier) Apply(ctx context.Context, o Object) error {
	if err := a.c.apply(ctx, o, a.known); err != nil {
		return fmt.Errorf("applying %s: %w", o.Where, err)
	}
	return nil
}

func (c *Client) apply(ctx context.Context, o Object, known map[string][]resource) error {
	path, err := c.pathOf(ctx, o, known)
	if err != nil {
		return err
	}
	// Force also replaces fields that a person has applied with another field manager.
	return c.send(ctx, http.MethodPatch, path+"/"+o.name+"?force=true&fieldManager="+applyManager, "application/apply-patch+yaml", o.json)
}

// Create creates an object. An object that exists is left unchanged.
func (a Applier) Create(ctx context.Context, o Object) error {
	path, err := a.c.pathOf(ctx, o, a.known)
	if err == nil {
		err = a.c.send(ctx, http.MethodPost, path, "application/json", o.json)
	}
	if err != nil && Code(err) != http.StatusConflict {
		return fmt.Errorf("creating %s: %w", o.Where, err)
	}
	return nil
}

// CreateAll creates the missing objects in order. The API server must already know their kinds.
func (c *Client) CreateAll(ctx context.Context, objects []Object) error {
	applier := c.Applier()
	for _, o := range objects {
		if err := applier.Create(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// resource is a kind that an API server serves.
type resource struct {
	Name       string `json:"name"`
	Kind       string `json:"kind"`
	Namespaced bool   `json:"namespaced"`
}

// pathOf returns the API path of the objects of o's kind. known caches the kinds of each API
// version; if o's kind is not in it, the API server is asked again.
func (c *Client) pathOf(ctx context.Context, o Object, known map[string][]resource) (string, error) {
	base := "/apis/" + o.apiVersion
	if !strings.Contains(o.apiVersion, "/") {
		base = "/api/" + o.apiVersion
	}
	find := func() string {
		for _, r := range known[o.apiVersion] {
			if r.Kind != o.kind || strings.Contains(r.Name, "/") { // a name with a slash is a subresource
				continue
			}
			if r.Namespaced {
				return base + "/namespaces/" + cmp.Or(o.namespace, "default") + "/" + r.Name
			}
			return base + "/" + r.Name
		}
		return ""
	}
	if path := find(); path != "" {
		return path, nil
	}
	var served struct {
		Resources []resource `json:"resources"`
	}
	if err := c.Get(ctx, base, &served); err != nil {
		return "", err
	}
	known[o.apiVersion] = served.Resources
	if path := find(); path != "" {
		return path, nil
	}
	return "", &StatusError{Code: http.StatusNotFound, Path: base, Message: "the API server does not know the kind " + quoted(o.kind)}
}
