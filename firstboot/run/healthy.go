package run

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// A boot on trial is confirmed by HealthyFile: edgebake-healthy.service waits for this file before
// boot-complete.target. If it does not appear before a timeout, the machine restarts, unless
// HeldFile exists.

// saveHealthy marks this boot as successful.
func saveHealthy(e *machine.Env) error {
	if e.Exists(ondisk.HealthyFile) {
		return nil
	}
	if err := e.WriteFile(ondisk.HealthyFile, nil, machine.Mode(0o644)); err != nil {
		return fmt.Errorf("marking this boot as healthy: %w", err)
	}
	return nil
}

// ErrUnproven means that a boot on trial shows no fault, but no API server has seen its Node. The
// boot is neither confirmed nor ended.
var ErrUnproven = errors.New("no API server has seen the Node Ready on this system yet")

// holdLimit limits how long a boot on trial waits for an API server: a fault of the new system may
// look like a network fault.
const holdLimit = 24 * time.Hour

// hold suspends the timeout of edgebake-healthy.service if held is true, and otherwise lets it run.
func hold(e *machine.Env, held bool) error {
	switch {
	case held == e.Exists(ondisk.HeldFile):
		return nil
	case held:
		return e.WriteFile(ondisk.HeldFile, nil, machine.Mode(0o644))
	}
	return e.Remove(ondisk.HeldFile)
}

// OnTrial reports whether this boot is on trial: the loader counted it, and its boot entry
// still has the count, or cannot be read.
func OnTrial(e *machine.Env) bool {
	entry := e.CountedEntry()
	if entry == "" {
		return false
	}
	_, err := os.Lstat(e.Path(machine.ESPDir + "/" + entry))
	return !errors.Is(err, fs.ErrNotExist)
}

// rejectTrial returns an error if this boot is on trial, because no change is permitted then.
func rejectTrial(e *machine.Env) error {
	if !OnTrial(e) {
		return nil
	}
	return Advise(errors.New("the running system is still on trial after an update"),
		"wait until the Node is Ready: the machine then keeps this system, or else returns to the previous one (`firstboot status`)")
}

// rejectPending returns an error if an update has written the boot entry of a new system and the
// machine has not restarted yet: the new system would not have the change.
func rejectPending(e *machine.Env) error {
	list, err := os.ReadDir(e.Path(machine.ESPDir + "/loader/entries"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("reading the boot entries: %w", err)
	}
	for _, f := range list {
		if n, ok := machine.ParseEntryName(f.Name()); ok && n.Trial && n.Left > 0 {
			return Advise(fmt.Errorf("an update is installed, and the next restart boots its system (boot entry %s)", f.Name()),
				"restart the machine and wait until it keeps the new system (`firstboot status`), then run this command again")
		}
	}
	return nil
}

// changeLock is held while an update, a convert, a revert or a reset changes the machine.
const changeLock = ondisk.RunMark + "change.lock"

// Exclusive prevents other updates, converts, reverts and resets until unlock is called. It fails
// during a trial, because the machine may return to the former system.
func Exclusive(ctx context.Context, e *machine.Env) (unlock func(), err error) {
	if err := rejectTrial(e); err != nil {
		return nil, err
	}
	unlock, err = e.Lock(ctx, changeLock)
	if errors.Is(err, machine.ErrLocked) {
		err = Advise(fmt.Errorf("another update, convert, revert or reset is running on this machine: %w", err), "wait until it is done, or end that command (Ctrl-C)")
	}
	return unlock, err
}

// ExclusiveSettled is like Exclusive, for changes of the running system. It also fails while an
// update waits for a restart.
func ExclusiveSettled(ctx context.Context, e *machine.Env) (unlock func(), err error) {
	if unlock, err = Exclusive(ctx, e); err != nil {
		return nil, err
	}
	if err := rejectPending(e); err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}
