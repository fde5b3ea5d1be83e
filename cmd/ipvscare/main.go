// Command ipvscare keeps the API servers (masters) reachable from this node. Package ipvs describes
// its work, and docs/ipvscare.md its use.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/edgebake/edgebake/configs/printable"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") { // print each error on its own line
			fmt.Fprintln(printable.To(os.Stderr), "ipvscare:", line)
		}
		os.Exit(exitCode(err))
	}
}
