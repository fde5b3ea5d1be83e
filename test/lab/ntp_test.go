package lab

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"
)

func TestNTPAnswer(t *testing.T) {
	question := make([]byte, ntpSize)
	question[0] = 4<<3 | 3
	client := time.Date(2026, 11, 26, 7, 0, 0, 500_000_000, time.UTC)
	binary.BigEndian.PutUint32(question[40:], uint32(client.Unix()-ntpEra))
	binary.BigEndian.PutUint32(question[44:], uint32(client.Nanosecond()))
	got := ntpAnswer(question, func(t time.Time) time.Time { return t.Add(-8 * time.Hour) })
	if got[0]&7 != 4 || !bytes.Equal(got[24:32], question[40:48]) {
		t.Errorf("not the answer to this question: %x", got)
	}
	at := time.Unix(int64(binary.BigEndian.Uint32(got[40:]))+ntpEra, int64(uint64(binary.BigEndian.Uint32(got[44:]))*1e9>>32)).UTC()
	if want := client.Add(-8 * time.Hour); at.Sub(want).Abs() > time.Microsecond {
		t.Errorf("it says %s, expected %s", at, want)
	}
}
