package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

func waitForOwnNode(ctx context.Context, e *machine.Env, c *kubeapi.Client, active *site.Active) error {
	name, missing := active.Node, member.Absence{}
	e.Waiting("kubelet to register the Node %s", name)
	err := e.Retry(ctx, machine.Wait{Every: decideInterval}, func() error {
		_, err := c.GetNode(ctx, name)
		if kubeapi.Code(err) == 404 {
			return errors.Join(err, missing.End(ctx, e, active.Site))
		}
		missing = member.Absence{}
		return err
	})
	if err != nil {
		return run.Advise(fmt.Errorf("kubelet has not registered the Node %s: %w", name, err), "see `journalctl -u kubelet` on the machine")
	}
	return nil
}

// Label is the label by which kubeadm marks control-plane Nodes.
const Label = kubeapi.ControlPlaneLabel

// RegisterPhase labels the Node as a control-plane node, and makes kubelet renew its own
// certificate. The one that kubeadm writes into kubelet.conf would expire.
func RegisterPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "register", Doc: "the Node is labelled as a control-plane node, and kubelet renews its certificate", Timeout: 5 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			c, err := adminClient(e, active.Site)
			if err != nil {
				return run.Todo, err
			}
			n, err := c.GetNode(ctx, active.Node)
			if err != nil && kubeapi.Code(err) != 404 {
				return run.Todo, err
			}
			if err != nil {
				return run.Todo, nil
			}
			if _, marked := n.Metadata.Labels[Label]; !marked || !bytes.Contains(e.Contents(ondisk.KubeletConf), []byte(member.ClientCert)) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			c, err := adminClient(e, active.Site)
			if err != nil {
				return err
			}
			if err := waitForOwnNode(ctx, e, c, active); err != nil {
				return err
			}
			n, err := c.GetNode(ctx, active.Node)
			if err != nil {
				return err
			}
			if _, marked := n.Metadata.Labels[Label]; !marked {
				if err := kubeadm.Init(ctx, e, active, kubeadm.Local{}, []string{"mark-control-plane"}); err != nil {
					return err
				}
			}
			e.Waiting("kubelet to store its certificate in %s", member.ClientCert)
			if err := e.Poll(ctx, decideInterval, func() (bool, error) {
				_, err := os.Stat(e.Path(member.KubeletPKI))
				return err == nil && len(member.KubeletKeys(e)) > 0 && e.Exists(member.ClientCert), nil
			}); err != nil {
				return run.Advise(fmt.Errorf("kubelet has not stored its certificate in %s: %w", member.ClientCert, err), "see `journalctl -u kubelet` on the machine")
			}
			if err := kubeadm.Init(ctx, e, active, kubeadm.Local{}, []string{"kubelet-finalize", "all"}); err != nil {
				return err
			}
			return member.SyncCredentials(e)
		},
	}
}
