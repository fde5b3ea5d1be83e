package console

import (
	"bytes"
	"io"
	"testing"
)

// TestPrintAsList checks that an empty list is printed as [] in JSON.
func TestPrintAsList(t *testing.T) {
	var out bytes.Buffer
	if err := Form("json").Print(Streams{Out: &out}, []string(nil), nil); err != nil || out.String() != "[]\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
}

// TestJSONOnTerminals checks that printed JSON has no control characters from disks or servers.
func TestJSONOnTerminals(t *testing.T) {
	var b bytes.Buffer
	s := Streams{Out: &b, Err: io.Discard}.Printable(&Results{Writer: &b})
	if err := Form("json").Print(s, []string{"a stick\u009b2J\x7f"}, nil); err != nil {
		t.Fatal(err)
	}
	if got, want := b.String(), "[\n  \"a stick\\u009b2J\\u007f\"\n]\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
