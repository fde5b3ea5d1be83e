// Package console prints messages on all consoles of a machine.
package console

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/edgebake/edgebake/configs/printable"
)

// Active is the file in which the kernel lists its consoles.
const Active = "/sys/class/tty/console/active"

// Say writes a line to every console listed in the file active. dev is the directory of the
// consoles' devices. Say never waits for a console, which may have no reader.
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
		_, _ = f.WriteString("edgebake: " + line + "\r\n") // best effort
		f.Close()
	}
}
