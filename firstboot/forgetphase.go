package firstboot

import (
	"context"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
)

// forgetPhase leaves nothing of the token on this machine.
func forgetPhase(active *Active) run.Phase {
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
			if found, err := secretsInSlot(e, active); err != nil || found != noSecrets {
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
			found, err := secretsInSlot(e, active)
			if err == nil && found != noSecrets {
				err = forgetToken(e, active, found == slotBlank)
			}
			if err != nil {
				return err
			}
			return member.SaveForgotten(e)
		},
	}
}
