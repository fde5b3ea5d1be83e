// Package fleettest simulates the parts of an API server that a rollout of updates uses: Nodes,
// Pods and evictions. test/cluster runs the same rollouts with a real API server.
package fleettest

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Object is a Kubernetes object as decoded JSON.
type Object = map[string]any

// Server is the API server.
type Server struct {
	URL string
	// Version is the version that the server reports at /version.
	Version string
	// Before, if not nil, is called before each request. It returns the HTTP status of an error, or
	// 0 to serve the request.
	Before func(r *http.Request) int
	// Evicted, if not nil, returns the HTTP status of a request to evict a pod, whose node may be
	// cordoned. If Evicted is nil, a pod is evicted at once.
	Evicted func(path string, cordoned bool) (status int)

	server  *httptest.Server
	mu      sync.Mutex
	objects map[string]Object // by path
	version int
	events  []event
	changed *sync.Cond
	closed  bool
}

type event struct {
	version int
	kind    string
	object  []byte
}

// New starts a server; call Close to end it.
func New() *Server {
	s := &Server{Version: "v1.37.2", objects: map[string]Object{}}
	s.changed = sync.NewCond(&s.mu)
	s.server = httptest.NewServer(s)
	s.URL = s.server.URL
	return s
}

// Close ends the server, and all watches.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.changed.Broadcast()
	s.mu.Unlock()
	s.server.Close()
}

const nodesPath = "/api/v1/nodes"

// Node creates a Ready Node with labels and annotations.
func (s *Server) Node(name string, labels, annotations map[string]string) {
	meta := Object{"name": name, "labels": anyOf(labels), "annotations": anyOf(annotations), "uid": "uid-" + name}
	s.put(nodesPath+"/"+name, Object{"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": Object{},
		"status": Object{"conditions": []any{Object{"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-26T12:00:00Z"}}}})
}

func anyOf(in map[string]string) Object {
	out := Object{}
	for k, v := range in {
		out[k] = v
	}
	return out
}

// Pod creates a pod on a node. owner is the kind of its controller, or "" for none.
func (s *Server) Pod(namespace, name, node, owner string) {
	meta := Object{"name": name, "namespace": namespace, "uid": "uid-" + name}
	if owner != "" {
		meta["ownerReferences"] = []any{Object{"apiVersion": "apps/v1", "kind": owner, "name": "x", "uid": "x", "controller": true}}
	}
	s.put("/api/v1/namespaces/"+namespace+"/pods/"+name, Object{"apiVersion": "v1", "kind": "Pod", "metadata": meta,
		"spec": Object{"nodeName": node}, "status": Object{"phase": "Running"}})
}

func (s *Server) put(path string, o Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep(path, o)
}

// keep stores an object. The caller must hold mu.
func (s *Server) keep(path string, o Object) Object {
	s.version++
	o["metadata"].(Object)["resourceVersion"] = strconv.Itoa(s.version)
	kind := "ADDED"
	if s.objects[path] != nil {
		kind = "MODIFIED"
	}
	s.objects[path] = o
	s.note(path, kind, o)
	return o
}

func (s *Server) note(path, kind string, o Object) {
	if strings.HasPrefix(path, nodesPath) {
		b, err := json.Marshal(o)
		if err != nil {
			panic(err)
		}
		s.events = append(s.events, event{s.version, kind, b})
		s.changed.Broadcast()
	}
}

// Change patches a Node with a merge patch (RFC 7386), as another client would.
func (s *Server) Change(name string, patch Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := nodesPath + "/" + name
	s.keep(path, merged(copyOf(s.objects[path]), patch).(Object))
}

// Annotate changes annotations of a Node.
func (s *Server) Annotate(name string, annotations Object) {
	s.Change(name, Object{"metadata": Object{"annotations": annotations}})
}

// Ready sets whether a Node is Ready.
func (s *Server) Ready(name string, ready bool) {
	status := "False"
	if ready {
		status = "True"
	}
	s.Change(name, Object{"status": Object{"conditions": []any{Object{"type": "Ready", "status": status, "message": "kubelet stopped"}}}})
}

// Get returns a Node, or nil if it does not exist.
func (s *Server) Get(name string) Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.objects[nodesPath+"/"+name]; o != nil {
		return copyOf(o)
	}
	return nil
}

// Annotation returns the value of a Node's annotation.
func (s *Server) Annotation(name, key string) string {
	if o := s.Get(name); o != nil {
		v, _ := o["metadata"].(Object)["annotations"].(Object)[key].(string)
		return v
	}
	return ""
}

// Cordoned reports whether a Node is cordoned.
func (s *Server) Cordoned(name string) bool {
	c, _ := s.Get(name)["spec"].(Object)["unschedulable"].(bool)
	return c
}

// Delete deletes a Node.
func (s *Server) Delete(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := nodesPath + "/" + name
	o := copyOf(s.objects[path])
	s.version++
	o["metadata"].(Object)["resourceVersion"] = strconv.Itoa(s.version)
	delete(s.objects, path)
	s.note(path, "DELETED", o)
}

// Nodes returns the names of all Nodes.
func (s *Server) Nodes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for path := range s.objects {
		if name, ok := strings.CutPrefix(path, nodesPath+"/"); ok {
			out = append(out, name)
		}
	}
	return slices.Sorted(slices.Values(out))
}

// Count returns the number of Nodes for which the given function returns true, all at the same
// moment.
func (s *Server) Count(is func(node Object) bool) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for path, o := range s.objects {
		if strings.HasPrefix(path, nodesPath+"/") && is(o) {
			n++
		}
	}
	return n
}

func copyOf(o Object) (out Object) {
	b, err := json.Marshal(o)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		panic(err)
	}
	return out
}

// merged applies a merge patch to a value and returns the result.
func merged(is, patch any) any {
	p, ok := patch.(Object)
	if !ok {
		return patch
	}
	o, ok := is.(Object)
	if !ok {
		o = Object{}
	}
	for k, v := range p {
		if v == nil {
			delete(o, k)
		} else {
			o[k] = merged(o[k], v)
		}
	}
	return o
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	refuse := func(code int, reason string) {
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(Object{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason})
	}
	if s.Before != nil {
		if code := s.Before(r); code != 0 {
			refuse(code, http.StatusText(code))
			return
		}
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	var in Object
	_ = json.Unmarshal(body, &in) // a GET has no body
	path := r.URL.Path
	if path == nodesPath && r.URL.Query().Get("watch") != "" {
		s.watch(w, r)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	is := s.objects[path]
	pod, evicts := strings.CutSuffix(path, "/eviction")
	switch {
	case path == "/version":
		json.NewEncoder(w).Encode(Object{"gitVersion": s.Version})
	case strings.HasSuffix(path, "/selfsubjectaccessreviews"):
		in["status"] = Object{"allowed": true}
		w.WriteHeader(http.StatusCreated)
		json.NewEncoder(w).Encode(in)
	case r.Method == http.MethodPost && evicts:
		if s.Evicted != nil {
			node, _ := s.objects[pod]["spec"].(Object)["nodeName"].(string)
			cordoned, _ := s.objects[nodesPath+"/"+node]["spec"].(Object)["unschedulable"].(bool)
			if code := s.Evicted(pod, cordoned); code != 0 {
				refuse(code, http.StatusText(code))
				return
			}
		}
		delete(s.objects, pod)
		w.WriteHeader(http.StatusCreated)
		json.NewEncoder(w).Encode(Object{"apiVersion": "v1", "kind": "Status", "status": "Success"})
	case path == nodesPath:
		s.list(w, "NodeList", func(p string, _ Object) bool { return strings.HasPrefix(p, nodesPath+"/") })
	case path == "/api/v1/pods":
		node, _ := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "spec.nodeName=")
		s.list(w, "PodList", func(p string, o Object) bool {
			return strings.Contains(p, "/pods/") && o["spec"].(Object)["nodeName"] == node
		})
	case is == nil:
		refuse(http.StatusNotFound, "NotFound")
	case r.Method == http.MethodGet:
		json.NewEncoder(w).Encode(is)
	case r.Method == http.MethodPatch:
		meta, _ := in["metadata"].(Object)
		if v := meta["resourceVersion"]; v != nil && v != is["metadata"].(Object)["resourceVersion"] {
			refuse(http.StatusConflict, "Conflict")
			return
		}
		json.NewEncoder(w).Encode(s.keep(path, merged(copyOf(is), in).(Object)))
	default:
		refuse(http.StatusMethodNotAllowed, "MethodNotAllowed")
	}
}

func (s *Server) list(w io.Writer, kind string, is func(string, Object) bool) {
	items := []any{}
	for _, p := range slices.Sorted(maps.Keys(s.objects)) {
		if is(p, s.objects[p]) {
			items = append(items, s.objects[p])
		}
	}
	json.NewEncoder(w).Encode(Object{"apiVersion": "v1", "kind": kind, "metadata": Object{"resourceVersion": strconv.Itoa(s.version)}, "items": items})
}

// watch sends the changes of Nodes until the client disconnects.
func (s *Server) watch(w http.ResponseWriter, r *http.Request) {
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	go func() {
		<-r.Context().Done()
		s.mu.Lock()
		s.changed.Broadcast()
		s.mu.Unlock()
	}()
	w.WriteHeader(http.StatusOK)
	for {
		s.mu.Lock()
		i, _ := slices.BinarySearchFunc(s.events, from+1, func(e event, v int) int { return e.version - v })
		for i == len(s.events) && !s.closed && r.Context().Err() == nil {
			s.changed.Wait()
		}
		todo := s.events[i:]
		end := s.closed || r.Context().Err() != nil
		s.mu.Unlock()
		if end {
			return
		}
		for _, e := range todo {
			fmt.Fprintf(w, `{"type":%q,"object":%s}`+"\n", e.kind, e.object)
			from = e.version
		}
		w.(http.Flusher).Flush()
	}
}
