// Package emulator recognizes guests that failed because of a fault in QEMU. For tests only.
package emulator

import (
	"fmt"
	"iter"
	"regexp"
)

// To switch a static key, a kernel writes an int3 over an instruction, then the rest of the new
// instruction, then its first byte. QEMU 7.2 and 8.0 cache translated code, so a second processor
// may still run the int3, which makes the kernel panic. A guest with one processor is not affected.

var (
	// trapped matches a first oops that was caused by an unexpected int3.
	trapped = regexp.MustCompile(`\bint3: 0000 \[#1\]`)
	// firstOops matches a first oops of any kind.
	firstOops = regexp.MustCompile(`: [0-9a-f]{4} \[#1\]`)
	rip       = regexp.MustCompile(`\bRIP: 0010:(\S+)`)
	// opcodes matches the memory around the instruction after the trap (in <>), as it was when the
	// kernel printed it.
	opcodes = regexp.MustCompile(`\bCode: .*\b([0-9a-f]{2}) <[0-9a-f]{2}>`)
)

// StaleTranslation returns the lines of a console that prove that the emulator ran an int3 that was
// not in memory, or "" if there are none.
func StaleTranslation(console iter.Seq[string]) string {
	seen, where := false, ""
	for line := range console {
		if !seen && firstOops.MatchString(line) {
			if seen = true; !trapped.MatchString(line) {
				return ""
			}
		}
		if !seen {
			continue
		}
		if m := rip.FindStringSubmatch(line); m != nil && where == "" {
			where = " in " + m[1]
		}
		if m := opcodes.FindStringSubmatch(line); m != nil {
			if m[1] == "cc" {
				return "" // the int3 is in memory, so the kernel itself failed
			}
			return fmt.Sprintf("it ran an int3%s where memory has %s", where, m[1])
		}
	}
	return ""
}
