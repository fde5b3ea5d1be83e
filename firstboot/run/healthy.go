package run

import (
	"fmt"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// A system that was just installed boots on trial: edgebake-healthy.service
// holds boot-complete.target until HealthyFile is there, and with it the mark
// that makes the system the one to boot from now on. A boot without it ends
// after a while, and after the last try the former system boots again.

// saveHealthy says that this boot is as good as the last one.
func saveHealthy(e *machine.Env) error {
	if e.Exists(ondisk.HealthyFile) {
		return nil
	}
	if err := e.WriteFile(ondisk.HealthyFile, nil, machine.Mode(0o644)); err != nil {
		return fmt.Errorf("noting that this boot went well: %w", err)
	}
	return nil
}
