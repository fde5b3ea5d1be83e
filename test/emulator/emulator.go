// Package emulator tells a guest that QEMU has failed from one that is broken.
// For tests only.
package emulator

import (
	"fmt"
	"iter"
	"regexp"
)

// A kernel switches its static keys by writing an int3 over an instruction,
// then the rest of it, then its first byte. QEMU translates code once and keeps
// the translation: a second processor may run an int3 that is no longer in
// memory, and then nobody knows what it was for. The kernel panics, whatever
// the disk holds. QEMU 7.2 does it, and 8.0; a guest with one processor is
// safe, since nobody patches while it runs.

var (
	// trapped is an int3 that the kernel had no use for, its first oops.
	trapped = regexp.MustCompile(`\bint3: 0000 \[#1\]`)
	// firstOops is a first oops of any kind.
	firstOops = regexp.MustCompile(`: [0-9a-f]{4} \[#1\]`)
	rip       = regexp.MustCompile(`\bRIP: 0010:(\S+)`)
	// opcodes is the memory around the instruction after the trap, which is
	// in <>, as it was when the kernel printed it.
	opcodes = regexp.MustCompile(`\bCode: .*\b([0-9a-f]{2}) <[0-9a-f]{2}>`)
)

// StaleTranslation says how a console's lines show that the emulator ran an int3
// where there was none in memory; "": they do not.
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
				return "" // it is there: the kernel stumbled over it itself
			}
			return fmt.Sprintf("it ran an int3%s where memory has %s", where, m[1])
		}
	}
	return ""
}
