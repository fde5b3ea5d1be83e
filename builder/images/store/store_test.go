package store

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

var date = time.Unix(1767225600, 0).UTC()

func sample() *State {
	s := &State{Schema: SchemaVersion, MetaSequence: 6, BackendSequence: 3}
	for n, parent := range []string{"", "sha256:1", "sha256:1"} {
		key := fmt.Sprint("sha256:", n+1)
		s.Snapshots = append(s.Snapshots, Snapshot{Key: key, Parent: parent, Backend: BackendName(uint64(2*n+2), key), ID: uint64(n + 1),
			Kind: KindCommitted, Size: 4096, Inodes: 1, Labels: map[string]string{LabelSnapshotRef: key}, Created: date, Updated: date})
	}
	s.Blobs = []Blob{{Digest: "sha256:b", Size: 7, Labels: map[string]string{LabelGCConfig: "sha256:c"}, Created: date, Updated: date},
		{Digest: "sha256:c", Size: 8, Created: date, Updated: date}}
	s.Images = []Image{{Name: "example.org/a:1", MediaType: "m", Digest: "sha256:b", Size: 7, Labels: map[string]string{LabelPinned: "pinned"}, Created: date, Updated: date}}
	return s
}

func write(t *testing.T, s *State) (meta, snaps string) {
	t.Helper()
	dir := t.TempDir()
	meta, snaps = filepath.Join(dir, "meta.db"), filepath.Join(dir, "metadata.db")
	if err := s.Write("overlayfs", meta, snaps); err != nil {
		t.Fatal(err)
	}
	return meta, snaps
}

func TestWriteThenRead(t *testing.T) {
	s := sample()
	meta, snaps := write(t, s)
	got, err := Read("overlayfs", meta, snaps)
	if err != nil || !reflect.DeepEqual(got, s) {
		t.Errorf("%v\ngot  %+v\nwant %+v", err, got, s)
	}
	for range 5 {
		m, n := write(t, sample())
		for a, b := range map[string]string{meta: m, snaps: n} {
			x, err1 := os.ReadFile(a)
			y, err2 := os.ReadFile(b)
			if err1 != nil || err2 != nil || string(x) != string(y) {
				t.Errorf("%s: the same state gave other bytes", filepath.Base(a))
			}
		}
	}
	if err := s.Write("overlayfs", meta, snaps); err == nil {
		t.Error("databases that exist were written over")
	}
}

// Each database is damaged in one way, as a bug or a bad disk would.
func TestReadFindsDamage(t *testing.T) {
	at := func(path ...string) func(*bolt.Tx) *bolt.Bucket {
		return func(tx *bolt.Tx) *bolt.Bucket { return descend(tx, path...) }
	}
	snapshots := at("v1", Namespace, "snapshots", "overlayfs")
	backend := at("v1", "snapshots")
	for name, tt := range map[string]struct {
		meta   bool
		change func(*bolt.Tx) error
		want   string
	}{
		"unknown schema": {true, func(tx *bolt.Tx) error {
			f := signed("version", 9)
			return tx.Bucket([]byte("v1")).Put([]byte(f.key), f.value)
		}, "version 9, this program knows 1 to 4"},
		"no schema": {true, func(tx *bolt.Tx) error { return tx.DeleteBucket([]byte("v1")) }, "containerd's?"},
		"no target": {true, func(tx *bolt.Tx) error {
			return at("v1", Namespace, "images", "example.org/a:1")(tx).DeleteBucket([]byte("target"))
		}, "has no target"},
		"no child entry": {true, func(tx *bolt.Tx) error {
			return snapshots(tx).Bucket([]byte("sha256:1")).Bucket([]byte("children")).Delete([]byte("sha256:2"))
		}, "not among the children"},
		"low sequence": {true, func(tx *bolt.Tx) error { return snapshots(tx).SetSequence(1) }, "above meta.db's sequence 1"},
		"stale child is no damage": {true, func(tx *bolt.Tx) error {
			return snapshots(tx).Bucket([]byte("sha256:1")).Bucket([]byte("children")).Put([]byte("gone"), nil)
		}, ""},
		"backend missing":      {false, func(tx *bolt.Tx) error { return backend(tx).DeleteBucket([]byte("k8s.io/6/sha256:3")) }, "of meta.db is missing"},
		"backend low sequence": {false, func(tx *bolt.Tx) error { return backend(tx).SetSequence(2) }, "above the sequence 2"},
		"link missing":         {false, func(tx *bolt.Tx) error { return at("v1", "parents")(tx).Delete(parentKey(1, 2)) }, "not linked to its parent"},
		"other parent": {false, func(tx *bolt.Tx) error {
			return backend(tx).Bucket([]byte("k8s.io/6/sha256:3")).Put([]byte("parent"), []byte("k8s.io/4/sha256:2"))
		}, "meta.db says"},
	} {
		t.Run(name, func(t *testing.T) {
			meta, snaps := write(t, sample())
			file := snaps
			if tt.meta {
				file = meta
			}
			db, err := bolt.Open(file, 0o600, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := db.Update(tt.change); err != nil {
				t.Fatal(err)
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			_, err = Read("overlayfs", meta, snaps)
			if tt.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, expected %q", err, tt.want)
			}
		})
	}
}

// A database that came through a power cut damaged is an error, not a crash.
func TestReadSurvivesGarbage(t *testing.T) {
	for n := 0; n < 40; n++ {
		meta, snaps := write(t, sample())
		raw, err := os.ReadFile(meta)
		if err != nil {
			t.Fatal(err)
		}
		for i := n * len(raw) / 40; i < (n+1)*len(raw)/40; i += 3 {
			raw[i] ^= 0x5a
		}
		if err := os.WriteFile(meta, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		Read("overlayfs", meta, snaps) // must return
	}
}

func TestChainID(t *testing.T) {
	// From the OCI image specification: the first layer's chain is its diffID.
	if ChainID("", "sha256:a") != "sha256:a" {
		t.Error("first layer")
	}
	if got := ChainID("sha256:a", "sha256:b"); len(got) != len("sha256:")+64 || got == ChainID("sha256:b", "sha256:a") {
		t.Error(got)
	}
}
