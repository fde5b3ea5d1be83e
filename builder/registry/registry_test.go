package registry

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// TestNobodyListens checks the error for a registry in a private network that is down: it must not
// be about plain HTTP.
func TestNobodyListens(t *testing.T) {
	const host = "127.0.0.1:1"
	r, err := name.NewRegistry(host)
	if err != nil {
		t.Fatal(err)
	}
	_, err = transport.NewWithContext(t.Context(), r, authn.Anonymous, Access{Stall: time.Minute}.Transport(), nil)
	err = &Error{Host: host, Err: err}
	if got := err.Error(); !strings.HasPrefix(got, host+" cannot be reached: ") {
		t.Error(got)
	}
	if got := Fix(err, Words{Insecure: "add --insecure"}); got != "check its name, its port and the network; add --insecure if it uses plain HTTP" {
		t.Error(got)
	}
}
