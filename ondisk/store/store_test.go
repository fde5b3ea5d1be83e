package store

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
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
	if err := s.Write(meta, snaps); err != nil {
		t.Fatal(err)
	}
	return meta, snaps
}

func TestWriteThenRead(t *testing.T) {
	s := sample()
	meta, snaps := write(t, s)
	got, err := Read(meta, snaps)
	if err != nil || !reflect.DeepEqual(got, s) {
		t.Errorf("%v\ngot  %+v\nwant %+v", err, got, s)
	}
	for range 5 {
		m, n := write(t, sample())
		for a, b := range map[string]string{meta: m, snaps: n} {
			x, err1 := os.ReadFile(a)
			y, err2 := os.ReadFile(b)
			if err1 != nil || err2 != nil || string(x) != string(y) {
				t.Errorf("%s: the same state gave different bytes", filepath.Base(a))
			}
		}
	}
	if err := s.Write(meta, snaps); err == nil {
		t.Error("existing databases were overwritten")
	}
}

// TestReadInUse reads a store that another process has open and changes all the time.
func TestReadInUse(t *testing.T) {
	s := sample()
	meta, snaps := write(t, s)
	live, err := OpenLive(meta, snaps)
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	stop, done := make(chan bool), make(chan error, 1)
	go func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			i := s.Images[0]
			i.Name = fmt.Sprintf("example.org/%d:1", n%50)
			c := Change{Images: []Image{i}}
			if err := live.Apply(c); err != nil {
				done <- err
				return
			}
		}
	}()
	for range 20 {
		got, err := ReadInUse(meta, snaps)
		if errors.Is(err, errBusy) {
			continue // the only permitted error
		}
		if err != nil {
			t.Error(err)
			break
		}
		if !slices.ContainsFunc(got.Images, func(i Image) bool { return i.Name == "example.org/a:1" }) || len(got.Snapshots) != 3 {
			t.Errorf("%+v", got)
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got, err := ReadInUse(meta, snaps); err != nil || len(got.Snapshots) != 3 {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := ReadInUse(meta+"x", snaps); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing database: %v", err)
	}
}

func TestLacks(t *testing.T) {
	now, next := sample(), sample()
	if l := now.Lacks(next); len(l.Images)+len(l.Blobs)+len(l.Snapshots) != 0 {
		t.Errorf("the same store: %+v", l)
	}
	now.Images[0].Digest = "sha256:d"
	now.Blobs, now.Snapshots = now.Blobs[:1], now.Snapshots[1:]
	l := now.Lacks(next)
	if len(l.Images) != 1 || l.Images[0].Digest != "sha256:b" || len(l.Blobs) != 1 || l.Blobs[0].Digest != "sha256:c" || len(l.Snapshots) != 1 || l.Snapshots[0].Key != "sha256:1" {
		t.Errorf("%+v", l)
	}
}

// TestReadFindsDamage damages a database in one place, as a bug or a bad disk could.
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
		}, "version 9, but this program supports only 1 to 4"},
		"no schema": {true, func(tx *bolt.Tx) error { return tx.DeleteBucket([]byte("v1")) }, "not a database of containerd"},
		"no target": {true, func(tx *bolt.Tx) error {
			return at("v1", Namespace, "images", "example.org/a:1")(tx).DeleteBucket([]byte("target"))
		}, "has no target"},
		"no child entry": {true, func(tx *bolt.Tx) error {
			return snapshots(tx).Bucket([]byte("sha256:1")).Bucket([]byte("children")).Delete([]byte("sha256:2"))
		}, "not among the children"},
		"low sequence": {true, func(tx *bolt.Tx) error { return snapshots(tx).SetSequence(1) }, "exceeds meta.db's sequence, 1"},
		"stale child is no damage": {true, func(tx *bolt.Tx) error {
			return snapshots(tx).Bucket([]byte("sha256:1")).Bucket([]byte("children")).Put([]byte("gone"), nil)
		}, ""},
		"backend missing":      {false, func(tx *bolt.Tx) error { return backend(tx).DeleteBucket([]byte("k8s.io/6/sha256:3")) }, "of meta.db is missing"},
		"backend low sequence": {false, func(tx *bolt.Tx) error { return backend(tx).SetSequence(2) }, "exceeds the sequence, 2"},
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
			_, err = Read(meta, snaps)
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

// large returns a state whose databases have branch pages, overflow pages and inline buckets.
func large() *State {
	s := sample()
	for n := range 60 {
		name := fmt.Sprintf("example.org/%03d:1", n)
		s.Images = append(s.Images, Image{Name: name, MediaType: "m", Digest: "sha256:b", Size: 7, Labels: map[string]string{LabelPinned: "pinned"}, Created: s.Images[0].Created, Updated: s.Images[0].Created})
	}
	s.Images[0].Labels["long"] = strings.Repeat("x", 9000)
	s.Sort()
	return s
}

// TestReadSurvivesEveryByte flips each byte of small databases, and some bytes of large ones, in
// memory. Reading must return an error or a state, without a crash or an endless loop.
func TestReadSurvivesEveryByte(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]*State{"small": sample(), "large": large()} {
		flips := map[string][]byte{"small": {0x81}, "large": {0xff}}[name]
		meta, snaps := write(t, s)
		for _, file := range []string{meta, snaps} {
			t.Run(name+" "+filepath.Base(file), func(t *testing.T) {
				t.Parallel()
				raw, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				step := 1 + len(raw)/100000*16
				found, live := 0, 0
				for at := 0; at < len(raw); at += step {
					for _, flip := range flips {
						raw[at] ^= flip
						if _, err := readDatabase(bytes.NewReader(raw), int64(len(raw))); err != nil {
							found++
						} else if at%(1009*step) == 0 {
							// bbolt must be able to open for writing every database that was read
							// completely.
							live++
							openFlipped(t, file, raw, meta, snaps)
						}
						raw[at] ^= flip
					}
				}
				if b, err := readDatabase(bytes.NewReader(raw), int64(len(raw))); err != nil || b.find("v1") == nil {
					t.Fatalf("the undamaged database: %v", err)
				}
				if found == 0 || live == 0 {
					t.Errorf("%d flips found, %d databases opened", found, live)
				}
				t.Logf("%d bytes: %d flips found, %d opened for writing", len(raw), found, live)
			})
		}
	}
}

// openFlipped opens a store for writing with one damaged database.
func openFlipped(t *testing.T, name string, raw []byte, meta, snaps string) {
	t.Helper()
	dir := t.TempDir()
	paths := map[string]string{}
	for _, p := range []string{meta, snaps} {
		b := raw
		if p != name {
			var err error
			if b, err = os.ReadFile(p); err != nil {
				t.Fatal(err)
			}
		}
		paths[p] = filepath.Join(dir, filepath.Base(p))
		if err := os.WriteFile(paths[p], b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l, err := OpenLive(paths[meta], paths[snaps])
	if err != nil {
		return
	}
	l.Read()
	l.Directories()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestReadSurvivesCuts reads truncated files, as after a power cut.
func TestReadSurvivesCuts(t *testing.T) {
	meta, _ := write(t, large())
	raw, err := os.ReadFile(meta)
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; n < len(raw); n += 509 {
		if b, err := readDatabase(bytes.NewReader(raw[:n]), int64(n)); err == nil && len(b.find("v1", Namespace, "images").children) < 60 {
			t.Errorf("cut after %d of %d bytes: no error", n, len(raw))
		}
	}
}

// TestReadAsBboltDoes reads a database that bbolt wrote, with a free list and after many changes,
// and compares the result with bbolt's.
func TestReadAsBboltDoes(t *testing.T) {
	for _, noFreelist := range []bool{false, true} {
		name := filepath.Join(t.TempDir(), "db")
		db, err := bolt.Open(name, 0o600, &bolt.Options{NoFreelistSync: noFreelist, NoSync: true})
		if err != nil {
			t.Fatal(err)
		}
		random := rand.New(rand.NewPCG(1, 2))
		for range 60 {
			err := db.Update(func(tx *bolt.Tx) error {
				for range 40 {
					b, err := makeBucket(tx, []string{"v1", fmt.Sprint(random.IntN(4)), fmt.Sprint(random.IntN(30))})
					if err != nil {
						return err
					}
					key := []byte(fmt.Sprint(random.IntN(200)))
					if random.IntN(3) == 0 {
						err = b.Delete(key)
					} else {
						err = errors.Join(b.Put(key, bytes.Repeat(key, random.IntN(1+random.IntN(3000)))), b.SetSequence(random.Uint64()))
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		want := &bucket{}
		if err := db.View(func(tx *bolt.Tx) error { return collect(tx.Cursor().Bucket(), want) }); err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		got, err := readFile(name)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("without list of free pages: %v: %v; the contents differ", noFreelist, err)
		}
	}
}

func collect(b *bolt.Bucket, into *bucket) error {
	into.sequence = b.Sequence()
	return b.ForEach(func(k, v []byte) error {
		if v == nil {
			return collect(b.Bucket(k), into.at(string(k)))
		}
		into.put(string(k), bytes.Clone(v))
		return nil
	})
}

func FuzzRead(f *testing.F) {
	dir := f.TempDir()
	meta, snaps := filepath.Join(dir, "meta.db"), filepath.Join(dir, "metadata.db")
	if err := sample().Write(meta, snaps); err != nil {
		f.Fatal(err)
	}
	for _, name := range []string{meta, snaps} {
		raw, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		b, err := readDatabase(bytes.NewReader(raw), int64(len(raw)))
		if err != nil {
			return
		}
		newState(b, b) // must return
		name := filepath.Join(t.TempDir(), "meta.db")
		if err := os.WriteFile(name, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		// bbolt must be able to open and walk a database that we accept.
		db, err := bolt.Open(name, 0o600, &bolt.Options{NoFreelistSync: true, NoSync: true})
		if err != nil {
			return
		}
		defer db.Close()
		if err := db.View(func(tx *bolt.Tx) error { return collect(tx.Cursor().Bucket(), &bucket{}) }); err != nil {
			t.Fatal(err)
		}
	})
}

func TestChainID(t *testing.T) {
	// The OCI image specification: the first layer's chain ID is its diffID.
	if ChainID("", "sha256:a") != "sha256:a" {
		t.Error("first layer")
	}
	if got := ChainID("sha256:a", "sha256:b"); len(got) != len("sha256:")+64 || got == ChainID("sha256:b", "sha256:a") {
		t.Error(got)
	}
}

// TestVerifyArchive checks that VerifyArchive rejects archives that containerd on the node would
// reject.
func TestVerifyArchive(t *testing.T) {
	type doc = map[string]any
	for name, test := range map[string]struct {
		edit func(blobs map[string][]byte, config, layer, manifest doc)
		want string
	}{
		"sound":                {func(map[string][]byte, doc, doc, doc) {}, ""},
		"a config's size":      {func(_ map[string][]byte, c, _, _ doc) { c["size"] = 1 }, "config sha256:"},
		"a layer's size":       {func(_ map[string][]byte, _, l, _ doc) { l["size"] = 100000 }, "its descriptor says 100000"},
		"a manifest's size":    {func(_ map[string][]byte, _, _, m doc) { m["size"] = 0 }, "its descriptor says 0"},
		"a layer that is gone": {func(b map[string][]byte, _, l, _ doc) { delete(b, l["digest"].(string)) }, "is missing"},
		"another blob":         {func(b map[string][]byte, _, l, _ doc) { b[l["digest"].(string)] = []byte("LAYER") }, "has digest"},
		"no index":             {func(b map[string][]byte, _, _, _ doc) { delete(b, "index.json") }, "no index.json"},
	} {
		t.Run(name, func(t *testing.T) {
			blobs := map[string][]byte{}
			put := func(b []byte) doc {
				d := fmt.Sprintf("sha256:%x", sha256.Sum256(b))
				blobs[d] = b
				return doc{"digest": d, "size": len(b)}
			}
			marshal := func(v any) []byte {
				b, err := json.Marshal(v)
				if err != nil {
					t.Fatal(err)
				}
				return b
			}
			config, layer := put([]byte("{}")), put([]byte("layer"))
			blobs["index.json"] = nil
			test.edit(blobs, config, layer, doc{})
			manifest := put(marshal(doc{"config": config, "layers": []any{layer}}))
			test.edit(map[string][]byte{config["digest"].(string): nil}, doc{}, layer, manifest)
			if _, ok := blobs["index.json"]; ok {
				blobs["index.json"] = marshal(doc{"manifests": []any{manifest}})
			}
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for name, content := range blobs {
				if hex, ok := strings.CutPrefix(name, "sha256:"); ok {
					name = "blobs/sha256/" + hex
				}
				if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644}); err != nil {
					t.Fatal(err)
				}
				w.Write(content)
			}
			w.Close()
			err := VerifyArchive(bytes.NewReader(b.Bytes()), int64(b.Len()))
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v", err)
			}
		})
	}
}
