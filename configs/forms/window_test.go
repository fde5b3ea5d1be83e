package forms

import (
	"strings"
	"testing"
	"time"
)

func TestWindow(t *testing.T) {
	t.Parallel()
	at := func(clock string) time.Time {
		x, err := time.Parse("15:04", clock)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	for text, want := range map[string][2]string{"22:00-05:00": {"22:00 23:59 00:00 04:59", "05:00 21:59"}, "09:30-17:00": {"09:30 16:59", "09:29 17:00 00:00"}} {
		var w Window
		if err := w.Set(text); err != nil || w.String() != text {
			t.Errorf("%s: %s, %v", text, &w, err)
		}
		for i, open := range []bool{true, false} {
			for clock := range strings.FieldsSeq(want[i]) {
				if w.Open(at(clock)) != open {
					t.Errorf("%s at %s: open is %v", text, clock, !open)
				}
			}
		}
	}
	for _, text := range []string{"", "22", "22:00", "25:00-03:00", "10:00-10:00", "a-b", "9:00-10:00", "09:00-10:00 ", "09:00_10:00", "09:00-10:0\x00"} {
		var w Window
		if w.Set(text) == nil {
			t.Errorf("%q is accepted", text)
		}
	}
	for _, zone := range []string{"Local", "Europe/Bielefeld", "../etc", "/etc/localtime"} {
		if BadTimeZone(zone) == "" {
			t.Errorf("%q is accepted", zone)
		}
	}
	for _, zone := range []string{"Europe/Berlin", "UTC", "America/Argentina/Buenos_Aires"} {
		if bad := BadTimeZone(zone); bad != "" {
			t.Error(bad)
		}
	}
}
