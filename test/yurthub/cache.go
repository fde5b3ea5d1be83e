package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// cache stores the responses for each component on disk. Each collection (path and selectors) that
// the component has read has a directory, with a file for each object.
type cache struct {
	dir string
	mu  sync.Mutex
}

// object is a Kubernetes object of any kind.
type object struct {
	APIVersion string `json:"apiVersion,omitempty"`
	Kind       string `json:"kind,omitempty"`
	Metadata   struct {
		Name            string `json:"name"`
		Namespace       string `json:"namespace,omitempty"`
		ResourceVersion string `json:"resourceVersion,omitempty"`
	} `json:"metadata"`
}

type list struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Items []json.RawMessage `json:"items"`
}

// collection returns the directory for a list or a watch. It depends on the path and the selectors,
// but not on paging or watching.
func (c *cache) collection(component string, u *url.URL) string {
	q := u.Query()
	sel := url.Values{}
	for _, k := range []string{"fieldSelector", "labelSelector"} {
		if v := q.Get(k); v != "" {
			sel.Set(k, v)
		}
	}
	sum := sha256.Sum256([]byte(u.Path + "?" + sel.Encode()))
	return filepath.Join(c.dir, component, filepath.Base(u.Path)+"-"+hex.EncodeToString(sum[:8]))
}

func (c *cache) single(component string, u *url.URL) string {
	sum := sha256.Sum256([]byte(u.Path))
	return filepath.Join(c.dir, component, "get-"+hex.EncodeToString(sum[:8])+".json")
}

// write replaces a file and syncs it, because the tests press the reset button.
func write(path string, b []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.Create(path + ".tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// putList replaces a collection with the response to a list.
func (c *cache) putList(dir string, body []byte) error {
	var l list
	if err := json.Unmarshal(body, &l); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	head := l
	head.Items = nil
	b, err := json.Marshal(head)
	if err != nil {
		return err
	}
	if err := write(filepath.Join(dir, "list"), b); err != nil {
		return err
	}
	for _, raw := range l.Items {
		if err := c.put(dir, raw, l.APIVersion, strings.TrimSuffix(l.Kind, "List")); err != nil {
			return err
		}
	}
	return nil
}

func (c *cache) file(dir string, o *object) string {
	return filepath.Join(dir, o.Metadata.Namespace+"_"+o.Metadata.Name+".json")
}

// put stores an item of a list. It adds the kind, which an item lacks but a stored object needs.
func (c *cache) put(dir string, raw json.RawMessage, apiVersion, kind string) error {
	var o object
	if err := json.Unmarshal(raw, &o); err != nil {
		return err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return err
	}
	fields["apiVersion"], _ = json.Marshal(apiVersion)
	fields["kind"], _ = json.Marshal(kind)
	b, err := json.Marshal(fields)
	if err != nil {
		return err
	}
	return write(c.file(dir, &o), b)
}

// event applies one line of a watch to the cached collection.
func (c *cache) event(dir string, line []byte) error {
	var e struct {
		Type   string          `json:"type"`
		Object json.RawMessage `json:"object"`
	}
	if err := json.Unmarshal(line, &e); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e.Type {
	case "ADDED", "MODIFIED":
		var o object
		if err := json.Unmarshal(e.Object, &o); err != nil {
			return err
		}
		head := filepath.Join(dir, "list")
		if _, err := os.Stat(head); errors.Is(err, fs.ErrNotExist) {
			b, err := json.Marshal(list{APIVersion: o.APIVersion, Kind: o.Kind + "List"})
			if err != nil {
				return err
			}
			if err := write(head, b); err != nil {
				return err
			}
		}
		return write(c.file(dir, &o), e.Object)
	case "DELETED":
		var o object
		if err := json.Unmarshal(e.Object, &o); err != nil {
			return err
		}
		return os.Remove(c.file(dir, &o))
	}
	return nil
}

// items returns the objects of a collection. ok reports whether the collection was read before.
func (c *cache) items(dir string) (l list, ok bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := os.ReadFile(filepath.Join(dir, "list"))
	if errors.Is(err, fs.ErrNotExist) {
		return l, false, nil
	}
	if err != nil {
		return l, false, err
	}
	if err := json.Unmarshal(b, &l); err != nil {
		return l, false, err
	}
	l.Items = []json.RawMessage{}
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return l, false, err
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return l, false, err
		}
		l.Items = append(l.Items, bytes.TrimSpace(b))
	}
	if l.Metadata.ResourceVersion == "" {
		l.Metadata.ResourceVersion = "0"
	}
	return l, true, nil
}

func (p *proxy) getCached(component string, u *url.URL) ([]byte, error) {
	b, err := os.ReadFile(p.cache.single(component, u))
	if err == nil {
		return b, nil
	}
	// If the object itself is not cached, it may be in a list or a watch that was received.
	name := filepath.Base(u.Path)
	parent := &url.URL{Path: filepath.Dir(u.Path), RawQuery: url.Values{"fieldSelector": {"metadata.name=" + name}}.Encode()}
	l, ok, lerr := p.cache.items(p.cache.collection(component, parent))
	if lerr == nil && ok && len(l.Items) == 1 {
		return l.Items[0], nil
	}
	return nil, err
}
