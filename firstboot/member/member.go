package member

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// For decisions about untrusted sticks, a former member of a cluster counts as a member, even
// without credentials: a new join first removes them, and may then fail. Only a reset ends this.

// RecordFile records the membership. It is written before any other file of the membership is
// removed.
const RecordFile = ondisk.StateDir + "/member.json"

// RecordVersion is the version of a Record that this program writes.
const RecordVersion = 1

// Record means that the machine is or was a member of a cluster, and identifies that cluster.
type Record struct {
	Version int `json:"version"`
	// Node is the name in the certificate of the last enrolment; CA contains the pins of its CA.
	// Both are empty once the machine has left that cluster for another one.
	Node string   `json:"node,omitempty"`
	CA   []string `json:"ca,omitempty"`
}

// ReadRecord reads the record. ok is also true if the record is unreadable or from a later release.
func ReadRecord(e *machine.Env) (r Record, ok bool) {
	if !e.Exists(RecordFile) {
		return r, false
	}
	if json.Unmarshal(e.Contents(RecordFile), &r) != nil || r.Version != RecordVersion {
		return Record{}, true
	}
	return r, true
}

// RecordToSave returns the record that must be written, or nil if the current one is correct.
func RecordToSave(e *machine.Env) *Record {
	have, ok := ReadRecord(e)
	want := Record{Version: RecordVersion, Node: NodeName(e), CA: EnrolledPins(e)}
	switch {
	case e.Exists(LeavingFile):
		// Ignore credentials that are left of the former cluster.
		if ok && have.Node == "" && len(have.CA) == 0 {
			return nil
		}
		return &Record{Version: RecordVersion}
	case HasCredentials(e):
		if ok && have.Node == want.Node && slices.Equal(have.CA, want.CA) {
			return nil
		}
		return &want
	case !ok && e.Exists(ReadyMark): // a member whose credentials are damaged, from a former release
		return &want
	}
	return nil
}

// SaveRecord records that this machine is a member, if it is one.
func SaveRecord(e *machine.Env) error {
	want := RecordToSave(e)
	if want == nil {
		return nil
	}
	return want.Write(e)
}

func (r Record) Write(e *machine.Env) error {
	b, err := json.Marshal(r)
	if err == nil {
		_, err = e.Write(RecordFile, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("recording that this machine is a member of a cluster: %w", err)
	}
	return nil
}

// HasJoined reports whether this machine is or was a member of a cluster, even if its credentials
// are unusable or expired: a wrong clock must not make it a new machine.
func HasJoined(e *machine.Env) bool {
	_, was := ReadRecord(e)
	return was || HasCredentials(e) || e.Exists(ReadyMark)
}

// LastNodeName returns the name with which this machine is or was enrolled in a cluster, or "" if
// it is unknown.
func LastNodeName(e *machine.Env) string {
	r, _ := ReadRecord(e)
	return cmp.Or(NodeName(e), r.Node)
}

// Pins returns the CA pins of the cluster of which this machine is or was a member, or none if they
// are unknown.
func Pins(e *machine.Env) []string {
	if HasCredentials(e) {
		return EnrolledPins(e)
	}
	r, _ := ReadRecord(e)
	return r.CA
}
