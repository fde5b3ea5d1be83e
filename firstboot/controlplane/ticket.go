package controlplane

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/seat"
)

// A ticket is for one birth, and a word to restore a snapshot for one restore.
// The note beside etcd's data tells that it was used, also after the data is lost. On a
// disk that was written again nothing does. The machine's firmware can: it keeps
// variables, where it is UEFI's.
const (
	BornVar     = "/sys/firmware/efi/efivars/EdgebakeBorn-0c8f3d4e-6d1b-4f0e-9d0a-7c5e1f2a9b63"
	RestoredVar = "/sys/firmware/efi/efivars/EdgebakeRestored-0c8f3d4e-6d1b-4f0e-9d0a-7c5e1f2a9b63"
)

// ticket is the state of the site's.
func ticket(e *machine.Env, site *configs.Site) seat.Ticket {
	switch until := site.ControlPlane.Birth(); {
	case until.IsZero():
		return seat.NoTicket
	case !e.Now().Before(until):
		return seat.ExpiredTicket
	}
	word, note := TicketWord(site), ReadSeatNote(e)
	// A birth on this disk that was cut off before etcd served goes on.
	if note.Lived == word || firmwareNote(e, BornVar) == word && note.Born != word {
		return seat.UsedTicket
	}
	return seat.ValidTicket
}

// ticketDates says what the ticket was judged by. It is part of what is said once.
func ticketDates(e *machine.Env, site *configs.Site) string {
	return fmt.Sprintf("%s; this machine's clock says %s", site.ControlPlane.Birth().UTC().Format(time.RFC3339), e.Now().UTC().Format(time.DateOnly))
}

// NoTicketID is the TicketID of a Site without a ticket.
const NoTicketID = "none"

// TicketID tells one of a cluster's tickets from another.
func TicketID(site *configs.Site) string {
	if until := site.ControlPlane.Birth(); !until.IsZero() {
		return until.UTC().Format(time.RFC3339)
	}
	return NoTicketID
}

// TicketWord tells one ticket from another, of any cluster.
func TicketWord(site *configs.Site) string { return site.ControlPlane.ID + " " + TicketID(site) }

// firmwareNote is what this machine used last, as its firmware noted it.
func firmwareNote(e *machine.Env, variable string) string {
	b := e.Contents(variable)
	if len(b) < 4 { // the variable's attributes
		return ""
	}
	return string(b[4:])
}

// useTicket notes that this machine begins the cluster: on its disk, and then in
// its firmware. A birth begins also where the firmware takes no notes.
func (t *seatTaker) useTicket() error {
	word := TicketWord(t.site)
	note := seatNote{Cluster: t.site.ControlPlane.ID, Born: word, Said: ReadSeatNote(t.e).Said}
	if err := note.write(t.e); err != nil {
		return err
	}
	noteInFirmware(t.e, BornVar, word)
	return nil
}

// noteInFirmware keeps what was used where no disk does.
func noteInFirmware(e *machine.Env, variable, word string) {
	if firmwareNote(e, variable) == word {
		return
	}
	switch err := e.SetFirmwareVar(variable, []byte(word)); {
	case errors.Is(err, errors.ErrUnsupported):
		e.Log.Info("this machine has no UEFI to note in how its etcd began")
	case err != nil:
		e.Log.Warn("noting in the firmware how this machine's etcd began", "error", err)
	}
}

// restoreWord is what the firmware notes of a restore: of which cluster, and when it
// was said.
func restoreWord(site *configs.Site) string {
	return site.ControlPlane.ID + " " + site.ControlPlane.SaidAt().UTC().Format(time.RFC3339)
}

// restoredBefore reports whether this machine has carried out the Site's word to
// restore, or a later one, and has not that data any more, or data that was written
// since. A restore that was cut off goes on.
func restoredBefore(e *machine.Env, site *configs.Site) bool {
	c, note := site.ControlPlane, ReadSeatNote(e)
	if c.Restore == "" || c.ContinueFrom != site.Self().Name {
		return false
	}
	if note.Continued == continueWord(site) && (note.Lived == "" || !isBlank(e)) {
		return false
	}
	last := note.Said
	if id, at, _ := strings.Cut(firmwareNote(e, RestoredVar), " "); id == c.ID {
		if t, err := time.Parse(time.RFC3339, at); err == nil && t.After(last) {
			last = t
		}
	}
	return !last.Before(c.SaidAt())
}
