package probe

import "fmt"

// Outcome is the result of one probe.
type Outcome int

// Outcomes. Those before leastBad mean that the server is alive.
const (
	OK       Outcome = iota // ready
	Guarded                 // 401, 403 or 429: alive, but rejects the request
	TCPOnly                 // accepts connections, but does not speak TLS; accepted while no CA is known
	SkewedOK                // ready; the certificate is not valid according to this node's clock, which is probably wrong
	leastBad
	Draining    // reports that it is shutting down
	ServerError // 5xx, or another unexpected status
	Refused
	Closed  // the open connection failed
	Timeout // no answer
	Late    // no answer in time, but the server accepts connections
	Overdue // no answer to the request in time, but answers to PINGs
	Expired // certificate expired, according to the API server's own clock too
	Unreachable
	Unshown   // does not show which cluster it belongs to
	Busy      // answers 429 or 5xx when asked which cluster it belongs to
	Identity  // certificate of another CA, or not of a kube-apiserver
	Recreated // of another cluster, which has the same CA
)

func (o Outcome) String() string {
	switch o {
	case OK:
		return "ready"
	case Guarded:
		return "alive (status 401, 403 or 429)"
	case TCPOnly:
		return "accepts connections"
	case SkewedOK:
		return "ready, but this node's clock does not match its certificate"
	case Draining:
		return "draining"
	case ServerError:
		return "server error"
	case Refused:
		return "connection refused"
	case Closed:
		return "connection broken"
	case Timeout, Late, Overdue:
		return "no answer"
	case Expired:
		return "certificate expired"
	case Unreachable:
		return "unreachable"
	case Unshown:
		return "does not show which cluster it belongs to"
	case Busy:
		return "too busy to show which cluster it belongs to"
	case Recreated:
		return "it belongs to another cluster than this node joined, with the same keys: to accept it, give this node a Site with a token of that cluster"
	case Identity:
		return "wrong identity: its certificate is not signed by the cluster's CA for a kube-apiserver"
	}
	return fmt.Sprintf("outcome(%d)", int(o))
}

// Alive reports whether the outcome means that the API server is alive.
func (o Outcome) Alive() bool { return o < leastBad }

// Answered reports whether the outcome is an answer of an API server that has proved its identity
// on that connection.
func (o Outcome) Answered() bool {
	return o.Alive() || o == Draining || o == ServerError || o == Overdue || o == Expired
}
