package kernel

import "time"

// Pauses between attempts to load IP_VS: they double.
const (
	loadLeast = 10 * time.Second
	loadMost  = 5 * time.Minute
)

// module is the kernel's IP_VS, which may be a module that is not loaded, or not
// there at all.
type module struct {
	// shown is a look that has no effect.
	shown func() bool
	// known asks the kernel, which runs modprobe by itself if it does not know.
	known func() bool
	load  func()

	pause time.Duration
	next  time.Time // when it may be loaded again
}

// ready reports whether the kernel has IP_VS. It loads it if that is due.
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
