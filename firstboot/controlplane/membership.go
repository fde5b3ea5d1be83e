package controlplane

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// MembershipFile records the cluster to which etcd's data belongs, because etcd's own IDs do not
// show it. The file is next to the data.
const MembershipFile = configs.EtcdDataDir + "/edgebake.json"

// membership is the contents of MembershipFile.
type membership struct {
	Version int `json:"version"`
	// Cluster is the id of the Site's cluster.
	Cluster string `json:"cluster"`
	// Bootstrapped is the bootstrap permit with which etcd was bootstrapped on this disk.
	Bootstrapped string `json:"born,omitempty"`
	// Served is the Site's bootstrap permit at the time when this data last served this machine's
	// API server. Until it is set, an interrupted bootstrap continues.
	Served string `json:"lived,omitempty"`
	// Continued is the Site's request to continue after this machine has carried it out, by
	// dropping the other members or by joining again. It is removed once the Site has no request.
	Continued string `json:"continued,omitempty"`
	// RequestedAt is the time of the last such request. It is kept, so that an older request, for
	// example from a forgotten stick, is not carried out.
	RequestedAt time.Time `json:"said,omitzero"`
}

const membershipVersion = 1

// ReadMembership reads MembershipFile; the record is empty if the file is missing or damaged.
func ReadMembership(e *machine.Env) membership { return parseMembership(e.Contents(MembershipFile)) }

func parseMembership(b []byte) membership {
	var n membership
	if json.Unmarshal(b, &n) != nil {
		return membership{}
	}
	return n
}

// CarriedOut returns the record for data that results from the Site's request to continue, if the
// Site has one.
func (n membership) CarriedOut(site *configs.Site) membership {
	c := site.ControlPlane
	last := n.RequestedAt
	if requested := c.RequestTime(); requested.After(last) {
		last = requested
	}
	return membership{Cluster: c.ID, Continued: continueRequest(site), RequestedAt: last} // Bootstrapped stays empty: the data was not bootstrapped here
}

// hasCarriedOut reports whether this machine has carried out the Site's
// request to continue, or a later one.
func (n membership) hasCarriedOut(site *configs.Site) bool {
	c := site.ControlPlane
	return c.ContinueFrom != "" && (n.Continued == continueRequest(site) || !n.RequestedAt.Before(c.RequestTime()))
}

// notServedYet reports whether etcd's data on this disk belongs to the Site's cluster, but has not
// served this machine's API server under the Site's present bootstrap permit.
func (n membership) notServedYet(site *configs.Site) bool {
	return n.Cluster == site.ControlPlane.ID && n.Served != PermitKey(site)
}

// saveServed records that etcd's data has served this machine's API server. From then on the
// bootstrap is not repeated, even if the data is lost.
func saveServed(e *machine.Env, site *configs.Site) error {
	n := ReadMembership(e)
	if !n.notServedYet(site) {
		return nil
	}
	n.Served = PermitKey(site)
	return n.write(e)
}

// write writes MembershipFile. It must be on the disk before etcd starts.
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
