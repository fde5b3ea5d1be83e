// Command installer installs an image on the machine that it runs on; see
// package installer. The initrd of an installer's stick starts it.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/firstboot/console"
	"github.com/edgebake/edgebake/installer"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		console.Say(console.Active, "/dev", fmt.Sprintf("FAILED: %v", err))
		os.Exit(1)
	}
}

// run installs, in the initrd of an installer and nowhere else: it overwrites
// disks without being asked.
func run(ctx context.Context) error {
	c, err := installer.ReadConfig(ondisk.InstallConfig)
	if err != nil {
		return err
	}
	return installer.Run(ctx, c, installer.New(c))
}
