package kernel

import (
	"testing"
	"time"
)

// TestModuleIsLoadedNowAndThen checks that modprobe and the check over netlink run with growing
// pauses while IP_VS is missing.
func TestModuleIsLoadedNowAndThen(t *testing.T) {
	now, loads, asked, there := time.Now(), 0, 0, false
	m := module{shown: func() bool { return there }, known: func() bool { asked++; return there }, load: func() { loads++ }}
	look := func(d time.Duration) {
		t.Helper()
		for end := now.Add(d); now.Before(end); now = now.Add(5 * time.Second) {
			if m.ready(now) {
				t.Fatal("IP_VS is loaded already")
			}
		}
	}
	look(time.Second)
	if loads != 1 {
		t.Fatalf("loaded %d times at the start", loads)
	}
	look(time.Minute)
	if loads < 3 || loads > 4 {
		t.Errorf("loaded %d times in a minute", loads)
	}
	look(time.Hour)
	if loads < 12 || loads > 20 || asked > 2*loads {
		t.Errorf("loaded %d times in an hour, and the kernel asked %d times", loads, asked)
	}
	before := loads
	look(24 * time.Hour)
	if n := loads - before; n > 24*13 {
		t.Errorf("loaded %d times in a day", n)
	}
	// A module that another program loads is noticed at once.
	m.next, there = now.Add(time.Hour), true
	if !m.ready(now) {
		t.Error("the loaded module was not noticed")
	}
}

// TestModuleIsLoaded checks that IP_VS is available as soon as modprobe has loaded it.
func TestModuleIsLoaded(t *testing.T) {
	there := false
	m := module{shown: func() bool { return there }, known: func() bool { return there }, load: func() { there = true }}
	if !m.ready(time.Now()) {
		t.Error("IP_VS is not found")
	}
}
