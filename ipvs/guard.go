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

// A cluster may be born again with the same keys, its API servers' disks having
// been lost. By its certificates nobody tells it from the cluster that this node
// joined: kubelet would be told that it has no pods, and stop those that run. So
// where it is known what the node joined, an API server gets no traffic until it
// has shown something that only that cluster has.

// Joined is the cluster that the node joined. The zero value: any whose API
// servers have a certificate of the CA.
type Joined struct {
	// ClusterInfo is the UID of the ConfigMap kube-public/cluster-info, which
	// anybody may read.
	ClusterInfo string
	// Node is the node's name, and NodeUID the UID of its Node, which is read
	// with the node's certificate. It is the second witness: cluster-info may have
	// been made anew, or be hidden.
	Node, NodeUID string
	// ServiceUID is the UID of the Service default/kubernetes, which API servers make
	// when they start, and each node may read. A cluster that was born again shows
	// another one before it has published cluster-info. Notes of former releases lack it.
	ServiceUID string
}

const (
	clusterInfoPath = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
	nodePath        = "/api/v1/nodes/"
	servicePath     = "/api/v1/namespaces/default/services/kubernetes"
	// metadataOnly has an API server leave the contents of an object out.
	metadataOnly = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
)

const (
	// vouchTime bounds each question: some packets may be lost.
	vouchTime = 5 * time.Second
	// hiddenTime is how long an API server that has no cluster-info to show, and
	// not the node's Node, is taken for one whose cluster was just born: nodes
	// cannot join that yet. After it, somebody has hidden the one and deleted the
	// other. Where the Service was noted, time proves nothing: see below.
	hiddenTime = 10 * time.Minute
	// rebornPause is how many times longer than one that is down an API server of
	// another cluster is left alone: that ends when a person does something.
	rebornPause = 60
)

// errHidden: the API server shows neither.
var errHidden = errors.New("it shows neither cluster-info nor this node's Node")

// vouch has the API server show which cluster it is of.
func (j *Joined) vouch(ctx context.Context, t probe.Target) (probe.Outcome, error) {
	anonymous := t
	anonymous.Client = nil // kubeadm's RBAC rule grants it to system:anonymous alone
	info, infoStatus, err := uidOf(ctx, anonymous, clusterInfoPath)
	if infoStatus == 200 && info == j.ClusterInfo {
		return probe.OK, nil
	}
	var noInfo error
	if err != nil {
		noInfo = fmt.Errorf("asking for its cluster-info: %w", err)
		// One that hangs up on strangers may answer the node.
		if class := probe.Classify(err, false); class != probe.Closed || ctx.Err() != nil {
			return class, noInfo
		}
	}
	node, nodeStatus, err := uidOf(ctx, t, nodePath+j.Node)
	if nodeStatus == 200 && node == j.NodeUID {
		return probe.OK, nil
	}
	if err != nil && noInfo == nil {
		return probe.Classify(err, false), fmt.Errorf("asking for this node's Node: %w", err)
	}
	var service string
	var serviceStatus int
	if err == nil && j.ServiceUID != "" {
		service, serviceStatus, err = uidOf(ctx, t, servicePath)
		if serviceStatus == 200 && service == j.ServiceUID {
			return probe.OK, nil
		}
		if err != nil && noInfo == nil {
			return probe.Classify(err, false), fmt.Errorf("asking for its Service default/kubernetes: %w", err)
		}
	}
	if noInfo != nil {
		return probe.Closed, noInfo
	}
	said := fmt.Errorf("cluster-info: %s, it was %s; Node %s: %s, it was %s", uidWord(info, infoStatus), j.ClusterInfo, j.Node, uidWord(node, nodeStatus), j.NodeUID)
	if j.ServiceUID != "" {
		said = fmt.Errorf("%w; Service default/kubernetes: %s, it was %s", said, uidWord(service, serviceStatus), j.ServiceUID)
	}
	noNode := nodeStatus == 200 || nodeStatus == 404 // another machine's, or none
	switch {
	case noNode && (infoStatus == 200 || serviceStatus == 200):
		return probe.Reborn, said
	case noNode && j.ServiceUID != "":
		// A cluster that was just born shows none of the three, and publishing may
		// take any time.
		return probe.Unshown, said
	case isHidden(infoStatus) && (noNode || isHidden(nodeStatus)):
		return probe.Unshown, fmt.Errorf("%w (%w)", errHidden, said)
	}
	return probe.Unshown, said // as while it starts
}

// isHidden reports whether a status says that something is not there, or not to
// be seen.
func isHidden(status int) bool { return status == 401 || status == 403 || status == 404 }

func uidWord(uid string, status int) string {
	if status == 200 {
		return uid
	}
	return fmt.Sprintf("status %d", status)
}

// uidOf reads the UID of one object.
func uidOf(ctx context.Context, t probe.Target, path string) (uid string, status int, err error) {
	t.Progress = nil
	t.Probe = probe.Spec{Method: "GET", Path: path, Headers: map[string]string{"Accept": metadataOnly}}
	e, _, err := fetch(ctx, t, vouchTime)
	if err != nil || e.Status != 200 {
		return "", e.Status, err
	}
	var object struct {
		Metadata struct {
			UID string `json:"uid"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(e.Body, &object); err != nil || object.Metadata.UID == "" {
		return "", 0, fmt.Errorf("%s is answered with something else than an object", path)
	}
	return object.Metadata.UID, 200, nil
}

// vouch is asked for each new connection to an API server.
func (g *group) vouch(ctx context.Context, a netip.AddrPort, m *member) (probe.Outcome, error) {
	g.mu.Lock()
	joined, t := g.server.Joined, g.target(a, m.name)
	g.mu.Unlock()
	if joined == (Joined{}) || t.Roots == nil || t.Probe.Unsafe || t.Probe.Plain {
		return probe.OK, nil
	}
	class, err := joined.vouch(ctx, t)
	g.mu.Lock()
	defer g.mu.Unlock()
	if m.hiddenForLong(err, time.Now()) {
		if !m.excused { // it may be asked every few seconds
			m.excused = true
			g.d.logf("%s: API server %s: %v for %s: taking it for one of the cluster that this node joined", g.vip, a, err, hiddenTime)
		}
		return probe.OK, nil
	}
	return class, err
}

// hiddenForLong takes what became of a question, and reports whether the API
// server has shown nothing for so long that it is let through.
func (m *member) hiddenForLong(err error, now time.Time) bool {
	if !errors.Is(err, errHidden) {
		m.resetHidden()
		return false
	}
	if m.hidden.IsZero() {
		m.hidden = now
	}
	return now.Sub(m.hidden) >= hiddenTime
}

// resetHidden begins anew with the time for which an API server may show nothing.
func (m *member) resetHidden() { m.hidden, m.excused = time.Time{}, false }

// guarded reports whether API servers have to show their cluster. g.mu is held.
func (g *group) guarded() bool { return g.server.Joined != (Joined{}) }

// lost reports whether an API server that is down may come back as one of
// another cluster: it does not answer. One that answers, however badly or late, is
// what it was.
func (m *member) lost() bool {
	return m.health.State == Down && !m.health.Class.Answered() && !m.health.slow()
}
