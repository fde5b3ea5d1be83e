package mint

import (
	"bytes"
	"crypto/sha256"
	"os"
	"path/filepath"
	"testing"
)

// FuzzSnapshot reads arbitrary files as snapshots of etcd. Only those with the right checksum may
// be accepted, and the CA must be found even if it is split between two reads.
func FuzzSnapshot(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "shops")
	if _, err := newOf(dir, document, Options{Now: now()}); err != nil {
		f.Fatal(err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "pki", "ca.crt"))
	if err != nil {
		f.Fatal(err)
	}
	all := marks(ca)
	file := filepath.Join(f.TempDir(), "snapshot.db")
	f.Add(append(bytes.Repeat([]byte{7}, 100), ca...), uint16(50), uint16(7), true)
	f.Add(all[0], uint16(0), uint16(600), true)
	f.Add([]byte("apiVersion: v1\n"), uint16(511), uint16(1), false)
	f.Add([]byte{}, uint16(0), uint16(0), true)
	f.Fuzz(func(t *testing.T, body []byte, at, piece uint16, whole bool) {
		db := make([]byte, 2*sector)
		if n := int(at) % len(db); len(body) < len(db)-n {
			copy(db[n:], body)
		} else {
			db = append(db, body...)
			db = append(db, make([]byte, -len(db)&(sector-1))...)
		}
		sum := sha256.Sum256(db)
		if !whole {
			sum[0] ^= 1
		}
		if err := os.WriteFile(file, append(bytes.Clone(db), sum[:]...), 0o600); err != nil {
			t.Fatal(err)
		}
		ours := false
		for _, m := range all {
			ours = ours || bytes.Contains(db, m)
		}
		s, err := ReadSnapshot(dir, file)
		if (err == nil) != whole || s != nil && s.Ours != ours {
			t.Errorf("valid checksum: %v, contains the cluster's CA: %v; got %+v, %v", whole, ours, s, err)
		}
		look := finder{all: all}
		for rest := db; len(rest) > 0; {
			n := min(len(rest), int(piece)+1)
			look.Write(rest[:n])
			rest = rest[n:]
		}
		if look.found != ours {
			t.Errorf("CA found in writes of %d bytes: %v, in one write: %v", int(piece)+1, look.found, ours)
		}
		if err := os.WriteFile(file, body, 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := ReadSnapshot(dir, file); err == nil && len(body) < sector {
			t.Errorf("%d bytes are a snapshot: %+v", len(body), s)
		}
	})
}
