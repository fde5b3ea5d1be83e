package controlplane

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

const clusterInfo = "/api/v1/namespaces/kube-public/configmaps/cluster-info"

// clusterInfoRules let nodes that have no certificate yet read cluster-info, as
// kubeadm has them. It would make them only after cluster-info itself: cut off
// in between, the cluster would look published, and no node could join.
const clusterInfoRules = `apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: "kubeadm:bootstrap-signer-clusterinfo", namespace: kube-public}
rules:
- {apiGroups: [""], resources: [configmaps], resourceNames: [cluster-info], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: "kubeadm:bootstrap-signer-clusterinfo", namespace: kube-public}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: "kubeadm:bootstrap-signer-clusterinfo"}
subjects:
- {kind: User, name: "system:anonymous"}
`

// PublishPhase gives a new cluster what kubeadm's init gives it, and the
// objects of the site. cluster-info comes last: where it is, all is. Nothing
// is done twice in a cluster's life, which kubeadm-config notes: what somebody changed
// since stays.
func PublishPhase(active *site.Active) run.Phase {
	site, noted := active.Site, false
	return run.Phase{
		Name: "publish", Doc: "the cluster has what nodes join with", Timeout: 10 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			c, err := adminClient(e, site)
			if err != nil {
				return run.Todo, err
			}
			next, err := newerInfo(ctx, e, c)
			if err != nil && api.Code(err) != 404 {
				return run.Todo, fmt.Errorf("asking whether the cluster is published: %w", err)
			}
			published := err == nil
			if !noted {
				note, err := readPublishedNote(ctx, c)
				switch {
				case err != nil:
					return run.Todo, err
				case note == noteAbsent && published:
					return run.Todo, nil
				}
				noted = note == notePresent
			}
			switch {
			case next != nil:
				return run.Todo, nil
			case published:
				return run.Done, nil
			case site.Credentials.Keys != nil && !noted:
				return run.Todo, nil
			case noted || e.Exists(member.ReadyMark):
				// It was published, and somebody has deleted it since. What else is
				// there is not to be reset.
				e.Note("the cluster publishes no cluster-info any more: nodes that do not know its CA cannot join. To fix, unless it was deleted on purpose: `kubeadm init phase bootstrap-token` on this machine")
				return run.Done, nil
			default:
				return run.Todo, run.NeedsPerson(errors.New("the cluster was never published, and the keys and tokens to publish it with are gone from the slot"),
					"stamp the machine's Site again, with the keys (`edgebake cluster sites`), or bring it on a stick")
			}
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			c, err := adminClient(e, site)
			if err != nil {
				return err
			}
			switch next, err := newerInfo(ctx, e, c); {
			case err != nil && api.Code(err) != 404:
				return fmt.Errorf("asking whether the cluster is published: %w", err)
			case err != nil && site.Credentials.Keys == nil:
				return errors.New("cluster-info was deleted a moment ago")
			case err != nil:
				return publish(ctx, e, c, active)
			case next == nil: // another control-plane node was faster, or it is not noted
				return notePublished(ctx, c)
			default:
				if err := c.MergePatch(ctx, clusterInfo, map[string]any{"data": next}); err != nil {
					return fmt.Errorf("publishing the cluster's CA, which was issued again: %w", err)
				}
				return notePublished(ctx, c)
			}
		},
	}
}

// publish runs the phases of kubeadm init that write to the cluster, and creates the
// objects of the Site. cluster-info comes last.
func publish(ctx context.Context, e *machine.Env, c *api.Client, active *site.Active) error {
	site := active.Site
	if err := waitForOwnNode(ctx, e, c, active); err != nil { // kubeadm notes the runtime there
		return err
	}
	phases := [][]string{{"upload-config", "all"}, {"addon", "kube-proxy"}}
	there, err := dnsIsThere(ctx, c)
	if err != nil {
		return err
	}
	if !there {
		phases = append(phases, []string{"addon", "coredns"})
	}
	if err := kubeadm.Init(ctx, e, active, kubeadm.Local{}, phases...); err != nil {
		return err
	}
	documents, err := DocumentsOf(site)
	if err == nil {
		err = noteUploaded(ctx, e, c, documents)
	}
	if err != nil {
		return err
	}
	if err := createObjects(ctx, e, c, site); err != nil {
		return err
	}
	// Without one, kubeadm makes a token of its own that is valid for a day. It
	// prints both kinds, and the journal outlives a minute.
	token := configs.NewSecret(hex.EncodeToString(e.Random(3)) + "." + hex.EncodeToString(e.Random(8)))
	if err := kubeadm.Init(ctx, e, active, kubeadm.Local{Token: token, TokenTTL: time.Minute}, []string{"bootstrap-token", "--skip-token-print"}); err != nil {
		return err
	}
	return notePublished(ctx, c)
}

// publishedKey is the annotation of kubeadm-config that says that cluster-info was there.
const publishedKey = "edgebake.io/published"

// publishedNote is whether kubeadm-config notes that the cluster was published.
type publishedNote int

const (
	noteUnavailable publishedNote = iota // somebody deleted kubeadm-config
	noteAbsent
	notePresent
)

func readPublishedNote(ctx context.Context, c *api.Client) (publishedNote, error) {
	var o struct {
		Metadata struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
	}
	switch err := c.Get(ctx, kubeadmConfigMap, &o); {
	case api.Code(err) == 404:
		return noteUnavailable, nil
	case err != nil:
		return 0, fmt.Errorf("asking whether the cluster was published: %w", err)
	case o.Metadata.Annotations[publishedKey] == "":
		return noteAbsent, nil
	}
	return notePresent, nil
}

func notePublished(ctx context.Context, c *api.Client) error {
	if err := annotate(ctx, c, map[string]any{publishedKey: "true"}); api.Code(err) != 404 {
		return err
	}
	return nil // somebody deleted it
}

// createObjects creates the nodes' tokens, and applies the Cluster's manifests.
func createObjects(ctx context.Context, e *machine.Env, c *api.Client, site *configs.Site) error {
	tokens, err := manifest.Unpack(site.Credentials.Keys.Objects)
	if err != nil {
		return fmt.Errorf("reading the objects of the Site: %w", err)
	}
	objects, err := objectsOf(append(tokens, manifest.File{Name: "cluster-info's rules", Text: clusterInfoRules}))
	if err != nil {
		return err
	}
	kept, err := c.Kept() // tokens are many
	if err != nil {
		return err
	}
	if err := kept.CreateAll(ctx, objects); err != nil {
		return err
	}
	if e.Exists(ClusterManifests) {
		_, err = madeMarker(ctx, kept, site, applyAll)
	}
	return err
}

// newerInfo is what to change in cluster-info where it has the cluster's CA as it was
// issued before; nil: nothing. The former signatures go: the cluster signs it anew, and a
// wrong signature would look like one by another token.
func newerInfo(ctx context.Context, e *machine.Env, c *api.Client) (map[string]any, error) {
	var info struct {
		Data map[string]string `json:"data"`
	}
	if err := c.Get(ctx, clusterInfo, &info); err != nil {
		return nil, err
	}
	text := []byte(info.Data["kubeconfig"])
	k, err := api.ParseKubeconfig(text)
	if err != nil {
		return nil, nil // somebody has changed it
	}
	cluster, err := k.Cluster()
	if err != nil {
		return nil, nil
	}
	published, err := base64.StdEncoding.DecodeString(cluster.CAData)
	if err != nil {
		return nil, nil
	}
	ca := api.Reissued(published, e.Contents(ondisk.KubeCA), e.Now())
	if ca == nil {
		return nil, nil
	}
	next, err := api.SetCA(text, ca)
	if err != nil {
		return nil, err
	}
	change := map[string]any{}
	for key := range info.Data {
		if strings.HasPrefix(key, api.SignaturePrefix) {
			change[key] = nil
		}
	}
	change["kubeconfig"] = string(next)
	return change, nil
}

// Paths of the objects of the cluster's DNS.
const (
	DNSService    = "/api/v1/namespaces/kube-system/services/kube-dns"
	DNSDeployment = "/apis/apps/v1/namespaces/kube-system/deployments/coredns"
)

// dnsIsThere reports whether kubeadm has made the cluster's DNS. Found already, it
// is an upgrade to kubeadm, which knows no way from a CoreDNS newer than itself.
// The Service comes last: what is there without it was cut off, and is made anew.
func dnsIsThere(ctx context.Context, c *api.Client) (bool, error) {
	switch err := c.Get(ctx, DNSService, nil); {
	case err == nil:
		return true, nil
	case api.Code(err) != 404:
		return false, fmt.Errorf("looking for the cluster's DNS: %w", err)
	}
	if err := c.Delete(ctx, DNSDeployment); err != nil && api.Code(err) != 404 {
		return false, fmt.Errorf("removing a half-made CoreDNS: %w", err)
	}
	return false, nil
}
