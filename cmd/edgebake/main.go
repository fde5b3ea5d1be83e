// Edgebake bakes golden disk images for Kubernetes edge nodes and stamps Sites
// onto them. This package contains flags and printing; the packages that it
// calls do the work.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	_ "time/tzdata" // for updates.timeZone of a Site
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), ends()...)
	// A second Ctrl-C ends the program at once.
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	stop()
	os.Exit(code)
}

// ends returns the signals that end the program in an orderly way. SIGHUP, from a
// closed terminal, is one of them unless nohup ignores it: programs started by a
// build are not in the terminal's job, and would continue.
func ends() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}
