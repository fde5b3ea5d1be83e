package firstboot

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

// memberFile is the record of that. It is written before anything that shows the
// membership is removed.
const memberFile = ondisk.StateDir + "/member.json"

const memberVersion = 1

type memberRecord struct {
	Version int `json:"version"`
	// Node is the name in the certificate of the last enrolment, and CA are the pins of
	// its CA. Both are empty once the machine has left that cluster for another one.
	Node string   `json:"node,omitempty"`
	CA   []string `json:"ca,omitempty"`
}

// readMember reads the record. One that cannot be read, or is of a later release, still
// counts as one.
func readMember(e *machine.Env) (r memberRecord, ok bool) {
	if !e.Exists(memberFile) {
		return r, false
	}
	if json.Unmarshal(e.Contents(memberFile), &r) != nil || r.Version != memberVersion {
		return memberRecord{}, true
	}
	return r, true
}

// memberToRecord is the record as it should be, nil where it is right.
func memberToRecord(e *machine.Env) *memberRecord {
	have, ok := readMember(e)
	want := memberRecord{Version: memberVersion, Node: memberName(e), CA: enrolledPins(e)}
	switch {
	case e.Exists(leavingFile):
		// What is left of the former cluster's credentials goes.
		if ok && have.Node == "" && len(have.CA) == 0 {
			return nil
		}
		return &memberRecord{Version: memberVersion}
	case isMember(e):
		if ok && have.Node == want.Node && slices.Equal(have.CA, want.CA) {
			return nil
		}
		return &want
	case !ok && e.Exists(readyMark): // of a former release, and its credentials are damaged
		return &want
	}
	return nil
}

// recordMember records that this machine is a member, if it is one.
func recordMember(e *machine.Env) error {
	want := memberToRecord(e)
	if want == nil {
		return nil
	}
	return want.write(e)
}

func (r memberRecord) write(e *machine.Env) error {
	b, err := json.Marshal(r)
	if err == nil {
		_, err = e.Write(memberFile, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("recording that this machine is a member of a cluster: %w", err)
	}
	return nil
}

// hasJoined reports whether this machine is a member of a cluster, or was one until its
// certificate expired, its credentials were damaged, or a join that was to replace them
// failed. A machine whose clock is wrong, which somebody on its network can cause, does
// not count as a blank one.
func hasJoined(e *machine.Env) bool {
	_, was := readMember(e)
	return was || isMember(e) || e.Exists(readyMark)
}

// memberNode is the name under which this machine is enrolled in a cluster, or was; ""
// where it is unknown.
func memberNode(e *machine.Env) string {
	r, _ := readMember(e)
	return cmp.Or(memberName(e), r.Node)
}

// memberPins are the pins of the CA of the cluster that this machine is a member of, or
// was; none where that is unknown.
func memberPins(e *machine.Env) []string {
	if isMember(e) {
		return enrolledPins(e)
	}
	r, _ := readMember(e)
	return r.CA
}
