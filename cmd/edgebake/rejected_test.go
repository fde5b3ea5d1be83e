package main

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/ondisk"
)

// TestInspectObeysNoControlCharacters checks that inspect removes control characters of a slot.
// Anyone who has the disk can write into its slot.
func TestInspectObeysNoControlCharacters(t *testing.T) {
	var out bytes.Buffer
	i := &media.Info{Image: ondisk.ImageInfo{Name: "a\x1b]0;b\a"}}
	i.Slot.Report = "node is Ready\r\n\x1b[2Jgone\x9b2J\u009b2J\n\tüber"
	i.Packages = []media.Package{{Name: "p\x7f", Version: "1"}}
	printInfo(streams{}.Printable(&console.Results{Writer: &out}), i, false, false, true)
	if strings.ContainsAny(out.String(), "\x1b\x07\x7f\r\u009b") || !utf8.Valid(out.Bytes()) {
		t.Errorf("printed %q", out.String())
	}
	for _, want := range []string{"a?]0;b?", "node is Ready\n?[2Jgone", "\n\tüber"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in %q", want, out.String())
		}
	}
}
