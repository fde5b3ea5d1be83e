package controlplane_test

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/member"
)

// TestContinueFromThisMachine checks a request that names this machine after the loss of the
// quorum. Its etcd drops the others. Each request is carried out once.
func TestContinueFromThisMachine(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.lived(m.site.ControlPlane.ID)
	m.withRequests(mint.Requests{ContinueFrom: "m1"})
	forced := "--" + controlplane.ForceNewCluster + "=true"
	for round := range 2 {
		m.starts, m.restarts = nil, nil
		m.bootDone()
		if m.started != "has data\n" || !slices.Equal(m.restarts, []string{"has data"}) || !m.ConsoleHas("etcd continues with this machine's data alone") {
			t.Fatalf("round %d: etcd runs as %q, restarted as %q\n%s", round, m.started, m.restarts, strings.Join(m.Console, "\n"))
		}
		m.on()
		m.restarts = nil
		m.bootDone()
		if len(m.restarts) > 0 || m.ConsoleHas("etcd continues") {
			t.Fatalf("etcd was started with --force-new-cluster twice: %q %q", m.restarts, forced)
		}
		m.withRequests(mint.Requests{}) // the request is removed, and made again after another loss
		m.on()
		m.bootDone()
		m.withRequests(mint.Requests{ContinueFrom: "m1"})
		m.on()
	}
}

// TestContinueWithoutANote checks that data without a record of its cluster is not served on
// request either, and that the fix in the message keeps the data.
func TestContinueWithoutANote(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.lived(m.site.ControlPlane.ID)
	if err := os.Remove(m.HostPath(controlplane.MembershipFile)); err != nil {
		t.Fatal(err)
	}
	m.withRequests(mint.Requests{ContinueFrom: "m1"})
	for range 2 {
		if err := m.Boot(); err == nil || m.started != "" || m.Has(controlplane.EtcdRun) || !m.Has("/var/lib/etcd/member/wal/0.wal") || !m.ConsoleHas("no record of its cluster") || m.ConsoleHas("write the image") || !m.ConsoleHas("--restore FILE") {
			t.Fatalf("%v, etcd runs as %q\n%s", err, m.started, strings.Join(m.Console, "\n"))
		}
		m.on()
	}
	const text = "all objects of last week"
	digest := sha256.Sum256([]byte(text))
	m.Put(member.SnapshotDir+"/20261111-000000.db", text)
	m.withRequests(mint.Requests{ContinueFrom: "m1", Restore: hex.EncodeToString(digest[:])})
	m.bootDone()
	if m.Get("/var/lib/etcd/member/snap/db") != text || len(m.aside("/wal/0.wal")) != 1 {
		t.Errorf("etcd runs as %q\n%s", m.started, strings.Join(m.Console, "\n"))
	}
}

// TestContinueWithAnothersCA checks a Site of another cluster that requests to continue from this
// machine. The message must not tell anybody to overwrite the disk.
func TestContinueWithAnothersCA(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.site = mintedSites(t, 1)[0].Site
	m.withRequests(mint.Requests{ContinueFrom: "m1"})
	m.on()
	if err := m.Boot(); err == nil || !m.ConsoleHas("the CA of another cluster") || m.ConsoleHas("write the image") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
}

// TestPowerCutOfContinue cuts the power before each write of etcd's manifest and of the membership
// record. In the end, etcd runs without --force-new-cluster.
func TestPowerCutOfContinue(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 3)
	for at, times := range map[string]int{"write " + controlplane.EtcdRun: 2, "write " + controlplane.MembershipFile: 1, "symlink " + controlplane.EtcdManifest: 4, "kubeadm writes " + controlplane.EtcdManifest: 2} {
		for nth := 1; nth <= times; nth++ {
			t.Run(fmt.Sprint(at, nth), func(t *testing.T) {
				t.Parallel()
				m := newControlPlane(t, sites)
				m.Cluster.NoClusterInfo = false
				m.lived(m.site.ControlPlane.ID)
				m.withRequests(mint.Requests{ContinueFrom: "m1"})
				seen := 0
				m.BeforeEffect = func(effect string) {
					if effect == at && !m.PoweredOff {
						if seen++; seen == nth {
							m.PowerCutAt = 1
						}
					}
				}
				err := m.Boot()
				if seen < nth || err == nil {
					t.Fatalf("the machine continued after the power cut, or the effect occurred only %d times", seen)
				}
				m.BeforeEffect = nil
				m.LoseUnsynced()
				m.on()
				m.bootDone()
				if m.started != "has data\n" || !strings.HasPrefix(controlplane.ReadMembership(m.Env()).Continued, "m1 ") {
					t.Errorf("etcd runs as %q, note %+v", m.started, controlplane.ReadMembership(m.Env()))
				}
			})
		}
	}
}

// TestContinueFromAnother checks a request to continue from another machine. This machine's data is
// set aside, not deleted, and the machine joins.
func TestContinueFromAnother(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.Cluster.NoClusterInfo = false
	m.lived(m.site.ControlPlane.ID)
	m.withRequests(mint.Requests{ContinueFrom: "m2"})
	if err := m.Boot(); err == nil || len(m.starts) > 0 || m.Has(controlplane.EtcdManifest) {
		t.Fatalf("%v, etcd was started as %q before m2 runs", err, m.starts)
	}
	f := m.quorum()
	f.members = f.members[1:2]
	m.on()
	m.bootDone()
	if len(m.aside("/wal/0.wal")) != 1 || len(m.starts) != 1 || !strings.HasSuffix(m.starts[0], "existing") || len(f.members) != 2 {
		t.Errorf("set aside: %q, started as %q, members %v", m.aside(""), m.starts, f.members)
	}
	m.starts = nil
	m.on()
	m.bootDone()
	if len(m.starts) > 0 {
		t.Errorf("the machine joined again: %q", m.starts)
	}
}

// TestPowerCutAfterContinueFromAnother cuts the power of all machines while their Sites request to
// continue from m2. This machine's etcd starts without a quorum only if m2's data lists its member.
func TestPowerCutAfterContinueFromAnother(t *testing.T) {
	t.Parallel()
	for _, counted := range []bool{true, false} {
		t.Run(fmt.Sprint(counted), func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 3))
			m.Cluster.NoClusterInfo = false
			m.withRequests(mint.Requests{ContinueFrom: "m2"})
			f := m.quorum()
			f.members = f.members[1:2]
			m.bootDone()
			if note := controlplane.ReadMembership(m.Env()); !strings.HasPrefix(note.Continued, "m2 ") {
				t.Fatalf("the machine joined, but its record is %+v", note)
			}
			const member = 16045690984503098046
			m.Put("/var/lib/etcd/member/wal/0.wal", string(logHead(member, 77)))
			f.quorum = false // m2 needs this machine for a quorum
			if counted {
				f.counts = member
			}
			m.starts, m.started = nil, ""
			m.on()
			m.Patience = 90 * time.Second
			m.BeforeEffect = func(string) {
				if controlplane.Decided(m.Env()) {
					m.PowerCutAt = 1
				}
			}
			_ = m.Boot()
			if controlplane.Decided(m.Env()) != counted {
				t.Errorf("etcd may start: %v\n%s", !counted, m.Log.String())
			}
		})
	}
}

// logHead returns the head of an etcd log with these IDs.
func logHead(member, cluster uint64) []byte {
	ids := binary.AppendUvarint([]byte{1 << 3}, member)
	ids = binary.AppendUvarint(append(ids, 2<<3), cluster)
	record := append([]byte{1 << 3, 1, 2 << 3, 0, 3<<3 | 2, byte(len(ids))}, ids...)
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(record))), record...)
}
