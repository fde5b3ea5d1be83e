package main

import (
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/edgebake/edgebake/test/scripttest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"ipvscare": main})
}

// TestScript runs the scripts in testdata/script. With -update it writes the current output of
// ipvscare into the scripts.
func TestScript(t *testing.T) {
	scripttest.Run(t, nil, nil)
}
