package tree

import (
	"testing"

	"golang.org/x/sys/unix"
)

func setCapability(t *testing.T, name, value string) {
	t.Helper()
	if err := unix.Lsetxattr(name, capability, []byte(value), 0); err != nil {
		t.Fatal(err)
	}
}
