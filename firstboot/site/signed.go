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

// A signature does not end, so whoever finds an old stick could bring back what
// was corrected since. The machine remembers when the last signed Site that it
// took was signed, and takes none that is older than that one, than the Site that was
// stamped onto its disk, or than the Image allows. The date of a stick without a
// signature is anybody's word: it makes no signed Site old.

const (
	// signedFile has the date below which no signature counts, in seconds since the
	// epoch.
	signedFile = ondisk.StateDir + "/signed"
	// UnsignedFile has the dates of the last Sites that came from sticks without a
	// signature, in seconds since the epoch: of the one in the slot, and of one that may be
	// on its way there.
	UnsignedFile = ondisk.StateDir + "/unsigned"
	// clockFile has the dates of the last Sites that came to a member from sticks without
	// a signature, each with the date that counts for the clock in its place, in seconds
	// since the epoch: of the Site in the slot, and of one that may be on its way there.
	clockFile = ondisk.StateDir + "/stick-dates"
)

// checkSignature returns when the files of a stick were signed by a key that
// the Image names, or why that does not count. old is the active Site, nil: there is
// none.
func checkSignature(e *machine.Env, image ondisk.ImageInfo, old *Active, c *slot.Contents) (int64, error) {
	when, err := c.Verify(image.SiteKeys)
	if err != nil {
		return 0, err
	}
	if _, last := image.StampDates(); when.After(last) {
		return 0, fmt.Errorf("it was signed on %s, which cannot be: set the clock of the computer that signs, and sign it again", when.Format(time.DateTime))
	}
	for _, floor := range []struct {
		seconds int64
		words   string
	}{
		{image.SitesNotBefore, "the Image rejects what was signed before %s (sites.notBefore): sign it again"},
		{lastSigned(e), "the machine has taken a Site of %s: sign it again to go back to it"},
		{stampedOnDisk(e, old), "the Site in the slot was stamped on %s: sign it again to go back to it"},
	} {
		if when.Unix() < floor.seconds {
			return 0, fmt.Errorf("it was signed on %s, and "+floor.words, when.Format(time.DateTime), Date(floor.seconds))
		}
	}
	return when.Unix(), nil
}

// stampedOnDisk is the date of the active Site if somebody who has the disk, or a key of
// the Image, has put it there; 0: it came from an unsigned stick, or has no date. A date
// before the image's counts too: the image may be newer than the Site.
func stampedOnDisk(e *machine.Env, active *Active) int64 {
	if active == nil || slices.Contains(secondsIn(e, UnsignedFile), active.Stamped) {
		return 0
	}
	if _, last := active.Image.StampDates(); active.Stamped > last.Unix() {
		return 0
	}
	return active.Stamped
}

// lastSigned is the date below which the machine takes no signed Site; 0: there is none.
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

// saveSigned remembers, before the stick is taken, below which date no signature counts:
// its own, and that of the Site that it replaces, whose date is lost.
func (s *stick) saveSigned(e *machine.Env) error {
	floor := s.signed
	if !s.known {
		floor = max(floor, stampedOnDisk(e, s.before))
	}
	if floor <= lastSigned(e) {
		return nil
	}
	if err := writeSeconds(e, signedFile, floor); err != nil {
		return fmt.Errorf("noting when the Site of stick %s was signed: %w", s.dev, err)
	}
	return nil
}

// saveUnsigned remembers, before the stick is taken, that the date in the slot is the word
// of whoever made it.
func (s *stick) saveUnsigned(e *machine.Env, stamped int64) error {
	if s.signed > 0 {
		return nil
	}
	dates := []int64{stamped}
	if s.before != nil && slices.Contains(secondsIn(e, UnsignedFile), s.before.Stamped) {
		dates = append(dates, s.before.Stamped) // the power may go before the slot is written
	}
	if err := writeSeconds(e, UnsignedFile, dates...); err != nil {
		return fmt.Errorf("noting the date of the Site of stick %s: %w", s.dev, err)
	}
	return nil
}

// ClockDate is the date of the active Site as far as it counts for the clock. A stranger's
// stick must not move a member's clock, and the machine cannot tell a date that is ahead
// while its own clock is: so what counts is the date of the Site that the stick replaced.
func ClockDate(e *machine.Env, active *Active) int64 {
	pairs := secondsIn(e, clockFile)
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i] == active.Stamped {
			return pairs[i+1]
		}
	}
	return active.Stamped
}

// saveClockDate remembers, before the stick is taken, which date counts for the clock
// instead of the one that will be in the slot.
func (s *stick) saveClockDate(e *machine.Env, stamped int64) error {
	if s.signed > 0 || !member.HasJoined(e) {
		return nil
	}
	pairs := []int64{stamped, 0}
	if s.before != nil {
		counts := ClockDate(e, s.before)
		pairs = []int64{stamped, counts, s.before.Stamped, counts} // the power may go before the slot is written
	}
	if err := writeSeconds(e, clockFile, pairs...); err != nil {
		return fmt.Errorf("noting the date of the Site of stick %s: %w", s.dev, err)
	}
	return nil
}

func writeSeconds(e *machine.Env, file string, seconds ...int64) error {
	_, err := e.Write(file, []byte(strings.Trim(fmt.Sprint(seconds), "[]")+"\n"), machine.Mode(0o600))
	return err
}
