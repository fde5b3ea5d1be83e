package controlplane

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

const clusterInfo = "/api/v1/namespaces/kube-public/configmaps/cluster-info"

// clusterInfoRules let nodes without a certificate read cluster-info. kubeadm creates them only
// after cluster-info. Once cluster-info exists, the cluster counts as published, and kubeadm would
// not run again after an interruption. Therefore they are created first.
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

// PublishPhase creates the objects of kubeadm init and of the Site in a new cluster, cluster-info
// last. That is done once in a cluster's life, so that later changes by others stay. Afterwards the
// phase only puts a reissued CA into cluster-info.
func PublishPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "publish", Doc: "the cluster has everything that nodes need to join", Timeout: 10 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			return checkPublished(ctx, e, active.Site)
		},
		Run: func(ctx context.Context, e *machine.Env) error { return publishOnce(ctx, e, active) },
	}
}

// checkPublished is the Check of PublishPhase.
func checkPublished(ctx context.Context, e *machine.Env, site *configs.Site) (run.Verdict, error) {
	c, err := adminClient(e, site)
	if err != nil {
		return run.Todo, err
	}
	next, err := newerInfo(ctx, e, c)
	if err != nil && kubeapi.Code(err) != 404 {
		return run.Todo, fmt.Errorf("checking whether cluster-info is published: %w", err)
	}
	published := err == nil
	note, err := readPublishedMark(ctx, c)
	if err != nil {
		return run.Todo, err
	}
	noted := note == markPresent
	switch {
	case note == markAbsent && published:
		return run.Todo, nil
	case next != nil:
		return run.Todo, nil
	case published:
		return run.Done, nil
	case site.Credentials.Keys != nil && !noted:
		return run.Todo, nil
	case noted || e.Exists(member.ReadyMark):
		// Somebody has deleted cluster-info. Publishing it again would overwrite other objects too.
		e.Note("the cluster no longer publishes cluster-info: nodes that do not know its CA cannot join. To fix, unless it was deleted on purpose: `kubeadm init phase bootstrap-token` on this machine")
		return run.Done, nil
	}
	return run.Todo, run.NeedsPerson(errors.New("cluster-info and the join tokens were never published, and the slot no longer has the cluster's keys, which this requires"),
		"stamp the machine's Site again, with the keys (`edgebake cluster sites`), or bring it on a stick")
}

// publishOnce publishes the cluster or its newer CA, unless another control-plane node has done
// that.
func publishOnce(ctx context.Context, e *machine.Env, active *site.Active) error {
	c, err := adminClient(e, active.Site)
	if err != nil {
		return err
	}
	switch next, err := newerInfo(ctx, e, c); {
	case err != nil && kubeapi.Code(err) != 404:
		return fmt.Errorf("checking whether cluster-info is published: %w", err)
	case err != nil && active.Site.Credentials.Keys == nil:
		return errors.New("cluster-info was deleted while it was checked")
	case err != nil:
		return publish(ctx, e, c, active)
	case next != nil:
		if err := c.MergePatch(ctx, clusterInfo, map[string]any{"data": next}); err != nil {
			return fmt.Errorf("publishing the cluster's reissued CA: %w", err)
		}
	}
	return markPublished(ctx, c)
}

// publish runs the phases of kubeadm init that write to the cluster, and creates the objects of the
// Site. It writes cluster-info last.
func publish(ctx context.Context, e *machine.Env, c *kubeapi.Client, active *site.Active) error {
	if err := waitForOwnNode(ctx, e, c, active); err != nil { // kubeadm annotates the Node with its container runtime
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
	documents, err := DocumentsOf(active.Site)
	if err == nil {
		err = markUploaded(ctx, e, c, documents)
	}
	if err != nil {
		return err
	}
	if err := createObjects(ctx, e, c, active.Site); err != nil {
		return err
	}
	// Without this token, which expires in a minute, kubeadm would make one that is valid for a
	// day.
	token := configs.NewSecret(hex.EncodeToString(e.Random(3)) + "." + hex.EncodeToString(e.Random(8)))
	if err := kubeadm.Init(ctx, e, active, kubeadm.Local{Token: token, TokenTTL: time.Minute}, []string{"bootstrap-token", "--skip-token-print"}); err != nil {
		return err
	}
	return markPublished(ctx, c)
}

// publishedKey is the annotation of kubeadm-config that records the publication of the cluster.
const publishedKey = "edgebake.io/published"

// publishedMark is the state of publishedKey in kubeadm-config.
type publishedMark int

const (
	markUnavailable publishedMark = iota // kubeadm-config was deleted
	markAbsent
	markPresent
)

func readPublishedMark(ctx context.Context, c *kubeapi.Client) (publishedMark, error) {
	var o struct {
		Metadata struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
	}
	switch err := c.Get(ctx, kubeadmConfigMap, &o); {
	case kubeapi.Code(err) == 404:
		return markUnavailable, nil
	case err != nil:
		return 0, fmt.Errorf("checking whether the cluster was published: %w", err)
	case o.Metadata.Annotations[publishedKey] == "":
		return markAbsent, nil
	}
	return markPresent, nil
}

func markPublished(ctx context.Context, c *kubeapi.Client) error {
	if err := annotate(ctx, c, map[string]any{publishedKey: "true"}); kubeapi.Code(err) != 404 {
		return err
	}
	return nil // kubeadm-config does not exist
}

// createObjects creates the nodes' tokens, the rules of cluster-info, and the marker with which
// ManifestsPhase later applies the Cluster's manifests.
func createObjects(ctx context.Context, e *machine.Env, c *kubeapi.Client, site *configs.Site) error {
	tokens, err := manifest.Unpack(site.Credentials.Keys.Objects)
	if err != nil {
		return fmt.Errorf("reading the objects of the Site: %w", err)
	}
	objects, err := objectsOf(append(tokens, manifest.File{Name: "cluster-info's rules", Text: clusterInfoRules}))
	if err != nil {
		return err
	}
	kept, err := c.Kept() // read all existing objects once, because there are many tokens
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

// newerInfo returns a patch if cluster-info contains an earlier issue of the cluster's CA, and
// otherwise nil. The patch removes the old signatures, so that the cluster signs cluster-info again.
func newerInfo(ctx context.Context, e *machine.Env, c *kubeapi.Client) (map[string]any, error) {
	var info struct {
		Data map[string]string `json:"data"`
	}
	if err := c.Get(ctx, clusterInfo, &info); err != nil {
		return nil, err
	}
	text := []byte(info.Data["kubeconfig"])
	k, err := kubeapi.ParseKubeconfig(text)
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
	ca := kubeapi.Reissued(published, e.Contents(ondisk.KubeCA), e.Now())
	if ca == nil {
		return nil, nil
	}
	next, err := kubeapi.SetCA(text, ca)
	if err != nil {
		return nil, err
	}
	change := map[string]any{}
	for key := range info.Data {
		if strings.HasPrefix(key, kubeapi.SignaturePrefix) {
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

// dnsIsThere reports whether the cluster has DNS, which kubeadm must then not change. kubeadm makes
// the Service last, so without the Service, CoreDNS is incomplete and is removed.
func dnsIsThere(ctx context.Context, c *kubeapi.Client) (bool, error) {
	switch err := c.Get(ctx, DNSService, nil); {
	case err == nil:
		return true, nil
	case kubeapi.Code(err) != 404:
		return false, fmt.Errorf("looking for the cluster's DNS add-on: %w", err)
	}
	if err := c.Delete(ctx, DNSDeployment); err != nil && kubeapi.Code(err) != 404 {
		return false, fmt.Errorf("removing an incomplete CoreDNS: %w", err)
	}
	return false, nil
}
