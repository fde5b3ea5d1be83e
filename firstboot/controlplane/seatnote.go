package controlplane

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// SeatNoteFile is next to etcd's data. It records the cluster of that data, which etcd's own
// IDs do not show.
const SeatNoteFile = configs.EtcdDataDir + "/edgebake.json"

// seatNote is the membership record in SeatNoteFile.
type seatNote struct {
	Version int `json:"version"`
	// Cluster is the id of the Site's cluster.
	Cluster string `json:"cluster"`
	// Born is the bootstrap permission with which etcd was bootstrapped on this disk.
	Born string `json:"born,omitempty"`
	// Lived is the Site's bootstrap permission when this data last served this machine's API
	// server. Without it, making the data may have been interrupted, and continues.
	Lived string `json:"lived,omitempty"`
	// Continued is the Site's request to continue, once this machine has done its part: the
	// named one has dropped the others, any other has joined again. It is removed when the
	// Site no longer has a request.
	Continued string `json:"continued,omitempty"`
	// Said is the time of the last such request. It is kept: a request that is not later, as
	// on a stick that was left plugged in, is not carried out again.
	Said time.Time `json:"said,omitzero"`
}

const seatNoteVersion = 1

// ReadSeatNote reads the record; it is empty if the file is missing or damaged.
func ReadSeatNote(e *machine.Env) seatNote {
	var n seatNote
	if json.Unmarshal(e.Contents(SeatNoteFile), &n) != nil {
		return seatNote{}
	}
	return n
}

// CarriedOut returns the record for data that complies with the Site's request to continue, if
// there is one.
func (n seatNote) CarriedOut(site *configs.Site) seatNote {
	c := site.ControlPlane
	last := n.Said
	if said := c.SaidAt(); said.After(last) {
		last = said
	}
	return seatNote{Cluster: c.ID, Continued: continueWord(site), Said: last} // without Born: the data was not bootstrapped here
}

// hasCarriedOut reports whether this machine has done its part of the Site's request to
// continue, or of a later one.
func (n seatNote) hasCarriedOut(site *configs.Site) bool {
	c := site.ControlPlane
	return c.ContinueFrom != "" && (n.Continued == continueWord(site) || !n.Said.Before(c.SaidAt()))
}

// lacksLived reports whether Lived is not the Site's bootstrap permission yet.
func (n seatNote) lacksLived(site *configs.Site) bool {
	return n.Cluster == site.ControlPlane.ID && n.Lived != TicketWord(site)
}

// noteLived records that etcd's data serves this machine's API server: making it is complete,
// and is not repeated if the data is lost.
func noteLived(e *machine.Env, site *configs.Site) error {
	n := ReadSeatNote(e)
	if !n.lacksLived(site) {
		return nil
	}
	n.Lived = TicketWord(site)
	return n.write(e)
}

// write writes the record, which must be on the disk before etcd starts.
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
