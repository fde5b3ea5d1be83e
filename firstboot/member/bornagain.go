package member

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// A cluster may be born again with the keys that it had. Nothing in its API
// servers' certificates tells, and a kubelet that takes it for its own is told
// that it has no pods, and stops those that run. So a node notes once it is Ready
// what only this cluster has, and ipvscare (package ipvs) gives no other one any
// traffic.

// JoinedCluster is that note.
const JoinedCluster = ondisk.StateDir + "/joined-cluster.json"

// ReadJoinedCluster returns what the machine noted of the cluster that it joined, nil if
// nothing usable is there.
func ReadJoinedCluster(e *machine.Env) *ondisk.IPVSJoined {
	j := new(ondisk.IPVSJoined)
	if json.Unmarshal(e.Contents(JoinedCluster), j) != nil || j.ClusterInfo == "" || j.NodeUID == "" {
		return nil
	}
	return j
}

// ClusterNow identifies the cluster that this node is Ready in, by the UIDs of
// cluster-info, of the Node and, where the node may read it, of the API servers' Service.
// It is nil if cluster-info cannot be read.
func ClusterNow(ctx context.Context, e *machine.Env, n *api.Node) (*ondisk.IPVSJoined, error) {
	c, err := NodeClient(e)
	if err != nil {
		return nil, err
	}
	uid, err := c.ClusterInfoUID(ctx)
	if err != nil && api.Code(err) == 0 {
		return nil, fmt.Errorf("asking for cluster-info: %w", err)
	}
	if uid == "" || n.Metadata.UID == "" {
		return nil, nil
	}
	service, err := c.ServiceUID(ctx)
	if err != nil && api.Code(err) == 0 {
		return nil, fmt.Errorf("asking for the Service default/kubernetes: %w", err)
	}
	return &ondisk.IPVSJoined{ClusterInfo: uid, Node: n.Metadata.Name, NodeUID: n.Metadata.UID, ServiceUID: service}, nil
}

// ClusterToNote is the note that is to replace the one there is, nil if that one is
// right or cannot be made better.
//
// A person may publish cluster-info anew, and later delete the Node: a note that kept
// what it began with would match nothing then, and the node would take its own cluster
// for one that was born again. So the note follows what changes: new values are taken
// only from an API server that shows another witness as it was noted. A cluster that
// shows none is ErrOtherCluster.
func ClusterToNote(ctx context.Context, e *machine.Env, site *configs.Site, n *api.Node) (*ondisk.IPVSJoined, error) {
	if site.NodeType == configs.NodeControlPlane {
		return nil, nil // its way leads to its own API server
	}
	now, err := ClusterNow(ctx, e, n)
	if now == nil || err != nil {
		return nil, err
	}
	noted := ReadJoinedCluster(e)
	switch {
	case noted == nil:
		return now, nil
	case *noted == *now:
		return nil, nil
	}
	// What was asked through the endpoint may be the answers of two API servers.
	return clusterShown(ctx, e, site, noted)
}

// clusterShown is the cluster of an API server that shows cluster-info and the Node, and
// one of the witnesses as noted; nil if that is the note already, or nobody shows both.
func clusterShown(ctx context.Context, e *machine.Env, site *configs.Site, noted *ondisk.IPVSJoined) (*ondisk.IPVSJoined, error) {
	masters := MastersOf(e, site)
	shown := make([]ondisk.IPVSJoined, len(masters))
	errs := askEach(ctx, masters, func(ctx context.Context, i int) error {
		c, err := directClient(ctx, e, site, masters[i])
		if err != nil {
			return err
		}
		uid, err := c.ClusterInfoUID(ctx)
		if err != nil {
			return err
		}
		n, err := c.GetNode(ctx, noted.Node)
		if err != nil {
			return err
		}
		service, err := c.ServiceUID(ctx)
		if err != nil && api.Code(err) == 0 {
			return err
		}
		shown[i] = ondisk.IPVSJoined{ClusterInfo: uid, Node: noted.Node, NodeUID: n.Metadata.UID, ServiceUID: cmp.Or(service, noted.ServiceUID)}
		if uid == "" || n.Metadata.UID == "" {
			return fmt.Errorf("%s shows objects without UIDs", masters[i])
		}
		if uid != noted.ClusterInfo && n.Metadata.UID != noted.NodeUID && (service == "" || service != noted.ServiceUID) {
			return ErrOtherCluster
		}
		return nil
	})
	if i := slices.Index(errs, nil); i >= 0 {
		if shown[i] == *noted {
			return nil, nil
		}
		return &shown[i], nil
	}
	if err := errors.Join(errs...); errors.Is(err, ErrOtherCluster) {
		return nil, err
	}
	return nil, nil
}

// showTimeout bounds what an API server is asked to show that it is the node's. That
// takes three connections, each of them a second and more by satellite.
const showTimeout = 20 * time.Second

// ErrOtherCluster: an API server is of another cluster than the node joined.
var ErrOtherCluster = errors.New("another cluster with the same keys")

// errCertRefused: an API server's cluster-info is not the one noted, and for anything else
// it does not accept the node's certificate.
var errCertRefused = errors.New("it does not accept this node's certificate")

// CannotShow reports whether unclear, of CheckBornAgain, stays for good: this node's
// certificate is out of time for an API server too, so that it cannot show the node which
// cluster it is of. Such a node gets no orders from it either.
func CannotShow(e *machine.Env, unclear error) bool {
	return errors.Is(unclear, errCertRefused) && OutOfTime(Enrolled(e))
}

// BornAgain reports whether the API servers that answer are of another cluster
// than the node joined, which has the same keys.
func BornAgain(ctx context.Context, e *machine.Env, site *configs.Site) bool {
	again, _ := CheckBornAgain(ctx, e, site)
	return again
}

// CheckBornAgain is BornAgain, and what keeps API servers from showing of which
// cluster they are, e.g. a clock here for which their certificates are not valid yet.
func CheckBornAgain(ctx context.Context, e *machine.Env, site *configs.Site) (again bool, unclear error) {
	noted := ReadJoinedCluster(e)
	if noted == nil || !Is(e) {
		return false, nil
	}
	masters := MastersOf(e, site)
	errs := askEach(ctx, masters, func(ctx context.Context, i int) error {
		if err := showsCluster(ctx, e, site, noted, masters[i]); err != nil {
			return fmt.Errorf("%s: %w", masters[i], err)
		}
		return nil
	})
	if slices.Contains(errs, nil) {
		return false, nil
	}
	err := errors.Join(errs...)
	if errors.Is(err, ErrOtherCluster) {
		return true, nil
	}
	return false, err
}

// askEach asks all of masters at once, the i-th by ask.
func askEach(ctx context.Context, masters []string, ask func(ctx context.Context, i int) error) []error {
	ctx, cancel := context.WithTimeout(ctx, showTimeout)
	defer cancel()
	errs := make([]error, len(masters))
	var wg sync.WaitGroup
	for i := range masters {
		wg.Go(func() { errs[i] = ask(ctx, i) })
	}
	wg.Wait()
	return errs
}

// directClient asks one API server, past the endpoint, with the node's certificate.
func directClient(ctx context.Context, e *machine.Env, site *configs.Site, master string) (*api.Client, error) {
	name, err := api.ServerName(ctx, e.Dial, e.Now, master, EnrolledCA(e), []string{api.SharedName, site.Endpoint})
	if err != nil {
		return nil, err
	}
	c, err := NodeClient(e)
	if err != nil {
		return nil, err
	}
	c.Server, c.ServerName = "https://"+master, name
	return c, nil
}

// showsCluster has one API server show cluster-info, the node's Node and the Service of
// the API servers: one of them is enough, as it is for ipvscare.
func showsCluster(ctx context.Context, e *machine.Env, site *configs.Site, noted *ondisk.IPVSJoined, master string) error {
	c, err := directClient(ctx, e, site, master)
	if err != nil {
		return err
	}
	uid, noInfo := c.ClusterInfoUID(ctx)
	if noInfo == nil && uid == noted.ClusterInfo || api.Code(noInfo) == 0 && noInfo != nil {
		return noInfo
	}
	n, err := c.GetNode(ctx, noted.Node)
	switch {
	case err == nil && n.Metadata.UID == noted.NodeUID:
		return nil
	case api.Code(err) == http.StatusUnauthorized:
		return fmt.Errorf("%w: %w", errCertRefused, err)
	case err != nil && api.Code(err) != http.StatusNotFound:
		return cmp.Or(noInfo, err)
	case noted.ServiceUID == "":
		return cmp.Or(noInfo, ErrOtherCluster)
	}
	switch service, err := c.ServiceUID(ctx); {
	case err != nil && api.Code(err) == 0:
		return err
	case err == nil && service == noted.ServiceUID:
		return nil
	case err == nil:
		return ErrOtherCluster // whether it has published cluster-info or not
	}
	return cmp.Or(noInfo, ErrOtherCluster)
}

// BornAgainNote is said of a node whose API servers are another cluster's.
func BornAgainNote(e *machine.Env) string {
	noted := ReadJoinedCluster(e)
	return fmt.Sprintf("the API servers are of another cluster with the same keys (cluster-info had UID %s, Node %s %s): the node keeps its pods, and treats the API servers as out of reach. To fix: bring the former cluster back; or, to have the node join the new one and stop its pods, put a token of it into site.yaml, in the slot or on a stick",
		noted.ClusterInfo, noted.Node, noted.NodeUID)
}
