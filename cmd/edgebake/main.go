// Edgebake bakes golden disk images for Kubernetes edge nodes and stamps Sites onto them. This
// package contains only flags and printing; other packages do the work.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	_ "time/tzdata" // time zones for updates.timeZone of a Site
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), ends()...)
	// After the first signal, a second one ends the program at once.
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	stop()
	os.Exit(code)
}

// ends returns the signals on which the program stops cleanly, together with the programs that it
// started. SIGHUP, from a closed terminal, is one of them unless nohup ignores it.
func ends() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}
