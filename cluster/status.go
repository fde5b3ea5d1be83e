package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/edgebake/edgebake/cluster/reports"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/servercert"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// Site is the status of a node, or of a machine that is expected to become one.
type Site struct {
	Node  string `json:"node"`
	State string `json:"state"` // one of the states below
	// Since is when the state began, if known.
	Since  time.Time `json:"since,omitzero"`
	Detail string    `json:"detail,omitempty"`
	Fix    string    `json:"fix,omitempty"`
}

// States of a Site.
const (
	Waiting  = "waiting"  // there is a token, but no node
	Booting  = "booting"  // the machine reports that first boot runs
	Failed   = "failed"   // the machine reports that first boot failed
	Joining  = "joining"  // the machine's certificate request waits for approval
	NotReady = "notReady" // the machine has joined, but its Node is not Ready
	Ready    = "ready"
)

// Status returns the status of each node, and of each machine that has not joined yet but for which
// there is a token or a pending certificate request.
func (c *Client) Status(ctx context.Context, now time.Time) ([]Site, error) {
	all, err := c.list(ctx, nodes, "", metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	requests, err := c.list(ctx, csrs, "", metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	tokens, err := c.Tokens(ctx, now)
	if err != nil {
		return nil, err
	}
	byName := map[string]Site{}
	for i := range tokens {
		if name, ok := kubeapi.TokenNode(tokens[i].Description); ok {
			byName[name] = waiting(name, &tokens[i])
		}
	}
	for i := range all {
		byName[all[i].GetName()] = nodeState(&all[i])
	}
	for i := range requests {
		name, pending := requestOf(&requests[i])
		if !pending || name == "" {
			continue
		}
		s := byName[name]
		s.Node = name
		if s.State == "" || s.State == Waiting {
			s.State, s.Since = Joining, requests[i].GetCreationTimestamp().UTC()
		}
		s.Detail = "CSR " + requests[i].GetName() + " is not approved"
		s.Fix = "check that the approver runs (for yurthub's certificates: " + openyurt.Manager + "), or run kubectl certificate approve " + requests[i].GetName()
		byName[name] = s
	}
	var out []Site
	for _, s := range byName {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b Site) int { return cmp.Compare(a.Node, b.Node) })
	return out, nil
}

func waiting(name string, t *Token) Site {
	s := Site{Node: name, State: Waiting, Detail: "token " + t.ID + " is valid"}
	if !t.Expires.IsZero() {
		s.Detail += " until " + t.Expires.Format(time.RFC3339)
	}
	if len(t.Problems) > 0 {
		s.Detail, s.Fix = "token "+t.ID+": "+t.Problems[0].Error(), "edgebake cluster token mint --node "+name
	}
	return s
}

func nodeState(n *unstructured.Unstructured) Site {
	s := Site{Node: n.GetName(), State: NotReady, Detail: "kubelet has not reported yet", Since: n.GetCreationTimestamp().UTC()}
	conditions, _, _ := unstructured.NestedSlice(n.Object, "status", "conditions")
	for _, raw := range conditions {
		m, _ := raw.(map[string]any)
		if m["type"] != "Ready" {
			continue
		}
		if at, err := time.Parse(time.RFC3339, fmt.Sprint(m["lastTransitionTime"])); err == nil {
			s.Since = at.UTC()
		}
		s.Detail = ""
		if m["status"] == "True" {
			s.State = Ready
			continue
		}
		s.Detail = fmt.Sprint(m["message"])
		s.Fix = "see firstboot status on the node, or its console"
	}
	if unschedulable, _, _ := unstructured.NestedBool(n.Object, "spec", "unschedulable"); unschedulable {
		s.Detail = strings.TrimPrefix(s.Detail+"; cordoned", "; ")
	}
	return s
}

// requestOf returns the node of a certificate request, and whether it is pending.
func requestOf(r *unstructured.Unstructured) (node string, pending bool) {
	conditions, _, _ := unstructured.NestedSlice(r.Object, "status", "conditions")
	user, _, _ := unstructured.NestedString(r.Object, "spec", "username")
	if name, ok := strings.CutPrefix(user, servercert.NodeUser); ok {
		return name, len(conditions) == 0
	}
	return requestSubject(r), len(conditions) == 0
}

// RemoveOptions configure Remove.
type RemoveOptions struct {
	// Force removes a Node that is Ready.
	Force bool
	Now   time.Time
}

// precondition restricts a deletion to this very object, because it may have been replaced by
// another one with the same name.
func precondition(is *unstructured.Unstructured) metav1.DeleteOptions {
	uid := is.GetUID()
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
}

// Remove removes a node's tokens, certificate requests and Node from the cluster, so that another
// machine can use its name. It returns what it removed.
func (c *Client) Remove(ctx context.Context, name string, o RemoveOptions) ([]string, error) {
	doing := "removing node " + name
	if err := c.requirePermissions(ctx, doing, permission{"get", nodes, "", name}, permission{"delete", nodes, "", name}, permission{"list", csrs, "", ""},
		permission{"delete", csrs, "", ""}, permission{"list", secrets, systemNamespace, ""}, permission{"delete", secrets, systemNamespace, ""}); err != nil {
		return nil, err
	}
	node, err := c.get(ctx, nodes, "", name)
	if err != nil {
		return nil, err
	}
	if node != nil {
		if _, controlPlane := node.GetLabels()[kubeapi.ControlPlaneLabel]; controlPlane {
			return nil, fmt.Errorf("%s: it is a control-plane node, and its member of etcd would stay; run kubeadm reset on it, or remove the member, and then run kubectl delete node %s", doing, name)
		}
		if nodeState(node).State == Ready && !o.Force {
			return nil, fmt.Errorf("%s: it is Ready, and its kubelet would keep running without a Node; first run firstboot reset on it, or add --force", doing)
		}
	}
	var done []string
	remove := func(what string, err error) error {
		if err == nil {
			done = append(done, what)
		} else if apierrors.IsNotFound(err) {
			return nil
		}
		return c.explain(doing+": "+what, err)
	}
	tokens, err := c.Tokens(ctx, o.Now)
	if err != nil {
		return nil, err
	}
	for _, t := range tokens {
		if t.Description == kubeapi.TokenDescription(name) {
			if err := remove("token "+t.ID, c.resource(secrets, systemNamespace).Delete(ctx, kubeapi.TokenSecretName(t.ID), metav1.DeleteOptions{})); err != nil {
				return done, err
			}
		}
	}
	requests, err := c.list(ctx, csrs, "", metav1.ListOptions{})
	if err != nil {
		return done, err
	}
	for i := range requests {
		if of, _ := requestOf(&requests[i]); of == name {
			if err := remove("CSR "+requests[i].GetName(), c.resource(csrs, "").Delete(ctx, requests[i].GetName(), precondition(&requests[i]))); err != nil {
				return done, err
			}
		}
	}
	// Delete the Node last, so that the command can be repeated after an interruption.
	if node != nil {
		if err := remove("Node "+name, c.resource(nodes, "").Delete(ctx, name, precondition(node))); err != nil {
			return done, err
		}
	}
	if len(done) == 0 {
		return nil, errors.New(doing + ": the cluster has no Node, CSR or token for it")
	}
	return done, nil
}

// Report adds the machines' reports of first boot to the status. The cluster's own state takes
// precedence: a Ready node is never shown with a failed first boot.
func Report(all []Site, told []reports.Summary) []Site {
	out := slices.Clone(all)
	for _, t := range told {
		i := slices.IndexFunc(out, func(s Site) bool { return s.Node == t.Node })
		if i < 0 {
			if t.Result == ondisk.ResultDone {
				continue // the node was removed since it reported
			}
			out = append(out, Site{Node: t.Node, State: Waiting})
			i = len(out) - 1
		}
		s := &out[i]
		if s.State == Ready || t.Result == ondisk.ResultDone || !t.Received.After(s.Since) {
			continue
		}
		if s.State == Waiting {
			s.State = Booting
		}
		if t.Result == ondisk.ResultFailed {
			s.State = Failed
		}
		s.Since, s.Fix = t.Received, cmp.Or(t.Fix, s.Fix)
		s.Detail = strings.TrimSuffix(fmt.Sprintf("first boot, %d/%d %s: %s", t.Step, t.Steps, t.Phase, t.Reason), ": ")
	}
	slices.SortFunc(out, func(a, b Site) int { return cmp.Compare(a.Node, b.Node) })
	return out
}
