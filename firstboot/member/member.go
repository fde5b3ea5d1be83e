package member

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// A machine that was a member of a cluster stays one to strangers' sticks, also while it
// has no credentials: joining again begins with the removal of the former ones, and may
// fail. Only reset makes it a blank machine.

// RecordFile is the record of that. It is written before anything that shows the
// membership is removed.
const RecordFile = ondisk.StateDir + "/member.json"

// RecordVersion is the form of a Record that this program writes.
const RecordVersion = 1

// Record says that the machine was a member of a cluster, and of which one.
type Record struct {
	Version int `json:"version"`
	// Node is the name in the certificate of the last enrolment, and CA are the pins of
	// its CA. Both are empty once the machine has left that cluster for another one.
	Node string   `json:"node,omitempty"`
	CA   []string `json:"ca,omitempty"`
}

// ReadRecord reads the record. One that cannot be read, or is of a later release, still
// counts as one.
func ReadRecord(e *machine.Env) (r Record, ok bool) {
	if !e.Exists(RecordFile) {
		return r, false
	}
	if json.Unmarshal(e.Contents(RecordFile), &r) != nil || r.Version != RecordVersion {
		return Record{}, true
	}
	return r, true
}

// ToRecord is the record as it should be, nil where it is right.
func ToRecord(e *machine.Env) *Record {
	have, ok := ReadRecord(e)
	want := Record{Version: RecordVersion, Node: Name(e), CA: EnrolledPins(e)}
	switch {
	case e.Exists(LeavingFile):
		// What is left of the former cluster's credentials goes.
		if ok && have.Node == "" && len(have.CA) == 0 {
			return nil
		}
		return &Record{Version: RecordVersion}
	case Is(e):
		if ok && have.Node == want.Node && slices.Equal(have.CA, want.CA) {
			return nil
		}
		return &want
	case !ok && e.Exists(ReadyMark): // of a former release, and its credentials are damaged
		return &want
	}
	return nil
}

// SaveRecord records that this machine is a member, if it is one.
func SaveRecord(e *machine.Env) error {
	want := ToRecord(e)
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

// HasJoined reports whether this machine is a member of a cluster, or was one until its
// certificate expired, its credentials were damaged, or a join that was to replace them
// failed. A machine whose clock is wrong, which somebody on its network can cause, does
// not count as a blank one.
func HasJoined(e *machine.Env) bool {
	_, was := ReadRecord(e)
	return was || Is(e) || e.Exists(ReadyMark)
}

// Node is the name under which this machine is enrolled in a cluster, or was; ""
// where it is unknown.
func Node(e *machine.Env) string {
	r, _ := ReadRecord(e)
	return cmp.Or(Name(e), r.Node)
}

// Pins are the pins of the CA of the cluster that this machine is a member of, or
// was; none where that is unknown.
func Pins(e *machine.Env) []string {
	if Is(e) {
		return EnrolledPins(e)
	}
	r, _ := ReadRecord(e)
	return r.CA
}
