// Edgebake bakes golden disk images for Kubernetes edge nodes and stamps
// sites onto them. This package is flags and printing; the work is done in
// the packages it calls.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), ends()...)
	// The second Ctrl-C ends a program that does not listen to the first.
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	stop()
	os.Exit(code)
}

// ends are the signals that end a command in good order. A closed terminal is
// one: what a build has started is not part of the terminal's job, and would go
// on. With nohup it ends nothing.
func ends() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}
