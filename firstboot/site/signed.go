package site

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// A signature is rejected if it is older than the last accepted one, the Site stamped onto the
// disk, or a date in the Image: an old stick must not undo a correction.

const (
	// signedFile holds the date before which signatures do not count, in seconds since the
	// epoch.
	signedFile = ondisk.StateDir + "/signed"
	// UnsignedFile holds the dates of the last Sites from unsigned sticks, in seconds since
	// the epoch: of the one in the slot, and of one that is being written to it.
	UnsignedFile = ondisk.StateDir + "/unsigned"
	// clockFile holds pairs of dates, in seconds since the epoch: that of a Site accepted from an
	// unsigned stick, and the one that counts instead. Two pairs cover a rewrite of the slot.
	clockFile = ondisk.StateDir + "/stick-dates"
)

// checkSignature returns when a stick was signed with a key that the Image names, or an
// error if its signature does not count. old is the active Site, nil if there is none.
func checkSignature(e *machine.Env, image ondisk.ImageInfo, old *Active, c *slot.Contents) (int64, error) {
	when, err := c.Verify(image.SiteKeys)
	if err != nil {
		return 0, err
	}
	if _, last := image.StampDates(); when.After(last) {
		return 0, fmt.Errorf("it was signed on %s, which is too late for this image: correct the clock of the signing computer, and sign it again", when.Format(time.DateTime))
	}
	for _, floor := range []struct {
		seconds int64
		format  string
	}{
		{image.SitesNotBefore, "the Image rejects Sites signed before %s (sites.notBefore): sign it again"},
		{lastSigned(e), "the machine has accepted a Site signed on %s: sign it again to use it anyway"},
		{stampedOnDisk(e, old), "the Site in the slot was stamped on %s: sign it again to use it anyway"},
	} {
		if when.Unix() < floor.seconds {
			return 0, fmt.Errorf("it was signed on %s, and "+floor.format, when.Format(time.DateTime), Date(floor.seconds))
		}
	}
	return when.Unix(), nil
}

// stampedOnDisk returns the date of the active Site if it was stamped onto the disk or signed,
// even if before the image's; 0 if the Site has none or is from an unsigned stick.
func stampedOnDisk(e *machine.Env, active *Active) int64 {
	if active == nil || slices.Contains(secondsIn(e, UnsignedFile), active.Stamped) {
		return 0
	}
	if _, last := active.Image.StampDates(); active.Stamped > last.Unix() {
		return 0
	}
	return active.Stamped
}

// lastSigned returns the date before which signatures do not count; 0 if there is none.
func lastSigned(e *machine.Env) int64 { return slices.Max(append(secondsIn(e, signedFile), 0)) }

func secondsIn(e *machine.Env, file string) []int64 {
	var out []int64
	for _, text := range strings.Fields(e.Text(file)) {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			out = append(out, n)
		}
	}
	return out
}

// saveSigned records, before the stick's Site is used, the date before which signatures do not
// count: that of the stick or of the Site that it replaces, whichever is later.
func (s *stick) saveSigned(e *machine.Env) error {
	floor := s.signed
	if !s.known {
		floor = max(floor, stampedOnDisk(e, s.before))
	}
	if floor <= lastSigned(e) {
		return nil
	}
	if err := writeSeconds(e, signedFile, floor); err != nil {
		return fmt.Errorf("recording when the Site of stick %s was signed: %w", s.dev, err)
	}
	return nil
}

// saveUnsigned records, before the stick's Site is used, that
// the date that the Site gets in the slot proves nothing.
func (s *stick) saveUnsigned(e *machine.Env, stamped int64) error {
	if s.signed > 0 {
		return nil
	}
	dates := []int64{stamped}
	if s.before != nil && slices.Contains(secondsIn(e, UnsignedFile), s.before.Stamped) {
		dates = append(dates, s.before.Stamped) // the power may be cut before the slot is written
	}
	if err := writeSeconds(e, UnsignedFile, dates...); err != nil {
		return fmt.Errorf("recording the date of the Site of stick %s: %w", s.dev, err)
	}
	return nil
}

// ClockDate returns the date of the active Site that counts for the clock. An untrusted stick
// must not move a member's clock, so the date of the Site that the stick replaced counts.
func ClockDate(e *machine.Env, active *Active) int64 {
	pairs := secondsIn(e, clockFile)
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i] == active.Stamped {
			return pairs[i+1]
		}
	}
	return active.Stamped
}

// saveClockDate records, before the stick's Site is used, which date counts for the clock
// instead of the stick's.
func (s *stick) saveClockDate(e *machine.Env, stamped int64) error {
	if s.signed > 0 || !member.HasJoined(e) {
		return nil
	}
	pairs := []int64{stamped, 0}
	if s.before != nil {
		counts := ClockDate(e, s.before)
		pairs = []int64{stamped, counts, s.before.Stamped, counts} // the power may be cut before the slot is written
	}
	if err := writeSeconds(e, clockFile, pairs...); err != nil {
		return fmt.Errorf("recording the date of the Site of stick %s: %w", s.dev, err)
	}
	return nil
}

func writeSeconds(e *machine.Env, file string, seconds ...int64) error {
	_, err := e.Write(file, []byte(strings.Trim(fmt.Sprint(seconds), "[]")+"\n"), machine.Mode(0o600))
	return err
}
