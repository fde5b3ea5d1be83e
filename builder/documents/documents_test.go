package documents

import (
	"errors"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
)

// TestExplainKeepsLongErrors checks that the output of a program in an error is not shortened,
// since its end may contain the fix.
func TestExplainKeepsLongErrors(t *testing.T) {
	doc := Source{Name: "image.yaml", Data: []byte("apiVersion: edgebake.io/v1alpha1\nkind: Image\nbase:\n  debian: {}\n")}
	output := strings.Repeat("Err: not there\n", 300) + "the last line"
	err := doc.Explain(&configs.FieldError{Path: "base.debian", Err: errors.New(output)})
	if want := "image.yaml:4:11: base.debian: " + output; err == nil || err.Error() != want {
		t.Errorf("%v", err)
	}
}
