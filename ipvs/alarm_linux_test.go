package ipvs

import (
	"testing"
	"time"
)

func TestClock(t *testing.T) {
	c, err := newClock()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	start := time.Now()
	heard := func(a alarm) time.Duration {
		t.Helper()
		select {
		case <-a.C:
			return time.Since(start)
		case <-time.After(10 * time.Second):
			t.Fatal("an alarm was not heard")
			return 0
		}
	}
	silent := func(a alarm, what string) {
		t.Helper()
		select {
		case <-a.C:
			t.Errorf("an alarm was heard that was %s", what)
		default:
		}
	}
	early, late, put, gone := c.alarm(), c.alarm(), c.alarm(), c.alarm()
	late.set(60 * time.Millisecond)
	early.set(30 * time.Millisecond) // before the one that the kernel waits for
	put.set(10 * time.Millisecond)
	put.set(time.Hour)
	gone.set(10 * time.Millisecond)
	gone.stop()
	if d := heard(early); d < 30*time.Millisecond {
		t.Errorf("the early one came after %s", d)
	}
	if d := heard(late); d < 60*time.Millisecond {
		t.Errorf("the late one came after %s", d)
	}
	silent(put, "put off")
	silent(gone, "stopped")
	put.set(0) // at once, from an hour ahead
	heard(put)
	early.set(-time.Second) // is over
	heard(early)
	silent(late, "heard before")
}

// TestClockMany: whatever the order in which many are set, each is heard, and
// none before its time.
func TestClockMany(t *testing.T) {
	c, err := newClock()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	done := make(chan time.Duration)
	const many = 100
	for i := range many {
		a, d := c.alarm(), time.Duration(i*37%many)*time.Millisecond
		go func() {
			for range 5 {
				began := time.Now()
				a.set(d)
				<-a.C
				done <- d - time.Since(began)
			}
		}()
	}
	end := time.After(30 * time.Second)
	for range 5 * many {
		select {
		case early := <-done:
			if early > 0 {
				t.Errorf("an alarm came %s too soon", early)
			}
		case <-end:
			t.Fatal("some alarms were not heard")
		}
	}
}
