package host

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// unit applies a verb to a unit, and waits for its job.
func unit(ctx context.Context, verb, name string) error {
	conn, err := dbus.NewSystemdConnectionContext(ctx)
	if err != nil {
		return fmt.Errorf("connecting to systemd: %w", err)
	}
	defer conn.Close()
	done := make(chan string, 1)
	switch verb {
	case "daemon-reload":
		return conn.ReloadContext(ctx)
	case "enable":
		_, _, err = conn.EnableUnitFilesContext(ctx, []string{name}, false, true)
		return err
	case "disable":
		_, err = conn.DisableUnitFilesContext(ctx, []string{name}, false)
		return err
	case "start":
		_, err = conn.StartUnitContext(ctx, name, "replace", done)
	case "restart":
		_, err = conn.RestartUnitContext(ctx, name, "replace", done)
	case "try-restart":
		_, err = conn.TryRestartUnitContext(ctx, name, "replace", done)
	case "reload":
		_, err = conn.ReloadUnitContext(ctx, name, "replace", done)
	case "stop":
		if _, err = conn.StopUnitContext(ctx, name, "replace", done); unknownUnit(err) {
			return nil // a missing unit is not running
		}
	default:
		return fmt.Errorf("BUG: unknown verb %q for unit %s", verb, name)
	}
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case result := <-done:
		if result != "done" && result != "skipped" {
			return fmt.Errorf("its job ended with %q; see `journalctl -u %s`", result, name)
		}
		return nil
	}
}

func unknownUnit(err error) bool {
	return err != nil && strings.Contains(err.Error(), "not loaded")
}

func unitState(ctx context.Context, name string) (string, error) {
	conn, err := dbus.NewSystemdConnectionContext(ctx)
	if err != nil {
		return "", fmt.Errorf("connecting to systemd: %w", err)
	}
	defer conn.Close()
	units, err := conn.ListUnitsByNamesContext(ctx, []string{name})
	if err != nil {
		return "", fmt.Errorf("asking for the state of %s: %w", name, err)
	}
	i := slices.IndexFunc(units, func(u dbus.UnitStatus) bool { return u.Name == name })
	if i < 0 {
		return "inactive", nil
	}
	return units[i].ActiveState, nil
}

// unitSince returns the time at which a unit was started, by the clock as it was then and as it is
// now. It computes the latter from the monotonic clock, which is never set.
func unitSince(ctx context.Context, name string) (machine.UnitStart, error) {
	conn, err := dbus.NewSystemdConnectionContext(ctx)
	if err != nil {
		return machine.UnitStart{}, fmt.Errorf("connecting to systemd: %w", err)
	}
	defer conn.Close()
	var stamps [2]time.Duration
	for i, property := range []string{"ActiveEnterTimestampMonotonic", "ActiveEnterTimestamp"} {
		p, err := conn.GetUnitPropertyContext(ctx, name, property)
		if err != nil {
			return machine.UnitStart{}, fmt.Errorf("asking when %s was started: %w", name, err)
		}
		usec, ok := p.Value.Value().(uint64)
		if !ok {
			return machine.UnitStart{}, fmt.Errorf("asking when %s was started: unexpected answer %s", name, p.Value)
		}
		stamps[i] = time.Duration(usec) * time.Microsecond
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return machine.UnitStart{}, fmt.Errorf("reading the clock: %w", err)
	}
	return machine.UnitStart{
		Now:  time.Now().Add(stamps[0] - time.Duration(now.Nano())),
		Then: time.UnixMicro(stamps[1].Microseconds()),
	}, nil
}
