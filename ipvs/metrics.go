package ipvs

import "sync/atomic"

// stats are the counters of one daemon.
type stats struct {
	repairs, routes, severed, transitions, reloads atomic.Int64
	wire                                           [counters]atomic.Int64
}
