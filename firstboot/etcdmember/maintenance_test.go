package etcdmember

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
)

// TestDefragmentNeedsRoom checks that the leader's machine does not defragment a member whose disk
// may be too small, and continues with the others.
func TestDefragmentNeedsRoom(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var done []string
	u := Maintenance{Name: "m1", Others: map[string]Client{}}
	members := []map[string]string{}
	for _, name := range []string{"m1", "m2", "m3"} {
		id := strings.TrimPrefix(name, "m")
		members = append(members, map[string]string{"ID": id, "name": name})
		size := "419430400"
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			var a any = map[string]any{}
			switch r.URL.Path {
			case "/v3/cluster/member/list":
				a = map[string]any{"members": members}
			case "/v3/maintenance/status":
				a = map[string]any{"header": map[string]string{"member_id": id}, "leader": "1", "dbSize": size, "dbSizeInUse": "104857600"}
			case "/v3/maintenance/defragment":
				done, size = append(done, name), "104857600"
			}
			json.NewEncoder(w).Encode(a)
		}))
		t.Cleanup(server.Close)
		if u.Others[name] = (Client{HTTP: server.Client(), URL: server.URL}); name == u.Name {
			u.Own = u.Others[name]
		}
	}
	u.Space = func(_ context.Context, name string, bytes int64) error {
		if bytes != 104857600 {
			t.Errorf("the free space of %s is checked for %d bytes", name, bytes)
		}
		if name == "m2" {
			return errors.New("its disk is full")
		}
		return nil
	}
	f, err := u.Run(t.Context())
	if err != nil || !slices.Equal(done, []string{"m3", "m1"}) || strings.Join(f.Notes, "\n") != "etcd's database on m2 was not defragmented: its disk is full" {
		t.Errorf("%v; defragmented %q, notes %q", err, done, f.Notes)
	}
}
