package firstboot

import (
	"fmt"
	"strconv"
	"time"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
)

// A signature does not end, so whoever finds an old stick could bring back what
// was corrected since. The machine remembers when the last signed site that it
// took was signed, and takes no older one.

// signedFile has the date below which no signature counts, in seconds since the
// epoch.
const signedFile = ondisk.StateDir + "/signed"

// checkSignature returns when the files of a stick were signed by a key that
// the Image names, or why that does not count.
func checkSignature(e *Env, image ondisk.ImageInfo, c *slot.Contents) (int64, error) {
	when, err := c.Verify(image.SiteKeys)
	if err != nil {
		return 0, err
	}
	if _, last := image.StampDates(); when.After(last) {
		return 0, fmt.Errorf("it was signed on %s, which cannot be: set the clock of the computer that signs, and sign it again", when.Format(time.DateTime))
	}
	if taken := lastSigned(e); when.Unix() < taken {
		return 0, fmt.Errorf("it was signed on %s, and the machine has taken a Site of %s: sign it again to go back to it", when.Format(time.DateTime), date(taken))
	}
	return when.Unix(), nil
}

// lastSigned is when the last signed site that was taken was signed; 0: none
// was.
func lastSigned(e *Env) int64 {
	n, err := strconv.ParseInt(e.text(signedFile), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// saveSigned remembers, before a stick is taken, when it was signed.
func (s *stick) saveSigned(e *Env) error {
	if s.signed <= lastSigned(e) {
		return nil
	}
	if err := e.WriteFile(signedFile, []byte(fmt.Sprintln(s.signed)), Mode(0o600)); err != nil {
		return fmt.Errorf("noting when the Site of stick %s was signed: %w", s.dev, err)
	}
	return nil
}
