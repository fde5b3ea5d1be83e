package builder

import (
	"context"
	"fmt"

	"github.com/edgebake/edgebake/builder/procgroup"
)

// checkEmulation returns an error if this computer cannot run programs of another architecture, as
// the scripts of Debian packages require. Like mmdebstrap, it calls arch-test.
func checkEmulation(ctx context.Context, arch string) error {
	if procgroup.Command(ctx, "arch-test", arch).Run() == nil {
		return nil
	}
	return fmt.Errorf("making the Debian base for %[1]s runs %[1]s programs, which this computer cannot run: install qemu-user-static (in a container: on its host) and arch-test, or use a base exported on an %[1]s computer (--export-base there, --base here)", arch)
}
