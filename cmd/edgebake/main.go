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

// ends returns the signals on which the program ends in an orderly way. They include SIGHUP, which
// a closed terminal sends, unless nohup ignores it. Otherwise programs that a build has started
// would continue, because they are not in the terminal's job.
func ends() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}
