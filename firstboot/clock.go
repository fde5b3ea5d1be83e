package firstboot

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs/ondisk"
)

const clockDoc = "a clock that is not in the past"

// clockPhase brings the clock to the latest moment that is certain to have
// passed: the image's date, or when its site was stamped. Boards without a
// battery wake up in 1970, where every certificate is not yet valid. A clock
// that follows a time server knows better than both. One that makes this node's
// certificate look expired may be in the future: a time server is asked first.
func clockPhase(active *Active) Phase {
	floor := clockFloor(active)
	return Phase{
		Name: "clock", Doc: clockDoc, Timeout: 3 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			behind := e.Now().Before(floor)
			ahead := errors.Is(enrolled(e), errExpired) && !e.exists(askedNTP)
			if (behind || ahead) && !clockSynced(ctx, e) {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			if e.Now().Before(floor) {
				e.Log.Info("the clock is behind what is certain", "clock", e.Now().UTC(), "floor", floor.UTC())
				if err := e.SetClock(floor); err != nil {
					return fmt.Errorf("setting the clock to %s: %w", floor.UTC().Format(time.RFC3339), err)
				}
			}
			waitForNTP(ctx, e)
			if err := e.WriteFile(askedNTP, nil, Mode(0o600)); err != nil {
				return fmt.Errorf("recording that a time server was asked: %w", err)
			}
			return nil
		},
	}
}

// askedNTP says that time servers were waited for since this machine was
// switched on.
const askedNTP = ondisk.RunMark + "asked-ntp"

// clockFloor is a moment that has certainly passed.
func clockFloor(active *Active) time.Time {
	return time.Unix(max(active.Image.SourceDate, credibleStamp(active.Image, active.Stamped)), 0)
}

// credibleStamp is the date of stamping; 0 where no computer with a right clock
// can have stamped this image then.
func credibleStamp(image ondisk.ImageInfo, stamped int64) int64 {
	first, last := image.StampDates()
	if t := time.Unix(stamped, 0); t.Before(first) || t.After(last) {
		return 0
	}
	return stamped
}

// clockSynced reports whether the clock follows a time server, as far as is
// known.
func clockSynced(ctx context.Context, e *Env) bool {
	synced, err := e.ClockSynced(ctx)
	if err != nil {
		e.Log.Warn("asking for the state of the clock", "error", err)
	}
	return err == nil && synced
}

// ntpPatience bounds the wait for a time server: a site without one must
// still join.
const ntpPatience = time.Minute

// waitForNTP waits for the clock to follow a time server, bounded, and says
// how it went. To have no time server is not a failure.
func waitForNTP(ctx context.Context, e *Env) bool {
	e.Waiting("a time server, since the clock may be wrong")
	end := e.Now().Add(ntpPatience)
	synced := false
	tries := 0
	err := e.poll(ctx, 2*time.Second, func() (bool, error) {
		synced = clockSynced(ctx, e)
		tries++
		// By tries too: time may jump while we wait for just that.
		return synced || e.Now().After(end) || tries > int(ntpPatience/(2*time.Second)), nil
	})
	if err != nil || !synced {
		e.Log.Warn("no time server answers; going on with the clock as it is", "clock", e.Now().UTC())
		return false
	}
	e.Log.Info("the clock follows a time server", "clock", e.Now().UTC())
	return true
}

// judgeExpired judges what enrolled says of a certificate that has expired:
// nil where the clock was wrong and is right by now; for good only by a clock
// that follows a time server.
func judgeExpired(ctx context.Context, e *Env) error {
	const newToken = "put a new token into site.yaml (`kubeadm token create`), in the slot or on a stick"
	synced := clockSynced(ctx, e) // before the clock is read once more
	err := enrolled(e)
	switch {
	case err == nil:
		return nil
	case synced:
		return Permanent(err, newToken)
	}
	return Advise(fmt.Errorf("%w (this machine's clock says %s and follows no time server)", err, e.Now().UTC().Format(time.DateOnly)),
		"if the clock is wrong, name a reachable time server in the Site (network.ntp); if it is right, "+newToken)
}
