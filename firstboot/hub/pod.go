package hub

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// As a static pod (form staticPod), yurthub requests its own certificate with the bootstrap token.
// kubelet has no certificate and connects through yurthub from its first start, so there is no
// RedirectPhase.

// PodJoinPhase makes kubeadm start a kubelet whose first pod is yurthub. kubelet reaches the
// cluster only through that pod.
func PodJoinPhase(active *site.Active) run.Phase {
	labels := openyurt.Labels(active.Site.NodePool, active.Site.NodeType == configs.NodeCloud)
	return run.Phase{
		Name: "join", Doc: "kubeadm joins, and kubelet runs yurthub and connects through it", Timeout: 5 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			if err := member.OtherForm(e, true); err != nil {
				return run.Todo, err
			}
			if cert, err := member.Enrolment(e); err == nil {
				if err := member.SameName(cert, active.Node, member.ResetForName); err != nil {
					return run.Todo, err
				}
				flags := e.Contents(member.KubeadmFlags)
				if e.Exists(kubeadm.KubeletRestart) || string(withRegistration(flags, labels)) != string(flags) {
					return run.Todo, nil // the Site's nodePool or nodeType has changed
				}
				return run.Done, nil
			}
			done, err := podJoined(ctx, e, active)
			if err != nil || !done {
				return run.Todo, err
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			if member.Enrolled(e) == nil {
				return register(ctx, e, labels)
			}
			return podJoin(ctx, e, active)
		},
		Undo: func(ctx context.Context, e *machine.Env) error {
			if member.Enrolled(e) == nil {
				return nil
			}
			if done, err := podJoined(ctx, e, active); err != nil || done {
				return err
			}
			return errors.Join(UndoPodJoin(ctx, e, active.Site.CRISocket), e.Remove(member.DiscoveryFile))
		},
	}
}

// podJoined reports whether kubeadm has done its part, and yurthub can request its identity.
func podJoined(ctx context.Context, e *machine.Env, active *site.Active) (bool, error) {
	for _, p := range []string{ondisk.KubeletConf, ondisk.KubeletConfig, member.KubeadmFlags, ondisk.KubeCA, openyurt.Manifest} {
		if !e.Exists(p) {
			return false, nil
		}
	}
	conf, err := e.Read(member.HubBootstrap)
	if err != nil || !strings.Contains(string(conf), active.Site.Credentials.Token.Reveal()) {
		return false, nil // the file is from another boot, or has another token
	}
	if !openyurt.PodIsOf(string(e.Contents(openyurt.Manifest)), active.Node) {
		return false, nil // the Site's name for this machine has changed
	}
	if !openyurt.IsRedirected(string(e.Contents(member.KubeadmFlags))) {
		return false, nil
	}
	state, err := e.UnitState(ctx, ondisk.UnitKubelet)
	return state == "active", err
}

func podJoin(ctx context.Context, e *machine.Env, active *site.Active) error {
	s := *active.Site
	s.KubeletExtraArgs = kubeadm.SiteArgs(active)
	if err := member.SaveJoin(e, &s, active.Node); err != nil {
		return err
	}
	if err := kubeadm.WriteConfDir(e, s.KubeletExtraArgs); err != nil {
		return err
	}
	if err := UndoPodJoin(ctx, e, active.Site.CRISocket); err != nil { // undo an interrupted attempt
		return err
	}
	withEndpoint, err := endpointInCert(ctx, e, active.Site)
	if err != nil {
		return err
	}
	h, err := hubOf(e, active)
	if err != nil {
		return err
	}
	h = h.withServers(withEndpoint)
	ca, err := e.Read(ondisk.KubeCA)
	if err != nil {
		return fmt.Errorf("reading the cluster's CA: %w", err)
	}
	server, err := hubServer(ctx, e, h.Servers, ca)
	if err != nil {
		return err
	}
	boot, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: server, CAData: base64.StdEncoding.EncodeToString(ca)},
		kubeapi.User{Token: active.Site.Credentials.Token.Reveal()})
	if err != nil {
		return err
	}
	if err := installPortRules(ctx, e, h.portAccess()); err != nil {
		return err
	}
	if err := makeManifests(e); err != nil {
		return err
	}
	for _, f := range []struct {
		path string
		data []byte
	}{
		{member.HubBootstrap, boot},
		{openyurt.KubeletConf, []byte(openyurt.Kubeconfig)},
		// kubeadm waits until this file, which kubelet would write, exists.
		{ondisk.KubeletConf, []byte(openyurt.Kubeconfig)},
		{openyurt.Manifest, h.PodManifest()},
	} {
		if err := e.WriteFile(f.path, f.data, machine.Mode(0o600)); err != nil {
			return fmt.Errorf("preparing yurthub: %w", err)
		}
	}
	gate, err := plainLists(ctx, e, active.Image.Kubernetes)
	if err != nil {
		return err
	}
	s.KubeletExtraArgs = openyurt.JoinedArgs(s.KubeletExtraArgs, gate)
	err = kubeadm.Join(ctx, e, active, s, "FileAvailable--etc-kubernetes-kubelet.conf")
	if err != nil && strings.Contains(err.Error(), "uploading crisocket") {
		// This is kubeadm's last step. It needs yurthub and ends after a minute, but the approval
		// of yurthub's requests may take longer. The next phase reports what is missing.
		if done, perr := podJoined(ctx, e, active); done && perr == nil {
			e.Log.Info("kubeadm joined, but could not annotate the Node; a later phase does so", "error", err)
			return nil
		}
	}
	return err
}

// SocketAnnotation is the annotation from which kubeadm before 1.34 reads the socket of a node's
// container runtime at an upgrade.
const SocketAnnotation = "kubeadm.alpha.kubernetes.io/cri-socket"

// NodeMissing returns the reason why OpenYurt does not accept the Site's Node in the cluster, or
// nil if no reason is known.
func NodeMissing(ctx context.Context, e *machine.Env, active *site.Active) error {
	h, err := hubOf(e, active)
	if err != nil {
		return nil
	}
	return poolFits(ctx, e, h)
}

// AnnotateSocket sets SocketAnnotation if kubeadm could not do so at the end of its join.
func AnnotateSocket(ctx context.Context, e *machine.Env, active *site.Active) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c, n, err := member.OwnNode(ctx, e, active.Node)
	if err != nil || n.Metadata.Annotations[SocketAnnotation] != "" {
		return err
	}
	patch := map[string]any{"metadata": map[string]any{"annotations": map[string]string{SocketAnnotation: active.Site.CRISocket}}}
	if err := c.MergePatch(ctx, "/api/v1/nodes/"+n.Metadata.Name, patch); err != nil {
		return fmt.Errorf("annotating Node %s with its container runtime: %w", n.Metadata.Name, err)
	}
	return nil
}

// hubServer returns the first server that answers and whose certificate yurthub can verify. yurthub
// puts this server into yurthub.conf, where it never changes.
func hubServer(ctx context.Context, e *machine.Env, servers []string, ca []byte) (string, error) {
	var errs []error
	for _, s := range servers {
		err := certHasOwnName(ctx, e, s, ca)
		if err == nil {
			return s, nil
		}
		errs = append(errs, err)
	}
	return "", run.Advise(fmt.Errorf("yurthub can use none of the API servers: %w", errors.Join(errs...)),
		"their certificates must have the endpoint or their own addresses (certSANs of the API servers)")
}

// UndoPodJoin removes yurthub's pod, and the files that podJoin, kubeadm and yurthub have written.
func UndoPodJoin(ctx context.Context, e *machine.Env, socket string) error {
	ran := e.Exists(openyurt.Manifest)
	if err := kubeadm.UndoJoin(ctx, e); err != nil {
		return err
	}
	if ran {
		// When kubelet stops and starts again, its pods keep running, so yurthub would continue
		// with its former configuration.
		if err := removeHubPod(ctx, e, socket); err != nil {
			return err
		}
	}
	return forgetHub(e)
}

var podID = regexp.MustCompile(`(?m)^[0-9a-f]{64}$`)

func removeHubPod(ctx context.Context, e *machine.Env, socket string) error {
	crictl := []string{"crictl", "--runtime-endpoint", socket}
	var out strings.Builder
	err := e.Run(ctx, machine.Cmd{Args: append(crictl[:3:3], "pods", "--quiet", "--namespace", openyurt.PodNamespace, "--name", openyurt.PodName), Output: &out})
	if err != nil {
		return fmt.Errorf("looking for yurthub's pod: %w: %s", err, strings.TrimSpace(out.String()))
	}
	for _, id := range podID.FindAllString(out.String(), -1) {
		if err := e.Run(ctx, machine.Cmd{Args: append(crictl[:3:3], "rmp", "--force", id)}); err != nil {
			return fmt.Errorf("removing yurthub's pod: %w", err)
		}
	}
	return nil
}

// missingIdentity uses the bootstrap token to check the state of yurthub's first certificate
// request.
func missingIdentity(ctx context.Context, e *machine.Env, h hub) error {
	c, err := e.ClientAt(member.HubBootstrap, "yurthub's bootstrap file")
	if err != nil {
		return err
	}
	csrs, err := listCSRs(ctx, c, openyurt.ClientSigner)
	switch {
	case kubeapi.Code(err) == 401:
		return run.Advise(errors.New("the bootstrap token is no longer valid, and yurthub has no certificate yet"),
			"put a new token into site.yaml (`kubeadm token create`), in the slot or on a stick")
	case kubeapi.Code(err) == 0 && err != nil:
		return run.Advise(fmt.Errorf("no API server answers: %w", err), "check the network between this node and the API servers")
	case err != nil:
		return fmt.Errorf("looking for yurthub's request for its client certificate: %w", err)
	}
	asked := false
	err = judgeCSRs(csrs, "client", openyurt.ClientSigner, func(r csr) bool {
		mine := requestOf(r).Subject.CommonName == member.NodeUser+h.Node
		asked = asked || mine
		return mine
	})
	if err != nil || asked {
		return err
	}
	return run.Advise(errors.New("yurthub has not requested its client certificate yet"), h.Logs())
}

// makeManifests creates kubelet's directory of static pods if it is missing. As with kubeadm, only
// root can read it.
func makeManifests(e *machine.Env) error {
	if e.Exists(ondisk.ManifestsDir) {
		return nil
	}
	if err := e.Mkdir(ondisk.ManifestsDir, machine.Mode(0o700)); err != nil {
		return fmt.Errorf("making %s: %w", ondisk.ManifestsDir, err)
	}
	return nil
}
