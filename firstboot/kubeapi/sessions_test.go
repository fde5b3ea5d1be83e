package kubeapi

import (
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/servercert"
)

// TestSessionsEnd checks that a full handshake follows at least once an hour: a resumed session
// hides a certificate that the API server has loaded since.
func TestSessionsEnd(t *testing.T) {
	var s Sessions
	const master = "10.0.0.1:6443"
	kept := s.cacheFor(master)
	if s.cacheFor(master) != kept {
		t.Error("no session is kept")
	}
	s.all[master].Began = time.Now().Add(-servercert.MaxSessionAge - time.Second)
	if s.cacheFor(master) == kept {
		t.Error("a session is kept for more than an hour")
	}
}
