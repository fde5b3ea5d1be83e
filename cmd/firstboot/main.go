// Command firstboot makes a booted machine a node of its cluster; see package
// firstboot. systemd runs `firstboot run` at every boot.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	_ "time/tzdata" // time zones for updates.timeZone of a Site
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := execute(ctx, thisMachine(), os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
