package store

import (
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
)

// bucket is a bbolt bucket in memory.
type bucket struct {
	pairs    map[string][]byte
	children map[string]*bucket
	sequence uint64
}

// at returns the bucket at a path. It adds missing buckets.
func (b *bucket) at(path ...string) *bucket {
	for _, name := range path {
		child := b.children[name]
		if child == nil {
			child = &bucket{}
			if b.children == nil {
				b.children = map[string]*bucket{}
			}
			b.children[name] = child
		}
		b = child
	}
	return b
}

func (b *bucket) put(key string, value []byte) {
	if b.pairs == nil {
		b.pairs = map[string][]byte{}
	}
	b.pairs[key] = value
}

// field is a key and its value in a bucket. In-memory buckets and open databases (*bolt.Bucket) are
// both written from fields, so that building and merging give the same content.
type field struct {
	key   string
	value []byte
}

func text(key, value string) field { return field{key, []byte(value)} }
func signed(key string, v int64) field {
	return field{key, binary.AppendVarint(nil, v)}
}
func unsigned(key string, v uint64) field {
	return field{key, binary.AppendUvarint(nil, v)}
}

func timestamps(created, updated time.Time) ([]field, error) {
	c, err := created.UTC().MarshalBinary()
	if err != nil {
		return nil, fmt.Errorf("encoding time %v: %w", created, err)
	}
	u, err := updated.UTC().MarshalBinary()
	if err != nil {
		return nil, fmt.Errorf("encoding time %v: %w", updated, err)
	}
	return []field{{"createdat", c}, {"updatedat", u}}, nil
}

func labelFields(labels map[string]string) []field {
	var fs []field
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		fs = append(fs, text(k, labels[k]))
	}
	return fs
}

// record is one object of a database: its path and its fields.
type record struct {
	path   []string
	fields []field
}

func (i *Image) records(ns string) ([]record, error) {
	times, err := timestamps(i.Created, i.Updated)
	if err != nil {
		return nil, err
	}
	at := []string{"v1", ns, "images", i.Name}
	return []record{
		{at, times},
		{append(slices.Clone(at), "labels"), labelFields(i.Labels)},
		{append(slices.Clone(at), "target"), []field{
			text("digest", i.Digest), text("mediatype", i.MediaType), signed("size", i.Size)}},
	}, nil
}

func (b *Blob) records(ns string) ([]record, error) {
	times, err := timestamps(b.Created, b.Updated)
	if err != nil {
		return nil, err
	}
	at := []string{"v1", ns, "content", "blob", b.Digest}
	rs := []record{{at, append(times, signed("size", b.Size))}}
	if len(b.Labels) > 0 {
		rs = append(rs, record{append(slices.Clone(at), "labels"), labelFields(b.Labels)})
	}
	return rs, nil
}

// metaRecords returns the snapshot's records in meta.db. The record in the parent's list of
// children keeps the parent from being removed first.
func (s *Snapshot) metaRecords(ns string) ([]record, error) {
	times, err := timestamps(s.Created, s.Updated)
	if err != nil {
		return nil, err
	}
	base := []string{"v1", ns, "snapshots", Snapshotter}
	fs := append(times, text("name", s.Backend))
	var rs []record
	if s.Parent != "" {
		fs = append(fs, text("parent", s.Parent))
		rs = append(rs, record{append(slices.Clone(base), s.Parent, "children"), []field{{s.Key, nil}}})
	}
	rs = append(rs, record{append(slices.Clone(base), s.Key), fs})
	if len(s.Labels) > 0 {
		rs = append(rs, record{append(slices.Clone(base), s.Key, "labels"), labelFields(s.Labels)})
	}
	return rs, nil
}

// backendRecords returns the snapshot's records in the snapshotter's database.
func (s *Snapshot) backendRecords(parent *Snapshot) ([]record, error) {
	times, err := timestamps(s.Created, s.Updated)
	if err != nil {
		return nil, err
	}
	fs := append(times, unsigned("id", s.ID), field{"kind", []byte{s.Kind}},
		signed("inodes", s.Inodes), signed("size", s.Size))
	at := []string{"v1", "snapshots", s.Backend}
	var rs []record
	if parent != nil {
		fs = append(fs, text("parent", parent.Backend))
		rs = append(rs, record{[]string{"v1", "parents"}, []field{text(string(parentKey(parent.ID, s.ID)), s.Backend)}})
	}
	rs = append(rs, record{at, fs})
	if len(s.Labels) > 0 {
		rs = append(rs, record{append(slices.Clone(at), "labels"), labelFields(s.Labels)})
	}
	return rs, nil
}

// parentKey returns a key that consists of the parent's number, a zero byte and the child's number.
// Before the snapshotter removes a snapshot, it searches for keys with that snapshot as the parent.
func parentKey(parent, child uint64) []byte {
	k := append(binary.AppendUvarint(nil, parent), 0)
	return binary.AppendUvarint(k, child)
}

func (b *bucket) add(rs []record, err error) error {
	for _, r := range rs {
		at := b.at(r.path...)
		for _, f := range r.fields {
			at.put(f.key, f.value)
		}
	}
	return err
}

// Write writes both databases as new files. Equal states give equal bytes.
func (s *State) Write(metaPath, snapshotsPath string) error {
	var meta, backend bucket
	backend.at("v1", "snapshots")
	backend.at("v1", "parents")
	v := signed("version", s.Schema)
	meta.at("v1").put(v.key, v.value)
	for i := range s.Images {
		if err := meta.add(s.Images[i].records(Namespace)); err != nil {
			return err
		}
	}
	for i := range s.Blobs {
		if err := meta.add(s.Blobs[i].records(Namespace)); err != nil {
			return err
		}
	}
	byKey := map[string]*Snapshot{}
	for i := range s.Snapshots {
		byKey[s.Snapshots[i].Key] = &s.Snapshots[i]
	}
	for i := range s.Snapshots {
		sn := &s.Snapshots[i]
		parent := byKey[sn.Parent]
		if sn.Parent != "" && parent == nil {
			return fmt.Errorf("writing snapshot %s: its parent %s is missing", sn.Key, sn.Parent)
		}
		if err := meta.add(sn.metaRecords(Namespace)); err != nil {
			return err
		}
		if err := backend.add(sn.backendRecords(parent)); err != nil {
			return err
		}
	}
	if len(s.Snapshots) > 0 {
		meta.at("v1", Namespace, "snapshots", Snapshotter).sequence = s.MetaSequence
		backend.at("v1", "snapshots").sequence = s.BackendSequence
	}
	if err := meta.write(metaPath); err != nil {
		return err
	}
	return backend.write(snapshotsPath)
}

// write writes a database with the children of b. bbolt writes the changed children of a bucket in
// random order, so each transaction changes only one child. The options fix the rest of the layout.
func (b *bucket) write(path string) error {
	if _, err := os.Stat(path); err == nil {
		return fmt.Errorf("writing database %s: it exists", path)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		NoSync: true, NoGrowSync: true, NoFreelistSync: true,
		FreelistType: bolt.FreelistArrayType, PageSize: 4096,
		InitialMmapSize: 1 << 26, // so large that a growing file is not mapped again
		Timeout:         5 * time.Second,
	})
	if err != nil {
		return fmt.Errorf("making database %s: %w", path, err)
	}
	if err := b.writeChildren(db, nil); err != nil {
		db.Close()
		return fmt.Errorf("writing database %s: %w", path, err)
	}
	if err := db.Close(); err != nil {
		return fmt.Errorf("writing database %s: %w", path, err)
	}
	return nil
}

func (b *bucket) writeChildren(db *bolt.DB, path []string) error {
	for _, name := range slices.Sorted(maps.Keys(b.children)) {
		child := b.children[name]
		at := append(slices.Clone(path), name)
		err := db.Update(func(tx *bolt.Tx) error {
			bk, err := makeBucket(tx, at)
			if err != nil {
				return err
			}
			for _, k := range slices.Sorted(maps.Keys(child.pairs)) {
				if err := bk.Put([]byte(k), child.pairs[k]); err != nil {
					return fmt.Errorf("putting %q: %w", k, err)
				}
			}
			if child.sequence > 0 {
				return bk.SetSequence(child.sequence)
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := child.writeChildren(db, at); err != nil {
			return err
		}
	}
	return nil
}

func makeBucket(tx *bolt.Tx, path []string) (*bolt.Bucket, error) {
	b, err := tx.CreateBucketIfNotExists([]byte(path[0]))
	for _, name := range path[1:] {
		if err != nil {
			break
		}
		b, err = b.CreateBucketIfNotExists([]byte(name))
	}
	if err != nil {
		return nil, fmt.Errorf("making bucket %q: %w", path, err)
	}
	return b, nil
}
