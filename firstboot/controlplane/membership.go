package controlplane

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// MembershipFile is next to etcd's data. It records the cluster of that data, which etcd's own
// IDs do not show.
const MembershipFile = configs.EtcdDataDir + "/edgebake.json"

// membership is the membership record in MembershipFile.
type membership struct {
	Version int `json:"version"`
	// Cluster is the id of the Site's cluster.
	Cluster string `json:"cluster"`
	// Bootstrapped is the bootstrap permission with which etcd was bootstrapped on this disk.
	Bootstrapped string `json:"born,omitempty"`
	// Served is the Site's bootstrap permission when this data last served this machine's API
	// server. Without it, making the data may have been interrupted, and continues.
	Served string `json:"lived,omitempty"`
	// Continued is the Site's request to continue, once this machine has done its part: the
	// named one has dropped the others, any other has joined again. It is removed when the
	// Site no longer has a request.
	Continued string `json:"continued,omitempty"`
	// RequestedAt is the time of the last such request. It is kept: a request that is not later, as
	// on a stick that was left plugged in, is not carried out again.
	RequestedAt time.Time `json:"said,omitzero"`
}

const membershipVersion = 1

// ReadMembership reads the record; it is empty if the file is missing or damaged.
func ReadMembership(e *machine.Env) membership {
	var n membership
	if json.Unmarshal(e.Contents(MembershipFile), &n) != nil {
		return membership{}
	}
	return n
}

// CarriedOut returns the record for data that complies with the Site's request to continue, if
// there is one.
func (n membership) CarriedOut(site *configs.Site) membership {
	c := site.ControlPlane
	last := n.RequestedAt
	if said := c.SaidAt(); said.After(last) {
		last = said
	}
	return membership{Cluster: c.ID, Continued: continueRequest(site), RequestedAt: last} // without Bootstrapped: the data was not bootstrapped here
}

// hasCarriedOut reports whether this machine has done its part of the Site's request to
// continue, or of a later one.
func (n membership) hasCarriedOut(site *configs.Site) bool {
	c := site.ControlPlane
	return c.ContinueFrom != "" && (n.Continued == continueRequest(site) || !n.RequestedAt.Before(c.SaidAt()))
}

// notServedYet reports whether Served is not the Site's bootstrap permission yet.
func (n membership) notServedYet(site *configs.Site) bool {
	return n.Cluster == site.ControlPlane.ID && n.Served != TicketKey(site)
}

// saveServed records that etcd's data serves this machine's API server: making it is complete,
// and is not repeated if the data is lost.
func saveServed(e *machine.Env, site *configs.Site) error {
	n := ReadMembership(e)
	if !n.notServedYet(site) {
		return nil
	}
	n.Served = TicketKey(site)
	return n.write(e)
}

// write writes the record, which must be on the disk before etcd starts.
func (n membership) write(e *machine.Env) error {
	n.Version = membershipVersion
	b, err := json.Marshal(n)
	if err == nil && !e.Exists(configs.EtcdDataDir) {
		err = e.Mkdir(configs.EtcdDataDir, machine.Mode(0o700))
	}
	if err == nil {
		_, err = e.Write(MembershipFile, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("recording the cluster of etcd's data: %w", err)
	}
	return nil
}
