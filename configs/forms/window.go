package forms

import (
	"errors"
	"fmt"
	"time"
)

// Window is a period of each day, such as 22:00-05:00. The zero value is the whole day.
type Window struct{ from, to time.Duration }

// String returns the window in the format that Set accepts.
func (w *Window) String() string {
	if *w == (Window{}) {
		return ""
	}
	clock := func(d time.Duration) string { return fmt.Sprintf("%02d:%02d", int(d.Hours()), int(d.Minutes())%60) }
	return clock(w.from) + "-" + clock(w.to)
}

// Type returns the name of the type in a flag's usage text (pflag.Value).
func (w *Window) Type() string { return "HH:MM-HH:MM" }

// Set parses a text such as "22:00-05:00".
func (w *Window) Set(text string) error {
	const form = "15:04"
	var times [2]time.Time
	var err error
	if len(text) != len(form)*2+1 || text[len(form)] != '-' {
		err = errors.New("another length")
	}
	for i := range times {
		if err == nil {
			times[i], err = time.Parse(form, text[i*(len(form)+1):][:len(form)])
		}
	}
	if err != nil || times[0].Equal(times[1]) {
		return errors.New("must be two times of the day, such as 22:00-05:00")
	}
	*w = Window{sinceMidnight(times[0]), sinceMidnight(times[1])}
	return nil
}

func sinceMidnight(t time.Time) time.Duration {
	return time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute
}

// Open reports whether a time is in the window, by the clock of the time's zone.
func (w Window) Open(now time.Time) bool {
	at := sinceMidnight(now)
	switch {
	case w == (Window{}):
		return true
	case w.from < w.to:
		return w.from <= at && at < w.to
	}
	return at >= w.from || at < w.to
}

// BadWindow returns why s is not a period of each day, or "".
func BadWindow(s string) string {
	if err := new(Window).Set(s); err != nil {
		return fmt.Sprintf("%q: %v", s, err)
	}
	return ""
}

// BadTimeZone returns why s is not the name of a time zone, or "".
func BadTimeZone(s string) string {
	if _, err := time.LoadLocation(s); err != nil || s == "Local" {
		return fmt.Sprintf("%q is not a time zone, such as Europe/Berlin", s)
	}
	return ""
}
