package join

import (
	"fmt"
	"slices"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
)

// Two machines with the same Site share one Node. If both are on, both join: their kubelets
// overwrite the Node's status alternately, and its pods run on both.

// reporterStays is how long the Node must show only this machine before a second machine is ruled
// out. If another machine has changed the status, kubelet writes it again within 10 s.
const reporterStays = 12 * time.Second

// reporters lists the machines that the Node's status has shown, in order.
type reporters struct {
	seen  []string
	since time.Time // when the last entry was added to seen
}

// saw records the machine that the Node's status shows.
func (r *reporters) saw(n *kubeapi.Node, now time.Time) {
	info := n.Status.NodeInfo
	who := fmt.Sprintf("machine ID %s, UUID %s", info.MachineID, info.SystemUUID)
	if info.MachineID != "" && (len(r.seen) == 0 || r.seen[len(r.seen)-1] != who) {
		r.seen, r.since = append(r.seen, who), now
	}
}

// judge returns an error if two machines report as the Node, or as long as that is possible.
// If trusted (the Node was Ready before) and the status has shown only this machine, judge does not
// require reporterStays.
func (r *reporters) judge(e *machine.Env, n *kubeapi.Node, trusted bool) error {
	last := len(r.seen) - 1
	if last < 0 {
		return nil
	}
	if slices.Contains(r.seen[:last], r.seen[last]) {
		return run.NeedsPerson(fmt.Errorf("two machines run as the Node %s (%s; and %s), and its pods run on both", n.Metadata.Name, r.seen[last-1], r.seen[last]),
			"switch one of the machines off, and stamp a Site with another nodeName before you switch it on again")
	}
	switch own := n.Status.NodeInfo.MachineID == machine.ID(e); {
	case !own:
		return run.Advise(fmt.Errorf("the Node %s still shows another machine (%s)", n.Metadata.Name, r.seen[last]),
			"this machine's kubelet changes that within seconds; otherwise switch the other machine off, or stamp a Site with another nodeName for one of the machines")
	case trusted && last == 0, e.Now().Sub(r.since) >= reporterStays:
		return nil
	}
	return errWatched
}

// errWatched means that nothing is wrong, but the Node was not watched for long enough.
var errWatched = fmt.Errorf("watching the Node for %s, in case another machine reports its status too", reporterStays)
