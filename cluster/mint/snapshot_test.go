package mint

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestReadSnapshot checks that a file that is not a snapshot is rejected, so that no Site names it.
// A snapshot counts as the cluster's own if it contains the cluster's CA anywhere.
func TestReadSnapshot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	if _, err := newOf(dir, threeMasters, Options{Now: now()}); err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "pki", "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	encoded := "    certificate-authority-data: " + base64.StdEncoding.EncodeToString(ca) + "\n"
	snapshot := func(at int, text string) []byte {
		db := bytes.Repeat([]byte{7}, 64<<10)
		copy(db[at:], text)
		sum := sha256.Sum256(db)
		return append(db, sum[:]...)
	}
	whole := snapshot(100, encoded)
	flipped := bytes.Clone(whole)
	flipped[9000] ^= 1
	for name, tt := range map[string]struct {
		data  []byte
		ours  bool
		wrong string
	}{
		"cluster-info":            {whole, true, ""},
		"cluster-info, in halves": {snapshot(32<<10-300, encoded), true, ""},
		"kube-root-ca.crt":        {snapshot(32<<10-20, string(ca)), true, ""},
		"another cluster's":       {snapshot(100, strings.Replace(encoded, "LS0t", "LS0x", 1)), false, ""},
		"empty":                   {nil, false, "has no checksum at its end"},
		"a document":              {[]byte("apiVersion: v1\n"), false, "has no checksum at its end"},
		"cut off":                 {whole[:20<<10], false, "has no checksum at its end"},
		"cut off at a sector":     {whole[:20<<10+32], false, "is damaged"},
		"a database":              {whole[:64<<10], false, "has no checksum at its end"},
		"damaged":                 {flipped, false, "is damaged"},
	} {
		file := filepath.Join(t.TempDir(), "s.db")
		if err := os.WriteFile(file, tt.data, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := ReadSnapshot(dir, file)
		if tt.wrong != "" {
			if err == nil || !strings.Contains(err.Error(), tt.wrong) || !strings.Contains(err.Error(), file) {
				t.Errorf("%s: %v, %v", name, s, err)
			}
			continue
		}
		sum := sha256.Sum256(tt.data)
		if err != nil || s.Ours != tt.ours || s.SHA256 != hex.EncodeToString(sum[:]) {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, other := range []string{dir, pipe} {
		if _, err := ReadSnapshot(dir, other); err == nil || !strings.Contains(err.Error(), "is not a regular file: unpack") {
			t.Errorf("%s: %v", other, err)
		}
	}
}
