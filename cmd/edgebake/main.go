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
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The second Ctrl-C ends a program that does not listen to the first.
	context.AfterFunc(ctx, stop)
	code := run(ctx, os.Args[1:], streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	stop()
	os.Exit(code)
}
