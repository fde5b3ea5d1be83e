package join_test

import (
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
)

// TestTwoMachinesWithOneSite checks two machines that have joined with the same Site, so that each
// kubelet overwrites the other's reports. First boot reports this, with the fix, until one machine
// is off.
func TestTwoMachinesWithOneSite(t *testing.T) {
	t.Parallel()
	const other = "00000000000000000000000000000002"
	for name, tt := range map[string]struct {
		every  time.Duration // how long each of the two reports
		before bool          // the node was Ready before the other machine was switched on
		first  string        // who reports first
		says   string
	}{
		"at the join":                     {every: 10 * time.Second, says: "two machines run as the Node edge-sn0042"},
		"at the join, the other is first": {every: 10 * time.Second, first: other, says: "two machines run as the Node edge-sn0042"},
		"at a later boot":                 {every: 10 * time.Second, first: other, before: true, says: "two machines run as the Node edge-sn0042"},
		"the other all the time":          {every: time.Hour, first: other, says: "the Node edge-sn0042 still shows another machine (machine ID " + other},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			if tt.before {
				w.MustBoot()
				w.PowerOn()
			}
			began := time.Time{}
			w.Cluster.ReportedMachineID = func(own string) string {
				if began.IsZero() {
					began = w.Now
				}
				if turn := int(w.Now.Sub(began)/tt.every) % 2; (turn == 0) == (tt.first == other) {
					return other
				}
				return own
			}
			if err := w.Boot(); err == nil || !w.ConsoleHas(tt.says) || w.Has(member.ReadyMark) != tt.before {
				t.Fatalf("%v, says Ready: %v\n%s", err, w.Has(member.ReadyMark), strings.Join(w.Console, "\n"))
			}
			w.Cluster.ReportedMachineID = nil
			w.PowerOn()
			w.MustBoot()
			if w.State().Result != ondisk.ResultDone {
				t.Errorf("result %s", w.State().Result)
			}
		})
	}
}

// TestNodeOfAFormerMachine checks that a Node that existed before shows the former machine with its
// name until this machine's kubelet reports.
func TestNodeOfAFormerMachine(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	began := time.Time{}
	w.Cluster.ReportedMachineID = func(own string) string {
		if began.IsZero() {
			began = w.Now
		}
		if w.Now.Sub(began) < 8*time.Second {
			return "00000000000000000000000000000002"
		}
		return own
	}
	w.MustBoot()
}
