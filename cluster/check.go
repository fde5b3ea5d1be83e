package cluster

// Check is the result of one check of a cluster or of documents, with a fix if there is one.
// Preflight, Verify, ExpiryChecks and DocumentChecks return Checks.
type Check struct {
	Name string `json:"name"`
	// Site is the checked Site; empty: the check concerns the cluster or all Sites.
	Site   string `json:"site,omitempty"`
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"`
	Fix    string `json:"fix,omitempty"`
}

// States of a check.
const (
	CheckOK      = "ok"
	CheckFailed  = "failed"
	CheckUnknown = "unknown" // the check could not be made, or its result is only advice
)
