// Package console prints what a machine does to the consoles that a person may be
// looking at.
package console

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/edgebake/edgebake/configs/printable"
)

// Active is where the kernel lists its consoles.
const Active = "/sys/class/tty/console/active"

// Say writes a line to every console that the file active lists, in the directory
// dev. A console nobody reads must not hold us up, so writing does not block.
func Say(active, dev, line string) {
	names, err := os.ReadFile(active)
	if err != nil {
		return // a container, or no console at all
	}
	line = printable.Text(line)
	for name := range strings.FieldsSeq(string(names)) {
		f, err := os.OpenFile(filepath.Join(dev, name), os.O_WRONLY|syscall.O_NOCTTY|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		_, _ = f.WriteString("edgebake: " + line + "\r\n") // best effort by nature
		f.Close()
	}
}
