package member_test

import (
	"testing"

	"github.com/edgebake/edgebake/firstboot/member"
)

// TestAnUnreadableRecord checks that an unreadable membership record, or one of a later release,
// counts as a record.
func TestAnUnreadableRecord(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "{", `{"version":7,"node":{}}`} {
		w := newWorld(t)
		w.Put(member.RecordFile, text)
		if got, ok := member.ReadRecord(w.Env()); !ok || got.Node != "" || !member.HasJoined(w.Env()) {
			t.Errorf("%q: %+v, %v", text, got, ok)
		}
	}
}
