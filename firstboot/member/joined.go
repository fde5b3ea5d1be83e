package member

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// JoinedFile contains a JoinedAs.
const JoinedFile = ondisk.StateDir + "/joined.json"

// JoinedAs records the machine and its Site at the join: facts that cannot be determined later, and
// settings that kubeadm and kubelet use only at a join.
type JoinedAs struct {
	Machine siteconf.Machine `json:"machine"`
	// Was is the former name of a member that joins again. The join removes the credentials that
	// contain that name.
	Was    string          `json:"was,omitempty"`
	Taints []configs.Taint `json:"taints,omitempty"`
	// KubeletExtraArgs are the arguments with which kubelet runs now.
	KubeletExtraArgs map[string]string `json:"kubeletExtraArgs,omitempty"`
	// TryingArgs are arguments on trial: kubelet may run with them, or may fail to start. It is nil
	// if there are none.
	TryingArgs map[string]string `json:"tryingArgs,omitzero"`
	CRISocket  string            `json:"criSocket"`
	// Labels are the labels that first boot has set on the Node, at the join or later.
	Labels map[string]string `json:"labels,omitempty"`
	// TokenForgotten means that this join's token was removed, so a token in the slot is a new one.
	TokenForgotten bool `json:"tokenForgotten,omitempty"`
}

// ReadJoinedAs reads JoinedFile. ok is false if there is no valid one. Each Check and Run reads it
// again, because other phases and `firstboot reset` change it.
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
		return fmt.Errorf("recording how this machine joined: %w", err)
	}
	return nil
}

// SaveJoin records the machine and its Site at a join. If the Site's node name, computed from the
// machine's present facts, is not name, the record keeps the facts of the earlier join.
func SaveJoin(e *machine.Env, site *configs.Site, name string) error {
	machine := e.Facts()
	if e.Exists(JoinedCluster) { // the machine may join another cluster now
		if err := e.Remove(JoinedCluster); err != nil {
			return fmt.Errorf("removing the record of the old cluster: %w", err)
		}
	}
	before, ok := ReadJoinedAs(e)
	if now, err := siteconf.NodeName(site, machine); ok && (err != nil || now != name) {
		machine = before.Machine
	}
	return JoinedAs{
		Machine: machine, Was: cmp.Or(NodeName(e), before.Was), Taints: site.Taints, KubeletExtraArgs: site.KubeletExtraArgs,
		CRISocket: site.CRISocket, Labels: siteconf.KubeletLabels(site),
	}.Write(e)
}

// NoteSocketKept adds a note if kubelet still uses the container runtime of the join instead of the
// Site's.
func NoteSocketKept(e *machine.Env, j JoinedAs, site *configs.Site) {
	if j.CRISocket != site.CRISocket {
		e.Note("criSocket of the Site is not in effect: kubelet still uses %s, as when the machine joined. To fix: join the node again (`firstboot reset`, and a new token), or set the old criSocket again", j.CRISocket)
	}
}

// Union returns a new map with the entries of both; b takes precedence.
func Union(a, b map[string]string) map[string]string {
	out := maps.Clone(a)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, b)
	return out
}

// RemarkTaints adds a note if the Site's taints have changed since the join and the Node's have
// not: a node may not change its own taints.
func RemarkTaints(e *machine.Env, j JoinedAs, site *configs.Site, n *kubeapi.Node) {
	var args []string
	for _, t := range site.Taints {
		if !slices.Contains(j.Taints, t) && !slices.Contains(n.Spec.Taints, kubeapi.Taint(t)) {
			args = append(args, taintWord(t))
		}
	}
	for _, t := range j.Taints {
		if !slices.Contains(site.Taints, t) && slices.Contains(n.Spec.Taints, kubeapi.Taint(t)) && !replaced(site.Taints, t) {
			args = append(args, taintWord(t)+"-")
		}
	}
	if len(args) > 0 {
		e.Note("taints of the Site are not in effect: they changed since the join, and a node may not taint itself. To fix: kubectl taint node %s --overwrite %s",
			n.Metadata.Name, strings.Join(args, " "))
	}
}

// replaced reports whether taints contains a taint with the key and effect of t.
func replaced(taints []configs.Taint, t configs.Taint) bool {
	return slices.ContainsFunc(taints, func(o configs.Taint) bool { return o.Key == t.Key && o.Effect == t.Effect })
}

func taintWord(t configs.Taint) string {
	if t.Value == "" {
		return t.Key + ":" + t.Effect
	}
	return t.Key + "=" + t.Value + ":" + t.Effect
}

// LeftLabels returns the Node's labels that first boot set and that the Site does not have any
// more. It omits OpenYurt's labels, which a revert removes.
func LeftLabels(j JoinedAs, site *configs.Site, n *kubeapi.Node) map[string]string {
	want := siteconf.KubeletLabels(site)
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

// SaveLabels records the labels that first boot has set on the Node. It reads JoinedFile again,
// because firstboot reset may have changed it.
func SaveLabels(e *machine.Env, site *configs.Site) error {
	j, ok := ReadJoinedAs(e)
	if !ok {
		return nil
	}
	j.Labels = siteconf.KubeletLabels(site)
	return j.Write(e)
}

// SaveForgotten records that the token of the join was removed.
func SaveForgotten(e *machine.Env) error {
	j, ok := ReadJoinedAs(e)
	if !ok || j.TokenForgotten {
		return nil
	}
	j.TokenForgotten = true
	return j.Write(e)
}
