package cluster

// Check is one thing that was looked at, on a cluster or in documents: whether
// it is as nodes need it, and what to do if not. Preflight and Verify return
// them.
type Check struct {
	Name string `json:"name"`
	// Site is the one it is about; empty: the cluster, or all that go to it.
	Site   string `json:"site,omitempty"`
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"`
	Fix    string `json:"fix,omitempty"`
}

// States of a check.
const (
	CheckOK      = "ok"
	CheckFailed  = "failed"
	CheckUnknown = "unknown" // it cannot be checked from here, or need not be
)
