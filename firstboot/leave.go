package firstboot

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// A machine belongs to the cluster whose CA it trusts. It moves to the Site's cluster only after
// that cluster was verified and has accepted the token: a mistake must not remove a node from its
// cluster.

// clusterPhase makes the machine leave a cluster that is not the Site's or was bootstrapped again,
// and installs the cluster's CA if that was reissued. It runs before ipvscare gets the Site's API
// servers, because ipvscare verifies them with the CA on the disk.
func clusterPhase(active *site.Active) run.Phase {
	var action clusterAction
	var newCA []byte // of adoptReissuedCA
	return run.Phase{
		Name: "cluster", Doc: "this machine is in the Site's cluster, or in none", Timeout: 2 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (_ run.Verdict, err error) {
			action, newCA, err = chooseClusterAction(ctx, e, active.Site)
			return action.verdict(), err
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			switch action {
			case adoptReissuedCA:
				return adoptCA(ctx, e, newCA)
			case rejoin:
				return forgetJoinedCluster(ctx, e, active)
			case leave:
				if err := beginToLeave(ctx, e, active); err != nil {
					return err
				}
				return leaveCluster(ctx, e, active)
			case finishLeaving:
				return leaveCluster(ctx, e, active)
			}
			return nil
		},
	}
}

// clusterAction is the work of clusterPhase.
type clusterAction int

const (
	stay            clusterAction = iota // the machine is in the Site's cluster, or in none
	wait                                 // it is unclear in which cluster the machine is
	adoptReissuedCA                      // install the new CA of the machine's cluster
	rejoin                               // join the same cluster again, because the node's certificate is not valid now
	leave                                // leave the cluster for the Site's, which may be the same one bootstrapped again
	finishLeaving                        // remove the files of a cluster that the machine has left
)

func (a clusterAction) verdict() run.Verdict {
	switch a {
	case stay:
		return run.Done
	case wait:
		return run.Unknown
	}
	return run.Todo
}

// chooseClusterAction is the Check of clusterPhase. newCA is set for adoptReissuedCA.
func chooseClusterAction(ctx context.Context, e *machine.Env, s *configs.Site) (action clusterAction, newCA []byte, err error) {
	if e.Exists(member.LeavingFile) {
		return finishLeaving, nil, nil
	}
	if !member.HasCredentials(e) {
		// Without a token the machine could join no cluster, so it keeps what is left of its credentials.
		_, damaged := member.KubeletCert(e)
		if member.StaleCA(e, s) && (damaged != nil || !s.Credentials.Token.IsZero()) {
			return finishLeaving, nil, nil
		}
		return stay, nil, nil
	}
	same, err := sameCluster(ctx, e, s)
	switch {
	case errors.Is(err, errUnclear):
		return wait, nil, nil
	case err != nil:
		return stay, nil, err
	case !same && !s.Credentials.Token.IsZero():
		return leave, nil, nil
	case !same && member.Unpinned(s):
		// Other servers may have the masters' addresses for a while. Treat the API servers as
		// unreachable.
		e.Note("%s", otherClusterNote(e))
		return wait, nil, nil
	case !same:
		return stay, nil, noTokenToMove(e, s)
	}
	if ca := member.NewerCA(ctx, e, s); ca != nil {
		return adoptReissuedCA, ca, nil
	}
	member.NoteCAExpiry(e, ondisk.KubeCA)
	if s.Credentials.Token.IsZero() {
		return stay, nil, nil
	}
	again, unclear := member.CheckRecreated(ctx, e, s)
	switch {
	case member.CannotShow(e, unclear):
		return rejoin, nil, nil
	case again:
		return leave, nil, nil // the Site has a token: the machine joins again
	}
	return stay, nil, nil
}

// beginToLeave clears the record of the machine's cluster, once the new cluster has accepted the
// token. Until then the machine stays a member.
func beginToLeave(ctx context.Context, e *machine.Env, active *site.Active) error {
	if err := verifyNewCluster(ctx, e, active); err != nil {
		return err
	}
	name := member.NodeName(e)
	e.Log.Info("leaving the old cluster", "node", name, "ca", strings.Join(member.EnrolledPins(e), ", "))
	if member.Recreated(ctx, e, active.Site) {
		e.Console("the cluster was bootstrapped again with the same keys, and the Site has a token for it: joining it again")
	} else {
		e.Console(fmt.Sprintf("the Site names another cluster: leaving the old one (CA %s). Remove the Node there: kubectl delete node %s",
			strings.Join(member.EnrolledPins(e), ", "), name))
	}
	// The record still has the old cluster's CA and node name.
	return (member.Record{Version: member.RecordVersion}).Write(e)
}

// forgetJoinedCluster removes the recorded UIDs of the cluster, because ipvscare rejects API
// servers with other UIDs. The cluster must accept the Site's token first. Afterwards the node
// joins again.
func forgetJoinedCluster(ctx context.Context, e *machine.Env, active *site.Active) error {
	d := join.OwnDiscovery(e, active)
	e.Waiting("the cluster to accept the Site's token (%s)", strings.Join(d.Masters, ", "))
	if _, err := join.FindCluster(ctx, e, d); err != nil {
		return err
	}
	e.Console("this node's certificate has expired or is not valid yet, so it cannot identify the cluster. The cluster accepts the Site's token: joining it again")
	if err := e.Remove(member.JoinedCluster); err != nil {
		return fmt.Errorf("removing the record of the old cluster: %w", err)
	}
	return nil
}

// errUnclear means that no API server showed whether it belongs to this machine's cluster.
var errUnclear = errors.New("no API server has shown its cluster")

// sameCluster reports whether a member belongs to the Site's cluster. It compares the Site's pins,
// which works offline. If the Site has none, it compares the API servers' certificates.
func sameCluster(ctx context.Context, e *machine.Env, s *configs.Site) (bool, error) {
	if !member.Unpinned(s) {
		return member.AnyPinned(member.EnrolledCA(e), s.CAPins()), nil
	}
	same, err := showCA(ctx, e, s, s.Masters)
	if same || err == nil && !s.Credentials.Token.IsZero() { // with a token, the machine may have to move to the cluster that answers
		return same, err
	}
	if learned := member.LearnedMasters(e, s); len(learned) > 0 {
		// The learned servers replaced the Site's. The Site's addresses may now belong to other
		// machines.
		if now, unclear := showCA(ctx, e, s, learned); now || err != nil {
			return now, unclear
		}
	}
	return same, err
}

// showCA reports whether one of these API servers has a certificate from the CA that this
// machine is enrolled with. It returns errUnclear if none shows its CA.
func showCA(ctx context.Context, e *machine.Env, s *configs.Site, masters []string) (bool, error) {
	ca := member.EnrolledCA(e)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	errs := make([]error, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		wg.Go(func() {
			_, errs[i] = e.APIDialer().ServerName(ctx, m, ca, []string{kubeapi.SharedName, s.Endpoint})
		})
	}
	wg.Wait()
	foreign := false
	for _, err := range errs {
		var unknown x509.UnknownAuthorityError
		switch {
		case err == nil, errors.Is(err, kubeapi.ErrServerName):
			return true, nil
		case errors.As(err, &unknown):
			foreign = true
		}
	}
	if !foreign {
		return false, errUnclear
	}
	return false, nil
}

// noTokenToMove is the error of a member whose Site names another cluster but has no token for it.
func noTokenToMove(e *machine.Env, s *configs.Site) error {
	return run.NeedsPerson(fmt.Errorf("the Site names another cluster than the one this machine has joined, and has no token for it: the Site pins CA %s, the machine has CA %s",
		strings.Join(s.CAPins(), ", "), strings.Join(member.EnrolledPins(e), ", ")),
		"to move the machine, put a token of the other cluster into site.yaml (`kubeadm token create`), in the slot or on a stick; else correct caCertHashes. Until then the node stays in its cluster")
}

// otherClusterNote is the note for a member whose Site has neither pins nor a token, and whose API
// servers' addresses lead to servers with another CA.
func otherClusterNote(e *machine.Env) string {
	return fmt.Sprintf("the API servers do not belong to the cluster that this machine has joined (CA %s): it stays in its cluster, and treats them as unreachable. To fix: if the cluster was rebuilt, put a token of the new cluster into site.yaml (`kubeadm token create`), in the slot or on a stick; else correct masters",
		strings.Join(member.EnrolledPins(e), ", "))
}

// verifyNewCluster checks that the new cluster answers, matches the pins, accepts the token, and
// has no Ready Node with this machine's name.
func verifyNewCluster(ctx context.Context, e *machine.Env, active *site.Active) error {
	d := join.DiscoveryOf(e, active)
	d.Masters = active.Site.Masters // without those learned from the old cluster
	e.Waiting("the Site's cluster to accept the token (%s); until then the node stays in its current cluster", strings.Join(d.Masters, ", "))
	found, err := join.FindCluster(ctx, e, d)
	if err != nil {
		return err
	}
	return join.NameIsFree(e, found.Node, active.Node)
}

// leaveCluster removes the files of the old cluster, except the membership record, and returns
// run.ErrRestart. The CA goes last, just before LeavingFile: after a power cut, it shows to which
// cluster the other files belong.
func leaveCluster(ctx context.Context, e *machine.Env, active *site.Active) error {
	if err := e.WriteFile(member.LeavingFile, nil, machine.Mode(0o600)); err != nil {
		return fmt.Errorf("leaving the cluster: %w", err)
	}
	e.Waiting("the old cluster's credentials to be removed")
	// Pods keep running until kubelet has joined the new cluster and stops those that are not in
	// it.
	if err := hub.UndoPodJoin(ctx, e, active.Site.CRISocket); err != nil {
		return fmt.Errorf("leaving the cluster: %w", err)
	}
	if err := hub.Remove(ctx, e, active.Image); err != nil {
		return fmt.Errorf("leaving the cluster: %w", err)
	}
	if err := resetIPVS(ctx, e, active.Site); err != nil {
		return fmt.Errorf("leaving the cluster: %w", err)
	}
	for _, p := range append(clusterFiles(e), ondisk.KubeCA, member.LeavingFile) {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("leaving the cluster: %w", err)
		}
	}
	return run.ErrRestart // from now on, the machine has the Site's node name
}

// clusterFiles returns the files that depend on the cluster, without kubelet's credentials, the CA, and
// the files of yurthub and ipvscare.
func clusterFiles(e *machine.Env) []string {
	return slices.Concat(member.ClusterFiles(e), kubeadm.ClusterFiles, join.ClusterFiles)
}

// adoptCA makes kubelet, yurthub and first boot trust a reissued CA. It writes KubeCA last: until
// then, the next run installs the CA again. ipvscare rereads KubeCA by itself.
func adoptCA(ctx context.Context, e *machine.Env, ca []byte) error {
	const doing = "installing the cluster's reissued CA"
	end, err := kubeapi.FirstExpiry(ca)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	var changes []func(*machine.Env) error
	for _, f := range []string{ondisk.KubeletConf, openyurt.Identity} {
		conf, err := e.Read(f)
		if err != nil {
			continue // missing: a later phase writes it with the new CA
		}
		k, err := e.ParseKubeconfig(conf)
		if err != nil {
			continue
		}
		if c, err := k.Cluster(); err != nil || c.CAData == "" {
			continue // it has no cluster, or names the CA's file
		}
		next, err := kubeapi.SetCA(conf, ca)
		if err != nil {
			return fmt.Errorf("%s: %s: %w", doing, f, err)
		}
		changes = append(changes, kubeadm.Writing(f, next, 0o600))
	}
	changes = append(changes, func(e *machine.Env) error {
		state, err := e.UnitState(ctx, openyurt.Unit)
		if err == nil && state == "active" {
			err = e.Unit(ctx, "restart", openyurt.Unit)
		}
		return err
	})
	if err := kubeadm.RestartFor(ctx, e, doing, changes...); err != nil {
		return err
	}
	if _, err := e.Write(ondisk.KubeCA, ca, machine.Mode(fs.FileMode(0o644))); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	e.Log.Info("the cluster's CA was issued again", "end", end.UTC())
	return nil
}
