package firstboot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
)

// kubeadm's documents that are for the whole cluster are uploaded at the birth: kubeadm
// reads them there when a node joins, or is upgraded. A Site with corrected ones changes
// what is uploaded, as long as nobody else has changed that.

const (
	kubeadmConfigMap = "/api/v1/namespaces/kube-system/configmaps/kubeadm-config"
	kubeletConfigMap = "/api/v1/namespaces/kube-system/configmaps/kubelet-config"
	// documentsKey is the annotation of kubeadm-config that names the documents that were
	// uploaded last; uploadedKey, what the ConfigMaps were then.
	documentsKey = "edgebake.io/documents"
	uploadedKey  = "edgebake.io/uploaded"
	// documentsMark names the documents of this machine that are in the cluster.
	documentsMark = ondisk.StateDir + "/cluster-documents"
	// documentsFile has them for a person, where first boot does not upload them.
	documentsFile = ondisk.StateDir + "/kubeadm.yaml"
)

// documentsOf names the cluster's documents of a Site by their contents.
func documentsOf(site *configs.Site) (string, error) {
	docs, err := site.ClusterDocuments()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(docs)
	return hex.EncodeToString(sum[:16]), nil
}

// uploaded is what the cluster has of such documents.
type uploaded struct {
	documents string // of which Site; "": unknown
	untouched bool   // it is still what was uploaded
	contents  string // names what it is now
}

func readUploaded(ctx context.Context, c *api.Client) (uploaded, error) {
	var cluster, kubelet struct {
		Metadata struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
		Data map[string]string `json:"data"`
	}
	for path, into := range map[string]any{kubeadmConfigMap: &cluster, kubeletConfigMap: &kubelet} {
		if err := c.Get(ctx, path, into); err != nil && api.Code(err) != 404 {
			return uploaded{}, fmt.Errorf("reading the cluster's configuration: %w", err)
		}
	}
	sum := sha256.Sum256([]byte(cluster.Data["ClusterConfiguration"] + "\x00" + kubelet.Data["kubelet"]))
	u := uploaded{documents: cluster.Metadata.Annotations[documentsKey], contents: hex.EncodeToString(sum[:16])}
	u.untouched = cluster.Metadata.Annotations[uploadedKey] == u.contents
	return u, nil
}

// noteUploaded notes in the cluster, and then on this machine, that the documents were
// uploaded.
func noteUploaded(ctx context.Context, e *Env, c *api.Client, documents string) error {
	now, err := readUploaded(ctx, c)
	if err == nil {
		err = c.MergePatch(ctx, kubeadmConfigMap, map[string]any{"metadata": map[string]any{"annotations": map[string]any{documentsKey: documents, uploadedKey: now.contents}}})
	}
	if err != nil {
		return fmt.Errorf("noting which of kubeadm's documents are uploaded: %w", err)
	}
	return markDocuments(e, documents)
}

func markDocuments(e *Env, documents string) error {
	if _, err := e.write(documentsMark, []byte(documents+"\n"), Mode(0o600)); err != nil {
		return fmt.Errorf("noting which of kubeadm's documents are uploaded: %w", err)
	}
	return e.Remove(documentsFile)
}

// documentsPhase uploads kubeadm's documents again when the Site has others, unless
// somebody else has changed what is there: that is reported.
func documentsPhase(active *Active) Phase {
	site, reported := active.Site, false
	return Phase{
		Name: "documents", Doc: "the cluster has kubeadm's documents of the Site", Timeout: 2 * time.Minute,
		Check: func(_ context.Context, e *Env) (Verdict, error) {
			documents, err := documentsOf(site)
			if err != nil || !reported && e.text(documentsMark) != documents {
				return Todo, err
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			documents, err := documentsOf(site)
			if err != nil {
				return err
			}
			c, err := adminClient(e, site)
			if err != nil {
				return err
			}
			there, err := readUploaded(ctx, c)
			if err != nil {
				return err
			}
			had := e.text(documentsMark)
			switch {
			case there.documents == documents: // by this machine, another one, or a person
				return markDocuments(e, documents)
			case had == "" && there.documents == "":
				// Of a former release: what the cluster has is what it is to have.
				return markDocuments(e, documents)
			case had != "" && there.documents != "" && there.untouched:
				if err := kubeadmInit(ctx, e, active, configs.KubeadmLocal{}, []string{"upload-config", "all"}); err != nil {
					return err
				}
				e.Console("kubeadm's documents of the Site are uploaded to the cluster")
				return noteUploaded(ctx, e, c, documents)
			}
			// A machine that comes with documents that the cluster never had may as well
			// have old ones.
			reported = true
			text, err := site.KubeadmDocuments(configs.KubeadmLocal{})
			if err == nil {
				_, err = e.write(documentsFile, text, Mode(0o600))
			}
			if err != nil {
				return fmt.Errorf("writing kubeadm's documents for a person: %w", err)
			}
			e.Note("kubeadm's documents of the Site differ from those that were uploaded to the cluster, and somebody else may have changed these: they stay. To upload the Site's: kubeadm init phase upload-config all --config %s && %s; to keep what is there: the last command alone",
				documentsFile, "kubectl -n kube-system annotate configmap kubeadm-config --overwrite "+documentsKey+"="+documents)
			return nil
		},
	}
}
