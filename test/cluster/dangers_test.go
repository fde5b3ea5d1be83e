package cluster

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/etcdmember"
)

// TestDangers shows how etcd fails if a member with a wiped disk starts, and that edgebake's
// decision prevents it. If a case no longer fails like this, etcd has changed, and the decision may
// be too strict.
func TestDangers(t *testing.T) {
	for name, danger := range map[string]func(t *testing.T, e *etcds){
		// etcd itself detects only this case.
		"new, a peer is reachable": func(t *testing.T, e *etcds) {
			e.wipe(0)
			until(t, "the others to have a leader", func() bool { return e.view(0).Quorum })
			e.decide(0, etcdmember.Join)
			e.start(0, e.all(), "new")
			until(t, "etcd to end", func() bool {
				log, err := os.ReadFile(e.disk(0) + ".log")
				return err == nil && strings.Contains(string(log), "has already been bootstrapped")
			})
		},
		"new, the peers come later": func(t *testing.T, e *etcds) {
			e.wipe(0)
			e.stop(1)
			e.stop(2)
			e.decide(0, etcdmember.Wait)
			e.start(0, e.all(), "new")
			until(t, "the wiped member to listen", func() bool { return e.probe(0) != etcdmember.Silent })
			e.bootstrap(1, 2)
			if !e.has(0, "k", "kept") {
				t.Error("etcd's behaviour has changed: it rejects the wiped member")
			}
			if v := e.view(1); len(v.Members) != 3 {
				t.Errorf("members: %+v", v.Members)
			}
		},
		"new, the reachable peer lacks the last write": func(t *testing.T, e *etcds) {
			e.stop(1)
			e.put(0, "late", "acknowledged") // m1 and m3 acknowledge
			e.stop(0)
			e.stop(2)
			e.wipe(0)
			e.bootstrap(1)
			until(t, "m2 to answer", func() bool { return e.probe(1) == etcdmember.InUse })
			e.decide(0, etcdmember.Stop)
			e.stop(1)
			e.start(0, e.all(), "new")
			until(t, "the wiped member to listen", func() bool { return e.probe(0) != etcdmember.Silent })
			e.bootstrap(1)
			if e.has(0, "late", "acknowledged") || !e.has(0, "k", "kept") {
				t.Error("etcd's behaviour has changed: the acknowledged write is not lost")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEtcds(t)
			e.bootstrap(0, 1, 2)
			e.put(0, "k", "kept")
			for i := range 3 {
				until(t, "all members to have the value", func() bool { return e.has(i, "k", "kept") })
			}
			danger(t, e)
		})
	}
}

func (e *etcds) probe(i int) etcdmember.PeerState {
	e.t.Helper()
	peer, _ := etcdmember.AskPeer(e.t.Context(), http.DefaultClient, e.peer[i])
	return peer.State
}

// TestForcedAgainAfterJoins shows that each start with --force-new-cluster drops all other members,
// even those that joined since. They stop permanently, and writes that only they had are lost. So
// no member may join while the flag is set: etcd then listens only for clients on its own machine.
func TestForcedAgainAfterJoins(t *testing.T) {
	e := newEtcds(t)
	e.bootstrap(0, 1, 2)
	e.put(0, "k", "kept")
	e.put(0, "l", "later")
	e.wipe(1)
	e.wipe(2)
	e.stop(0)
	e.request.ContinueFrom = "m1"
	e.decide(0, etcdmember.ForceNewCluster)
	e.start(0, e.all(), "existing", "--force-new-cluster=true")
	e.put(0, "l", "forced")
	e.replaceFrom(1, 0)
	e.replaceFrom(2, 0)
	e.stop(0)
	e.start(0, e.all(), "existing", "--force-new-cluster=true")
	until(t, "m2, which had joined, to exit", func() bool {
		log, err := os.ReadFile(e.disk(1) + ".log")
		return err == nil && strings.Contains(string(log), "the member has been permanently removed")
	})
	if v := e.view(1); len(v.Members) != 1 {
		t.Errorf("etcd's behaviour has changed: after a second --force-new-cluster it has the members %+v", v.Members)
	}

	e.wipe(1)
	e.wipe(2)
	e.stop(0)
	inside := strings.Replace(e.client[0], "127.0.0.1", "127.0.0.2", 1)
	e.start(0, e.all(), "existing", "--force-new-cluster=true", "--listen-client-urls", inside)
	own := etcdmember.Client{HTTP: http.DefaultClient, URL: inside}
	until(t, "the forced member to serve", func() bool { _, err := own.Members(t.Context()); return err == nil })
	until(t, "the others to see the forced member", func() bool { return e.probe(0) == etcdmember.InUse })
	e.decide(1, etcdmember.Wait)
	e.stop(0)
	e.start(0, e.all(), "existing")
	e.put(0, "l", "open")
	e.replaceFrom(1, 0)
	if !e.has(1, "k", "kept") {
		t.Error("a member that joins afterwards lacks the kept data")
	}
}
