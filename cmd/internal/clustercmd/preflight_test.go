package clustercmd

import (
	"bytes"
	"testing"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cmd/internal/console"
)

// TestPrintChecks checks that each check has its own mark, also after one whose detail has several
// lines.
func TestPrintChecks(t *testing.T) {
	var out bytes.Buffer
	printChecks(console.Streams{Out: &out}, []cluster.Check{
		{Name: "network", State: cluster.CheckFailed, Detail: "one\ntwo", Fix: "change it"},
		{Name: "token", State: cluster.CheckOK, Detail: "valid"},
		{Name: "CA", State: cluster.CheckUnknown, Detail: "no answer"},
	})
	const want = `✗ network    one
             two
             to fix: change it
✓ token      valid
– CA         no answer
`
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", &out, want)
	}
}
