package cluster

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/test/lab"
)

// etcds are three members of etcd as processes on this host, without TLS. The tests examine how
// etcd uses its disk and answers requests.
type etcds struct {
	t       *testing.T
	program string
	dir     string
	peer    [3]string
	client  [3]string
	running [3]*exec.Cmd
	request etcdmember.Request
	permit  string  // ID of the bootstrap permit that all Sites have
	unseen  [3]bool // members that the deciding master cannot reach
	// continued is set for a disk on which the request to continue was carried out.
	continued [3]bool
}

func newEtcds(t *testing.T) *etcds {
	t.Helper()
	free, err := lab.FreePorts(6)
	if err != nil {
		t.Fatal(err)
	}
	return etcdsAt(t, free)
}

// etcdsAt returns members that listen on these six ports.
func etcdsAt(t *testing.T, ports []int) *etcds {
	t.Helper()
	e := &etcds{t: t, program: needEtcd(t), dir: t.TempDir(), permit: "first"}
	for i, port := range ports {
		url := fmt.Sprintf("http://127.0.0.1:%d", port)
		if i < 3 {
			e.peer[i] = url
		} else {
			e.client[i-3] = url
		}
	}
	t.Cleanup(func() {
		for i := range 3 {
			e.stop(i)
		}
	})
	return e
}

func name(i int) string { return fmt.Sprintf("m%d", i+1) }

func (e *etcds) all() string {
	return fmt.Sprintf("m1=%s,m2=%s,m3=%s", e.peer[0], e.peer[1], e.peer[2])
}

func (e *etcds) disk(i int) string { return filepath.Join(e.dir, name(i)) }

// start starts the i-th member in a bootstrap (state "new") or as a join ("existing").
func (e *etcds) start(i int, cluster, state string, more ...string) {
	e.t.Helper()
	log, err := os.OpenFile(e.disk(i)+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		e.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(e.program, "--name", name(i), "--data-dir", e.disk(i), "--unsafe-no-fsync",
		"--listen-client-urls", e.client[i], "--advertise-client-urls", e.client[i], "--listen-peer-urls", e.peer[i], "--initial-advertise-peer-urls", e.peer[i],
		"--initial-cluster", cluster, "--initial-cluster-state", state, "--initial-cluster-token", etcdmember.Token("test", e.permit),
		"--heartbeat-interval", "500", "--election-timeout", "5000")
	cmd.Args = append(cmd.Args, more...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	e.running[i] = cmd
}

func (e *etcds) bootstrap(members ...int) {
	e.t.Helper()
	for _, i := range members {
		e.start(i, e.all(), "new")
	}
}

func (e *etcds) stop(i int) {
	if cmd := e.running[i]; cmd != nil {
		_ = cmd.Process.Kill() // it may have ended already
		_ = cmd.Wait()
		e.running[i] = nil
	}
}

// end lets the i-th member shut down. Its database then has all writes: those of the last 100 ms are
// only in the log while etcd runs.
func (e *etcds) end(i int) {
	e.t.Helper()
	if err := e.running[i].Process.Signal(syscall.SIGTERM); err != nil {
		e.t.Fatal(err)
	}
	_ = e.running[i].Wait() // etcd ends itself with the signal
	e.running[i] = nil
}

func (e *etcds) wipe(i int) {
	e.t.Helper()
	e.stop(i)
	if err := os.RemoveAll(e.disk(i)); err != nil {
		e.t.Fatal(err)
	}
}

func (e *etcds) kv(i int, what string, request map[string]string) (string, error) {
	for k, v := range request {
		request[k] = base64.StdEncoding.EncodeToString([]byte(v))
	}
	body, _ := json.Marshal(request)
	ctx, cancel := context.WithTimeout(e.t.Context(), 3*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.client[i]+"/v3/kv/"+what, strings.NewReader(string(body)))
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s", text)
	}
	return string(text), err
}

func (e *etcds) put(i int, key, value string) {
	e.t.Helper()
	until(e.t, "etcd to take a write", func() bool {
		_, err := e.kv(i, "put", map[string]string{"key": key, "value": value})
		return err == nil
	})
}

func (e *etcds) has(i int, key, value string) bool {
	e.t.Helper()
	var found bool
	until(e.t, "etcd to answer a read", func() bool {
		text, err := e.kv(i, "range", map[string]string{"key": key})
		found = strings.Contains(text, base64.StdEncoding.EncodeToString([]byte(value)))
		return err == nil
	})
	return found
}

// view returns the i-th master's view of the cluster, from real probes.
func (e *etcds) view(i int) etcdmember.View {
	e.t.Helper()
	v := etcdmember.View{Self: name(i), PeerURL: e.peer[i], Cluster: "test", Permit: etcdmember.ValidPermit, PermitID: e.permit, Request: e.request}
	v.Disk.Cluster, v.Disk.Continued = "test", e.continued[i]
	var err error
	v.Disk.WAL, v.Disk.Member, v.Disk.Etcd, err = etcdmember.ReadLog(filepath.Join(e.disk(i), "member", "wal"))
	if err != nil {
		e.t.Fatal(err)
	}
	for j := range 3 {
		if j == i {
			continue
		}
		client := &http.Client{Timeout: 10 * time.Second}
		if e.unseen[j] {
			client.Transport = &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
				return nil, errors.New("no route to host")
			}}
		}
		peer, counts := etcdmember.AskPeer(e.t.Context(), client, e.peer[j])
		peer.Name = name(j)
		v.Peers = append(v.Peers, peer)
		v.Counted = v.Counted || name(j) == e.request.ContinueFrom && slices.Contains(counts, v.Disk.Member)
		if cluster, members, err := (etcdmember.Client{HTTP: client, URL: e.client[j]}).List(e.t.Context()); err == nil {
			v.Quorum, v.Members, v.Etcd = true, members, cluster
		}
	}
	return v
}

func (e *etcds) decide(i int, want etcdmember.Action) etcdmember.Decision {
	e.t.Helper()
	v := e.view(i)
	d := etcdmember.Decide(v)
	if d.Do != want {
		e.t.Fatalf("%s: %s (%s), want %s; it sees %+v", name(i), d.Do, d.Why, want, v)
	}
	return d
}

// blank serves the response of a master that has no data, until stop is called or the test ends.
func (e *etcds) blank(i int) (stop func()) {
	e.t.Helper()
	l, err := net.Listen("tcp", strings.TrimPrefix(e.peer[i], "http://"))
	if err != nil {
		e.t.Fatal(err)
	}
	s := &http.Server{Handler: etcdmember.ServeBlank(etcdmember.BlankAnswer(e.permit, false), func() bool { return true })}
	go func() { _ = s.Serve(l) }() // ends with Close
	e.t.Cleanup(func() { s.Close() })
	return func() { s.Close() }
}

// TestTwoWiped tests the main danger: two wiped masters can start an empty etcd with the cluster's
// own ID. Instead, the decision waits, and stops once it sees that the cluster existed.
func TestTwoWiped(t *testing.T) {
	e := newEtcds(t)
	e.bootstrap(0, 1, 2)
	e.put(0, "k", "acknowledged")
	for i := range 3 {
		e.stop(i)
	}
	e.wipe(0)
	e.wipe(1)
	e.bootstrap(0, 1)
	if e.has(0, "k", "acknowledged") {
		t.Fatal("etcd's behaviour has changed: two wiped members have the write again")
	}
	e.wipe(0)
	e.wipe(1)

	stop := e.blank(1)
	e.decide(0, etcdmember.Wait) // m3, which has all data, is off
	e.start(2, e.all(), "new")
	until(t, "m3 to answer", func() bool {
		return e.probe(2) == etcdmember.InUse
	})
	e.decide(0, etcdmember.Stop)
	stop()
}

// TestBootstrap checks that blank masters bootstrap the cluster once they have seen each other, in
// any order.
func TestBootstrap(t *testing.T) {
	e := newEtcds(t)
	e.decide(0, etcdmember.Wait) // no other master is reachable
	stop := e.blank(1)
	e.decide(0, etcdmember.Wait) // one is missing
	stopToo := e.blank(2)
	e.decide(0, etcdmember.Bootstrap)
	e.bootstrap(0)
	until(t, "the bootstrapping member to answer", func() bool {
		return e.probe(0) == etcdmember.Leaderless
	})
	e.decide(1, etcdmember.Bootstrap)
	stop()
	e.bootstrap(1)
	until(t, "two of three to have a leader", func() bool { return e.view(2).Quorum })
	stopToo()
	// m3 was never a running member: it joins like a replacement.
	e.replace(2)
	e.put(2, "k", "v")
	if !e.has(0, "k", "v") {
		t.Error("m1 does not have a write made through m3")
	}
}

// replace carries out a Join.
func (e *etcds) replace(i int) {
	e.t.Helper()
	e.replaceFrom(i, (i+1)%3)
}

// replaceFrom carries out a Join through another member.
func (e *etcds) replaceFrom(i, other int) {
	e.t.Helper()
	d := e.decide(i, etcdmember.Join)
	client := &http.Client{Timeout: 15 * time.Second}
	via := etcdmember.Client{HTTP: client, URL: e.client[other]}
	ctx := e.t.Context()
	for _, id := range d.Remove {
		until(e.t, "the old member to be removed", func() bool { return via.Remove(ctx, id) == nil })
	}
	var self etcdmember.Member
	until(e.t, "the learner to be added", func() bool {
		var err error
		self, err = via.AddLearner(ctx, e.peer[i])
		return err == nil
	})
	members, err := via.Members(ctx)
	if err != nil {
		e.t.Fatal(err)
	}
	e.start(i, etcdmember.InitialCluster(members, self, name(i)), "existing")
	until(e.t, "the learner to be promoted", func() bool { return via.Promote(ctx, self.ID) == nil })
}

// TestReplacedMaster checks that one of three masters joins again after it was wiped, and has the
// written data. After a power cut at any step, the next decision must continue.
func TestReplacedMaster(t *testing.T) {
	e := newEtcds(t)
	e.bootstrap(0, 1, 2)
	e.put(0, "k", "kept")
	e.wipe(0)
	d := e.decide(0, etcdmember.Join)
	if len(d.Remove) != 1 {
		t.Fatalf("%+v", d)
	}
	via := etcdmember.Client{HTTP: http.DefaultClient, URL: e.client[1]}
	until(t, "the old member to be removed", func() bool { return via.Remove(t.Context(), d.Remove[0]) == nil })
	if d = e.decide(0, etcdmember.Join); len(d.Remove) != 0 { // power cut after the removal
		t.Errorf("%+v", d)
	}
	until(t, "the learner to be added", func() bool { _, err := via.AddLearner(t.Context(), e.peer[0]); return err == nil })
	if d = e.decide(0, etcdmember.Join); len(d.Remove) != 1 { // power cut after the addition
		t.Errorf("%+v", d)
	}
	// etcd reads the cluster token only when it bootstraps. So in a running cluster, machines may
	// have Sites with another permit, from which programs derive another token.
	e.permit = "another"
	e.replace(0)
	if !e.has(0, "k", "kept") {
		t.Error("the replaced master lacks the written data")
	}
	e.decide(0, etcdmember.Start)
}

// TestDeadLearner checks a machine that dies between its addition and its first start. Nobody else
// can join until its learner is removed, which does not affect the members.
func TestDeadLearner(t *testing.T) {
	e := newEtcds(t)
	e.start(1, "m2="+e.peer[1], "new")
	e.put(1, "k", "kept")
	via := etcdmember.Client{HTTP: http.DefaultClient, URL: e.client[1]}
	until(t, "the learner to be added", func() bool { _, err := via.AddLearner(t.Context(), e.peer[2]); return err == nil })
	v := e.view(0)
	d := etcdmember.Decide(v)
	if d.Do != etcdmember.Wait || !strings.Contains(d.Why, e.peer[2]) {
		t.Fatalf("%+v", d)
	}
	if _, err := via.AddLearner(t.Context(), e.peer[0]); err == nil {
		t.Fatal("etcd's behaviour has changed: it accepts two learners")
	}
	learner := v.Members[slices.IndexFunc(v.Members, func(m etcdmember.Member) bool { return m.Learner })]
	if active, err := via.Active(t.Context(), learner.ID); err != nil || active || !learner.NeverStarted() {
		t.Fatalf("%+v runs: %v, %v", learner, active, err)
	}
	v.DeadLearner = learner.ID
	if d = etcdmember.Decide(v); d.Do != etcdmember.Join || !slices.Contains(d.Remove, learner.ID) {
		t.Fatalf("%+v", d)
	}
	until(t, "the learner to be removed", func() bool { return via.Remove(t.Context(), learner.ID) == nil })
	e.replaceFrom(0, 1)
	if !e.has(0, "k", "kept") {
		t.Error("the member that joined lacks the written data")
	}
	e.replaceFrom(2, 1) // switched on later
}

// TestReflashedBehindAPartition checks a reflashed master that cannot reach the others: it waits,
// even with a valid bootstrap permit, and they keep running. It joins once it reaches one of them.
func TestReflashedBehindAPartition(t *testing.T) {
	e := newEtcds(t)
	e.bootstrap(0, 1, 2)
	e.put(0, "k", "before")
	e.wipe(0)
	e.unseen = [3]bool{1: true, 2: true}
	e.decide(0, etcdmember.Wait)
	e.put(1, "k", "meanwhile")
	e.decide(0, etcdmember.Wait)
	e.unseen[1] = false
	e.replace(0)
	if !e.has(0, "k", "meanwhile") {
		t.Error("the member lacks the data written while it was disconnected")
	}
}

// TestOldDiskPutBack checks that a replaced member does not start with its old disk. The member
// list has its name, but the old log has another ID.
func TestOldDiskPutBack(t *testing.T) {
	e := newEtcds(t)
	e.bootstrap(0, 1, 2)
	e.put(0, "k", "v")
	until(t, "m1 to have its own log", func() bool {
		v := e.view(0)
		return v.Quorum && v.Disk.Etcd == v.Etcd && len(v.Members) == 3
	})
	v := e.view(0)
	if own := v.Members[0]; own.ID != v.Disk.Member && v.Members[1].ID != v.Disk.Member && v.Members[2].ID != v.Disk.Member {
		t.Fatalf("the log is of member %s, the members are %+v", v.Disk.Member, v.Members)
	}
	e.decide(0, etcdmember.Start)
	e.stop(0)
	if err := os.Rename(e.disk(0), e.disk(0)+".old"); err != nil {
		t.Fatal(err)
	}
	e.replace(0)
	e.stop(0)
	e.wipe(0)
	if err := os.Rename(e.disk(0)+".old", e.disk(0)); err != nil {
		t.Fatal(err)
	}
	if d := e.decide(0, etcdmember.Stop); !strings.Contains(d.Why, "was removed") {
		t.Error(d.Why)
	}
}

// TestAnotherBootstrap wipes two masters, bootstraps them again, and starts the third with its old
// disk. With another permit, the new cluster has another ID, and the third stops. With the first
// permit the IDs are equal: neither the decision nor etcd detects the old disk, and etcd mixes two
// histories.
func TestAnotherBootstrap(t *testing.T) {
	for permit, want := range map[string]etcdmember.Action{"first": etcdmember.Start, "second": etcdmember.Stop} {
		t.Run(permit, func(t *testing.T) {
			t.Parallel()
			e := newEtcds(t)
			e.bootstrap(0, 1, 2)
			e.put(2, "k", "first")
			until(t, "m1 to have the value", func() bool { return e.has(0, "k", "first") })
			e.stop(2)
			e.wipe(0)
			e.wipe(1)
			e.permit = permit
			e.bootstrap(0, 1)
			e.put(0, "k", "second")
			if d := e.decide(2, want); want == etcdmember.Stop && !strings.Contains(d.Why, "run another etcd") {
				t.Error(d.Why)
			}
			// Test etcd itself too, even if the decision is Stop.
			e.start(2, e.all(), "new")
			if want == etcdmember.Start {
				until(t, "the former member to serve", func() bool { _, err := e.kv(2, "range", map[string]string{"key": "k"}); return err == nil })
				return
			}
			until(t, "the others to reject it", func() bool {
				log, err := os.ReadFile(e.disk(2) + ".log")
				return err == nil && strings.Contains(string(log), "cluster ID mismatch")
			})
			if _, err := e.kv(2, "range", map[string]string{"key": "k"}); err == nil {
				t.Error("a member of an earlier bootstrap serves")
			}
			if !e.has(1, "k", "second") {
				t.Error("the other members lack the written data")
			}
		})
	}
}

// TestTwoPermits checks that blank machines with two different permits do not bootstrap.
func TestTwoPermits(t *testing.T) {
	e := newEtcds(t)
	e.blank(1)
	e.permit = "second"
	e.blank(2)
	if d := e.decide(0, etcdmember.Wait); !strings.Contains(d.Why, "another bootstrap permit (second) than the Site of m2 (first)") {
		t.Error(d.Why)
	}
}

// TestActiveMember checks that another member can report whether a member's machine runs.
func TestActiveMember(t *testing.T) {
	e := newEtcds(t)
	e.bootstrap(0, 1, 2)
	e.put(0, "k", "v")
	v := e.view(1)
	id := ""
	for _, m := range v.Members {
		if m.Name == "m1" {
			id = m.ID
		}
	}
	via := etcdmember.Client{HTTP: http.DefaultClient, URL: e.client[1]}
	active := func() bool {
		a, err := via.Active(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	until(t, "m1 to be seen", active)
	e.wipe(0)
	e.blank(0) // the response of a second machine at the same address does not count
	until(t, "m1 to be missed", func() bool { return !active() })
	if _, err := via.Active(t.Context(), "m1"); err == nil {
		t.Error("a name was accepted as a member ID")
	}
}

// TestContinueFromOne checks a permanent loss of the quorum. The member that a person names drops
// the two others once. They join it again, one of them after moving its data aside.
func TestContinueFromOne(t *testing.T) {
	e := newEtcds(t)
	e.bootstrap(0, 1, 2)
	e.put(0, "k", "kept")
	until(t, "m3 to have the value", func() bool { return e.has(2, "k", "kept") })
	// Write more, because the last write may be lost: a member logs a commit only with the next
	// write, and --force-new-cluster discards uncommitted entries.
	for i := range 3 {
		e.put(0, "l", fmt.Sprint(i))
	}
	e.stop(2)
	e.stop(1)
	e.wipe(1)
	e.stop(0)
	e.request.ContinueFrom = "m1"
	e.decide(1, etcdmember.Wait)
	e.decide(2, etcdmember.Wait)
	e.decide(0, etcdmember.ForceNewCluster)
	e.start(0, e.all(), "existing", "--force-new-cluster=true")
	if !e.has(0, "k", "kept") {
		t.Fatal("the data of the member in continueFrom is lost")
	}
	e.stop(0)
	e.start(0, e.all(), "existing")
	e.put(0, "l", "after")
	e.replaceFrom(1, 0)
	e.decide(2, etcdmember.SetAside)
	e.wipe(2)
	e.replaceFrom(2, 0)
	if !e.has(2, "k", "kept") || !e.has(1, "l", "after") {
		t.Error("the members that joined lack the written data")
	}
	if v := e.view(1); len(v.Members) != 3 {
		t.Errorf("members: %+v", v.Members)
	}
	e.stop(0)
	e.decide(0, etcdmember.Start) // it has a quorum: the request has no effect

	// All machines lose power while the request is still in their Sites. m1 alone has no quorum. The
	// others start without one, because m1 counts them as members.
	for i := range 3 {
		e.stop(i)
	}
	e.continued = [3]bool{true, true, true}
	e.decide(1, etcdmember.Wait)
	e.decide(0, etcdmember.Start)
	e.start(0, e.all(), "existing")
	until(t, "m1 to count m2, without a quorum", func() bool { v := e.view(1); return v.Counted && !v.Quorum })
	e.decide(1, etcdmember.Start)
	e.decide(2, etcdmember.Start)
	e.start(1, e.all(), "existing")
	if !e.has(1, "l", "after") {
		t.Error("the data written afterwards is lost")
	}
	// If m1's power was cut before it recorded that the request was carried out, it drops the
	// others once more, and they join again.
	e.stop(1)
	e.stop(0)
	e.start(0, e.all(), "existing", "--force-new-cluster=true")
	until(t, "m1 to count nobody else", func() bool { v := e.view(1); return !v.Counted && v.Quorum })
	e.decide(1, etcdmember.SetAside)
}

// TestSnapshot checks that etcdutl accepts a snapshot, and that it has the written data.
func TestSnapshot(t *testing.T) {
	etcdutl := needEtcdutl(t)
	e := newEtcds(t)
	e.start(0, "m1="+e.peer[0], "new")
	e.put(0, "k", strings.Repeat("v", 300_000)) // more than one part of the stream
	file := filepath.Join(t.TempDir(), "snapshot.db")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join((etcdmember.Client{HTTP: http.DefaultClient, URL: e.client[0]}).Snapshot(t.Context(), f), f.Close()); err != nil {
		t.Fatal(err)
	}
	e.wipe(0)
	run(t, etcdutl, etcdmember.RestoreArgs(file, e.disk(0), "m1", e.peer[0], "id-0123")[1:]...)
	wal, member, cluster, err := etcdmember.ReadLog(filepath.Join(e.disk(0), "member", "wal"))
	if err != nil || !wal || member == "" || cluster == "" {
		t.Fatalf("the restored write-ahead log: %v %q %q %v", wal, member, cluster, err)
	}
	e.start(0, "m1="+e.peer[0], "existing")
	if !e.has(0, "k", strings.Repeat("v", 300_000)) {
		t.Error("the snapshot lacks the written data")
	}
	// The others join the restored member, whatever data they have.
	e.request = etcdmember.Request{ContinueFrom: "m1", Restore: true}
	e.replaceFrom(1, 0)
	if !e.has(1, "k", strings.Repeat("v", 300_000)) {
		t.Error("a member that joined lacks the restored data")
	}
}

// TestMembersNeedQuorum checks that a member returns no member list without a quorum, because its
// own list may be wrong.
func TestMembersNeedQuorum(t *testing.T) {
	e := newEtcds(t)
	e.bootstrap(0, 1, 2)
	e.put(0, "k", "v")
	e.stop(1)
	e.stop(2)
	until(t, "m1 to notice", func() bool {
		_, err := (etcdmember.Client{HTTP: &http.Client{Timeout: 10 * time.Second}, URL: e.client[0]}).Members(t.Context())
		return err != nil
	})
	if s := e.probe(0); s != etcdmember.InUse {
		t.Errorf("the state of m1 without a quorum is %d", s)
	}
	e.wipe(2)
	e.decide(2, etcdmember.Stop)
}
