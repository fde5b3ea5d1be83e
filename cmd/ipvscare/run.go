package main

import (
	"context"
	"errors"
	"io"
	"log"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/ipvs"
)

// usageError is a mistake in the command line.
type usageError struct{ error }

func exitCode(err error) int {
	var usage usageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}

// run is the whole program but for signals and the exit.
func run(ctx context.Context, args []string, _ io.Reader, stdout, stderr io.Writer) error {
	root := &cobra.Command{
		Use:           "ipvscare",
		Short:         "Keep the way from this node to the masters open",
		SilenceUsage:  true,
		SilenceErrors: true,
		CompletionOptions: cobra.CompletionOptions{
			DisableDefaultCmd: true,
		},
	}
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(runCommand(stderr))
	return root.ExecuteContext(ctx)
}

func runCommand(stderr io.Writer) *cobra.Command {
	opt := ipvs.Options{}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Keep the virtual servers of the configuration file until told to stop",
		Long: `Keep the virtual servers of the configuration file until told to stop.
On SIGTERM the rules stay; on SIGHUP all files are read anew.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return keep(cmd.Context(), opt, stderr)
		},
	}
	cmd.Flags().StringVar(&opt.ConfigFile, "config", ondisk.IPVSConfig, "configuration file")
	cmd.Flags().StringVar(&opt.HostsFile, "hosts", "/etc/hosts", "hosts file in which the endpoint's line is kept")
	return cmd
}

// keep runs the daemon under systemd or by itself.
func keep(ctx context.Context, opt ipvs.Options, stderr io.Writer) error {
	tuneMemory()
	kernel, err := ipvs.OpenKernel()
	if err != nil {
		return err
	}
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	defer signal.Stop(reload)
	lines := log.New(stderr, "", 0) // the journal has the time
	opt.Kernel = kernel
	opt.Log = func(line string) { lines.Print(line) }
	opt.Reload = reload
	opt.Ready = func() { notify(lines, daemon.SdNotifyReady) }
	opt.Alive = func() { notify(lines, daemon.SdNotifyWatchdog) }
	defer notify(lines, daemon.SdNotifyStopping)
	return ipvs.NewDaemon(opt).Run(ctx)
}

// notify tells systemd; without systemd it does nothing.
func notify(lines *log.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		lines.Printf("telling systemd %q: %v", state, err)
	}
}

// tuneMemory trades a little processor time, of which ipvscare uses next to
// none, for a small heap. GOGC in the environment overrides it.
func tuneMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(20)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(8 << 20)
	}
}
