package firstboot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// A cluster may be born again with the keys that it had. Nothing in its API
// servers' certificates tells, and a kubelet that takes it for its own is told
// that it has no pods, and stops those that run. So a node notes once it is Ready
// what only this cluster has, and ipvscare (package ipvs) gives no other one any
// traffic.

// joinedCluster is that note.
const joinedCluster = ondisk.StateDir + "/joined-cluster.json"

func readJoinedCluster(e *Env) *ondisk.IPVSJoined {
	j := new(ondisk.IPVSJoined)
	if json.Unmarshal(e.contents(joinedCluster), j) != nil || j.ClusterInfo == "" || j.NodeUID == "" {
		return nil
	}
	return j
}

// clusterNow identifies the cluster that this node is Ready in, by the UIDs of
// cluster-info and of the Node. It is nil if cluster-info cannot be read.
func clusterNow(ctx context.Context, e *Env, n *api.Node) (*ondisk.IPVSJoined, error) {
	c, err := nodeClient(e)
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
	return &ondisk.IPVSJoined{ClusterInfo: uid, Node: n.Metadata.Name, NodeUID: n.Metadata.UID}, nil
}

// clusterSaved reports whether the note is of the cluster that has this Node.
func clusterSaved(e *Env, active *Active, n *api.Node) bool {
	if active.Site.NodeType == configs.NodeControlPlane {
		return true // its way leads to its own API server
	}
	noted := readJoinedCluster(e)
	return noted != nil && noted.NodeUID == n.Metadata.UID
}

// saveCluster notes it, for ipvscare too.
func saveCluster(ctx context.Context, e *Env, active *Active) error {
	_, n, err := ownNode(ctx, e, active.Node)
	if err != nil {
		return err
	}
	if clusterSaved(e, active, n) {
		return nil
	}
	now, err := clusterNow(ctx, e, n)
	if now == nil || err != nil {
		return err
	}
	doc, err := json.Marshal(now)
	if err == nil {
		_, err = e.write(joinedCluster, append(doc, '\n'), Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("noting which cluster this is: %w", err)
	}
	if active.Site.IPVS.Disabled {
		return nil
	}
	return writeIPVSConfig(e, active.Site)
}

// showTimeout bounds what an API server is asked to show that it is the node's. That
// takes three connections, each of them a second and more by satellite.
const showTimeout = 20 * time.Second

// errOther: an API server is of another cluster than the node joined.
var errOther = errors.New("another cluster with the same keys")

// bornAgain reports whether the API servers that answer are of another cluster
// than the node joined, which has the same keys.
func bornAgain(ctx context.Context, e *Env, site *configs.Site) bool {
	again, _ := checkBornAgain(ctx, e, site)
	return again
}

// checkBornAgain is bornAgain, and what keeps API servers from showing of which
// cluster they are, e.g. a clock here for which their certificates are not valid yet.
func checkBornAgain(ctx context.Context, e *Env, site *configs.Site) (again bool, unclear error) {
	noted := readJoinedCluster(e)
	if noted == nil || !isMember(e) {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, showTimeout)
	defer cancel()
	masters := mastersOf(e, site)
	errs := make([]error, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		wg.Go(func() {
			if err := showsCluster(ctx, e, site, noted, m); err != nil {
				errs[i] = fmt.Errorf("%s: %w", m, err)
			}
		})
	}
	wg.Wait()
	if slices.Contains(errs, nil) {
		return false, nil
	}
	err := errors.Join(errs...)
	if errors.Is(err, errOther) {
		return true, nil
	}
	return false, err
}

// showsCluster has one API server show cluster-info and the node's Node: one of
// the two is enough, as it is for ipvscare.
func showsCluster(ctx context.Context, e *Env, site *configs.Site, noted *ondisk.IPVSJoined, master string) error {
	ca := enrolledCA(e)
	name, err := api.ServerName(ctx, e.Dial, master, ca, []string{api.SharedName, site.Endpoint})
	if err != nil {
		return err
	}
	c, err := nodeClient(e)
	if err != nil {
		return err
	}
	c.Server, c.ServerName = "https://"+master, name
	uid, err := c.ClusterInfoUID(ctx)
	if err != nil || uid == noted.ClusterInfo {
		return err
	}
	n, err := c.GetNode(ctx, noted.Node)
	switch {
	case err == nil && n.Metadata.UID == noted.NodeUID:
		return nil
	case err == nil, api.Code(err) == 404:
		return errOther
	}
	return err
}

// bornAgainNote is said of a node whose API servers are another cluster's.
func bornAgainNote(e *Env) string {
	noted := readJoinedCluster(e)
	return fmt.Sprintf("the API servers are of another cluster with the same keys (cluster-info had UID %s, Node %s %s): the node keeps its pods, and treats the API servers as out of reach. To fix: bring the former cluster back; or, to have the node join the new one and stop its pods, put a token of it into site.yaml, in the slot or on a stick",
		noted.ClusterInfo, noted.Node, noted.NodeUID)
}
