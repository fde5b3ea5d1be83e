package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"strings"

	bolt "go.etcd.io/bbolt"
)

// Live is a store whose databases are open and locked. containerd cannot use the store until Close.
type Live struct {
	meta, snaps *bolt.DB
}

// OpenLive opens the databases of a store for writing. It creates missing databases.
func OpenLive(metaPath, snapshotsPath string) (*Live, error) {
	// bbolt must not open a damaged database; see pages.go.
	for _, name := range []string{metaPath, snapshotsPath} {
		if st, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) || err == nil && st.Size() == 0 {
			continue // a new database
		}
		if _, err := readFile(name); err != nil {
			return nil, err
		}
	}
	meta, err := openBolt(metaPath, 0o644)
	if err != nil {
		return nil, openError(metaPath, err)
	}
	snaps, err := openBolt(snapshotsPath, 0o600)
	if err != nil {
		return nil, errors.Join(openError(snapshotsPath, err), meta.Close())
	}
	return &Live{meta, snaps}, nil
}

func openBolt(path string, perm os.FileMode) (db *bolt.DB, err error) {
	o := &bolt.Options{Timeout: lockTimeout, NoFreelistSync: true} // as containerd does
	err = guard(func() error {
		db, err = bolt.Open(path, perm, o)
		return err
	})
	return db, err
}

// guard turns panics into errors. Causes are bbolt's assertions, and faults if the disk cannot read
// a mapped page.
func guard(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the database cannot be read: %v", p)
		}
	}()
	return f()
}

func update(db *bolt.DB, f func(*bolt.Tx) error) error {
	return guard(func() error { return db.Update(f) })
}

// Close closes and unlocks the databases.
func (l *Live) Close() error { return errors.Join(l.snaps.Close(), l.meta.Close()) }

// Read returns the current contents of the databases.
func (l *Live) Read() (*State, error) {
	meta, err := l.content(l.meta)
	if err != nil {
		return nil, err
	}
	snaps, err := l.content(l.snaps)
	if err != nil {
		return nil, err
	}
	if meta.find("v1") == nil {
		meta.at("v1").put("version", signed("version", SchemaVersion).value) // a new database
	}
	return newState(meta, snaps)
}

// content reads an open database from its file, to which bbolt writes every commit.
func (l *Live) content(db *bolt.DB) (*bucket, error) {
	f, err := os.Open(db.Path())
	if err != nil {
		return nil, fmt.Errorf("opening database %s: %w", db.Path(), err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("opening database %s: %w", db.Path(), err)
	}
	b, err := readDatabase(f, st.Size())
	if err != nil {
		return nil, fmt.Errorf("reading database %s: it is damaged: %w", db.Path(), err)
	}
	return b, nil
}

// Directories returns the directory numbers of all snapshots in metadata.db, whatever their
// namespace and state.
func (l *Live) Directories() (map[uint64]bool, error) {
	db, err := l.content(l.snaps)
	if err != nil {
		return nil, err
	}
	ids := map[uint64]bool{}
	return ids, db.find("v1", "snapshots").each(func(_ string, b *bucket) error {
		id, _ := binary.Uvarint(b.pairs["id"])
		ids[id] = true
		return nil
	})
}

func descend(tx *bolt.Tx, path ...string) *bolt.Bucket {
	b := tx.Bucket([]byte(path[0]))
	for _, name := range path[1:] {
		if b == nil {
			return nil
		}
		b = b.Bucket([]byte(name))
	}
	return b
}

// AddSnapshots records snapshots in metadata.db. Their directories must exist and be synced. First
// it removes records of the same layers whose names are not in known: an interrupted merge left
// them. known has the names in meta.db.
func (l *Live) AddSnapshots(add []Snapshot, parents map[string]Snapshot, sequence uint64, known map[string]bool) error {
	keys := map[string]bool{}
	for _, s := range add {
		keys[s.Key] = true
	}
	err := update(l.snaps, func(tx *bolt.Tx) error {
		snaps, err := makeBucket(tx, []string{"v1", "snapshots"})
		if err != nil {
			return err
		}
		if _, err := makeBucket(tx, []string{"v1", "parents"}); err != nil {
			return err
		}
		if err := dropLeftovers(tx, snaps, keys, known); err != nil {
			return err
		}
		for i := range add {
			var parent *Snapshot
			if p, ok := parents[add[i].Parent]; ok {
				parent = &p
			}
			rs, err := add[i].backendRecords(parent)
			if err != nil {
				return err
			}
			if err := putRecords(tx, rs); err != nil {
				return err
			}
		}
		return snaps.SetSequence(max(sequence, snaps.Sequence()))
	})
	if err != nil {
		return fmt.Errorf("adding %d snapshots to metadata.db: %w", len(add), err)
	}
	return nil
}

// dropLeftovers removes snapshots that have one of the keys and are not in known. It removes
// children first.
func dropLeftovers(tx *bolt.Tx, snaps *bolt.Bucket, keys, known map[string]bool) error {
	links := descend(tx, "v1", "parents")
	for {
		var drop []string
		err := snaps.ForEachBucket(func(key []byte) error {
			name, b := string(key), snaps.Bucket(key)
			parts := strings.SplitN(name, "/", 3)
			if len(parts) != 3 || parts[0] != Namespace || !keys[parts[2]] || known[name] {
				return nil
			}
			id, _ := binary.Uvarint(b.Get([]byte("id")))
			prefix := append(binary.AppendUvarint(nil, id), 0)
			if k, _ := links.Cursor().Seek(prefix); k != nil && strings.HasPrefix(string(k), string(prefix)) {
				return nil // it has children, which must be removed first
			}
			drop = append(drop, name)
			return nil
		})
		if err != nil || len(drop) == 0 {
			return err
		}
		for _, name := range drop {
			b := snaps.Bucket([]byte(name))
			id, _ := binary.Uvarint(b.Get([]byte("id")))
			if p := snaps.Bucket(b.Get([]byte("parent"))); p != nil {
				pid, _ := binary.Uvarint(p.Get([]byte("id")))
				if err := links.Delete(parentKey(pid, id)); err != nil {
					return err
				}
			}
			if err := snaps.DeleteBucket([]byte(name)); err != nil {
				return err
			}
		}
	}
}

// Change is a set of changes that are made in one transaction on meta.db.
type Change struct {
	Images    []Image // images to add; an image of the same name is replaced
	Blobs     []Blob  // blobs to add; labels are merged into those of an existing blob
	Snapshots []Snapshot
	Sequence  uint64
	Schema    int64 // schema version for a new database
}

// Apply makes all changes of c in one transaction.
func (l *Live) Apply(c Change) error {
	err := update(l.meta, func(tx *bolt.Tx) error {
		v1, err := makeBucket(tx, []string{"v1"})
		if err != nil {
			return err
		}
		if v1.Get([]byte("version")) == nil {
			v := signed("version", c.Schema)
			if err := v1.Put([]byte(v.key), v.value); err != nil {
				return err
			}
		}
		if err := putBlobs(tx, c.Blobs); err != nil {
			return err
		}
		if err := putSnapshots(tx, c.Snapshots, c.Sequence); err != nil {
			return err
		}
		return putImages(tx, c.Images)
	})
	if err != nil {
		return fmt.Errorf("changing meta.db: %w", err)
	}
	return nil
}

func putBlobs(tx *bolt.Tx, blobs []Blob) error {
	for i := range blobs {
		rs, err := blobs[i].records(Namespace)
		if err != nil {
			return err
		}
		if descend(tx, "v1", Namespace, "content", "blob", blobs[i].Digest) != nil {
			rs = rs[1:] // keep the existing record with its times and size
		}
		if err := putRecords(tx, rs); err != nil {
			return err
		}
	}
	return nil
}

// putSnapshots records snapshots, and raises the bucket's sequence to at least sequence.
func putSnapshots(tx *bolt.Tx, snapshots []Snapshot, sequence uint64) error {
	if len(snapshots) == 0 {
		return nil
	}
	for i := range snapshots {
		rs, err := snapshots[i].metaRecords(Namespace)
		if err != nil {
			return err
		}
		if err := putRecords(tx, rs); err != nil {
			return err
		}
	}
	b, err := makeBucket(tx, []string{"v1", Namespace, "snapshots", Snapshotter})
	if err != nil {
		return err
	}
	return b.SetSequence(max(sequence, b.Sequence()))
}

// putImages records images. They replace images of the same names.
func putImages(tx *bolt.Tx, put []Image) error {
	images, err := makeBucket(tx, []string{"v1", Namespace, "images"})
	if err != nil {
		return err
	}
	for i := range put {
		if name := []byte(put[i].Name); images.Bucket(name) != nil {
			if err := images.DeleteBucket(name); err != nil {
				return err
			}
		}
		rs, err := put[i].records(Namespace)
		if err != nil {
			return err
		}
		if err := putRecords(tx, rs); err != nil {
			return err
		}
	}
	return nil
}

func putRecords(tx *bolt.Tx, rs []record) error {
	for _, r := range rs {
		b, err := makeBucket(tx, r.path)
		if err != nil {
			return err
		}
		for _, f := range r.fields {
			if err := b.Put([]byte(f.key), f.value); err != nil {
				return fmt.Errorf("putting %q: %w", f.key, err)
			}
		}
	}
	return nil
}
