package main

import (
	"strings"
	"testing"
)

func TestImagesCommand(t *testing.T) {
	for _, tc := range []struct {
		args  string
		code  int
		words string
	}{
		{"images merge", exitUsage, "--from is required"},
		{"images merge --from x -o yaml", exitUsage, "text or json"},
		{"images nonsense", exitUsage, "merge, verify"},
		{"images merge --from /nonexistent/store", exitFailed, "DATA partition"},
		{"images verify --root /nonexistent/store", exitFailed, "/nonexistent/store"},
	} {
		code, _, errOut := call(t, strings.Fields(tc.args)...)
		if code != tc.code || !strings.Contains(errOut, tc.words) {
			t.Errorf("firstboot %s: %d, %s", tc.args, code, errOut)
		}
	}
}
