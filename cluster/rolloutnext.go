package cluster

import (
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/ondisk/order"
)

// limits are the conditions that the whole rollout sets for the next action on a node. actFinish
// does not depend on them.
type limits struct {
	spent   bool // the budget is used up
	free    bool // the rollout is not halted, its budget is not used up, and its window is open
	restart bool // one more node may be drained or restart
	begin   bool // one more node may get the order
}

// next returns the next action on a node. It alone decides on actions during a rollout.
func (r *Rollout) next(n *updateNode, past *history, now time.Time, l limits) rolloutAct {
	d := &decision{r: r, n: n, past: past.nodes[n.name], turns: past.turns[n.name], now: now, limits: l}
	a := d.act()
	a.node = n
	return a
}

// decision decides on the next action on one node. In each of its methods, the first case that
// applies counts. The actions have no node yet.
type decision struct {
	r     *Rollout
	n     *updateNode
	past  nodeHistory
	turns int // see history
	now   time.Time
	limits
}

// act decides for a node in any state.
func (d *decision) act() rolloutAct {
	r, n := d.r, d.n
	if r.ours(n) && n.mark.corrected(d.now) != n.mark {
		return rolloutAct{what: actCorrect}
	}
	switch state := r.state(n); state {
	case UpdatePending:
		if d.begin {
			return rolloutAct{what: actGive}
		}
	case UpdateFailed:
		if r.runs(n) && n.rejected == "" {
			return updated() // it finished after the time limit, or a person repaired it
		}
	case UpdateFetching, UpdateHeld, UpdateDraining, UpdateRestarts:
		return d.withOrder(state)
	}
	return rolloutAct{}
}

// withOrder decides for a node that has an order.
func (d *decision) withOrder(state string) rolloutAct {
	r, n := d.r, d.n
	switch {
	case r.runs(n):
		return updated()
	case r.answers(n, order.StateFailed):
		return failed("%s", n.answer.Reason)
	case r.answers(n, order.StateDone) && n.answer.Plan != r.Info.Plan:
		return failed("the machine runs another image: plan %s", n.answer.Plan)
	case state == UpdateFetching:
		return d.fetching()
	case state == UpdateHeld:
		return d.held()
	case state == UpdateDraining:
		return d.draining()
	}
	return d.restarting()
}

// fetching decides for a node that fetches.
func (d *decision) fetching() rolloutAct {
	r, n := d.r, d.n
	switch {
	case d.waitedTooLong():
		return d.notReadyAfter(d.patience())
	case d.late(n.mark.Given, r.Fetch) && !r.outsideWindow(n): // outside its window, it may have fetched everything
		return d.notReadyAfter(r.Fetch)
	case d.spent:
		return rolloutAct{what: actWithdraw}
	case n.order == "" && d.free: // the order was removed by --stop or by hand
		return rolloutAct{what: actGive}
	case d.past.moved && !r.outsideWindow(n): // for the next run
		return rolloutAct{what: actCorrect}
	}
	return rolloutAct{}
}

// held decides for a node that has fetched everything.
func (d *decision) held() rolloutAct {
	r, n := d.r, d.n
	switch {
	case !n.ready && d.waitedTooLong():
		return d.notReadyAfter(d.patience())
	case !n.ready && d.late(n.mark.Given, r.Fetch) && d.late(n.since, r.Fetch): // some machines are off at night
		return d.notReadyAfter(r.Fetch)
	case d.turns >= maxTurns && r.Order.NoDrain:
		return failed("it was allowed to restart %d times, and each time the updates were halted or the window closed before it restarted", maxTurns)
	case d.turns >= maxTurns:
		return failed("it was drained %d times, and each time the updates were halted or the window closed before it restarted", maxTurns)
	case d.spent:
		return rolloutAct{what: actWithdraw}
	case n.order == "" && d.free:
		return rolloutAct{what: actGive}
	case n.order == "" || !n.ready || !d.restart:
		return rolloutAct{} // wait
	case r.Order.NoDrain:
		return rolloutAct{what: actRelease}
	}
	return rolloutAct{what: actDrain}
}

// draining decides for a node that is being drained.
func (d *decision) draining() rolloutAct {
	r, n := d.r, d.n
	switch {
	case r.outsideWindow(n):
		return rolloutAct{what: actUndrain}
	case d.late(n.mark.Drain, r.Drain):
		return failed("it was not drained within %s: a PodDisruptionBudget may prevent the eviction of a pod", r.Drain)
	case d.spent:
		return rolloutAct{what: actWithdraw}
	case !d.free:
		return rolloutAct{what: actUndrain}
	}
	return rolloutAct{what: actEvict}
}

// restarting decides for a node that may restart.
func (d *decision) restarting() rolloutAct {
	r, n := d.r, d.n
	switch {
	case r.answers(n, order.StateWithdrawn): // updates were halted before it restarted
		return rolloutAct{what: actWithdraw}
	case r.outsideWindow(n), !d.free && r.answers(n, order.StateHeld):
		return rolloutAct{what: actGive} // the window closed before it read the order: put the order on hold again
	case d.late(n.mark.Released, r.Restart):
		return failed("it does not run the new system, or is not Ready, after %s", r.Restart)
	}
	return rolloutAct{}
}

// updated records that a node was updated.
func updated() rolloutAct { return rolloutAct{what: actFinish, result: UpdateDone} }

// failed records that the update of a node failed.
func failed(format string, args ...any) rolloutAct {
	return rolloutAct{what: actFinish, result: UpdateFailed, reason: fmt.Sprintf(format, args...)}
}

// notReadyAfter is failed for a node that was not ready to restart within a limit.
func (d *decision) notReadyAfter(limit time.Duration) rolloutAct {
	return failed("%s", strings.TrimSuffix(fmt.Sprintf("it was not ready to restart after %s: %s", limit, d.n.answer.Reason), ": "))
}

// late reports whether more than limit has passed since a time. It is never true for a halted
// machine, which does nothing.
func (d *decision) late(since time.Time, limit time.Duration) bool {
	return d.n.halt == "" && d.now.Sub(since) > limit
}

// patience is how long the run waits for a node, whatever the node answers.
func (d *decision) patience() time.Duration { return d.r.Fetch + windowPatience }

// waitedTooLong reports whether the run has waited for longer than patience.
func (d *decision) waitedTooLong() bool {
	return !d.past.waits.IsZero() && d.late(d.past.waits, d.patience())
}
