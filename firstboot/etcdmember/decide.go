// Package etcdmember decides whether and how a control-plane node (a master) may start etcd.
//
// All control-plane nodes are stamped with the same keys and the same list of nodes, so each could
// start an empty etcd with the cluster's ID. If the cluster has data elsewhere, acknowledged writes
// would then be lost without any error. Therefore each start is decided from the data on the disk
// and the answers of the other nodes. A disk that was flashed again has no data.
//
// Decide is pure: package controlplane collects its input, and carries out the decision.
// Maintenance maintains the databases of running members.
//
// Invariants:
//   - A node with a blank disk bootstraps a cluster only with a valid bootstrap permit, and
//     only if every other control-plane node has answered that it is blank with the same
//     permit, or that it is leaderless. Nodes that the Site lists as absent are left out.
//   - A control-plane node that does not answer delays a bootstrap without limit, because it
//     may have the cluster's data.
//   - Data of another cluster is never started, and a membership is never taken over while
//     its machine is running.
//   - An action that could lose data requires an instruction from a person, which names the
//     control-plane node whose data is kept.
package etcdmember

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// PeerState is the state of another control-plane node, as it has answered.
type PeerState int

// States of a peer, from the answer at its port 2380.
const (
	// Silent means no answer. The node may be off or disconnected, or may have all the data.
	Silent PeerState = iota
	// Blank means that the node has no data, and its first boot waits for its own decision.
	Blank
	// Leaderless means that etcd runs there and has never had a leader: no member has a client URL.
	Leaderless
	// InUse means that a member has a client URL: the cluster has accepted writes, whether or not
	// it has a quorum now.
	InUse
	// Spent means that the node has no data, and that the bootstrap permit or request in its Site
	// was already used. It bootstraps nothing.
	Spent
)

// Peer is another control-plane node.
type Peer struct {
	Name  string
	State PeerState
	// Permit is the bootstrap permit in the Site of a Blank or Spent peer. It is empty if the
	// peer's program is older than permits.
	Permit string
}

// Member is an etcd member as a quorum lists it.
type Member struct {
	ID       string
	Name     string // empty until its first start
	PeerURLs []string
	Learner  bool
}

// Disk describes the data on this machine's disk.
type Disk struct {
	// WAL means that there is a write-ahead log, so the member has run here. (A start that etcd
	// rejected leaves a database without a log.)
	WAL bool
	// Cluster is the cluster's ID, as first boot recorded it before it started etcd. Data without a
	// record is never served.
	Cluster string
	// Member and Etcd are etcd's own IDs of the member and the cluster in the log; empty if the log
	// has none.
	Member, Etcd string
	// Continued means that the request to continue was carried out: the named node continued with
	// this data, or this node joined it.
	Continued bool
}

// Former is the state of this machine's former membership, as the other members report it.
type Former int

// States of a former membership.
const (
	// Gone means that its machine is not running, or that there is no former membership.
	Gone Former = iota
	// Watched means that the state is not known yet.
	Watched
	// Alive means that another machine is running with that membership.
	Alive
)

// Permit is the state of the one-time bootstrap permit in the Site.
type Permit int

// States of a bootstrap permit.
const (
	NoPermit Permit = iota
	ValidPermit
	ExpiredPermit
	// UsedPermit means that this machine bootstrapped the cluster with this permit, or was a
	// member, and that the data is gone from its disk.
	UsedPermit
)

// Request is the operator's explicit request in the Site.
type Request struct {
	// ContinueFrom names the control-plane node whose data is kept after a permanent loss
	// of the quorum; empty if there is no request.
	ContinueFrom string
	// Restore means that the named node starts from a snapshot instead of its own data.
	Restore bool
	// Restored means that this machine is the named node and has recorded an earlier restore. The
	// restored data is gone from its disk, or the Site had other requests meanwhile.
	Restored bool
	// Absent lists control-plane nodes that never worked. The cluster is bootstrapped without them.
	Absent []string
}

// View is the input of Decide.
type View struct {
	Self    string
	PeerURL string // this machine's peer URL, https://ADDRESS:2380
	// Cluster is the ID of the Site's cluster.
	Cluster string
	Disk    Disk
	Peers   []Peer // all other control-plane nodes of the Site
	// Quorum means that a quorum answered and listed Members.
	Quorum  bool
	Members []Member
	// Etcd is etcd's own ID of the quorum's cluster; empty if unknown.
	Etcd string
	// Former is the state of the former membership, if the disk is blank; FormerWhy is the reason.
	Former    Former
	FormerWhy string
	// DeadLearner is the ID of another machine's learner that has never started, and that no member
	// was connected to for LearnerTimeout; empty if there is none.
	DeadLearner string
	Permit      Permit
	// PermitID identifies this Site's bootstrap permit, to compare it with those of the peers.
	PermitID string
	// Dates describes the end of the permit and the time of this machine's clock, which may be
	// wrong.
	Dates   string
	Request Request
	// Counted means that the named node's etcd runs without a quorum, and has listed this disk's
	// member for a while. (If it were to continue without the others, it would soon drop them.)
	Counted bool
}

// Action is the next step of a control-plane node.
type Action int

// Actions of a control-plane node.
const (
	Wait  Action = iota // decide again later
	Stop                // decide again later, and ask a person for help
	Start               // start etcd with the data on the disk
	// Bootstrap means to start etcd with initial-cluster-state new.
	Bootstrap
	// Join means to remove the former memberships, add a learner, start etcd with
	// initial-cluster-state existing, and promote the learner.
	Join
	// ForceNewCluster means to start etcd once with --force-new-cluster.
	ForceNewCluster
	// Restore means to make data from the named snapshot, and to decide again.
	Restore
	// SetAside means to move the data away, and to decide again with a blank disk.
	SetAside
)

func (a Action) String() string {
	return [...]string{"wait", "stop", "start", "bootstrap", "join", "force-new-cluster", "restore", "set-aside"}[a]
}

// Decision is an Action with its parameters and its reason.
type Decision struct {
	Do Action
	// Remove lists the IDs of the members to remove before a Join: former memberships of this node,
	// and a dead learner.
	Remove   []string
	Why, Fix string
}

// Decide applies the decision table.
func Decide(v View) Decision {
	switch {
	case v.Disk.WAL && v.Disk.Cluster != "" && v.Disk.Cluster != v.Cluster:
		return Decision{Do: Stop, Why: fmt.Sprintf("etcd's data on this disk belongs to another cluster (ID %s) than the Site (ID %s)", v.Disk.Cluster, v.Cluster),
			Fix: v.rewriting("stamp a Site of the data's cluster; or write the image to this disk again, which destroys the data", "stamp a Site of the data's cluster, or name another control-plane node in continueFrom")}
	case v.Request.ContinueFrom != "":
		return v.decideContinued()
	case v.Disk.WAL:
		return v.decideWithData()
	}
	return v.decideBlank()
}

// decideWithData decides for a disk with data of this cluster.
func (v View) decideWithData() Decision {
	switch {
	case v.Quorum && v.Etcd != "" && v.Disk.Etcd != "" && v.Etcd != v.Disk.Etcd:
		return Decision{Do: Stop, Why: fmt.Sprintf("the other control-plane nodes run another etcd cluster (%s) than the one on this disk (%s)", v.Etcd, v.Disk.Etcd),
			Fix: v.rewriting("to keep their data, write the image to this machine's disk again, which deletes the data on it; to keep the data on this disk, keep all disks and switch the other nodes off", fixChooseOneCopy)}
	case v.Quorum && !slices.ContainsFunc(v.Members, v.member):
		return Decision{Do: Stop, Why: "this control-plane node's member was removed from etcd, so its data cannot be used",
			Fix: v.rewriting("write the image to this machine's disk again: it then joins as a new member", fixChooseOneCopy)}
	case v.Disk.Cluster == "":
		return v.decideWithoutRecord()
	}
	return Decision{Do: Start, Why: "the disk has this control-plane node's etcd data"}
}

// fixChooseOneCopy is the fix if the Site requests to continue from this machine although the
// others have a quorum: a person must choose whose data is kept.
const fixChooseOneCopy = "keep all disks; to keep this machine's data, switch the other control-plane nodes off; to keep their data, remove continueFrom from the Site"

// decideWithoutRecord decides for data without a record of its cluster. No request makes this
// machine serve that data.
func (v View) decideWithoutRecord() Decision {
	d := Decision{Do: Stop, Why: "this disk has etcd data, but no record of its cluster",
		Fix: "keep this disk, and switch the other control-plane nodes on; if they are permanently lost, restore a snapshot, for example from /var/lib/edgebake/snapshots (`edgebake cluster sites DIR --continue-from NAME --restore FILE`)"}
	if v.Quorum {
		d.Fix = v.rewriting("write the image to this machine's disk again: it then joins the other control-plane nodes, and the data on the disk is lost; to use the data instead, restore it as a snapshot", d.Fix)
	}
	return d
}

// rewriting returns fix, which overwrites this machine's disk. If the Site requests to continue
// from this machine, it returns keeping instead, because the disk may have the only copy.
func (v View) rewriting(fix, keeping string) string {
	if v.Request.ContinueFrom == v.Self {
		return keeping
	}
	return fix
}

// member reports whether m is the member in the log. Name and address do not prove that: they also
// fit a member that was added after the one in the log had been removed.
func (v View) member(m Member) bool {
	if v.Disk.Member == "" {
		return v.Own(m)
	}
	return m.ID == v.Disk.Member
}

// Own reports whether m has this node's name or address. A member that has never started has no
// name.
func (v View) Own(m Member) bool {
	return m.Name == v.Self || slices.Contains(m.PeerURLs, v.PeerURL)
}

// decideBlank decides for a disk without data: new, wiped or reflashed.
func (v View) decideBlank() Decision {
	lived, silent := v.in(InUse), slices.DeleteFunc(v.in(Silent), v.absent)
	risen := slices.DeleteFunc(slices.Concat(v.in(Blank), v.in(Leaderless), v.in(Spent)), func(name string) bool { return !v.absent(name) })
	switch {
	case v.Quorum:
		return v.decideJoin()
	case len(lived) > 0:
		return Decision{Do: Stop, Why: fmt.Sprintf("the cluster has been in use (%s), and has no quorum: an empty member could complete the quorum and lose data", list(lived)),
			Fix: "switch the other control-plane nodes on until more than half of all run; if they are permanently lost, continue from one that has data (`edgebake cluster sites DIR --continue-from NAME`)"}
	case len(silent) > 0 && v.Permit == UsedPermit:
		return Decision{Do: Wait, Why: fmt.Sprintf("this machine has already used this bootstrap permit or was a member, and its data is gone: it can only join the other control-plane nodes; no answer yet from %s", list(silent)),
			Fix: "switch the other control-plane nodes on; if their data is lost too, " + spentFix}
	case len(silent) > 0:
		return Decision{Do: Wait, Why: fmt.Sprintf("no answer yet from %s: the cluster is bootstrapped only after every control-plane node has answered, since one that is off could have its data", list(silent)),
			Fix: "switch every control-plane node on; if one has never worked, list it as absent in the Sites of the other nodes (`edgebake cluster sites DIR --absent NAME`)"}
	}
	if d, wait := v.permits(); wait {
		return d
	}
	switch {
	case v.absent(v.Self):
		return Decision{Do: Wait, Why: "the Site lists this control-plane node as absent: it joins once the other control-plane nodes run", Fix: "switch the other control-plane nodes on, or remove this one from absent in every control-plane node's Site"}
	case len(risen) > 0:
		return Decision{Do: Stop, Why: fmt.Sprintf("the Site lists %s as absent, but it answers", list(risen)), Fix: "remove it from absent in every control-plane node's Site, or switch it off"}
	}
	switch v.Permit {
	case NoPermit:
		return Decision{Do: Stop, Why: "no control-plane node has etcd data, and the Site has no bootstrap permit: all of their disks may have been written again",
			Fix: "restore a snapshot (`edgebake cluster sites DIR --continue-from NAME --restore FILE`), or start an empty cluster (`edgebake cluster sites DIR --bootstrap 48h`)"}
	case ExpiredPermit:
		return Decision{Do: Stop, Why: "no control-plane node has etcd data, and the bootstrap permit has expired (" + v.Dates + "): all of their disks may have been written again",
			Fix: "if this machine's clock is wrong, name a reachable time server in the Site (network.ntp); else restore a snapshot (`edgebake cluster sites DIR --continue-from NAME --restore FILE`), or start an empty cluster (`edgebake cluster sites DIR --bootstrap 48h`)"}
	case UsedPermit:
		return Decision{Do: Stop, Why: "no control-plane node has etcd data; this machine has already used this bootstrap permit or was a member, and its data is gone",
			Fix: spentFix}
	}
	return Decision{Do: Bootstrap, Why: "every control-plane node has answered, none has etcd data, and the bootstrap permit is valid"}
}

// permits delays a bootstrap while the blank nodes have different bootstrap permits, because etcd's
// cluster ID depends on the permit, or while one of these nodes has already used its permit.
func (v View) permits() (d Decision, wait bool) {
	var older, other []string
	for _, p := range v.Peers {
		switch {
		case p.State != Blank && p.State != Spent || v.absent(p.Name):
		case p.Permit == "":
			older = append(older, p.Name)
		case p.Permit != v.PermitID:
			other = append(other, fmt.Sprintf("%s (%s)", p.Name, p.Permit))
		}
	}
	spent := slices.DeleteFunc(v.in(Spent), v.absent)
	switch {
	case len(older) > 0:
		return Decision{Do: Wait, Why: fmt.Sprintf("%s does not report a bootstrap permit: its image is older than this machine's", list(older)),
			Fix: "write the same image to every control-plane node"}, true
	case len(other) > 0:
		return Decision{Do: Wait, Why: fmt.Sprintf("this machine's Site has another bootstrap permit (%s) than the Site of %s", v.PermitID, list(other)),
			Fix: "stamp the Sites of one run of `edgebake cluster sites` onto every control-plane node"}, true
	case len(spent) > 0:
		return Decision{Do: Wait, Why: fmt.Sprintf("%s has already used this bootstrap permit or was a member, and its data is gone: a permit can be used only once", list(spent)),
			Fix: spentFix}, true
	}
	return Decision{}, false
}

const spentFix = "restore a snapshot (`edgebake cluster sites DIR --continue-from NAME --restore FILE`), or start an empty cluster again (`edgebake cluster sites DIR --bootstrap 48h`), with new Sites for every control-plane node"

// decideJoin decides how to join a running cluster.
func (v View) decideJoin() Decision {
	switch v.Former {
	case Alive:
		return Decision{Do: Stop, Why: "another machine runs with this machine's Site: " + v.FormerWhy,
			Fix: "switch one of the two off. To replace a control-plane node, switch the old machine off first; never use one machine's Site or stick for another"}
	case Watched:
		return Decision{Do: Wait, Why: v.FormerWhy}
	}
	d := Decision{Do: Join, Why: "the other control-plane nodes have a quorum"}
	for _, m := range v.Members {
		switch {
		case v.Own(m), m.Learner && m.ID == v.DeadLearner:
			d.Remove = append(d.Remove, m.ID)
		case m.Learner && m.NeverStarted():
			// etcd accepts only one learner at a time.
			return Decision{Do: Wait, Why: fmt.Sprintf("another control-plane node (%s) is joining", orUnnamed(m)),
				Fix: fmt.Sprintf("switch it on; if its etcd does not start within %s, its membership is removed", LearnerTimeout)}
		case m.Learner:
			return Decision{Do: Wait, Why: fmt.Sprintf("another control-plane node (%s) is joining, and has no vote yet", orUnnamed(m)),
				Fix: fmt.Sprintf("switch it on; if it is permanently lost, write the image with its Site to another disk, or remove it with `etcdctl member remove %s` in etcd's container", hexID(m.ID))}
		}
	}
	return d
}

// LearnerTimeout is how long a learner that has never started may block other nodes: its machine
// may be slow to start etcd.
const LearnerTimeout = 10 * time.Minute

// NeverStarted reports whether the member's etcd has never connected to the others. When it first
// connects, it reports its name.
func (m Member) NeverStarted() bool { return m.Name == "" }

// hexID formats an ID as etcdctl does.
func hexID(id string) string {
	if n, err := strconv.ParseUint(id, 10, 64); err == nil {
		return strconv.FormatUint(n, 16)
	}
	return id
}

func orUnnamed(m Member) string {
	if m.Name != "" {
		return m.Name
	}
	return strings.Join(m.PeerURLs, ", ")
}

// decideContinued decides after a person has given up the data of lost nodes, and has named the
// node with whose data the cluster continues.
func (v View) decideContinued() Decision {
	from := v.Request.ContinueFrom
	switch {
	case from != v.Self && !slices.ContainsFunc(v.Peers, func(p Peer) bool { return p.Name == from }):
		return Decision{Do: Stop, Why: "continueFrom in the Site names " + from + ", which is not one of its control-plane nodes", Fix: "correct continueFrom in the Site"}
	case v.Disk.WAL && v.Disk.Continued && (from == v.Self || v.Counted && !v.Quorum):
		return v.decideWithData() // the named node may need this member for a quorum
	case from == v.Self:
		return v.decideContinuedFromSelf()
	}
	return v.decideContinuedFromPeer(from)
}

// inQuorum reports whether the cluster has a quorum that lists this node's data.
func (v View) inQuorum() bool {
	return v.Quorum && v.Disk.WAL && slices.ContainsFunc(v.Members, v.member)
}

// decideContinuedFromSelf decides for the node that continueFrom names.
func (v View) decideContinuedFromSelf() Decision {
	switch {
	case !v.Disk.WAL && v.Quorum:
		return v.decideJoin()
	case !v.Disk.WAL && v.Request.Restored:
		return v.decideRestoredBefore()
	case !v.Disk.WAL && v.Request.Restore:
		return Decision{Do: Restore, Why: "continueFrom in the Site names this control-plane node, with a snapshot to restore"}
	case !v.Disk.WAL:
		return Decision{Do: Stop, Why: "continueFrom in the Site names this control-plane node, but its disk has no etcd data", Fix: "name a control-plane node that has data, or a snapshot (`edgebake cluster sites DIR --continue-from NAME --restore FILE`)"}
	case v.inQuorum():
		return v.decideWithData() // no data has to be given up
	case v.Quorum:
		return Decision{Do: Stop, Why: "continueFrom in the Site names this control-plane node, but the other control-plane nodes have a quorum without it", Fix: "remove continueFrom from the Site"}
	case v.Request.Restored && v.Disk.Cluster == "":
		return v.decideRestoredBefore()
	case v.Request.Restored:
		return Decision{Do: Start, Why: DoneBefore}
	case v.Request.Restore:
		return Decision{Do: SetAside, Why: "continueFrom in the Site names this control-plane node, with a snapshot that replaces its data"}
	case v.Disk.Cluster == "":
		return v.decideWithoutRecord()
	}
	return Decision{Do: ForceNewCluster, Why: "continueFrom in the Site names this control-plane node, and there is no quorum"}
}

// decideContinuedFromPeer decides for the nodes that continueFrom does not name.
func (v View) decideContinuedFromPeer(from string) Decision {
	switch {
	case v.inQuorum():
		return v.decideWithData() // no data has to be given up
	case !v.Quorum && v.Disk.WAL && v.Disk.Continued:
		return Decision{Do: Wait, Why: "this control-plane node has joined " + from + " (continueFrom), but " + from + " does not list it as a member yet", Fix: "switch " + from + " on; if it is permanently lost, stamp Sites without continueFrom onto all other control-plane nodes"}
	case !v.Quorum && slices.Contains(v.in(Spent), from):
		return Decision{Do: Wait, Why: "continueFrom in the Site names " + from + ", which has already continued, and its data is gone", Fix: restoreAgain}
	case !v.Quorum:
		return Decision{Do: Wait, Why: "continueFrom in the Site names " + from + ", which does not answer yet", Fix: "switch " + from + " on, with the same continueFrom in its Site"}
	case v.Disk.WAL:
		return Decision{Do: SetAside, Why: "the cluster continues with the data of " + from + " (continueFrom), and this control-plane node's data may differ"}
	}
	return v.decideJoin()
}

// decideRestoredBefore stops: the restore was carried out before, and another one would lose all
// later writes.
func (v View) decideRestoredBefore() Decision {
	return Decision{Do: Stop, Why: "this machine has already carried out the Site's request (continueFrom, restore) or a later one, and its data is gone",
		Fix: "if other control-plane nodes have joined since, they have the newer data: continue from one of them (`edgebake cluster sites DIR --continue-from NAME`); " + restoreAgain}
}

// DoneBefore explains why a node that has data does not carry out the Site's request to restore.
const DoneBefore = "this machine has already carried out the Site's request to restore a snapshot, or a later one, and now has newer data: it does not restore the snapshot again; " + restoreAgain

const restoreAgain = "to restore the snapshot again, stamp new Sites (`edgebake cluster sites DIR --continue-from NAME --restore FILE --force`)"

func (v View) absent(name string) bool { return slices.Contains(v.Request.Absent, name) }

// in returns the names of the peers in state s.
func (v View) in(s PeerState) []string {
	var names []string
	for _, p := range v.Peers {
		if p.State == s {
			names = append(names, p.Name)
		}
	}
	return names
}

func list(names []string) string { return strings.Join(names, ", ") }
