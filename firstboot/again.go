package firstboot

import (
	"context"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// againPhase keeps first boot's timer running on a control-plane node, which may run for years
// without a reboot.
func againPhase() run.Phase {
	return run.Phase{
		Name: "again", Doc: "first boot renews certificates and makes snapshots while the machine is on", Timeout: time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			state, err := e.UnitState(ctx, ondisk.UnitAgain)
			if err != nil || state != "active" {
				return run.Todo, err
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			if err := e.Unit(ctx, "start", ondisk.UnitAgain); err != nil {
				return fmt.Errorf("starting %s: %w", ondisk.UnitAgain, err)
			}
			return nil
		},
	}
}
