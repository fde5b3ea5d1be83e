package ipvs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// A cluster may be created again with the same keys after its disks were lost. Its certificates
// then look the same, but kubelet would stop all pods if it used that cluster. Therefore a node
// that knows which cluster it joined sends traffic to an API server only after the API server has
// shown an object that only that cluster has. See maxHidden for the exception.

// Joined identifies the cluster that the node joined. The zero value accepts any cluster with the
// same CA.
type Joined struct {
	// ClusterInfo is the UID of the ConfigMap kube-public/cluster-info, which
	// is readable without authentication.
	ClusterInfo string
	// Node is the node's name, and NodeUID the UID of its Node object. It is read with the node's
	// certificate, and checked because cluster-info may be re-created or unreadable.
	Node, NodeUID string
	// ServiceUID is the UID of the Service default/kubernetes, which API servers create when they
	// start and every node may read. A re-created cluster has another UID even before it has
	// cluster-info. It is empty if an older release wrote the configuration.
	ServiceUID string
}

const (
	clusterInfoPath = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
	nodePath        = "/api/v1/nodes/"
	servicePath     = "/api/v1/namespaces/default/services/kubernetes"
	// metadataOnly is an Accept header that requests objects without their
	// contents.
	metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
)

const (
	// questionTimeout limits each request. An overloaded API server may need as long for it as for
	// a handshake.
	questionTimeout = maxTimeout
	// maxHidden is the time after which an API server that shows neither cluster-info nor the Node
	// is trusted: a new cluster would have published cluster-info by then. If ServiceUID is known,
	// this applies only if access to the Node is denied.
	maxHidden = 10 * time.Minute
	// recreatedPause multiplies the pause before the next probe of an API server of another
	// cluster: only a person can repair that.
	recreatedPause = 60
)

// errHidden means that the API server shows neither cluster-info nor the Node.
var errHidden = errors.New("it shows neither cluster-info nor this node's Node")

// shownUID is an API server's answer to a request for an object's UID.
type shownUID struct {
	uid    string // "" unless status is 200
	status int
}

func (s shownUID) is(uid string) bool { return uid != "" && s.uid == uid }

// hidden reports whether the object does not exist or is not readable.
func (s shownUID) hidden() bool { return s.status == 401 || s.status == 403 || s.status == 404 }

// busy reports whether the API server is too busy to answer, or does not reach etcd.
func (s shownUID) busy() bool { return s.status == 429 || s.status >= 500 }

func (s shownUID) String() string {
	if s.status == 200 {
		return s.uid
	}
	return fmt.Sprintf("status %d", s.status)
}

// check checks that an API server belongs to the joined cluster. One matching UID is sufficient
// proof. It asks no further question after an answer that tells nothing about the cluster, because
// the API server may be overloaded.
func (j *Joined) check(ctx context.Context, t probe.Target) (probe.Outcome, error) {
	type question struct {
		object    string
		target    probe.Target
		path, uid string
	}
	anonymous := t
	anonymous.Client = nil // kubeadm's RBAC rule grants access only to system:anonymous
	questions := []question{
		// The Node first: an overloaded API server serves nodes before anonymous clients.
		{"this node's Node", t, nodePath + j.Node, j.NodeUID},
		{"its cluster-info", anonymous, clusterInfoPath, j.ClusterInfo},
	}
	if j.ServiceUID != "" {
		questions = append(questions, question{"its Service default/kubernetes", t, servicePath, j.ServiceUID})
	}
	var answers [3]shownUID
	var broken error
	for i, q := range questions {
		answer, err := uidOf(ctx, q.target, q.path)
		if answer.is(q.uid) {
			return probe.OK, nil
		}
		if answers[i] = answer; err == nil && !answer.busy() {
			continue
		}
		outcome := probe.Busy
		if err == nil {
			err = errors.New(answer.String())
		} else {
			outcome = probe.Classify(err, false)
		}
		err = fmt.Errorf("asking for %s: %w", q.object, err)
		// A server that closes anonymous connections may answer requests with the node's
		// certificate, and the other way round.
		if outcome != probe.Closed || ctx.Err() != nil {
			return outcome, err
		}
		if broken == nil {
			broken = err
		}
	}
	if broken != nil {
		return probe.Closed, broken
	}
	node, info, service := answers[0], answers[1], answers[2]
	return j.judge(info, node, service)
}

// judge returns the outcome for an API server that showed none of the recorded objects.
func (j *Joined) judge(info, node, service shownUID) (probe.Outcome, error) {
	err := fmt.Errorf("UID of cluster-info: %s, recorded: %s; of Node %s: %s, recorded: %s", info, j.ClusterInfo, j.Node, node, j.NodeUID)
	if j.ServiceUID != "" {
		err = fmt.Errorf("%w; of Service default/kubernetes: %s, recorded: %s", err, service, j.ServiceUID)
	}
	noNode := node.status == 200 || node.status == 404 // the Node of another machine, or none
	switch {
	case noNode && (info.status == 200 || service.status == 200):
		return probe.Recreated, err
	case noNode && j.ServiceUID != "":
		// A cluster that was just initialized shows none of the three objects, and may take
		// arbitrarily long to create them.
		return probe.Unshown, err
	case info.hidden() && (noNode || node.hidden()):
		return probe.Unshown, fmt.Errorf("%w (%w)", errHidden, err)
	}
	return probe.Unshown, err // for example while it starts
}

// uidOf reads the UID of one object.
func uidOf(ctx context.Context, t probe.Target, path string) (shownUID, error) {
	t.Progress = nil
	t.Probe = probe.Spec{Method: "GET", Path: path, Headers: map[string]string{"Accept": metadataOnly}}
	e, _, err := fetch(ctx, t, questionTimeout)
	if err != nil || e.Status != 200 {
		return shownUID{status: e.Status}, err
	}
	var object struct {
		Metadata struct {
			UID string `json:"uid"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(e.Body, &object); err != nil || object.Metadata.UID == "" {
		return shownUID{}, fmt.Errorf("its answer to GET %s is not a Kubernetes object", path)
	}
	return shownUID{object.Metadata.UID, 200}, nil
}

// checkCluster checks the cluster of an API server on a new connection.
func (g *group) checkCluster(ctx context.Context, a netip.AddrPort, srv *apiServer) (probe.Outcome, error) {
	g.mu.Lock()
	joined, name := g.server.Joined, srv.name
	g.mu.Unlock()
	t := g.target(a, name)
	if joined == (Joined{}) || t.Roots == nil || t.Probe.Unsafe || t.Probe.Plain {
		return probe.OK, nil
	}
	outcome, err := joined.check(ctx, t)
	g.mu.Lock()
	defer g.mu.Unlock()
	if srv.hiddenForLong(err, time.Now()) {
		if !srv.trustedAnyway { // log it once
			srv.trustedAnyway = true
			g.d.logf("%s: API server %s: %v for %s: trusting it as an API server of the cluster that this node joined", g.vip, a, err, maxHidden)
		}
		return probe.OK, nil
	}
	return outcome, err
}

// hiddenForLong records the result of a check. It reports whether the API server has shown nothing
// for maxHidden.
func (srv *apiServer) hiddenForLong(err error, now time.Time) bool {
	if !errors.Is(err, errHidden) {
		srv.resetHidden()
		return false
	}
	if srv.hiddenSince.IsZero() {
		srv.hiddenSince = now
	}
	return now.Sub(srv.hiddenSince) >= maxHidden
}

// resetHidden forgets how long the API server has shown nothing.
func (srv *apiServer) resetHidden() { srv.hiddenSince, srv.trustedAnyway = time.Time{}, false }

// guarded reports whether API servers must show their cluster. g.mu must be
// held.
func (g *group) guarded() bool { return g.server.Joined != (Joined{}) }

// lost reports whether an API server is down and does not answer, so that it could come back in
// another cluster. A server that answers with errors, or late, is still the same one.
func (srv *apiServer) lost() bool {
	return srv.health.State == Down && !srv.health.Outcome.Answered() && !srv.health.slow()
}
