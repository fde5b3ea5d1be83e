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

// Snapshot is a snapshot of etcd that a control-plane node is to begin with.
type Snapshot struct {
	SHA256 string
	// Ours: the cluster's CA is in it, as each cluster publishes its own.
	Ours bool
}

// sector is what a database of etcd is a multiple of; behind it a snapshot has its
// checksum.
const sector = 512

// ReadSnapshot reads a snapshot for the cluster of dir, and rejects one that was cut
// off or damaged: a machine that begins with it gives up what it has.
func ReadSnapshot(dir, file string) (*Snapshot, error) {
	fail := func(err error) (*Snapshot, error) {
		return nil, fmt.Errorf("reading the snapshot (--restore): %w", err)
	}
	// Opening a pipe waits for who writes to it.
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
		return fail(fmt.Errorf("%s has no checksum at its end, as `firstboot snapshot` and `etcdctl snapshot save` write it: it was cut off, or is another file, e.g. etcd's own database: name a whole snapshot", file))
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
		return fail(fmt.Errorf("%s is damaged: its checksum does not fit: name another snapshot", file))
	}
	return &Snapshot{hex.EncodeToString(whole.Sum(nil)), look.found}, nil
}

// marks are what a cluster's data has of its CA: in cluster-info as base64 of the PEM,
// in each namespace's kube-root-ca.crt as it is.
func marks(ca []byte) [][]byte {
	text := strings.TrimSpace(string(ca))
	lines := strings.Split(text, "\n")
	marks := [][]byte{[]byte(base64.StdEncoding.EncodeToString([]byte(text[:len(text)/3*3])))}
	if n := len(lines); n > 3 {
		marks = append(marks, []byte(lines[n-3])) // the last whole line: of the signature
	}
	return marks
}

// finder looks for texts in what is written to it.
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
