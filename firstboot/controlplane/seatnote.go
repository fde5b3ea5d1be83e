package controlplane

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// SeatNoteFile lies beside etcd's data, and goes where that goes: it says of
// which cluster the data is, which etcd's own ids do not.
const SeatNoteFile = configs.EtcdDataDir + "/edgebake.json"

// seatNote is SeatNoteFile.
type seatNote struct {
	Version int `json:"version"`
	// Cluster is the id of the Site's cluster.
	Cluster string `json:"cluster"`
	// Born is the ticket that etcd began with on this disk.
	Born string `json:"born,omitempty"`
	// Lived is the ticket in the Site with which this data last served this machine's API
	// server. Without it, what made the data may have been cut off, and goes on.
	Lived string `json:"lived,omitempty"`
	// Continued is the Site's word to continue, once this machine has done its part:
	// the one that is named has dropped the others, each other has joined again. It is
	// forgotten when the Site has no such word any more.
	Continued string `json:"continued,omitempty"`
	// Said is when the last such word was said. It is kept: one that is not later,
	// as on a stick that was left, is not carried out again.
	Said time.Time `json:"said,omitzero"`
}

const seatNoteVersion = 1

// ReadSeatNote reads the note; one that is missing or damaged says nothing.
func ReadSeatNote(e *machine.Env) seatNote {
	var n seatNote
	if json.Unmarshal(e.Contents(SeatNoteFile), &n) != nil {
		return seatNote{}
	}
	return n
}

// CarriedOut is the note of data that is as the Site's word to continue says, if it
// has one.
func (n seatNote) CarriedOut(site *configs.Site) seatNote {
	c := site.ControlPlane
	last := n.Said
	if said := c.SaidAt(); said.After(last) {
		last = said
	}
	return seatNote{Cluster: c.ID, Continued: continueWord(site), Said: last} // it is not the data of a birth here
}

// hasCarriedOut reports whether the Site's word to continue needs nothing done any
// more: this machine has done its part, or that of a later word.
func (n seatNote) hasCarriedOut(site *configs.Site) bool {
	c := site.ControlPlane
	return c.ContinueFrom != "" && (n.Continued == continueWord(site) || !n.Said.Before(c.SaidAt()))
}

// lacksLived reports whether the note does not say yet that its data serves, with the
// Site's ticket.
func (n seatNote) lacksLived(site *configs.Site) bool {
	return n.Cluster == site.ControlPlane.ID && n.Lived != TicketWord(site)
}

// noteLived notes that etcd's data serves this machine's API server: what made it is over,
// and is not done again if the data is lost.
func noteLived(e *machine.Env, site *configs.Site) error {
	n := ReadSeatNote(e)
	if !n.lacksLived(site) {
		return nil
	}
	n.Lived = TicketWord(site)
	return n.write(e)
}

// write notes it before etcd can start. It outlasts a power cut.
func (n seatNote) write(e *machine.Env) error {
	n.Version = seatNoteVersion
	b, err := json.Marshal(n)
	if err == nil && !e.Exists(configs.EtcdDataDir) {
		err = e.Mkdir(configs.EtcdDataDir, machine.Mode(0o700))
	}
	if err == nil {
		_, err = e.Write(SeatNoteFile, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("noting of which cluster etcd's data is: %w", err)
	}
	return nil
}
