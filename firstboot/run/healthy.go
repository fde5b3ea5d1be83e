package run

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// A system that was just installed boots on trial: edgebake-healthy.service
// holds boot-complete.target until HealthyFile is there, and with it the mark
// that makes the system the one to boot from now on. A boot without it ends
// after a while, and after the last try the former system boots again. As long as
// HeldFile is there, this time does not run.

// saveHealthy says that this boot is as good as the last one.
func saveHealthy(e *machine.Env) error {
	if e.Exists(ondisk.HealthyFile) {
		return nil
	}
	if err := e.WriteFile(ondisk.HealthyFile, nil, machine.Mode(0o644)); err != nil {
		return fmt.Errorf("noting that this boot went well: %w", err)
	}
	return nil
}

// ErrUnproven is a boot on trial that shows no fault, and whose node no API server has
// seen: it is neither kept nor ended.
var ErrUnproven = errors.New("no API server has seen the Node on this system yet")

// holdLimit bounds how long a boot on trial waits for an API server. A fault of the new
// system may be the reason, and look from here like one of the network.
const holdLimit = 24 * time.Hour

// hold has edgebake-healthy.service go on waiting, or not.
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
// still has the count.
func OnTrial(e *machine.Env) bool {
	entry := e.CountedEntry()
	return entry != "" && e.Exists(machine.ESPDir+"/"+entry)
}

// rejectTrial returns an error if this boot is on trial: no change is made then.
func rejectTrial(e *machine.Env) error {
	if !OnTrial(e) {
		return nil
	}
	return Advise(errors.New("the system that runs is on trial itself, after an update"),
		"wait until the Node is Ready: the machine then keeps this system, or else returns to the former one (`firstboot status`)")
}

// changeLock is held while an update, a convert, a revert or a reset changes the machine.
const changeLock = ondisk.RunMark + "change.lock"

// Exclusive keeps other changes that a person asks for out until release is called. A boot
// on trial takes none: its way back would lead to a machine that was changed meanwhile.
func Exclusive(ctx context.Context, e *machine.Env) (release func(), err error) {
	if err := rejectTrial(e); err != nil {
		return nil, err
	}
	release, err = e.Lock(ctx, changeLock)
	if err != nil {
		return nil, Advise(fmt.Errorf("another update, convert, revert or reset is at work on this machine: %w", err), "wait until it is done, or end that command (Ctrl-C)")
	}
	return release, nil
}
