package join

import (
	"context"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
)

// ForgetPhase leaves nothing of the token on this machine.
func ForgetPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "forget-token", Doc: "nothing of the bootstrap token is left", Timeout: time.Minute,
		Irreversible: true, // nothing before it needs the token any more
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			for _, f := range member.TokenFiles {
				if e.Exists(f) {
					return run.Todo, nil
				}
			}
			if j, ok := member.ReadJoinedAs(e); ok && !j.TokenForgotten {
				return run.Todo, nil
			}
			if found, err := site.SecretsInSlot(e, active); err != nil || found != site.NoSecrets {
				return run.Todo, err
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			// Kubeadm and kubelet sync nothing, and the token is the only way
			// back in.
			if err := member.SyncCredentials(e); err != nil {
				return err
			}
			for _, f := range member.TokenFiles {
				if err := e.Remove(f); err != nil {
					return fmt.Errorf("forgetting the token: %w", err)
				}
			}
			found, err := site.SecretsInSlot(e, active)
			if err == nil && found != site.NoSecrets {
				err = site.ForgetToken(e, active, found == site.SlotBlank)
			}
			if err != nil {
				return err
			}
			return member.SaveForgotten(e)
		},
	}
}
