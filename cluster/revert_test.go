package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// store is a fake API server for Prepare and Revert: objects by path, with
// versions, conflicts and preconditions.
type store struct {
	mu      sync.Mutex
	objects map[string]map[string]any
	version int
	// before runs before each request, without the lock.
	before func(method, path string)
}

func newStore(t *testing.T) (*store, *Client) {
	t.Helper()
	s := &store{objects: map[string]map[string]any{}}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	c, err := newClient(&rest.Config{Host: srv.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	return s, c
}

// put stores an object on behalf of another client.
func (s *store) put(path string, obj map[string]any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep(path, copyOf(obj))
}

func (s *store) keep(path string, obj map[string]any) map[string]any {
	s.version++
	meta := obj["metadata"].(map[string]any)
	meta["resourceVersion"], meta["uid"] = fmt.Sprint(s.version), "u"+path
	s.objects[path] = obj
	return obj
}

// is returns the object without the fields that the server sets; nil if there is no object.
func (s *store) is(path string) map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.objects[path] == nil {
		return nil
	}
	return clean(s.objects[path])
}

func (s *store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.before != nil {
		s.before(r.Method, r.URL.Path)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	var in map[string]any
	_ = json.Unmarshal(body, &in) // a GET has no body
	refuse := func(code int, reason string) {
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": reason})
	}
	w.Header().Set("Content-Type", "application/json")
	path := r.URL.Path
	is := s.objects[path]
	version := func() any { return is["metadata"].(map[string]any)["resourceVersion"] }
	switch {
	case strings.HasSuffix(path, "/selfsubjectaccessreviews"):
		in["status"] = map[string]any{"allowed": true}
		w.WriteHeader(http.StatusCreated)
		json.NewEncoder(w).Encode(in)
	case r.Method == http.MethodPost:
		path += "/" + in["metadata"].(map[string]any)["name"].(string)
		if s.objects[path] != nil {
			refuse(http.StatusConflict, "AlreadyExists")
			return
		}
		w.WriteHeader(http.StatusCreated)
		json.NewEncoder(w).Encode(s.keep(path, in))
	case is == nil:
		refuse(http.StatusNotFound, "NotFound")
	case r.Method == http.MethodGet:
		json.NewEncoder(w).Encode(is)
	case r.Method == http.MethodPut:
		if in["metadata"].(map[string]any)["resourceVersion"] != version() {
			refuse(http.StatusConflict, "Conflict")
			return
		}
		json.NewEncoder(w).Encode(s.keep(path, in))
	case r.Method == http.MethodDelete:
		if p, _ := in["preconditions"].(map[string]any); p["resourceVersion"] != nil && p["resourceVersion"] != version() {
			refuse(http.StatusConflict, "Conflict")
			return
		}
		delete(s.objects, path)
		json.NewEncoder(w).Encode(map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Success"})
	}
}

const (
	hubPath    = "/apis/rbac.authorization.k8s.io/v1/clusterroles/yurt-hub"
	recordPath = "/api/v1/namespaces/kube-system/configmaps/edgebake-prepared"
)

// hub is yurthub's ClusterRole with one rule for each of the resources.
func hub(resources ...string) map[string]any {
	var rules []any
	for _, r := range resources {
		rules = append(rules, map[string]any{"apiGroups": anyList(""), "resources": anyList(r), "verbs": anyList("get")})
	}
	return rbac("ClusterRole", "", hubName, map[string]any{"rules": rules})
}

func hubChange(before, after map[string]any) []Change {
	return []Change{{Resource: clusterRoles, Name: hubName, Before: before, After: after}}
}

func prepare(t *testing.T, c *Client, plan []Change) {
	t.Helper()
	if err := c.Prepare(t.Context(), plan); err != nil {
		t.Fatal(err)
	}
}

func revert(t *testing.T, c *Client) []Reverted {
	t.Helper()
	back, err := c.Revert(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return back
}

func same(a, b map[string]any) bool { return fmt.Sprint(a) == fmt.Sprint(b) }

// TestRevertKeepsWhatOthersMadeBetween checks that if somebody else changed an object between two
// runs of prepare, Revert restores that change.
func TestRevertKeepsWhatOthersMadeBetween(t *testing.T) {
	s, c := newStore(t)
	s.put(hubPath, hub("old"))
	prepare(t, c, hubChange(hub("old"), hub("old", "ours")))
	s.put(hubPath, hub("chart"))
	prepare(t, c, hubChange(hub("chart"), hub("chart", "ours")))
	if back := revert(t, c); len(back) != 1 || back[0].Kept != "" || !same(s.is(hubPath), hub("chart")) {
		t.Errorf("%+v\n%v", back, s.is(hubPath))
	}
}

// TestRevertComesBackToTheFirst checks that after two runs of prepare, Revert restores the first
// state, even if a power cut interrupted the second run.
func TestRevertComesBackToTheFirst(t *testing.T) {
	for _, cut := range []bool{false, true} {
		s, c := newStore(t)
		s.put(hubPath, hub("old"))
		prepare(t, c, hubChange(hub("old"), hub("old", "ours")))
		second := hubChange(hub("old", "ours"), hub("old", "ours", "more"))
		if cut { // twice: the repeated run is interrupted too
			if err := errors.Join(c.record(t.Context(), second), c.record(t.Context(), second)); err != nil {
				t.Fatal(err)
			}
		} else {
			prepare(t, c, second)
		}
		if back := revert(t, c); len(back) != 1 || back[0].Kept != "" || !same(s.is(hubPath), hub("old")) || s.is(recordPath) != nil {
			t.Errorf("cut %v: %+v\n%v", cut, back, s.is(hubPath))
		}
	}
}

// TestRevertKeepsAChangeWhileItRuns checks that if somebody else changes an object during Revert,
// the change is kept and reported, and the object stays in the record.
func TestRevertKeepsAChangeWhileItRuns(t *testing.T) {
	s, c := newStore(t)
	s.put(hubPath, hub("old"))
	prepare(t, c, hubChange(hub("old"), hub("old", "ours")))
	s.before = func(_, path string) {
		if strings.HasSuffix(path, "/selfsubjectaccessreviews") { // the plan is made, no change yet
			s.put(hubPath, hub("theirs"))
		}
	}
	back := revert(t, c)
	if len(back) != 1 || back[0].Kept == "" || !same(s.is(hubPath), hub("theirs")) || s.is(recordPath) == nil {
		t.Errorf("%+v\n%v", back, s.is(hubPath))
	}
}

// TestRevertKeepsARecordWrittenWhileItRuns checks that Revert keeps entries that a concurrent run
// of prepare adds to the record.
func TestRevertKeepsARecordWrittenWhileItRuns(t *testing.T) {
	s, c := newStore(t)
	s.put(hubPath, hub("old"))
	prepare(t, c, hubChange(hub("old"), hub("old", "ours")))
	done := false
	s.before = func(method, path string) {
		if method == http.MethodDelete && path == recordPath && !done {
			done = true
			record := s.is(recordPath)
			record["data"].(map[string]any)["more"] = "x"
			s.put(recordPath, record)
		}
	}
	if _, err := c.Revert(t.Context()); err == nil || !strings.Contains(err.Error(), "ran at the same time") || s.is(recordPath) == nil {
		t.Error(err)
	}
}

// TestRevertRejectsARecordOfSomebodyElse checks that Revert, which has an administrator's rights,
// rejects entries that prepare never writes.
func TestRevertRejectsARecordOfSomebodyElse(t *testing.T) {
	admin := rbac("ClusterRoleBinding", "", "evil", map[string]any{"roleRef": map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}})
	for name, change := range map[string]Change{
		"another object":     {Resource: clusterRoleBindings, Name: "evil", Before: admin, After: nil},
		"another, there":     {Resource: clusterRoleBindings, Name: "evil", Before: nil, After: admin},
		"another namespace":  {Resource: configMaps, Namespace: "default", Name: proxyName, After: map[string]any{"metadata": map[string]any{"name": proxyName, "namespace": "default"}}},
		"another inside":     {Resource: clusterRoles, Name: hubName, Before: admin, After: hub("ours")},
		"removed by prepare": {Resource: clusterRoles, Name: hubName, Before: hub("ours")},
		"a version's path":   {Resource: nodePools("v1/../../../api/v1"), Name: "p", After: map[string]any{"metadata": map[string]any{"name": "p"}}},
	} {
		s, c := newStore(t)
		if err := c.writeRecord(t.Context(), []recordedChange{{Change: change}}, nil); err != nil {
			t.Fatal(err)
		}
		was := s.version
		for _, act := range []func() error{
			func() error { _, err := c.Revert(t.Context()); return err },
			func() error { _, err := c.RevertPlan(t.Context()); return err },
			func() error { return c.Prepare(t.Context(), hubChange(nil, hub("ours"))) },
		} {
			if err := act(); err == nil || !strings.Contains(err.Error(), "the record is damaged") || s.version != was || len(s.objects) != 1 {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
