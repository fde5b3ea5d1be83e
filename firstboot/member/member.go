package member

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// For an untrusted stick, a machine that was a member of a cluster
// stays one, even without credentials: joining again begins with
// their removal, and may fail. Only a reset makes the machine blank.

// RecordFile records the membership. It is written before any other trace of it is removed.
const RecordFile = ondisk.StateDir + "/member.json"

// RecordVersion is the version of a Record that this program writes.
const RecordVersion = 1

// Record means that the machine was a member of a cluster, and names that cluster.
type Record struct {
	Version int `json:"version"`
	// Node is the name in the certificate of the last enrolment, and CA are the pins of its
	// CA. Both are empty once the machine has left that cluster for another one.
	Node string   `json:"node,omitempty"`
	CA   []string `json:"ca,omitempty"`
}

// ReadRecord reads the record. ok is also true for a record that is unreadable or of a later
// release.
func ReadRecord(e *machine.Env) (r Record, ok bool) {
	if !e.Exists(RecordFile) {
		return r, false
	}
	if json.Unmarshal(e.Contents(RecordFile), &r) != nil || r.Version != RecordVersion {
		return Record{}, true
	}
	return r, true
}

// RecordToSave returns the record to write, nil if the present one is right.
func RecordToSave(e *machine.Env) *Record {
	have, ok := ReadRecord(e)
	want := Record{Version: RecordVersion, Node: Name(e), CA: EnrolledPins(e)}
	switch {
	case e.Exists(LeavingFile):
		// Remaining credentials of the former cluster do not count.
		if ok && have.Node == "" && len(have.CA) == 0 {
			return nil
		}
		return &Record{Version: RecordVersion}
	case Is(e):
		if ok && have.Node == want.Node && slices.Equal(have.CA, want.CA) {
			return nil
		}
		return &want
	case !ok && e.Exists(ReadyMark): // a member with damaged credentials, from a former release
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

// HasJoined reports whether this machine is or was a member of a cluster, even if its
// certificate has expired, its credentials are damaged or a new join has failed. So a wrong
// clock, which others on the network can cause, does not make it count as blank.
func HasJoined(e *machine.Env) bool {
	_, was := ReadRecord(e)
	return was || Is(e) || e.Exists(ReadyMark)
}

// Node returns the name under which this machine is or was enrolled in a cluster, "" if
// unknown.
func Node(e *machine.Env) string {
	r, _ := ReadRecord(e)
	return cmp.Or(Name(e), r.Node)
}

// Pins returns the CA pins of the cluster that this machine is or was a member of, none if
// unknown.
func Pins(e *machine.Env) []string {
	if Is(e) {
		return EnrolledPins(e)
	}
	r, _ := ReadRecord(e)
	return r.CA
}
