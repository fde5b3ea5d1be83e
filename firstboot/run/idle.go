package run

import (
	"context"
	"fmt"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// Idle returns an error while first boot applies the Site, because first boot and the caller would
// undo each other's work. First boot counts as idle once its result is done.
func Idle(ctx context.Context, e *machine.Env) error {
	switch state, err := e.UnitState(ctx, ondisk.UnitFirstboot); {
	case err != nil:
		return err
	case state != "active" && state != "activating" && state != "reloading":
		return nil
	}
	since, err := e.UnitSince(ctx, ondisk.UnitFirstboot)
	if err != nil {
		return err
	}
	result := ondisk.ResultRunning // also for a state that is unreadable, or from an earlier run
	if s, err := LoadState(e.Root); err == nil && s.BootID == machine.BootID(e) && !s.Updated.Before(since.Earlier()) {
		result = s.Result
	}
	if result == ondisk.ResultDone {
		return nil
	}
	return Advise(fmt.Errorf("first boot has not finished on this machine (%s)", result),
		"`firstboot status` shows what it waits for; wait until it is done, or stop it: systemctl stop firstboot")
}
