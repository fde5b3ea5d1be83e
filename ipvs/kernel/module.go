package kernel

import "time"

// Pauses between attempts to load IP_VS; they double each time.
const (
	loadLeast = 10 * time.Second
	loadMost  = 5 * time.Minute
)

// module checks whether the kernel has IP_VS. IP_VS may be a module that is not loaded or not
// installed.
type module struct {
	// shown checks for IP_VS without side effects.
	shown func() bool
	// known checks for IP_VS over netlink. The kernel then runs modprobe if IP_VS is not loaded.
	known func() bool
	load  func()

	pause time.Duration
	next  time.Time // earliest time of the next attempt to load it
}

// ready reports whether the kernel has IP_VS. If an attempt is due, it tries to load the module.
func (m *module) ready(now time.Time) bool {
	if m.shown() {
		return m.known()
	}
	if now.Before(m.next) {
		return false
	}
	m.pause = min(max(2*m.pause, loadLeast), loadMost)
	m.next = now.Add(m.pause)
	if m.known() {
		return true
	}
	m.load()
	return m.known()
}
