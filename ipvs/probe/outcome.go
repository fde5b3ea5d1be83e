package probe

import "fmt"

// Outcome is what became of one probe.
type Outcome int

// Outcomes. The first group means alive.
const (
	OK       Outcome = iota // ready
	Guarded                 // 401, 403, 429: alive, and not talking to us
	TCPOnly                 // accepts connections; the CA is not known yet and it does not speak TLS
	SkewedOK                // ready; its certificate does not fit this node's clock, which is the suspect
	leastBad
	Draining    // says that it is shutting down
	ServerError // 5xx, or a status that was not expected
	Refused
	Closed  // the held connection broke
	Timeout // no answer
	Late    // no answer in time; but it accepts connections
	Expired // certificate expired by the API server's own clock too
	Unreachable
	Unshown  // does not show which cluster it is of
	Identity // certificate of another authority, or not a kube-apiserver's
	Reborn   // of another cluster, which has the same CA
)

func (c Outcome) String() string {
	switch c {
	case OK:
		return "ready"
	case Guarded:
		return "alive (status 401, 403 or 429)"
	case TCPOnly:
		return "accepts connections"
	case SkewedOK:
		return "ready, but this node's clock does not fit its certificate"
	case Draining:
		return "draining"
	case ServerError:
		return "server error"
	case Refused:
		return "connection refused"
	case Closed:
		return "connection broken"
	case Timeout, Late:
		return "no answer"
	case Expired:
		return "certificate expired"
	case Unreachable:
		return "unreachable"
	case Unshown:
		return "does not show which cluster it is of"
	case Reborn:
		return "another cluster with the same keys than this node joined: to accept it, give this node a Site with a token of that cluster"
	case Identity:
		return "wrong identity: its certificate is not signed by the cluster's CA for a kube-apiserver"
	}
	return fmt.Sprintf("class(%d)", int(c))
}

// Alive reports whether the outcome counts for the API server.
func (c Outcome) Alive() bool { return c < leastBad }

// Answered reports whether the outcome is an answer over a connection on which
// the API server has proven itself.
func (c Outcome) Answered() bool {
	return c.Alive() || c == Draining || c == ServerError || c == Expired
}
