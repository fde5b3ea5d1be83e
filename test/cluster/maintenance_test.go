package cluster

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/etcdmember"
)

// TestBootstrapOverALoglessDatabase shows that etcd accepts no writes if it starts with a database
// but without a log: it skips everything that the database records as applied. So first boot moves
// such a database aside before a bootstrap or a join.
func TestBootstrapOverALoglessDatabase(t *testing.T) {
	e := newEtcds(t)
	alone := "m1=" + e.peer[0]
	writes := func() bool {
		_, err := e.kv(0, "put", map[string]string{"key": "k", "value": "new"})
		return err == nil
	}
	e.start(0, alone, "new")
	for range 200 {
		e.put(0, "k", "old")
	}
	e.end(0)
	member := filepath.Join(e.disk(0), "member")
	if err := os.RemoveAll(filepath.Join(member, "wal")); err != nil {
		t.Fatal(err)
	}
	e.decide(0, etcdmember.Wait) // blank, and the others are unreachable
	e.start(0, alone, "new")
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(time.Second) {
		if writes() {
			t.Fatal("etcd's behaviour has changed: it accepts writes with a database that has no write-ahead log")
		}
	}
	e.stop(0)
	if err := os.Rename(member, member+"-aside"); err != nil {
		t.Fatal(err)
	}
	e.start(0, alone, "new")
	until(t, "etcd to take a write", writes)
}

// TestFullDatabase fills the database with overwritten values until etcd accepts no writes. The
// leader's machine then frees space on all members, but not while one of them is down.
func TestFullDatabase(t *testing.T) {
	e := newEtcds(t)
	quota := []string{"--quota-backend-bytes", "157286400"}
	for i := range 3 {
		e.start(i, e.all(), "new", quota...)
	}
	e.put(0, "k", "v")
	text := strings.Repeat("x", 1<<20)
	var err error
	for range 400 {
		if _, err = e.kv(0, "put", map[string]string{"key": "k", "value": text}); err != nil && strings.Contains(err.Error(), "space exceeded") {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "space exceeded") {
		t.Fatalf("with a quota of 150 MiB, etcd does not reject 400 MiB of writes: %v", err)
	}
	etcd := func(i int) etcdmember.Client { return etcdmember.Client{HTTP: http.DefaultClient, URL: e.client[i]} }
	leader := func() int {
		found := -1
		until(t, "etcd to have a leader", func() bool {
			for i := range 3 {
				if s, err := etcd(i).Status(t.Context()); err == nil && s.Member == s.Leader {
					found = i
				}
			}
			return found >= 0
		})
		return found
	}
	keep := func(i int) etcdmember.Maintained {
		t.Helper()
		u := etcdmember.Maintenance{Own: etcd(i), Name: name(i), Others: map[string]etcdmember.Client{}, Space: func(context.Context, string, int64) error { return nil }}
		for j := range 3 {
			if i != j {
				u.Others[name(j)] = etcd(j)
			}
		}
		var f etcdmember.Maintained
		until(t, "etcd's maintenance to succeed", func() bool {
			f, err = u.Run(t.Context())
			return err == nil
		})
		t.Logf("%s: %+v", name(i), f)
		return f
	}
	said := func(f etcdmember.Maintained) string { return strings.Join(slices.Concat(f.Notes, f.Done), "; ") }

	// One member is down.
	away := (leader() + 1) % 3
	e.stop(away)
	if f := keep(leader()); f.Healthy || !strings.Contains(said(f), "rejects writes") || !strings.Contains(said(f), "these members do not answer or do not vote: "+name(away)) || strings.Contains(said(f), "defragmented etcd's database on") {
		t.Errorf("while one member does not answer: %+v", f)
	}
	e.start(away, e.all(), "new", quota...)
	until(t, name(away)+" to answer", func() bool { _, err := etcd(away).Status(t.Context()); return err == nil })
	// Machines other than the leader's only report the full database.
	lead := leader()
	if f := keep((lead + 1) % 3); f.Healthy || len(f.Done) > 0 || !strings.Contains(said(f), "rejects writes") {
		t.Errorf("not the leader: %+v", f)
	}
	// While a member is defragmented it does not answer, so another one may become the leader. So
	// the test always uses the present leader's machine. Real machines maintain etcd once a day.
	until(t, "the leader to free space", func() bool {
		f := keep(leader())
		return strings.Contains(said(f), "cleared etcd's alarm NOSPACE")
	})
	for i := range 3 {
		if s, err := etcd(i).Status(t.Context()); err != nil || s.Size > 100<<20 {
			t.Errorf("%s: %+v, %v", name(i), s, err)
		}
	}
	for range 20 {
		e.put(0, "k", "after")
	}
	if f := keep(leader()); !f.Healthy || said(f) != "" {
		t.Errorf("in the end: %+v", f)
	}
}
