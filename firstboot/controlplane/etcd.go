package controlplane

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// etcd's manifest is a link into /run, so that kubelet does not start etcd before this boot has
// decided how etcd starts. The target is not in RunDir, which is removed when first boot ends.
const (
	EtcdManifest = ondisk.ManifestsDir + "/etcd.yaml"
	EtcdRun      = "/run/edgebake-etcd.yaml"
)

const (
	// stopDelay is how long a state that only a person can change must last before it is reported.
	// After a power cut of all machines, the others need some time to form a quorum.
	stopDelay      = 2 * time.Minute
	decideInterval = 2 * time.Second
	// fixAfter is how long a wait must last before its fix is reported: most waits end by themselves.
	fixAfter = 5 * time.Minute
	// countedFor is how long the node to continue from must have listed this machine's member: an
	// etcd that is about to drop all other members still lists them for a moment.
	countedFor = 15 * time.Second
	// askTimeout bounds one request to another control-plane node.
	askTimeout = 8 * time.Second
)

// EtcdStartPhase starts etcd in the way that package etcdmember decides.
func EtcdStartPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "etcd-start", Doc: "etcd is started without losing data", Timeout: time.Hour,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			if Decided(e) {
				return run.Done, nil
			}
			return run.Todo, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			client, err := etcdClient(e)
			if err != nil {
				return err
			}
			defer client.CloseIdleConnections()
			t := &etcdStarter{e: e, active: active, site: active.Site, client: client}
			// Close the listener only at the end of the pass, because other nodes also ask while
			// the pass waits after a failure.
			e.AtEndOfPass(t.close)
			return t.run(ctx)
		},
	}
}

// Decided reports whether this boot has decided how etcd starts.
func Decided(e *machine.Env) bool {
	target, err := os.Readlink(e.Path(EtcdManifest))
	return err == nil && target == EtcdRun && len(e.Contents(EtcdRun)) > 0
}

// EtcdTLS returns the TLS configuration with which control-plane nodes trust each other before
// there is a cluster. It uses etcd's CA, whose key only they have.
func EtcdTLS(e *machine.Env) (*tls.Config, error) {
	pool, err := kubeapi.Pool(e.Contents(etcdCA))
	if err != nil {
		return nil, fmt.Errorf("reading etcd's CA: %w", err)
	}
	cert, err := tls.X509KeyPair(e.Contents(member.PKIDir+"/etcd/peer.crt"), e.Contents(member.PKIDir+"/etcd/peer.key"))
	if err != nil {
		return nil, fmt.Errorf("reading etcd's certificate: %w", err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert}, RootCAs: pool, MinVersion: tls.VersionTLS12,
		ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, Time: e.Now,
	}, nil
}

// etcdClient returns a client for etcd and for other control-plane nodes. It keeps connections
// open; the caller must close them.
func etcdClient(e *machine.Env) (*http.Client, error) {
	conf, err := EtcdTLS(e)
	if err != nil {
		return nil, err
	}
	return &http.Client{Timeout: askTimeout, Transport: &http.Transport{DialContext: e.Dial, TLSClientConfig: conf, IdleConnTimeout: askTimeout}}, nil
}

// etcdStarter carries out EtcdStartPhase in one pass.
type etcdStarter struct {
	e      *machine.Env
	active *site.Active
	site   *configs.Site
	client *http.Client

	blank   *http.Server      // tells other nodes that this machine has no data
	stopped time.Time         // since when the decision is to stop; zero: it is not
	via     etcdmember.Client // a member through which a quorum responds
	watch   leaseWatch        // watches the former membership
	learner learnerWatch      // watches another machine's learner
	since   time.Time         // when the decision last changed
	named   time.Time         // since when the node to continue from has listed this machine's member
}

// run repeats the decision until etcd is started.
func (t *etcdStarter) run(ctx context.Context) error {
	lastLine := ""
	for {
		if !areUsable(t.e, t.site) { // the clock was set, and a certificate is not valid now
			return run.ErrRestart
		}
		v, err := t.view(ctx)
		if err != nil {
			return err
		}
		d := etcdmember.Decide(v)
		if line := d.Do.String() + ": " + d.Why; line != lastLine {
			t.e.Log.Info("decided how etcd starts", "decision", d.Do.String(), "why", d.Why)
			lastLine, t.since = line, t.e.Now()
		}
		switch next, err := t.execute(ctx, d); {
		case err != nil || next == etcdStarted:
			return err
		case next == dataChanged:
			continue
		}
		if !v.Disk.WAL {
			t.answerBlank(ctx, etcdmember.BlankAnswer(v.PermitID, v.Permit == etcdmember.UsedPermit || v.Request.Restored))
		}
		if err := t.e.Sleep(ctx, decideInterval); err != nil {
			return run.Advise(fmt.Errorf("etcd is not started yet: %s: %w", d.Why, err), d.Fix)
		}
	}
}

// startResult is the result of a decision that was carried out.
type startResult int

const (
	startWaits  startResult = iota // waits for other nodes, or for a person
	dataChanged                    // data on the disk has changed: decide again at once
	etcdStarted                    // etcd was started
)

// execute carries out a decision.
func (t *etcdStarter) execute(ctx context.Context, d etcdmember.Decision) (startResult, error) {
	if d.Do != etcdmember.Stop {
		t.stopped = time.Time{}
	}
	switch d.Do {
	case etcdmember.Start:
		if restoredBefore(t.e, t.site) {
			t.e.Note("%s", etcdmember.DoneBefore)
		}
		if err := t.forgetRequest(); err != nil {
			return startWaits, err
		}
		return etcdStarted, t.start(ctx, "existing", everyMember(t.site))
	case etcdmember.ForceNewCluster:
		t.e.Console("etcd continues with this machine's data alone: " + d.Why)
		return etcdStarted, t.start(ctx, "existing", everyMember(t.site), forcedArgs(t.site)...)
	case etcdmember.Restore:
		t.e.Console("restoring etcd from a snapshot: " + d.Why)
		return dataChanged, restoreSnapshot(ctx, t.e, t.active)
	case etcdmember.SetAside:
		return t.setAside(d)
	case etcdmember.Bootstrap:
		t.e.Console("bootstrapping an empty etcd: " + d.Why)
		if err := SetAsideLogless(t.e); err != nil {
			return startWaits, err
		}
		if err := t.usePermit(); err != nil {
			return startWaits, err
		}
		return etcdStarted, t.start(ctx, "new", everyMember(t.site))
	case etcdmember.Join:
		return t.joinCluster(ctx, d)
	case etcdmember.Stop:
		if t.stopped.IsZero() {
			t.stopped = t.e.Now()
		}
		if t.e.Now().Sub(t.stopped) >= stopDelay {
			return startWaits, run.NeedsPerson(errors.New(d.Why), d.Fix)
		}
	case etcdmember.Wait:
	default:
		return startWaits, run.NeedsPerson(fmt.Errorf("this version of firstboot cannot carry out the decision %q about etcd", d.Do), "keep the disk, and update the image")
	}
	if d.Fix != "" && t.e.Now().Sub(t.since) >= fixAfter {
		t.e.Waiting("a safe start of etcd: %s; to fix: %s", d.Why, d.Fix)
	} else {
		t.e.Waiting("a safe start of etcd: %s", d.Why)
	}
	return startWaits, nil
}

// setAside moves etcd's data aside.
func (t *etcdStarter) setAside(d etcdmember.Decision) (startResult, error) {
	if c := t.site.ControlPlane; c.Restore != "" && c.ContinueFrom == t.site.Self().Name {
		// Check that the snapshot that will replace the data exists.
		if _, err := stageSnapshot(t.e, strings.ToLower(c.Restore)); err != nil {
			return startWaits, err
		}
	}
	to, err := moveAside(t.e)
	if err != nil {
		return startWaits, err
	}
	t.e.Console("etcd's data was moved to " + to + ": " + d.Why)
	return dataChanged, nil
}

// joinCluster adds this machine to the members of etcd, and starts etcd.
func (t *etcdStarter) joinCluster(ctx context.Context, d etcdmember.Decision) (startResult, error) {
	if err := SetAsideLogless(t.e); err != nil {
		return startWaits, err
	}
	members, err := t.join(ctx, d)
	if err != nil {
		// A temporary failure, for example while another member is restarting.
		t.e.Waiting("etcd to accept this machine as a member: %s", machine.OneLine(err))
		return startWaits, nil
	}
	if err := saveMembership(t.e, t.site); err != nil {
		return startWaits, err
	}
	return etcdStarted, t.start(ctx, "existing", members)
}

// view reads the state of this machine's disk, and asks the other control-plane nodes for their
// states.
func (t *etcdStarter) view(ctx context.Context) (etcdmember.View, error) {
	self := t.site.Self()
	v := etcdmember.View{Self: self.Name, PeerURL: self.PeerURL(), Cluster: t.site.ControlPlane.ID, Permit: permitState(t.e, t.site), PermitID: PermitID(t.site), Dates: permitDates(t.e, t.site),
		Request: etcdmember.Request{ContinueFrom: t.site.ControlPlane.ContinueFrom, Restore: t.site.ControlPlane.Restore != "", Restored: restoredBefore(t.e, t.site), Absent: t.site.ControlPlane.Absent}}
	var err error
	if v.Disk, err = etcdDisk(t.e); err != nil {
		return v, err
	}
	v.Disk.Continued = ReadMembership(t.e).hasCarriedOut(t.site)
	t.via = etcdmember.Client{}
	var etcds []etcdmember.Client
	counted := false
	for _, a := range t.askPeers(ctx) {
		v.Peers = append(v.Peers, a.peer)
		counted = counted || a.peer.Name == v.Request.ContinueFrom && a.peer.State == etcdmember.InUse && v.Disk.Member != "" && slices.Contains(a.counts, v.Disk.Member)
		if a.members == nil {
			continue
		}
		etcds = append(etcds, a.etcd)
		if !v.Quorum {
			v.Quorum, v.Members, v.Etcd, t.via = true, a.members, a.cluster, a.etcd
		}
	}
	if !counted || v.Quorum {
		t.named = time.Time{}
	} else if t.named.IsZero() {
		t.named = t.e.Now()
	}
	v.Counted = !t.named.IsZero() && t.e.Now().Sub(t.named) >= countedFor
	if v.Quorum && !v.Disk.WAL {
		v.Former, v.FormerWhy, err = t.formerMembership(ctx, v, etcds)
		v.DeadLearner = t.deadLearner(ctx, v, etcds)
	}
	return v, err
}

// peerAnswer is the state of another control-plane node, and of etcd's quorum as that node sees it.
type peerAnswer struct {
	peer    etcdmember.Peer
	counts  []string // IDs of the members in its data
	cluster string
	members []etcdmember.Member // nil: no quorum responds through this node
	etcd    etcdmember.Client
}

// askPeers asks all other control-plane nodes at once.
func (t *etcdStarter) askPeers(ctx context.Context) []peerAnswer {
	peers := slices.DeleteFunc(slices.Clone(t.site.ControlPlane.Members), func(m configs.ControlPlaneMember) bool { return m.Name == t.site.Self().Name })
	answers := make([]peerAnswer, len(peers))
	var wg sync.WaitGroup
	for i, m := range peers {
		wg.Go(func() {
			a := &answers[i]
			a.peer, a.counts = etcdmember.AskPeer(ctx, t.client, m.PeerURL())
			a.peer.Name = m.Name
			if a.peer.State != etcdmember.InUse {
				return
			}
			a.etcd = memberEtcd(t.client, m)
			cluster, members, err := a.etcd.List(ctx)
			if err != nil {
				t.e.Log.Debug("no quorum of etcd answers through "+m.Name, "error", err)
				return
			}
			a.cluster, a.members = cluster, members
		})
	}
	wg.Wait()
	return answers
}

func memberEtcd(client *http.Client, m configs.ControlPlaneMember) etcdmember.Client {
	return etcdmember.Client{HTTP: client, URL: "https://" + net.JoinHostPort(m.Address, configs.EtcdClientPort)}
}

// etcdDisk describes etcd's data on the disk. An unreadable disk is an error, because it may have
// data, or a record that the cluster was already created.
func etcdDisk(e *machine.Env) (etcdmember.Disk, error) {
	var d etcdmember.Disk
	var err error
	d.WAL, d.Member, d.Etcd, err = etcdmember.ReadLog(e.Path(configs.EtcdDataDir + "/member/wal"))
	if err != nil {
		return d, run.Advise(fmt.Errorf("reading etcd's data: %w", err), "check the disk; to replace it, write the image to a new disk: the machine then joins again, if more than half of all control-plane nodes run without it")
	}
	b, err := e.ReadIfExists(MembershipFile)
	if err != nil {
		return d, run.Advise(fmt.Errorf("reading the record of etcd's data: %w", err), "check the disk (`journalctl -k`)")
	}
	d.Cluster = parseMembership(b).Cluster
	return d, nil
}

func isBlank(e *machine.Env) bool {
	d, err := etcdDisk(e)
	return err == nil && !d.WAL
}

// everyMember returns the value of etcd's --initial-cluster: all control-plane nodes that are not
// absent.
func everyMember(site *configs.Site) string {
	var parts []string
	for _, m := range site.ControlPlane.Members {
		if slices.Contains(site.ControlPlane.Absent, m.Name) {
			continue
		}
		parts = append(parts, m.Name+"="+m.PeerURL())
	}
	return strings.Join(parts, ",")
}

// answerBlank tells the other nodes that this machine has no data, until etcd is started or the
// pass ends.
func (t *etcdStarter) answerBlank(ctx context.Context, answer etcdmember.Answer) {
	if t.blank != nil {
		return
	}
	conf, err := EtcdTLS(t.e)
	if err != nil {
		t.e.Log.Warn("telling the other control-plane nodes that this one has no etcd data", "error", err)
		return
	}
	l, err := t.e.Listen(ctx, net.JoinHostPort(t.site.Self().Address, configs.EtcdPeerPort))
	if err != nil {
		t.e.Log.Warn("telling the other control-plane nodes that this one has no etcd data", "error", err)
		return
	}
	server := &http.Server{Handler: etcdmember.ServeBlank(answer, func() bool { return isBlank(t.e) }), ReadHeaderTimeout: askTimeout}
	t.blank = server
	go func() { _ = server.Serve(tls.NewListener(l, conf)) }() // ends with Close
}

func (t *etcdStarter) close() {
	if t.blank != nil {
		t.blank.Close()
		t.blank = nil
	}
}

// saveMembership records that etcd's data belongs to the Site's cluster, and that the Site's
// request to continue is carried out.
func saveMembership(e *machine.Env, site *configs.Site) error {
	return ReadMembership(e).CarriedOut(site).write(e)
}

// join removes the members in d.Remove, and adds this machine as a member of a running cluster.
// An attempt after an interruption reads the list of members again.
func (t *etcdStarter) join(ctx context.Context, d etcdmember.Decision) (initialCluster string, err error) {
	for _, id := range d.Remove {
		if err := t.via.Remove(ctx, id); err != nil {
			return "", err
		}
		t.e.Log.Info("removed an old member of etcd: this machine's previous one, or one that never started", "id", id)
	}
	self, err := t.via.AddLearner(ctx, t.site.Self().PeerURL())
	if err != nil {
		return "", err
	}
	members, err := t.via.Members(ctx)
	if err != nil {
		return "", err
	}
	return etcdmember.InitialCluster(members, self, t.site.Self().Name), nil
}

// start makes kubelet start etcd.
func (t *etcdStarter) start(ctx context.Context, state, members string, more ...kubeadm.Arg) error {
	t.close() // etcd needs its port
	return startEtcd(ctx, t.e, t.active, append([]kubeadm.Arg{
		{Name: "initial-cluster", Value: members},
		{Name: "initial-cluster-state", Value: state},
		// etcd uses the token only at a bootstrap. The token is the same on all machines, whatever
		// their image, and differs between bootstrap permits.
		{Name: "initial-cluster-token", Value: etcdmember.Token(t.site.ControlPlane.ID, PermitID(t.site))},
	}, more...))
}

// startEtcd makes kubelet start etcd, or restart it with other arguments.
func startEtcd(ctx context.Context, e *machine.Env, active *site.Active, args []kubeadm.Arg) error {
	if err := e.Symlink(EtcdRun, EtcdManifest); err != nil {
		return fmt.Errorf("starting etcd: %w", err)
	}
	if err := kubeadm.Init(ctx, e, active, kubeadm.Local{EtcdArgs: args}, []string{"etcd", "local"}); err != nil {
		return err
	}
	written := EtcdManifest
	if target, err := os.Readlink(e.Path(EtcdManifest)); err == nil {
		written = target // kubeadm writes through a link
	}
	pod := e.Contents(written)
	if len(pod) == 0 {
		return errors.New("starting etcd: kubeadm wrote no manifest of etcd's pod")
	}
	if err := e.WriteFile(EtcdRun, pod, machine.Mode(0o600)); err != nil {
		return fmt.Errorf("starting etcd: %w", err)
	}
	// kubelet notices changes in the directory, but not changes of a link's target.
	if err := e.Symlink(EtcdRun, EtcdManifest); err != nil {
		return fmt.Errorf("starting etcd: %w", err)
	}
	return nil
}

// promote gives this machine's etcd member a vote if it is a learner.
func promote(ctx context.Context, e *machine.Env, site *configs.Site, client *http.Client) error {
	self := site.Self()
	for _, m := range site.ControlPlane.Members {
		if m.Name == self.Name {
			continue
		}
		via := memberEtcd(client, m)
		members, err := via.Members(ctx)
		if err != nil {
			continue
		}
		for _, own := range members {
			if own.Learner && slices.Contains(own.PeerURLs, self.PeerURL()) {
				if err := via.Promote(ctx, own.ID); err != nil {
					return err
				}
				e.Log.Info("this machine is now a voting member of etcd", "id", own.ID)
			}
		}
		return nil
	}
	return nil
}
