package member

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/overlays/node"
)

// JoinedFile is what the machine and its site were when it joined.
const JoinedFile = ondisk.StateDir + "/joined.json"

// JoinedAs is JoinedFile: what cannot be observed later, and what kubeadm and
// kubelet take from a site once, when they join.
type JoinedAs struct {
	Machine node.Machine `json:"machine"`
	// Was is the former name of a member that joins again. It is kept here because
	// the join removes the credentials that had it.
	Was    string          `json:"was,omitempty"`
	Taints []configs.Taint `json:"taints,omitempty"`
	// KubeletExtraArgs are what kubelet runs with now.
	KubeletExtraArgs map[string]string `json:"kubeletExtraArgs,omitempty"`
	// TryingArgs are those that kubelet may run with instead, while it is not
	// known whether it comes up with them; nil: there are none.
	TryingArgs map[string]string `json:"tryingArgs,omitzero"`
	CRISocket  string            `json:"criSocket"`
	// Labels are those that first boot gave the Node, at the join or later.
	Labels map[string]string `json:"labels,omitempty"`
	// TokenForgotten: a token that is in the slot now is not the one of this
	// join.
	TokenForgotten bool `json:"tokenForgotten,omitempty"`
}

// ReadJoinedAs reads it. A phase does so once in each Check and Run: Check tells
// what is on the machine, which a Run that was killed, or another phase since, has
// changed; and reset, another process, writes the same file.
func ReadJoinedAs(e *machine.Env) (JoinedAs, bool) {
	var j JoinedAs
	b := e.Contents(JoinedFile)
	return j, b != nil && json.Unmarshal(b, &j) == nil
}

func (j JoinedAs) Write(e *machine.Env) error {
	b, err := json.MarshalIndent(j, "", "  ")
	if err == nil {
		_, err = e.Write(JoinedFile, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("noting how this machine joined: %w", err)
	}
	return nil
}

// SaveJoin keeps what the machine and its site are while it joins. One that
// joins again keeps the facts that its name came from.
func SaveJoin(e *machine.Env, site *configs.Site, name string) error {
	machine := e.Facts()
	if e.Exists(JoinedCluster) { // it may be another one by now
		if err := e.Remove(JoinedCluster); err != nil {
			return fmt.Errorf("forgetting the former cluster: %w", err)
		}
	}
	before, ok := ReadJoinedAs(e)
	if now, err := node.NodeName(site, machine); ok && (err != nil || now != name) {
		machine = before.Machine
	}
	return JoinedAs{
		Machine: machine, Was: cmp.Or(Name(e), before.Was), Taints: site.Taints, KubeletExtraArgs: site.KubeletExtraArgs,
		CRISocket: site.CRISocket, Labels: node.KubeletLabels(site),
	}.Write(e)
}

// RemarkSocketKept says that kubelet's container runtime is the one of the join.
func RemarkSocketKept(e *machine.Env, j JoinedAs, site *configs.Site) {
	if j.CRISocket != site.CRISocket {
		e.Note("criSocket of the Site is not in place: kubelet uses %s, with which it joined. To fix: `firstboot reset` and a new token join the node again with the Site's; or give it back its former value", j.CRISocket)
	}
}

// Union is a new map of both; b wins.
func Union(a, b map[string]string) map[string]string {
	out := maps.Clone(a)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, b)
	return out
}

// RemarkTaints says which taints were added to a site or taken from it since the
// join, and are still to be changed: a node may not do that itself. Those that
// somebody took from the Node are left to him.
func RemarkTaints(e *machine.Env, j JoinedAs, site *configs.Site, n *api.Node) {
	var args []string
	for _, t := range site.Taints {
		if !slices.Contains(j.Taints, t) && !slices.Contains(n.Spec.Taints, api.Taint(t)) {
			args = append(args, taintWord(t))
		}
	}
	for _, t := range j.Taints {
		if !slices.Contains(site.Taints, t) && slices.Contains(n.Spec.Taints, api.Taint(t)) && !replaced(site.Taints, t) {
			args = append(args, taintWord(t)+"-")
		}
	}
	if len(args) > 0 {
		e.Note("taints of the Site are not in place: they changed since the join, and a node may not taint itself. To fix: kubectl taint node %s --overwrite %s",
			n.Metadata.Name, strings.Join(args, " "))
	}
}

// replaced reports whether taints has another value in place of t.
func replaced(taints []configs.Taint, t configs.Taint) bool {
	return slices.ContainsFunc(taints, func(o configs.Taint) bool { return o.Key == t.Key && o.Effect == t.Effect })
}

func taintWord(t configs.Taint) string {
	if t.Value == "" {
		return t.Key + ":" + t.Effect
	}
	return t.Key + "=" + t.Value + ":" + t.Effect
}

// LeftLabels are those that first boot gave the Node and the site has no more.
// OpenYurt's stay: they go with yurthub, by a revert.
func LeftLabels(j JoinedAs, site *configs.Site, n *api.Node) map[string]string {
	want := node.KubeletLabels(site)
	out := map[string]string{}
	for k, v := range j.Labels {
		if _, kept := want[k]; !kept && !openyurt.IsLabel(k) && n.Metadata.Labels[k] == v {
			if _, has := n.Metadata.Labels[k]; has {
				out[k] = v
			}
		}
	}
	return out
}

// SaveLabels keeps which labels first boot has given the Node. Like SaveForgotten
// it changes what is there now: a reset may have written since it was read last.
func SaveLabels(e *machine.Env, site *configs.Site) error {
	j, ok := ReadJoinedAs(e)
	if !ok {
		return nil
	}
	j.Labels = node.KubeletLabels(site)
	return j.Write(e)
}

// SaveForgotten keeps that the token of the join is forgotten.
func SaveForgotten(e *machine.Env) error {
	j, ok := ReadJoinedAs(e)
	if !ok || j.TokenForgotten {
		return nil
	}
	j.TokenForgotten = true
	return j.Write(e)
}
