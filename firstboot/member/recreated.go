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

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// If a cluster is recreated with the same keys, its certificates look the same, but a kubelet that
// connects to it stops its pods. Therefore a Ready node records UIDs of its own cluster.

// JoinedCluster is the file with these UIDs.
const JoinedCluster = ondisk.StateDir + "/joined-cluster.json"

// ReadJoinedCluster returns the record, or nil if there is no usable one.
func ReadJoinedCluster(e *machine.Env) *ondisk.IPVSJoined {
	j := new(ondisk.IPVSJoined)
	if json.Unmarshal(e.Contents(JoinedCluster), j) != nil || j.ClusterInfo == "" || j.NodeUID == "" {
		return nil
	}
	return j
}

// ClusterNow identifies the cluster in which this node is Ready by the UIDs of cluster-info, the
// Node and, if readable, the API servers' Service. It returns nil if cluster-info is unreadable.
func ClusterNow(ctx context.Context, e *machine.Env, n *kubeapi.Node) (*ondisk.IPVSJoined, error) {
	c, err := NodeClient(e)
	if err != nil {
		return nil, err
	}
	uid, err := c.ClusterInfoUID(ctx)
	if err != nil && kubeapi.Code(err) == 0 {
		return nil, fmt.Errorf("reading cluster-info: %w", err)
	}
	if uid == "" || n.Metadata.UID == "" {
		return nil, nil
	}
	service, err := c.ServiceUID(ctx)
	if err != nil && kubeapi.Code(err) == 0 {
		return nil, fmt.Errorf("reading the Service default/kubernetes: %w", err)
	}
	return &ondisk.IPVSJoined{ClusterInfo: uid, Node: n.Metadata.Name, NodeUID: n.Metadata.UID, ServiceUID: service}, nil
}

// ClusterToSave returns the record that must replace the current one, or nil. It accepts new UIDs
// only from an API server that also shows a recorded one: cluster-info or the Node may have been
// recreated. If a server shows no recorded UID, the error is ErrOtherCluster.
func ClusterToSave(ctx context.Context, e *machine.Env, site *configs.Site, n *kubeapi.Node) (*ondisk.IPVSJoined, error) {
	if site.NodeType == configs.NodeControlPlane {
		return nil, nil // it uses its own API server
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
	// Two requests through the endpoint may be answered by two different API servers.
	return clusterShown(ctx, e, site, noted)
}

// clusterShown returns the UIDs from an API server that shows cluster-info, the Node and at least
// one recorded UID. It returns nil if they equal the record, or if there is no such API server.
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
		if err != nil && kubeapi.Code(err) == 0 {
			return err
		}
		shown[i] = ondisk.IPVSJoined{ClusterInfo: uid, Node: noted.Node, NodeUID: n.Metadata.UID, ServiceUID: cmp.Or(service, noted.ServiceUID)}
		if uid == "" || n.Metadata.UID == "" {
			return fmt.Errorf("API server %s returns objects without UIDs", masters[i])
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

// showTimeout limits the check of the API servers. It takes three connections, and each may take
// more than a second over a satellite link.
const showTimeout = 20 * time.Second

// ErrOtherCluster means that an API server belongs to another cluster than the one that the node
// joined.
var ErrOtherCluster = errors.New("another cluster with the same keys")

// errCertRefused means that an API server does not show the recorded cluster-info and rejects the
// node's certificate, so no other UID can be compared.
var errCertRefused = errors.New("it does not accept this node's certificate")

// CannotShow reports whether unclear, a result of CheckRecreated, is permanent: API servers reject
// the node's certificate, which has expired or is not valid yet, so they cannot show their cluster.
func CannotShow(e *machine.Env, unclear error) bool {
	return errors.Is(unclear, errCertRefused) && OutOfTime(Enrolled(e))
}

// Recreated reports whether the API servers that answer belong to a recreated cluster with the same
// keys.
func Recreated(ctx context.Context, e *machine.Env, site *configs.Site) bool {
	again, _ := CheckRecreated(ctx, e, site)
	return again
}

// CheckRecreated is like Recreated. unclear is the reason why API servers could not prove their
// cluster, for example certificates that are not valid yet by this machine's clock.
func CheckRecreated(ctx context.Context, e *machine.Env, site *configs.Site) (again bool, unclear error) {
	noted := ReadJoinedCluster(e)
	if noted == nil || !HasCredentials(e) {
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

// askEach calls ask for all masters in parallel. The errors are in the order of masters.
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

// directClient returns a client with the node's certificate for one API server, instead of the
// endpoint.
func directClient(ctx context.Context, e *machine.Env, site *configs.Site, master string) (*kubeapi.Client, error) {
	name, err := e.APIDialer().ServerName(ctx, master, EnrolledCA(e), []string{kubeapi.SharedName, site.Endpoint})
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

// showsCluster reads cluster-info, the Node and the API servers' Service from one API server, until
// one recorded UID matches. ipvscare applies the same rule.
func showsCluster(ctx context.Context, e *machine.Env, site *configs.Site, noted *ondisk.IPVSJoined, master string) error {
	c, err := directClient(ctx, e, site, master)
	if err != nil {
		return err
	}
	uid, noInfo := c.ClusterInfoUID(ctx)
	if noInfo == nil && uid == noted.ClusterInfo || kubeapi.Code(noInfo) == 0 && noInfo != nil {
		return noInfo
	}
	n, err := c.GetNode(ctx, noted.Node)
	switch {
	case err == nil && n.Metadata.UID == noted.NodeUID:
		return nil
	case kubeapi.Code(err) == http.StatusUnauthorized:
		return fmt.Errorf("%w: %w", errCertRefused, err)
	case err != nil && kubeapi.Code(err) != http.StatusNotFound:
		return cmp.Or(noInfo, err)
	case noted.ServiceUID == "":
		return cmp.Or(noInfo, ErrOtherCluster)
	}
	switch service, err := c.ServiceUID(ctx); {
	case err != nil && kubeapi.Code(err) == 0:
		return err
	case err == nil && service == noted.ServiceUID:
		return nil
	case err == nil:
		return ErrOtherCluster // even if it has not published cluster-info
	}
	return cmp.Or(noInfo, ErrOtherCluster)
}

// RecreatedNote is the note for a node whose API servers belong to another cluster.
func RecreatedNote(e *machine.Env) string {
	noted := ReadJoinedCluster(e)
	return fmt.Sprintf("the API servers are of another cluster with the same keys (cluster-info had UID %s, Node %s %s): the node keeps its pods, and treats the API servers as unreachable. To fix: restore the old cluster; or, to join the new one, which stops the node's pods, put a token of it into site.yaml, in the slot or on a stick",
		noted.ClusterInfo, noted.Node, noted.NodeUID)
}
