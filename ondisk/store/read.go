package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	berrors "go.etcd.io/bbolt/errors"
)

// Read reads the two databases. It writes nothing. It fails if another program has them open.
func Read(metaPath, snapshotsPath string) (*State, error) {
	meta, err := readFile(metaPath)
	if err != nil {
		return nil, err
	}
	snaps, err := readFile(snapshotsPath)
	if err != nil {
		return nil, err
	}
	return newState(meta, snaps)
}

// ReadInUse is like Read, but containerd may have the databases open. So the result may be
// outdated.
func ReadInUse(metaPath, snapshotsPath string) (s *State, err error) {
	// The two databases may disagree for a moment: containerd adds to meta.db last, and removes
	// from it first.
	for range 20 {
		var meta, snaps *bucket
		if meta, err = readInUse(metaPath); err == nil {
			if snaps, err = readInUse(snapshotsPath); err == nil {
				if s, err = newState(meta, snaps); err == nil {
					return s, nil
				}
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil, err
}

// errBusy means that a database was changed while it was read.
var errBusy = errors.New("the database was changed during each attempt to read it")

// readInUse reads a database without its lock. bbolt does not reuse the pages of a transaction
// before the next one is complete, so the read is consistent if the transaction number stays the
// same.
func readInUse(name string) (*bucket, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("opening database %s: %w", name, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("opening database %s: %w", name, err)
	}
	tx := func() uint64 {
		m, _ := (&pages{file: f}).meta()
		return m.tx
	}
	before := tx()
	b, err := readDatabase(f, st.Size())
	if tx() != before {
		err = errBusy
	}
	if err != nil {
		return nil, fmt.Errorf("reading database %s: %w", name, err)
	}
	return b, nil
}

// newState returns the content of the two databases as a State.
func newState(meta, snaps *bucket) (*State, error) {
	s := &State{}
	if err := s.readMeta(meta); err != nil {
		return nil, fmt.Errorf("reading database %s: %w", path.Base(MetaDB), err)
	}
	if err := s.readBackend(snaps); err != nil {
		return nil, fmt.Errorf("reading database %s: %w", path.Base(SnapshotterDB), err)
	}
	s.Sort()
	return s, nil
}

// readFile reads a database that no other program has open.
func readFile(name string) (*bucket, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("opening database %s: %w", name, err)
	}
	defer f.Close()
	if err := lockShared(f); err != nil {
		return nil, openError(name, err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("opening database %s: %w", name, err)
	}
	b, err := readDatabase(f, st.Size())
	if err != nil {
		return nil, fmt.Errorf("reading database %s: it is damaged: %w", name, err)
	}
	return b, nil
}

// lockTimeout is the time to wait for a database that is locked.
const lockTimeout = 2 * time.Second

// lockShared takes bbolt's lock on the file in shared mode. Closing the file unlocks it.
func lockShared(f *os.File) error {
	for until := time.Now().Add(lockTimeout); ; time.Sleep(50 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		if time.Now().After(until) {
			return berrors.ErrTimeout
		}
	}
}

func openError(path string, err error) error {
	if errors.Is(err, berrors.ErrTimeout) {
		return fmt.Errorf("opening database %s: another program has it open; stop containerd first", path)
	}
	return fmt.Errorf("opening database %s: %w", path, err)
}

// each calls f for every child bucket of b, sorted by name. b may be nil.
func (b *bucket) each(f func(name string, b *bucket) error) error {
	if b == nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(b.children)) {
		if err := f(name, b.children[name]); err != nil {
			return err
		}
	}
	return nil
}

// find returns the bucket at path, or nil.
func (b *bucket) find(path ...string) *bucket {
	for _, name := range path {
		if b == nil {
			return nil
		}
		b = b.children[name]
	}
	return b
}

func readLabels(b *bucket) map[string]string {
	l := b.find("labels")
	if l == nil {
		return nil
	}
	m := map[string]string{}
	for k, v := range l.pairs {
		m[k] = string(v)
	}
	return m
}

func readTimes(b *bucket, created, updated *time.Time) error {
	for key, t := range map[string]*time.Time{"createdat": created, "updatedat": updated} {
		v := b.pairs[key]
		if len(v) == 0 {
			continue
		}
		if err := t.UnmarshalBinary(v); err != nil {
			return fmt.Errorf("field %s: %w", key, err)
		}
	}
	return nil
}

func readSigned(b *bucket, key string) (int64, error) {
	raw := b.pairs[key]
	if len(raw) == 0 {
		return 0, nil
	}
	v, n := binary.Varint(raw)
	if n <= 0 {
		return 0, fmt.Errorf("field %s: not a number: %x", key, raw)
	}
	return v, nil
}

func (s *State) readMeta(db *bucket) error {
	v1 := db.find("v1")
	if v1 == nil {
		return errors.New("no schema v1, so it is not a database of containerd")
	}
	var err error
	if s.Schema, err = readSigned(v1, "version"); err != nil {
		return err
	}
	if s.Schema < 1 || s.Schema > NewestSchema {
		return fmt.Errorf("the schema is version %d, but this program supports only 1 to %d: use a newer edgebake", s.Schema, NewestSchema)
	}
	err = db.find("v1", Namespace, "images").each(func(name string, b *bucket) error {
		i := Image{Name: name}
		t := b.find("target")
		if t == nil {
			return fmt.Errorf("image %s has no target", name)
		}
		i.Digest = string(t.pairs["digest"])
		i.MediaType = string(t.pairs["mediatype"])
		i.Labels = readLabels(b)
		var err error
		i.Size, err = readSigned(t, "size")
		if err := errors.Join(err, readTimes(b, &i.Created, &i.Updated)); err != nil {
			return fmt.Errorf("image %s: %w", name, err)
		}
		s.Images = append(s.Images, i)
		return nil
	})
	if err != nil {
		return err
	}
	err = db.find("v1", Namespace, "content", "blob").each(func(name string, b *bucket) error {
		bl := Blob{Digest: name}
		bl.Labels = readLabels(b)
		var err error
		bl.Size, err = readSigned(b, "size")
		if err := errors.Join(err, readTimes(b, &bl.Created, &bl.Updated)); err != nil {
			return fmt.Errorf("blob %s: %w", name, err)
		}
		s.Blobs = append(s.Blobs, bl)
		return nil
	})
	if err != nil {
		return err
	}
	snaps := db.find("v1", Namespace, "snapshots", Snapshotter)
	if snaps != nil {
		s.MetaSequence = snaps.sequence
	}
	children := map[string]*bucket{}
	err = snaps.each(func(name string, b *bucket) error {
		sn := Snapshot{Key: name, Backend: string(b.pairs["name"]), Parent: string(b.pairs["parent"]), Labels: readLabels(b)}
		if err := readTimes(b, &sn.Created, &sn.Updated); err != nil {
			return fmt.Errorf("snapshot %s: %w", name, err)
		}
		s.Snapshots = append(s.Snapshots, sn)
		children[name] = b.find("children")
		return nil
	})
	if err != nil {
		return err
	}
	// Every child must be in the list of its parent, so that the parent is not removed first. A
	// list may contain more names, because containerd's garbage collector does not remove them.
	for _, sn := range s.Snapshots {
		if sn.Parent != "" && !children[sn.Parent].has(sn.Key) {
			return fmt.Errorf("snapshot %s is not among the children of its parent %s", sn.Key, sn.Parent)
		}
	}
	return nil
}

// has reports whether b, which may be nil, has the key.
func (b *bucket) has(key string) bool {
	if b == nil {
		return false
	}
	_, ok := b.pairs[key]
	return ok
}

// readBackend adds the data in the snapshotter's database to the snapshots.
func (s *State) readBackend(db *bucket) error {
	byBackend := map[string]*Snapshot{}
	for i := range s.Snapshots {
		byBackend[s.Snapshots[i].Backend] = &s.Snapshots[i]
	}
	snaps := db.find("v1", "snapshots")
	if snaps == nil {
		if len(s.Snapshots) > 0 {
			return errors.New("it has no snapshots, but meta.db has some")
		}
		return nil
	}
	s.BackendSequence = snaps.sequence
	ids := map[string]uint64{}
	parentOf := map[string]string{}
	err := snaps.each(func(name string, b *bucket) error {
		id, n := binary.Uvarint(b.pairs["id"])
		if n <= 0 {
			return fmt.Errorf("snapshot %s has no valid id", name)
		}
		ids[name] = id
		parentOf[name] = string(b.pairs["parent"])
		sn := byBackend[name]
		if sn == nil {
			return nil // a snapshot of another namespace, or one that awaits garbage collection
		}
		sn.ID = id
		if k := b.pairs["kind"]; len(k) == 1 {
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
	links := db.find("v1", "parents")
	for i := range s.Snapshots {
		sn := &s.Snapshots[i]
		if sn.ID == 0 {
			problems = append(problems, fmt.Errorf("snapshot %s (%s) of meta.db is missing", sn.Key, sn.Backend))
			continue
		}
		if sn.ID > s.BackendSequence {
			problems = append(problems, fmt.Errorf("snapshot %s has number %d, which exceeds the sequence, %d", sn.Key, sn.ID, s.BackendSequence))
		}
		if n, ok := backendNumber(sn.Backend); ok && n > s.MetaSequence {
			problems = append(problems, fmt.Errorf("snapshot %s: the number in its name %s exceeds meta.db's sequence, %d", sn.Key, sn.Backend, s.MetaSequence))
		}
		want := ""
		if sn.Parent != "" {
			p := byKey[sn.Parent]
			if p == nil {
				problems = append(problems, fmt.Errorf("snapshot %s has parent %s, which meta.db lacks", sn.Key, sn.Parent))
				continue
			}
			want = p.Backend
			if links == nil || string(links.pairs[string(parentKey(p.ID, sn.ID))]) != sn.Backend {
				problems = append(problems, fmt.Errorf("snapshot %s is not linked to its parent %s", sn.Backend, p.Backend))
			}
		}
		if parentOf[sn.Backend] != want {
			problems = append(problems, fmt.Errorf("snapshot %s has parent %q, but meta.db says %q", sn.Backend, parentOf[sn.Backend], want))
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
