package etcdmember

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// walRecord returns a record of etcd's log, padded to eight bytes.
func walRecord(message []byte) []byte {
	frame, padding := uint64(len(message)), -len(message)&7
	if padding > 0 {
		frame |= uint64(0x80|padding) << 56
	}
	return append(append(binary.LittleEndian.AppendUint64(nil, frame), message...), make([]byte, padding)...)
}

// FuzzLog reads logs with any contents. The IDs that ReadLog finds must not change when etcd
// appends to the log.
func FuzzLog(f *testing.F) {
	ids := []byte("\x08\x85\xa6\xe3\x9b\xca\xf0\xc7\xdb\x01\x10\xf1\xe5\x8f\xc5\x9c\xd1\xb3\xa0\x0c")
	metadata := append([]byte{8, 1, 16, 0, 26, byte(len(ids))}, ids...)
	whole := append(walRecord([]byte{8, 4, 16, 0}), walRecord(metadata)...)
	f.Add(whole)
	f.Add(whole[:len(whole)-9])
	f.Add(walRecord([]byte{8, 1, 26, 200}))
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xff\x00"))
	dir := f.TempDir()
	file := filepath.Join(dir, "0000000000000000-0000000000000000.wal")
	f.Fuzz(func(t *testing.T, raw []byte) {
		logOf := func(b []byte) (member, cluster string) {
			if err := os.WriteFile(file, b, 0o600); err != nil {
				t.Fatal(err)
			}
			wal, member, cluster, err := ReadLog(dir)
			if !wal || err != nil {
				t.Fatalf("the write-ahead log was not found: %v", err)
			}
			if (member == "") != (cluster == "") || strings.HasPrefix(member, "0") || strings.HasPrefix(cluster, "0") {
				t.Errorf("member %q of cluster %q", member, cluster)
			}
			return member, cluster
		}
		member, cluster := logOf(raw)
		if m, c := logOf(append(raw, walRecord([]byte{8, 2})...)); member != "" && (m != member || c != cluster) {
			t.Errorf("member %s of %s, and of %s %s later", member, cluster, m, c)
		}
	})
}
