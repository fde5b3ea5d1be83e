package console

import (
	"os"
	"path/filepath"
	"testing"
)

func TestConsole(t *testing.T) {
	dir := t.TempDir()
	active := filepath.Join(dir, "active")
	if err := os.WriteFile(active, []byte("tty0 ttyS0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tty := range []string{"tty0", "ttyS0"} {
		if err := os.WriteFile(filepath.Join(dir, tty), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	Say(active, dir, "hello")
	for _, tty := range []string{"tty0", "ttyS0"} {
		if b, _ := os.ReadFile(filepath.Join(dir, tty)); string(b) != "edgebake: hello\r\n" {
			t.Errorf("%s has %q", tty, b)
		}
	}
	Say(filepath.Join(dir, "nothing"), dir, "no console is no trouble")
}
