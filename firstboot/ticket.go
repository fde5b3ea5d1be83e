package firstboot

import (
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/seat"
)

// A ticket is for one birth. Nothing on a disk that was written again tells that
// it was used, and with all of them written again nothing in the cluster does. The
// machine's firmware can: it keeps a variable, where it is UEFI's.
const bornVar = "/sys/firmware/efi/efivars/EdgebakeBorn-0c8f3d4e-6d1b-4f0e-9d0a-7c5e1f2a9b63"

// ticket is the state of the site's.
func ticket(e *Env, site *configs.Site) seat.Ticket {
	switch until := site.ControlPlane.Birth(); {
	case until.IsZero():
		return seat.NoTicket
	case !e.Now().Before(until):
		return seat.ExpiredTicket
	}
	// A birth on this disk may have been cut off, and goes on.
	if bornBefore(e) == ticketWord(site) && readSeatNote(e).Born != ticketWord(site) {
		return seat.UsedTicket
	}
	return seat.ValidTicket
}

// ticketDates says what the ticket was judged by. It is part of what is said once.
func ticketDates(e *Env, site *configs.Site) string {
	return fmt.Sprintf("%s; this machine's clock says %s", site.ControlPlane.Birth().UTC().Format(time.RFC3339), e.Now().UTC().Format(time.DateOnly))
}

// ticketWord tells one ticket from another.
func ticketWord(site *configs.Site) string {
	return site.ControlPlane.ID + " " + site.ControlPlane.Birth().UTC().Format(time.RFC3339)
}

// bornBefore is the last ticket that this machine has used, as its firmware
// noted it.
func bornBefore(e *Env) string {
	b := e.contents(bornVar)
	if len(b) < 4 { // the variable's attributes
		return ""
	}
	return string(b[4:])
}

// useTicket notes that this machine begins the cluster: on its disk, and then in
// its firmware. A birth begins also where the firmware takes no notes.
func (t *taker) useTicket() error {
	word := ticketWord(t.site)
	note := seatNote{Cluster: t.site.ControlPlane.ID, Born: word}
	if err := note.write(t.e); err != nil || bornBefore(t.e) == word {
		return err
	}
	switch err := t.e.SetFirmwareVar(bornVar, []byte(word)); {
	case errors.Is(err, errors.ErrUnsupported):
		t.e.Log.Info("this machine has no UEFI to note the cluster's birth in")
	case err != nil:
		t.e.Log.Warn("noting the cluster's birth in the firmware", "error", err)
	}
	return nil
}
