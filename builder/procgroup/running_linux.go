package procgroup

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// running reports whether a process of the group is running. Zombies do not count: in many
// containers no init reaps them, so they stay in the group.
func running(group int) bool {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil || len(stats) == 0 {
		return true // there is no /proc
	}
	for _, file := range stats {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended
		}
		// The format is: pid (name) state parent group …, see proc_pid_stat(5). A name may contain
		// any character.
		f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if len(f) > 2 && f[2] == strconv.Itoa(group) && f[0] != "Z" && f[0] != "X" {
			return true
		}
	}
	return false
}
