package fleettest

import "github.com/edgebake/edgebake/ondisk/order"

// Outcomes of an order on a Machine.
const (
	Works   = "works"   // keeps the new system
	Bad     = "bad"     // leaves the new system, and is Ready with the former one
	Dead    = "dead"    // never starts again
	Rejects = "rejects" // rejects the image
	Slow    = "slow"    // works, but needs some more steps
)

// Machine simulates a machine that carries out orders.
type Machine struct {
	Name, Outcome string
	// Plan is the plan of the running system, and Next that of the ordered image.
	Plan, Next string

	// Ready is the status that kubelet reports.
	Ready bool
	// AtRisk is set from the restart for an order until the machine keeps the new system.
	AtRisk bool
	// Restarts counts the restarts for orders.
	Restarts int

	key, state, reason string
	steps              int
}

// NewMachine returns a machine whose Node is Ready.
func NewMachine(name, outcome, plan, next string) *Machine {
	return &Machine{Name: name, Outcome: outcome, Plan: plan, Next: next, Ready: true}
}

// Step reads the order of the machine's Node, takes one step, and returns the machine's answer.
func (m *Machine) Step(text string, halted bool) order.Answer {
	x, err := order.Parse(text)
	stands := text != "" && err == nil && !halted
	switch {
	case m.state == order.StateRestarting || m.state == order.StateTrial:
		m.restart()
	case !stands:
		if m.state == order.StateWorking || m.state == order.StateHeld {
			m.state, m.reason = order.StateWithdrawn, "the order was withdrawn or changed"
		}
	case x.Key() == m.key && (m.state == order.StateDone || m.state == order.StateFailed):
	case x.Key() != m.key || m.state == order.StateWithdrawn || m.state == "":
		m.key, m.state, m.reason, m.steps = x.Key(), order.StateWorking, "", 0
	case m.Outcome == Rejects:
		m.state, m.reason = order.StateFailed, "the image is for another machine"
	case m.Outcome == Slow && m.steps < 5:
		m.steps++
	case x.Hold:
		m.state = order.StateHeld
	default:
		m.state, m.Ready, m.AtRisk, m.steps = order.StateRestarting, false, true, 0
		m.Restarts++
	}
	return order.Answer{Plan: m.Plan, Image: "edge", Serial: 1, Order: m.key, State: m.state, Reason: m.reason}
}

// restart takes one step of a restart.
func (m *Machine) restart() {
	m.steps++
	switch {
	case m.steps < 2 || m.Outcome == Dead:
	case m.Outcome == Bad:
		m.state, m.reason, m.Ready = order.StateFailed, "the machine left the new system after its last try", true
	case m.state == order.StateRestarting:
		m.Plan, m.state, m.Ready = m.Next, order.StateTrial, true
	default:
		m.state, m.AtRisk = order.StateDone, false
	}
}
