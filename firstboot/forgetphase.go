package firstboot

import (
	"context"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// forgetPhase leaves nothing of the token on this machine.
func forgetPhase(active *Active) Phase {
	return Phase{
		Name: "forget-token", Doc: "nothing of the bootstrap token is left", Timeout: time.Minute,
		Final: true, // nothing before it needs the token any more
		Check: func(_ context.Context, e *machine.Env) (Verdict, error) {
			for _, f := range tokenFiles {
				if e.Exists(f) {
					return Todo, nil
				}
			}
			if j, ok := readJoinedAs(e); ok && !j.TokenForgotten {
				return Todo, nil
			}
			if found, err := secretsInSlot(e, active); err != nil || found != noSecrets {
				return Todo, err
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			// Kubeadm and kubelet sync nothing, and the token is the only way
			// back in.
			if err := syncCredentials(e); err != nil {
				return err
			}
			for _, f := range tokenFiles {
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
			return saveForgotten(e)
		},
	}
}
