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
// disk, or a date in the Image. So an old stick cannot undo a correction.

const (
	// signedFile contains the date before which signatures are rejected, in seconds since the
	// epoch.
	signedFile = ondisk.StateDir + "/signed"
	// UnsignedFile contains the dates of the last Sites from unsigned sticks, in seconds since the
	// epoch: that of the Site in the slot, and that of a Site that is being written to the slot.
	UnsignedFile = ondisk.StateDir + "/unsigned"
	// clockFile contains pairs of dates, in seconds since the epoch: the date of a Site accepted
	// from an unsigned stick, and the date that is used for the clock instead. Two pairs are needed
	// while the slot is rewritten.
	clockFile = ondisk.StateDir + "/stick-dates"
)

// checkSignature returns when a stick was signed with a key that the Image names, or an error if
// its signature is not accepted. old is the active Site, or nil if there is none.
func checkSignature(e *machine.Env, image ondisk.ImageInfo, old *Active, c *slot.Contents) (int64, error) {
	when, err := c.Verify(image.SiteKeys)
	if err != nil {
		return 0, err
	}
	if _, last := image.StampDates(); when.After(last) {
		return 0, fmt.Errorf("it was signed on %s, which is too late for this image: correct the clock of the signing computer, and sign it again", when.Format(time.DateTime))
	}
	accepted, err := lastSigned(e)
	if err != nil {
		return 0, err
	}
	for _, floor := range []struct {
		seconds int64
		format  string
	}{
		{image.SitesNotBefore, "the Image rejects Sites signed before %s (sites.notBefore): sign it again"},
		{accepted, "the machine has accepted a Site signed on %s: sign it again to use it anyway"},
		{stampedOnDisk(e, old), "the Site in the slot was stamped on %s: sign it again to use it anyway"},
	} {
		if when.Unix() < floor.seconds {
			return 0, fmt.Errorf("it was signed on %s, and "+floor.format, when.Format(time.DateTime), Date(floor.seconds))
		}
	}
	return when.Unix(), nil
}

// stampedOnDisk returns the date of the active Site. It returns 0 if the Site is from an unsigned
// stick, or if its date is missing or too late for the image.
func stampedOnDisk(e *machine.Env, active *Active) int64 {
	if active == nil || slices.Contains(secondsIn(e, UnsignedFile), active.Stamped) {
		return 0
	}
	if _, last := active.Image.StampDates(); active.Stamped > last.Unix() {
		return 0
	}
	return active.Stamped
}

// lastSigned returns the date before which signatures are rejected, or 0 if there is none. If it
// cannot be read, a Site of any date could be an old one.
func lastSigned(e *machine.Env) (int64, error) {
	b, err := e.ReadIfExists(signedFile)
	if err != nil {
		return 0, fmt.Errorf("reading when the last accepted Site was signed: %w: check the disk (`journalctl -k`)", err)
	}
	return slices.Max(append(parseSeconds(string(b)), 0)), nil
}

func secondsIn(e *machine.Env, file string) []int64 { return parseSeconds(e.Text(file)) }

func parseSeconds(list string) []int64 {
	var out []int64
	for _, text := range strings.Fields(list) {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			out = append(out, n)
		}
	}
	return out
}

// saveSigned records the date before which signatures are rejected, before the stick's Site is
// used: the date of the stick or that of the Site that it replaces, whichever is later.
func (s *stick) saveSigned(e *machine.Env) error {
	floor := s.signed
	if !s.known {
		floor = max(floor, stampedOnDisk(e, s.before))
	}
	if last, err := lastSigned(e); err != nil || floor <= last {
		return err
	}
	if err := writeSeconds(e, signedFile, floor); err != nil {
		return fmt.Errorf("recording when the Site of stick %s was signed: %w", s.dev, err)
	}
	return nil
}

// saveUnsigned records, before the stick's Site is used, that its date is not signed; see
// UnsignedFile.
func (s *stick) saveUnsigned(e *machine.Env, stamped int64) error {
	if s.signed > 0 {
		return nil
	}
	dates := []int64{stamped}
	if s.before != nil && slices.Contains(secondsIn(e, UnsignedFile), s.before.Stamped) {
		dates = append(dates, s.before.Stamped) // the power may fail before the slot is written
	}
	if err := writeSeconds(e, UnsignedFile, dates...); err != nil {
		return fmt.Errorf("recording the date of the Site of stick %s: %w", s.dev, err)
	}
	return nil
}

// ClockDate returns the date to which the active Site may set the clock. An untrusted stick must
// not set a member's clock: for a Site from such a stick, it is the date of the Site before.
func ClockDate(e *machine.Env, active *Active) int64 {
	pairs := secondsIn(e, clockFile)
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i] == active.Stamped {
			return pairs[i+1]
		}
	}
	return active.Stamped
}

// saveClockDate records, before the stick's Site is used, the date that is used for the clock
// instead of the stick's.
func (s *stick) saveClockDate(e *machine.Env, stamped int64) error {
	if s.signed > 0 || !member.HasJoined(e) {
		return nil
	}
	pairs := []int64{stamped, 0}
	if s.before != nil {
		counts := ClockDate(e, s.before)
		pairs = []int64{stamped, counts, s.before.Stamped, counts} // the power may fail before the slot is written
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
