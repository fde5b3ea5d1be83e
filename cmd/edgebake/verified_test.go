package main

import (
	"encoding/json"
	"testing"

	"github.com/edgebake/edgebake/cluster"
)

// Scripts read what and missing of cluster verify; name is every command's.
func TestVerifiedAsJSON(t *testing.T) {
	row := verified{Check: cluster.Check{Name: "a thing", State: "missing", Fix: "make it"}, What: "a thing"}
	got, err := json.Marshal(row)
	if want := `{"name":"a thing","state":"missing","fix":"make it","what":"a thing"}`; err != nil || string(got) != want {
		t.Errorf("%s, %v", got, err)
	}
}
