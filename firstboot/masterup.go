package firstboot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// controlPlaneMark names the documents that the control plane's pods and
// kubelet's settings were made from, once they are on the disk.
const controlPlaneMark = ondisk.StateDir + "/control-plane"

var masterPods = []string{manifests + "/kube-apiserver.yaml", manifests + "/kube-controller-manager.yaml", manifests + "/kube-scheduler.yaml"}

// controlPlanePhase has kubelet run the control plane.
func controlPlanePhase(active *Active) Phase {
	site := active.Site
	sum := sha256.Sum256([]byte(active.Image.Plan + "\x00" + site.ControlPlane.Kubeadm))
	mark := hex.EncodeToString(sum[:])
	made := func(e *Env) bool {
		return e.text(controlPlaneMark) == mark && enrolled(e) == nil &&
			!slices.ContainsFunc(masterPods, func(p string) bool { return len(e.contents(p)) == 0 })
	}
	return Phase{
		Name: "control-plane", Doc: "this machine's API server is ready", Timeout: 20 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			state, err := e.UnitState(ctx, ondisk.UnitKubelet)
			if err != nil || state != "active" || !made(e) || ownAPI(ctx, e, site) != nil {
				return Todo, err
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			if !made(e) {
				if err := kubeadmInit(ctx, e, active, configs.KubeadmLocal{}, []string{"control-plane", "all"}, []string{"kubelet-start"}); err != nil {
					return err
				}
				if err := outlast(e); err != nil { // kubeadm does not sync
					return err
				}
				if _, err := e.write(controlPlaneMark, []byte(mark+"\n"), Mode(0o600)); err != nil {
					return fmt.Errorf("noting how the control plane was made: %w", err)
				}
			}
			if state, err := e.UnitState(ctx, ondisk.UnitKubelet); err != nil {
				return err
			} else if state != "active" {
				if err := e.Unit(ctx, "start", ondisk.UnitKubelet); err != nil {
					return fmt.Errorf("starting kubelet: %w", err)
				}
			}
			return waitForAPI(ctx, e, site)
		},
	}
}

// waitForAPI waits for this machine's own API server. While its member of etcd
// has no vote, it answers nothing.
func waitForAPI(ctx context.Context, e *Env, site *configs.Site) error {
	client, err := etcdClient(e)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	var last error
	err = e.poll(ctx, seatInterval, func() (bool, error) {
		if last = ownAPI(ctx, e, site); last == nil {
			return true, nil
		}
		e.Waiting("this machine's API server: %s", oneLine(last))
		if err := promote(ctx, e, site, client); err != nil {
			e.Waiting("this machine's member of etcd to catch up: %s", oneLine(err))
		}
		return false, nil
	})
	if err != nil && last != nil {
		return Advise(fmt.Errorf("this machine's API server is not ready: %w", last), "etcd needs more than half of the control-plane nodes; else see `crictl ps -a` and /var/log/pods on the machine")
	}
	return err
}

// ownAPI reports what is wrong with this machine's own API server.
func ownAPI(ctx context.Context, e *Env, site *configs.Site) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c := api.Client{Server: "https://" + ownHostPort(site), CA: e.contents(ondisk.KubeCA), Dial: e.Dial, Ways: e.ways()}
	return c.Get(ctx, "/readyz", nil)
}

// adminClient may do anything in the cluster, through this machine's own API
// server.
func adminClient(e *Env, site *configs.Site) (*api.Client, error) {
	conf, err := e.read(superAdminConf)
	if err != nil {
		return nil, fmt.Errorf("reading the administrator's kubeconfig: %w", err)
	}
	k, err := e.parseKubeconfig(conf)
	if err != nil {
		return nil, err
	}
	c, err := e.clientOf(k)
	if err != nil {
		return nil, err
	}
	c.Server, c.ServerName = "https://"+ownHostPort(site), ""
	return c, nil
}

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

// publishPhase gives a new cluster what kubeadm's init gives it, and the
// objects of the site. cluster-info comes last: where it is, all is. Nothing
// is done twice in a cluster's life: what somebody changed since stays.
func publishPhase(active *Active) Phase {
	site := active.Site
	return Phase{
		Name: "publish", Doc: "the cluster has what nodes join with", Timeout: 10 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			c, err := adminClient(e, site)
			if err != nil {
				return Todo, err
			}
			switch err := c.Get(ctx, clusterInfo, nil); {
			case err == nil:
				return Done, nil
			case api.Code(err) != 404:
				return Todo, fmt.Errorf("asking whether the cluster is published: %w", err)
			case site.Credentials.Keys != nil:
				return Todo, nil
			case e.exists(readyMark):
				// It was published before the keys were wiped, and somebody has
				// deleted it since. What else is there is not to be reset.
				e.Note("the cluster publishes no cluster-info any more: nodes that do not know its CA cannot join. To fix, unless it was deleted on purpose: `kubeadm init phase bootstrap-token` on this machine")
				return Done, nil
			default:
				return Todo, Permanent(errors.New("the cluster was never published, and the keys and tokens to publish it with are gone from the slot"),
					"stamp the machine's Site again, with the keys (`edgebake cluster sites`), or bring it on a stick")
			}
		},
		Run: func(ctx context.Context, e *Env) error {
			c, err := adminClient(e, site)
			if err != nil {
				return err
			}
			if err := waitForOwnNode(ctx, e, c, active.Node); err != nil { // kubeadm notes the runtime there
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
			if err := kubeadmInit(ctx, e, active, configs.KubeadmLocal{}, phases...); err != nil {
				return err
			}
			tokens, err := configs.UnpackManifests(site.Credentials.Keys.Objects)
			if err != nil {
				return fmt.Errorf("reading the objects of the Site: %w", err)
			}
			objects, err := objectsOf(append(tokens, configs.Manifest{Name: "cluster-info's rules", Text: clusterInfoRules}))
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
			// Without one, kubeadm makes a token of its own that is valid for a
			// day and printed.
			token := configs.NewSecret(hex.EncodeToString(e.Random(3)) + "." + hex.EncodeToString(e.Random(8)))
			return kubeadmInit(ctx, e, active, configs.KubeadmLocal{Token: token, TokenTTL: time.Minute}, []string{"bootstrap-token"})
		},
	}
}

const (
	dnsService    = "/api/v1/namespaces/kube-system/services/kube-dns"
	dnsDeployment = "/apis/apps/v1/namespaces/kube-system/deployments/coredns"
)

// dnsIsThere reports whether kubeadm has made the cluster's DNS. Found already, it
// is an upgrade to kubeadm, which knows no way from a CoreDNS newer than itself.
// The Service comes last: what is there without it was cut off, and is made anew.
func dnsIsThere(ctx context.Context, c *api.Client) (bool, error) {
	switch err := c.Get(ctx, dnsService, nil); {
	case err == nil:
		return true, nil
	case api.Code(err) != 404:
		return false, fmt.Errorf("looking for the cluster's DNS: %w", err)
	}
	if err := c.Delete(ctx, dnsDeployment); err != nil && api.Code(err) != 404 {
		return false, fmt.Errorf("removing a half-made CoreDNS: %w", err)
	}
	return false, nil
}

func waitForOwnNode(ctx context.Context, e *Env, c *api.Client, name string) error {
	e.Waiting("kubelet to register the Node %s", name)
	var last error
	err := e.poll(ctx, seatInterval, func() (bool, error) {
		_, last = c.GetNode(ctx, name)
		return last == nil, nil
	})
	if err != nil && last != nil {
		return Advise(fmt.Errorf("kubelet has not registered the Node %s: %w", name, last), "see `journalctl -u kubelet` on the machine")
	}
	return err
}

const controlPlaneLabel = "node-role.kubernetes.io/control-plane"

// registerPhase marks the Node, and has kubelet renew its own certificate:
// kubeadm writes one into its kubeconfig that would expire.
func registerPhase(active *Active) Phase {
	site := active.Site
	return Phase{
		Name: "register", Doc: "the Node is a control-plane node's, and kubelet renews its certificate", Timeout: 5 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			c, err := adminClient(e, site)
			if err != nil {
				return Todo, err
			}
			n, err := c.GetNode(ctx, active.Node)
			if err != nil && api.Code(err) != 404 {
				return Todo, err
			}
			if err != nil {
				return Todo, nil
			}
			if _, marked := n.Metadata.Labels[controlPlaneLabel]; !marked || !bytes.Contains(e.contents(ondisk.KubeletConf), []byte(clientCert)) {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			c, err := adminClient(e, site)
			if err != nil {
				return err
			}
			if err := waitForOwnNode(ctx, e, c, active.Node); err != nil {
				return err
			}
			n, err := c.GetNode(ctx, active.Node)
			if err != nil {
				return err
			}
			if _, marked := n.Metadata.Labels[controlPlaneLabel]; !marked {
				if err := kubeadmInit(ctx, e, active, configs.KubeadmLocal{}, []string{"mark-control-plane"}); err != nil {
					return err
				}
			}
			e.Waiting("kubelet to keep its certificate in %s", clientCert)
			if err := e.poll(ctx, seatInterval, func() (bool, error) {
				_, err := os.Stat(e.path(kubeletPKI))
				return err == nil && len(kubeletKeys(e)) > 0 && e.exists(clientCert), nil
			}); err != nil {
				return Advise(fmt.Errorf("kubelet has no %s: %w", clientCert, err), "see `journalctl -u kubelet` on the machine")
			}
			if err := kubeadmInit(ctx, e, active, configs.KubeadmLocal{}, []string{"kubelet-finalize", "all"}); err != nil {
				return err
			}
			return outlast(e)
		},
	}
}
