package lab

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"
)

func TestNTPAnswer(t *testing.T) {
	question := make([]byte, ntpPacket)
	question[0] = 4<<3 | ntpClient
	copy(question[40:], "\xde\xad\xbe\xef\x01\x02\x03\x04") // systemd-timesyncd sends random bits here
	now := time.Date(2026, 11, 26, 12, 0, 0, int(time.Second/2), time.UTC)
	a := ntpAnswer(question, now)
	if len(a) != ntpPacket || a[0] != 4<<3|ntpServer || !bytes.Equal(a[24:32], question[40:]) {
		t.Fatalf("the answer is %x", a)
	}
	for _, at := range []int{32, 40} {
		since1900 := time.Date(1900, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
		if s, f := binary.BigEndian.Uint32(a[at:]), binary.BigEndian.Uint32(a[at+4:]); int64(s)+since1900 != now.Unix() || f != 1<<31 {
			t.Errorf("the time at byte %d is %d and %d/2^32 s", at, s, f)
		}
	}
	for name, bad := range map[string][]byte{"short": question[:40], "an answer": a, "nothing": nil} {
		if ntpAnswer(bad, now) != nil {
			t.Errorf("%s is answered", name)
		}
	}
}
