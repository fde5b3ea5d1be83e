package mint

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Snapshot is a snapshot of etcd that a control-plane node will start with.
type Snapshot struct {
	SHA256 string
	// Ours is set if the snapshot contains the cluster's CA, which every cluster stores in etcd.
	Ours bool
}

// sector is the unit of an etcd database's size in bytes. A snapshot is a database and a checksum.
const sector = 512

// ReadSnapshot reads a snapshot for the cluster of dir. It rejects a truncated or damaged snapshot,
// because a machine that starts with a snapshot discards its own data.
func ReadSnapshot(dir, file string) (*Snapshot, error) {
	fail := func(err error) (*Snapshot, error) {
		return nil, fmt.Errorf("reading the snapshot (--restore): %w", err)
	}
	// Opening a pipe would wait for a writer.
	info, err := os.Stat(file)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file: unpack or copy the snapshot into one", file)
	}
	if err != nil {
		return fail(err)
	}
	f, err := os.Open(file)
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	if info, err = f.Stat(); err != nil {
		return fail(err)
	}
	if size := info.Size(); size < sector || size%sector != sha256.Size {
		return fail(fmt.Errorf("%s has no checksum at its end: it is truncated, or not a snapshot but, for example, etcd's own database; name a file that `firstboot snapshot` or `etcdctl snapshot save` wrote", file))
	}
	record, err := Load(dir)
	if err != nil {
		return fail(err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "pki", "ca.crt"))
	if err != nil {
		return fail(err)
	}
	whole, body, look := sha256.New(), sha256.New(), finder{all: marks(ca)}
	for _, former := range record.FormerCAs {
		look.all = append(look.all, marks([]byte(former))...)
	}
	if _, err := io.CopyN(io.MultiWriter(whole, body, &look), f, info.Size()-sha256.Size); err != nil {
		return fail(fmt.Errorf("%s: %w", file, err))
	}
	sum, err := io.ReadAll(io.TeeReader(f, whole))
	if err != nil {
		return fail(fmt.Errorf("%s: %w", file, err))
	}
	if !bytes.Equal(sum, body.Sum(nil)) {
		return fail(fmt.Errorf("%s is damaged: its checksum does not match; name another snapshot", file))
	}
	return &Snapshot{hex.EncodeToString(whole.Sum(nil)), look.found}, nil
}

// marks returns texts that prove that etcd's data contains a CA: the base64 of its PEM (in
// cluster-info), and a line of its PEM (in each namespace's kube-root-ca.crt).
func marks(ca []byte) [][]byte {
	text := strings.TrimSpace(string(ca))
	lines := strings.Split(text, "\n")
	marks := [][]byte{[]byte(base64.StdEncoding.EncodeToString([]byte(text[:len(text)/3*3])))}
	if n := len(lines); n > 3 {
		marks = append(marks, []byte(lines[n-3])) // the last full line, which is part of the signature
	}
	return marks
}

// finder is a Writer that searches for texts.
type finder struct {
	all   [][]byte
	tail  []byte
	found bool
}

func (f *finder) Write(p []byte) (int, error) {
	if f.found {
		return len(p), nil
	}
	buf := append(f.tail, p...)
	most := 0
	for _, m := range f.all {
		f.found = f.found || bytes.Contains(buf, m)
		most = max(most, len(m))
	}
	f.tail = bytes.Clone(buf[max(0, len(buf)-most):])
	return len(p), nil
}
