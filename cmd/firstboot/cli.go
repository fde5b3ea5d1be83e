package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/edgebake/edgebake/cmd/internal/flagvalue"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/update"
	"github.com/edgebake/edgebake/ondisk"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// usageError is an error in the command line.
type usageError struct{ error }

// target is the machine that the commands work on.
type target struct {
	// env returns the environment through which commands use the machine. The environment logs
	// to log.
	env func(log io.Writer) *machine.Env
	// root means that the process runs as root.
	root bool
	// boot returns a line about the duration of the boot, or "".
	boot func(context.Context) string
	// insist ignores the signals of a closed terminal, so that no change is left half done.
	insist func()
}

// thisMachine returns the machine on which the program runs.
func thisMachine() target {
	return target{
		env: host.New, root: os.Geteuid() == 0, boot: host.Boot,
		insist: func() { signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE) },
	}
}

// needRoot returns an error unless the process runs as root. why is the reason, for the message.
func (m target) needRoot(what, why string) error {
	if !m.root {
		return fmt.Errorf("%s needs root, since it %s", what, why)
	}
	return nil
}

// execute runs one command line on a machine and returns the exit code.
func execute(ctx context.Context, m target, args []string, out, errOut io.Writer) int {
	// Messages quote untrusted sticks and servers, so remove control characters.
	out, errOut = printable.To(out), printable.To(errOut)
	root := newRoot(m, out, errOut)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if errors.Is(err, run.ErrAlready) {
		_, err = fmt.Fprintln(out, err)
	}
	if err == nil {
		return exitOK
	}
	for line := range strings.SplitSeq(err.Error(), "\n") { // print each error on its own line
		fmt.Fprintln(errOut, "firstboot:", line)
	}
	if advice := run.Advice(err); advice != "" {
		fmt.Fprintln(errOut, "    to fix:", advice)
	}
	if u := (usageError{}); errors.As(err, &u) {
		return exitUsage
	}
	return exitFailed
}

func newRoot(m target, out, errOut io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "firstboot",
		Short: "Make this machine a node of its cluster",
		Long: `firstboot turns a machine that was booted from an edgebake image into the node
that its Site describes. systemd runs it at every boot. "firstboot status" shows
its progress, and what it waits for.`,
		Version:       version.OfSource(),
		SilenceErrors: true, SilenceUsage: true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:              subcommand,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.SetOut(out)
	root.SetErr(errOut)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{flagvalue.Explain(err)} })
	root.AddCommand(newRun(m, errOut), newStatus(m, errOut), newCertificates(m, errOut), newUpdate(m, errOut), newConvert(m, errOut), newRevert(m, errOut), newReset(m, errOut), newSnapshot(m, errOut), newImages(m))
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" {
			c.Args = func(_ *cobra.Command, args []string) error {
				if _, rest, err := root.Find(args); err != nil || len(rest) > 0 {
					return subcommand(root, args)
				}
				return nil
			}
		}
	}
	return root
}

// subcommand rejects arguments of a command that has only subcommands.
func subcommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
	}
	return usageError{fmt.Errorf("unknown command %q: want one of %s; see %s --help", strings.Join(args, " "), strings.Join(names, ", "), cmd.CommandPath())}
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unexpected argument %q", args[0])}
	}
	return nil
}

func newRun(m target, log io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "run", Short: "Run first boot, or check its result again", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := m.needRoot("run", "sets up this machine"); err != nil {
				return err
			}
			e := m.env(log)
			if _, err := os.Stat(filepath.Join(e.Root, ondisk.ImageInfoFile)); errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("this machine was not booted from an edgebake image: %s does not exist; nothing was changed", ondisk.ImageInfoFile)
			}
			// Programs that first boot starts write files which other users must be able to read.
			syscall.Umask(0o022)
			r := firstboot.New(e)
			// Notify systemd now: units ordered after firstboot must not wait for the cluster.
			e.Notify("READY=1\nSTATUS=starting")
			if up := m.boot(cmd.Context()); up != "" {
				e.Console(up)
				e.Log.Info(up)
			}
			stop := watch(cmd.Context(), e, r)
			defer stop()
			err := r.Run(cmd.Context())
			if cmd.Context().Err() != nil && errors.Is(err, context.Canceled) {
				return nil // systemd stopped the run; the next one continues
			}
			return err
		},
	}
}

func newCertificates(m target, log io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "certificates", Short: "Restore usable certificates after a power cut", Args: noArgs,
		Long: `Certificates checks the certificates that kubelet and yurthub rotate. If the
current one is empty, truncated or does not match its key, it restores the newest
usable one. It restores the cluster's CA from kubelet's credentials. After an update
to another minor version of Kubernetes it saves the settings of the previous kubelet;
if the machine returns to the previous system, it restores them. It runs at each boot,
before kubelet and yurthub.`,
		RunE: func(*cobra.Command, []string) error {
			if err := m.needRoot("certificates", "reads private keys"); err != nil {
				return err
			}
			e := m.env(log)
			image, err := site.ImageInfo(e)
			if err == nil {
				err = member.TakeOverKubelet(e, kubeadm.Minor(image.Kubernetes))
			}
			return errors.Join(member.RestoreCertificates(e), err)
		},
	}
}

func newSnapshot(m target, log io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "snapshot", Short: "Save a snapshot of etcd on this control-plane node", Args: noArgs,
		Long: `Snapshot writes a snapshot for etcdctl and etcdutl to /var/lib/edgebake/snapshots,
and prints its path. First boot does so once a day, and keeps the newest seven, at
most 2 GiB in total. Snapshots contain the cluster's secrets. Copy them to a safe
place: on this disk, they are lost with it.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := m.needRoot("snapshot", "connects to etcd with this machine's certificate"); err != nil {
				return err
			}
			path, err := controlplane.Snapshot(cmd.Context(), m.env(log))
			if path != "" {
				fmt.Fprintln(cmd.OutOrStdout(), path)
			}
			return err
		},
	}
}

// watch notifies systemd's watchdog as long as the run makes progress.
func watch(ctx context.Context, e *machine.Env, r *run.Runner) (stop func()) {
	ctx, stop = context.WithCancel(ctx)
	go func() {
		for e.Sleep(ctx, 20*time.Second) == nil {
			if r.Alive(e.Now()) {
				e.Notify("WATCHDOG=1")
			}
		}
	}()
	return stop
}

func newStatus(m target, log io.Writer) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use: "status", Short: "Show the progress of first boot", Args: noArgs,
		Example: "  firstboot status\n  firstboot status -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return usageError{fmt.Errorf("unknown output %q: want text or json", output)}
			}
			e := m.env(log)
			s, err := run.LoadState(e.Root)
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%w; first boot has not begun here: it runs as firstboot.service on machines booted from an edgebake image", err)
			}
			if err != nil {
				return err
			}
			s.Update, s.Order = update.Status(e), update.OrderStatus(e)
			if output == "text" {
				fmt.Fprint(cmd.OutOrStdout(), run.ReportText(s))
			} else {
				enc := json.NewEncoder(printable.JSON(cmd.OutOrStdout()))
				enc.SetIndent("", "  ")
				if err := enc.Encode(s); err != nil {
					return fmt.Errorf("printing the status: %w", err)
				}
			}
			if s.Result == ondisk.ResultFailed {
				return errors.New("first boot has failed; the fix is above")
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}
