package join

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
)

// ForgetPhase removes the bootstrap token from this machine, and the cluster's keys from the slot.
func ForgetPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "forget-token", Doc: "the bootstrap token is removed from this machine", Timeout: time.Minute,
		Irreversible: true, // until earlier phases succeed, they need the token
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			for _, f := range member.TokenFiles {
				// After any other error, the file may still exist.
				if _, err := os.Lstat(e.Path(f)); !errors.Is(err, fs.ErrNotExist) {
					return run.Todo, nil
				}
			}
			if j, ok := member.ReadJoinedAs(e); ok && !j.TokenForgotten {
				return run.Todo, nil
			}
			if found, err := site.CredentialsInSlot(e, active); err != nil || found != site.NoCredentials {
				return run.Todo, err
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			// kubeadm and kubelet do not sync the credentials. If they were lost, the machine could
			// join again only with the token.
			if err := member.SyncCredentials(e); err != nil {
				return err
			}
			for _, f := range member.TokenFiles {
				if err := e.Remove(f); err != nil {
					return fmt.Errorf("removing the token: %w", err)
				}
			}
			found, err := site.CredentialsInSlot(e, active)
			if err == nil && found != site.NoCredentials {
				err = site.RemoveCredentials(e, active, found == site.SlotBlank)
			}
			if err != nil {
				return err
			}
			return member.SaveForgotten(e)
		},
	}
}
