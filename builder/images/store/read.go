package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

// Read says what the two databases hold. It opens them read-only; a daemon
// that has them open is an error that says so.
func Read(snapshotter, metaPath, snapshotsPath string) (*State, error) {
	s := &State{}
	err := view(metaPath, func(tx *bolt.Tx) error { return s.readMeta(tx, snapshotter) })
	if err != nil {
		return nil, err
	}
	err = view(snapshotsPath, func(tx *bolt.Tx) error { return s.readBackend(tx) })
	if err != nil {
		return nil, err
	}
	s.Sort()
	return s, nil
}

func view(path string, f func(*bolt.Tx) error) (err error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: lockTimeout})
	if err != nil {
		return openError(path, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	// A damaged page makes bbolt panic; whoever asked about a disk that came
	// through a power cut wants an error.
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("reading database %s: it is damaged: %v", path, p)
		}
	}()
	if err := db.View(f); err != nil {
		return fmt.Errorf("reading database %s: %w", path, err)
	}
	return nil
}

// lockTimeout is how long we wait for a daemon to let go of a database.
const lockTimeout = 2 * time.Second

func openError(path string, err error) error {
	if errors.Is(err, berrors.ErrTimeout) {
		return fmt.Errorf("opening database %s: another program has it open; stop containerd first", path)
	}
	return fmt.Errorf("opening database %s: %w", path, err)
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

// eachBucket calls f for every bucket in b, which may be nil.
func eachBucket(b *bolt.Bucket, f func(name string, b *bolt.Bucket) error) error {
	if b == nil {
		return nil
	}
	return b.ForEachBucket(func(k []byte) error { return f(string(k), b.Bucket(k)) })
}

func readLabels(b *bolt.Bucket) (map[string]string, error) {
	l := b.Bucket([]byte("labels"))
	if l == nil {
		return nil, nil
	}
	m := map[string]string{}
	err := l.ForEach(func(k, v []byte) error { m[string(k)] = string(v); return nil })
	return m, err
}

func readTimes(b *bolt.Bucket, created, updated *time.Time) error {
	for key, t := range map[string]*time.Time{"createdat": created, "updatedat": updated} {
		v := b.Get([]byte(key))
		if v == nil {
			continue
		}
		if err := t.UnmarshalBinary(v); err != nil {
			return fmt.Errorf("field %s: %w", key, err)
		}
	}
	return nil
}

func readSigned(b *bolt.Bucket, key string) (int64, error) {
	raw := b.Get([]byte(key))
	if raw == nil {
		return 0, nil
	}
	v, n := binary.Varint(raw)
	if n <= 0 {
		return 0, fmt.Errorf("field %s: not a number: %x", key, raw)
	}
	return v, nil
}

func (s *State) readMeta(tx *bolt.Tx, snapshotter string) error {
	v1 := tx.Bucket([]byte("v1"))
	if v1 == nil {
		return errors.New("it has no schema v1; is it containerd's?")
	}
	var err error
	if s.Schema, err = readSigned(v1, "version"); err != nil {
		return err
	}
	if s.Schema < 1 || s.Schema > NewestSchema {
		return fmt.Errorf("its schema is version %d, this program knows 1 to %d; a newer edgebake may know it", s.Schema, NewestSchema)
	}
	err = eachBucket(descend(tx, "v1", Namespace, "images"), func(name string, b *bolt.Bucket) error {
		i := Image{Name: name}
		t := b.Bucket([]byte("target"))
		if t == nil {
			return fmt.Errorf("image %s has no target", name)
		}
		i.Digest = string(t.Get([]byte("digest")))
		i.MediaType = string(t.Get([]byte("mediatype")))
		var err1, err2 error
		i.Size, err1 = readSigned(t, "size")
		i.Labels, err2 = readLabels(b)
		if err := errors.Join(err1, err2, readTimes(b, &i.Created, &i.Updated)); err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
		s.Images = append(s.Images, i)
		return nil
	})
	if err != nil {
		return err
	}
	err = eachBucket(descend(tx, "v1", Namespace, "content", "blob"), func(name string, b *bolt.Bucket) error {
		bl := Blob{Digest: name}
		var err1, err2 error
		bl.Size, err1 = readSigned(b, "size")
		bl.Labels, err2 = readLabels(b)
		if err := errors.Join(err1, err2, readTimes(b, &bl.Created, &bl.Updated)); err != nil {
			return fmt.Errorf("blob %s: %w", name, err)
		}
		s.Blobs = append(s.Blobs, bl)
		return nil
	})
	if err != nil {
		return err
	}
	snaps := descend(tx, "v1", Namespace, "snapshots", snapshotter)
	if snaps != nil {
		s.MetaSequence = snaps.Sequence()
	}
	children := map[string][]string{}
	err = eachBucket(snaps, func(name string, b *bolt.Bucket) error {
		sn := Snapshot{Key: name, Backend: string(b.Get([]byte("name"))), Parent: string(b.Get([]byte("parent")))}
		var err error
		if sn.Labels, err = readLabels(b); err != nil {
			return err
		}
		if err := readTimes(b, &sn.Created, &sn.Updated); err != nil {
			return fmt.Errorf("snapshot %s: %w", name, err)
		}
		s.Snapshots = append(s.Snapshots, sn)
		if c := b.Bucket([]byte("children")); c != nil {
			return c.ForEach(func(k, _ []byte) error {
				children[name] = append(children[name], string(k))
				return nil
			})
		}
		return nil
	})
	if err != nil {
		return err
	}
	// Every child must be in its parent's list, which keeps the parent from
	// being removed first. The lists may name more: containerd's collector
	// leaves the names of what it removed.
	for _, sn := range s.Snapshots {
		if sn.Parent != "" && !slices.Contains(children[sn.Parent], sn.Key) {
			return fmt.Errorf("snapshot %s is not among the children of its parent %s", sn.Key, sn.Parent)
		}
	}
	return nil
}

// readBackend completes the snapshots with what the snapshotter knows.
func (s *State) readBackend(tx *bolt.Tx) error {
	byBackend := map[string]*Snapshot{}
	for i := range s.Snapshots {
		byBackend[s.Snapshots[i].Backend] = &s.Snapshots[i]
	}
	snaps := descend(tx, "v1", "snapshots")
	if snaps == nil {
		if len(s.Snapshots) > 0 {
			return errors.New("it has no snapshots, but meta.db has some")
		}
		return nil
	}
	s.BackendSequence = snaps.Sequence()
	ids := map[string]uint64{}
	parentOf := map[string]string{}
	err := eachBucket(snaps, func(name string, b *bolt.Bucket) error {
		id, n := binary.Uvarint(b.Get([]byte("id")))
		if n <= 0 {
			return fmt.Errorf("snapshot %s has no number", name)
		}
		ids[name] = id
		parentOf[name] = string(b.Get([]byte("parent")))
		sn := byBackend[name]
		if sn == nil {
			return nil // another namespace's, or left for the garbage collector
		}
		sn.ID = id
		if k := b.Get([]byte("kind")); len(k) == 1 {
			sn.Kind = k[0]
		}
		var err1, err2 error
		sn.Size, err1 = readSigned(b, "size")
		sn.Inodes, err2 = readSigned(b, "inodes")
		return errors.Join(err1, err2)
	})
	if err != nil {
		return err
	}
	var problems []error
	byKey := map[string]*Snapshot{}
	for i := range s.Snapshots {
		byKey[s.Snapshots[i].Key] = &s.Snapshots[i]
	}
	links := descend(tx, "v1", "parents")
	for i := range s.Snapshots {
		sn := &s.Snapshots[i]
		if sn.ID == 0 {
			problems = append(problems, fmt.Errorf("snapshot %s (%s) of meta.db is missing", sn.Key, sn.Backend))
			continue
		}
		if sn.ID > s.BackendSequence {
			problems = append(problems, fmt.Errorf("snapshot %s has number %d, above the sequence %d", sn.Key, sn.ID, s.BackendSequence))
		}
		if n, ok := backendNumber(sn.Backend); ok && n > s.MetaSequence {
			problems = append(problems, fmt.Errorf("snapshot %s is named %s, above meta.db's sequence %d", sn.Key, sn.Backend, s.MetaSequence))
		}
		want := ""
		if sn.Parent != "" {
			p := byKey[sn.Parent]
			if p == nil {
				problems = append(problems, fmt.Errorf("snapshot %s has parent %s, which meta.db lacks", sn.Key, sn.Parent))
				continue
			}
			want = p.Backend
			if links == nil || string(links.Get(parentKey(p.ID, sn.ID))) != sn.Backend {
				problems = append(problems, fmt.Errorf("snapshot %s is not linked to its parent %s", sn.Backend, p.Backend))
			}
		}
		if parentOf[sn.Backend] != want {
			problems = append(problems, fmt.Errorf("snapshot %s has parent %q, meta.db says %q", sn.Backend, parentOf[sn.Backend], want))
		}
	}
	return errors.Join(problems...)
}

func backendNumber(name string) (uint64, bool) {
	rest, ok := strings.CutPrefix(name, Namespace+"/")
	if !ok {
		return 0, false
	}
	var n uint64
	for i, c := range rest {
		if c == '/' {
			return n, i > 0
		}
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return 0, false
}
