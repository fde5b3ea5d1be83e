package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// At the bootstrap, kubeadm's documents for all nodes are uploaded, for joins and upgrades. Later,
// changed documents of a Site replace them, unless somebody else has changed those in the cluster.

const (
	kubeadmConfigMap = "/api/v1/namespaces/kube-system/configmaps/kubeadm-config"
	kubeletConfigMap = "/api/v1/namespaces/kube-system/configmaps/kubelet-config"
	proxyConfigMap   = "/api/v1/namespaces/kube-system/configmaps/kube-proxy"
	// These are annotations of kubeadm-config. DocumentsKey has a hash of the documents that were
	// uploaded last, uploadedKey a hash of the resulting ConfigMaps. uploadingKey exists only during
	// an upload.
	DocumentsKey = "edgebake.io/documents"
	uploadedKey  = "edgebake.io/uploaded"
	uploadingKey = "edgebake.io/uploading"
	// DocumentsMark records the hash of this machine's documents once they are in the cluster.
	DocumentsMark = ondisk.StateDir + "/cluster-documents"
	// DocumentsFile contains the documents for the operator if first boot does not upload them.
	DocumentsFile = ondisk.StateDir + "/kubeadm.yaml"
)

// ResetFiles lists the files of this package that a reset removes. Snapshots and etcd data that was
// set aside stay.
var ResetFiles = []string{ClusterManifests, DocumentsMark, DocumentsFile, MadeFile, UpdateLeaseFile}

// DocumentsOf returns a hash of the Site's kubeadm documents that apply to the whole cluster.
func DocumentsOf(site *configs.Site) (string, error) {
	docs, err := site.ControlPlane.Documents().Only("ClusterConfiguration", "KubeletConfiguration").Encode()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(docs)
	return hex.EncodeToString(sum[:16]), nil
}

// uploadState describes the documents in the cluster.
type uploadState struct {
	documents string // hash as of DocumentsOf; "": unknown
	untouched bool   // nobody else has changed them, or an upload was interrupted
	cutOff    bool   // an upload was interrupted
	contents  string // hash of the current ConfigMaps
}

func readUploaded(ctx context.Context, c *kubeapi.Client) (uploadState, error) {
	var cluster, kubelet struct {
		Metadata struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
		Data map[string]string `json:"data"`
	}
	for path, into := range map[string]any{kubeadmConfigMap: &cluster, kubeletConfigMap: &kubelet} {
		if err := c.Get(ctx, path, into); err != nil && kubeapi.Code(err) != 404 {
			return uploadState{}, fmt.Errorf("reading the cluster's configuration: %w", err)
		}
	}
	sum := sha256.Sum256([]byte(cluster.Data["ClusterConfiguration"] + "\x00" + kubelet.Data["kubelet"]))
	u := uploadState{documents: cluster.Metadata.Annotations[DocumentsKey], contents: hex.EncodeToString(sum[:16])}
	u.cutOff = cluster.Metadata.Annotations[uploadingKey] != ""
	u.untouched = u.cutOff || cluster.Metadata.Annotations[uploadedKey] == u.contents
	return u, nil
}

// annotate sets annotations of kubeadm-config; nil removes one.
func annotate(ctx context.Context, c *kubeapi.Client, annotations map[string]any) error {
	err := c.MergePatch(ctx, kubeadmConfigMap, map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		return fmt.Errorf("annotating the ConfigMap kubeadm-config: %w", err)
	}
	return nil
}

// markUploaded records in the cluster, and then on this machine, that these documents are uploaded.
func markUploaded(ctx context.Context, e *machine.Env, c *kubeapi.Client, documents string) error {
	now, err := readUploaded(ctx, c)
	if err == nil {
		err = annotate(ctx, c, map[string]any{DocumentsKey: documents, uploadedKey: now.contents, uploadingKey: nil})
	}
	if err != nil {
		return err
	}
	return markDocuments(e, documents)
}

func markDocuments(e *machine.Env, documents string) error {
	if _, err := e.Write(DocumentsMark, []byte(documents+"\n"), machine.Mode(0o600)); err != nil {
		return fmt.Errorf("recording which of kubeadm's documents are uploaded: %w", err)
	}
	return e.Remove(DocumentsFile)
}

// DocumentsPhase uploads kubeadm's documents again if the Site has new ones. If somebody else has
// changed those in the cluster, it only reports the difference.
func DocumentsPhase(active *site.Active) run.Phase {
	p := &documentsPhase{active: active}
	return run.Phase{
		Name: "documents", Doc: "the cluster has the Site's kubeadm documents", Timeout: 2 * time.Minute,
		Check: p.check, Run: p.run,
	}
}

// documentsPhase is the phase documents of one pass.
type documentsPhase struct {
	active   *site.Active
	compared bool // remarkProxy was called in this pass
}

func (p *documentsPhase) check(ctx context.Context, e *machine.Env) (run.Verdict, error) {
	if !p.compared {
		p.compared = true
		remarkProxy(ctx, e, p.active.Site)
	}
	documents, err := DocumentsOf(p.active.Site)
	if err != nil || e.Text(DocumentsMark) != documents {
		return run.Todo, err
	}
	return run.Done, nil
}

func (p *documentsPhase) run(ctx context.Context, e *machine.Env) error {
	documents, err := DocumentsOf(p.active.Site)
	if err != nil {
		return err
	}
	c, err := adminClient(e, p.active.Site)
	if err != nil {
		return err
	}
	there, err := readUploaded(ctx, c)
	if err != nil {
		return err
	}
	had := e.Text(DocumentsMark)
	switch entitled := had != "" && there.documents != "" && there.untouched; {
	case there.documents == documents && !(entitled && there.cutOff):
		return markDocuments(e, documents) // this machine, another one or a person has uploaded them
	case had == "" && there.documents == "":
		// A former release uploaded the documents: those in the cluster count as correct.
		return markDocuments(e, documents)
	case entitled:
		return uploadDocuments(ctx, e, c, p.active, documents)
	}
	// Somebody else may have changed the documents in the cluster. Or this machine has
	// recorded none yet: its own may be outdated.
	if err := writeForPerson(e, p.active.Site, documents); err != nil {
		return err
	}
	return run.ErrConfirmed
}

func uploadDocuments(ctx context.Context, e *machine.Env, c *kubeapi.Client, active *site.Active, documents string) error {
	if err := annotate(ctx, c, map[string]any{uploadingKey: documents}); err != nil {
		return err
	}
	if err := kubeadm.Init(ctx, e, active, kubeadm.Local{}, []string{"upload-config", "all"}); err != nil {
		return err
	}
	if err := markUploaded(ctx, e, c, documents); err != nil {
		return err
	}
	e.Console("uploaded the Site's kubeadm documents to the cluster")
	return nil
}

// writeForPerson writes the Site's documents to a file, and adds a note that explains how to upload
// them.
func writeForPerson(e *machine.Env, site *configs.Site, documents string) error {
	text, err := site.ControlPlane.Documents().Encode()
	if err == nil {
		_, err = e.Write(DocumentsFile, text, machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("writing the Site's kubeadm documents to %s: %w", DocumentsFile, err)
	}
	e.Note("the Site's kubeadm documents differ from those in the cluster. First boot does not overwrite the cluster's, since somebody else may have changed them. To upload the Site's: kubeadm init phase upload-config all --config %s && %s; to keep the cluster's: run only the second command",
		DocumentsFile, "kubectl -n kube-system annotate configmap kubeadm-config --overwrite "+DocumentsKey+"="+documents)
	return nil
}

// remarkProxy adds a note if kube-proxy's configuration in the cluster differs from the Site's.
// kubeadm can upload it only together with a new DaemonSet.
func remarkProxy(ctx context.Context, e *machine.Env, site *configs.Site) {
	differences, err := proxyDifferences(ctx, e, site)
	if err != nil {
		e.Log.Warn("comparing kube-proxy's configuration with the Site's", "error", err)
	} else if len(differences) > 0 {
		e.Note("kube-proxy's configuration in the cluster differs from the Site's (%s). First boot leaves it, since kubeadm would overwrite kube-proxy's DaemonSet. To fix: correct config.conf (`kubectl -n kube-system edit configmap kube-proxy`), then `kubectl -n kube-system rollout restart daemonset kube-proxy`",
			strings.Join(differences, "; "))
	}
}

func proxyDifferences(ctx context.Context, e *machine.Env, site *configs.Site) ([]string, error) {
	document, err := site.ControlPlane.Documents().Only("KubeProxyConfiguration").Encode()
	if err != nil || len(document) == 0 {
		return nil, err
	}
	c, err := adminClient(e, site)
	if err != nil {
		return nil, err
	}
	var there struct {
		Data map[string]string `json:"data"`
	}
	if err := c.Get(ctx, proxyConfigMap, &there); kubeapi.Code(err) == 404 {
		return nil, nil // the cluster uses no kube-proxy
	} else if err != nil {
		return nil, err
	}
	var want, has map[string]any
	if err := yamltree.Unmarshal(document, &want); err != nil {
		return nil, err
	}
	if err := yamltree.Unmarshal([]byte(there.Data["config.conf"]), &has); err != nil {
		return nil, fmt.Errorf("reading config.conf of ConfigMap kube-system/kube-proxy: %w", err)
	}
	delete(want, "apiVersion") // an upgrade may change this field
	delete(want, "kind")
	return differences("", want, has), nil
}

// differences lists the fields of want that are missing from has or differ there. A missing field
// counts as the zero value. Fields and list items that only has contains are ignored.
func differences(field string, want, has any) []string {
	switch w := want.(type) {
	case map[string]any:
		h, _ := has.(map[string]any)
		var all []string
		for _, key := range slices.Sorted(maps.Keys(w)) {
			all = append(all, differences(strings.TrimPrefix(field+"."+key, "."), w[key], h[key])...)
		}
		return all
	case []any:
		h, _ := has.([]any)
		if !slices.ContainsFunc(w, func(item any) bool {
			return !slices.ContainsFunc(h, func(o any) bool { return fmt.Sprint(o) == fmt.Sprint(item) })
		}) {
			return nil
		}
	default:
		zero := want == nil || has == nil && reflect.ValueOf(want).IsZero()
		if zero || fmt.Sprint(want) == fmt.Sprint(has) || sameDuration(want, has) {
			return nil
		}
	}
	if has == nil || has == "" {
		return []string{fmt.Sprintf("%s is not set in the cluster, but %v in the Site", field, want)}
	}
	return []string{fmt.Sprintf("%s is %v in the cluster, but %v in the Site", field, has, want)}
}

// sameDuration reports whether two values are the same duration, such as 1h and 1h0m0s.
func sameDuration(a, b any) bool {
	x, err := time.ParseDuration(fmt.Sprint(a))
	y, errY := time.ParseDuration(fmt.Sprint(b))
	return err == nil && errY == nil && x == y
}
