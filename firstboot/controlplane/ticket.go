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

// A bootstrap permission is for one bootstrap, and a request to restore a snapshot for one
// restore. The record next to etcd's data shows that it was used, also after the data is lost,
// but not after the disk was rewritten. Variables of UEFI firmware still show it then.
const (
	BornVar     = "/sys/firmware/efi/efivars/EdgebakeBorn-0c8f3d4e-6d1b-4f0e-9d0a-7c5e1f2a9b63"
	RestoredVar = "/sys/firmware/efi/efivars/EdgebakeRestored-0c8f3d4e-6d1b-4f0e-9d0a-7c5e1f2a9b63"
)

// ticket returns the state of the Site's bootstrap permission.
func ticket(e *machine.Env, site *configs.Site) seat.Ticket {
	switch until := site.ControlPlane.Birth(); {
	case until.IsZero():
		return seat.NoTicket
	case !e.Now().Before(until):
		return seat.ExpiredTicket
	}
	word, note := TicketWord(site), ReadSeatNote(e)
	// A bootstrap on this disk that was interrupted before etcd served continues.
	if note.Lived == word || firmwareNote(e, BornVar) == word && note.Born != word {
		return seat.UsedTicket
	}
	return seat.ValidTicket
}

// ticketDates describes the dates by which the permission was judged. It has no time of day,
// since each new text is reported.
func ticketDates(e *machine.Env, site *configs.Site) string {
	return fmt.Sprintf("%s; this machine's clock says %s", site.ControlPlane.Birth().UTC().Format(time.RFC3339), e.Now().UTC().Format(time.DateOnly))
}

// NoTicketID is the TicketID of a Site without a bootstrap permission.
const NoTicketID = "none"

// TicketID identifies a bootstrap permission among those of its cluster.
func TicketID(site *configs.Site) string {
	if until := site.ControlPlane.Birth(); !until.IsZero() {
		return until.UTC().Format(time.RFC3339)
	}
	return NoTicketID
}

// TicketWord identifies a bootstrap permission among those of all clusters.
func TicketWord(site *configs.Site) string { return site.ControlPlane.ID + " " + TicketID(site) }

// firmwareNote returns what this machine used last, as recorded in its firmware.
func firmwareNote(e *machine.Env, variable string) string {
	b := e.Contents(variable)
	if len(b) < 4 { // the variable's attributes come first
		return ""
	}
	return string(b[4:])
}

// useTicket records that this machine bootstraps the cluster: on its disk, and then in its
// firmware. It does so even if the firmware cannot record it.
func (t *seatTaker) useTicket() error {
	word := TicketWord(t.site)
	note := seatNote{Cluster: t.site.ControlPlane.ID, Born: word, Said: ReadSeatNote(t.e).Said}
	if err := note.write(t.e); err != nil {
		return err
	}
	noteInFirmware(t.e, BornVar, word)
	return nil
}

// noteInFirmware records in the firmware what was used, since the disk may be rewritten.
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

// restoreWord returns the firmware's record of a restore:
// its cluster, and the time of the request.
func restoreWord(site *configs.Site) string {
	return site.ControlPlane.ID + " " + site.ControlPlane.SaidAt().UTC().Format(time.RFC3339)
}

// restoredBefore reports whether this machine has carried out the Site's request to restore,
// or a later one, and no longer has the data of this one. An interrupted restore continues.
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
