package ipvs

import "time"

// alarm tells one goroutine that a time has come. Setting it again forgets the
// time before; C may still deliver that one, so whoever hears it looks at the
// clock.
type alarm struct {
	C    <-chan time.Time
	set  func(time.Duration)
	stop func()
}

// alarms makes an alarm, not yet set.
type alarms func() alarm

// runtimeAlarm is an alarm by Go's own timer.
func runtimeAlarm() alarm {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return alarm{C: t.C, set: func(d time.Duration) { t.Reset(d) }, stop: func() { t.Stop() }}
}
