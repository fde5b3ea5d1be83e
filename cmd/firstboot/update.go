package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/firstboot/update"
	"github.com/edgebake/edgebake/ondisk/order"
)

// updateFlags are the flags of firstboot update.
type updateFlags struct {
	options                    update.Options
	rate, most                 string
	finish, plugged, fromOrder bool // set only by systemd units
}

func newUpdate(m target, log io.Writer) *cobra.Command {
	u := &updateFlags{}
	cmd := &cobra.Command{
		Use: "update FILE|URL|oci://REGISTRY/REPOSITORY:TAG|stick", Short: "Replace this machine's system with that of another image",
		Example: "  firstboot update oci://registry.example.com/edge/my-edge:2026.11\n  firstboot update https://images.example.com/my-edge.raw.zst\n  firstboot update /mnt/my-edge.raw.zst --no-reboot\n  firstboot update stick",
		Long: `update writes the root file system, kernel and initrd of a compressed image
(.raw.zst) beside those that run, and restarts the machine with them. Data that is
already on this machine's disk is not fetched. After an interruption, the same command
continues.

With oci:// it uses an image that edgebake push has put into a registry; the login
is the one that kubelet uses, in /var/lib/kubelet/config.json. With "stick" it uses
the image on a USB stick or card, which must have exactly one image that this machine
accepts.

The new system boots on trial. If the Node does not become Ready within 15 minutes
(control-plane node: within an hour) in any of three boots, the machine returns to the
system that runs now.

The image must be signed by a key that this machine's image names (updates.keys).
Its kubelet may have a later minor version of Kubernetes, but not a later one than any
API server; pods that have a controller are then evicted before the restart. Container
images that this machine lacks are part of the update; containerd is stopped for some
seconds while they are added.

Control-plane nodes accept only patch releases of Kubernetes, one node at a time, while
all members of etcd are healthy, and after a snapshot of etcd.`,
		Args: u.checkArgs,
		RunE: func(cmd *cobra.Command, args []string) error { return u.run(cmd, m, log, args) },
	}
	f := cmd.Flags()
	f.BoolVar(&u.options.Unsigned, "unsigned", false, "accept an image without a signature, if this machine's image names no keys")
	f.BoolVar(&u.options.NoReboot, "no-reboot", false, "do not restart the machine")
	f.BoolVar(&u.options.NoDrain, "no-drain", false, "evict no pods before a restart with another minor version of Kubernetes")
	f.StringVar(&u.rate, "limit-rate", "", "maximum number of bytes to fetch per second, e.g. 500k")
	f.StringVar(&u.most, "max-bytes", "", "maximum number of bytes to fetch in total, e.g. 20M; required if the Site's link is metered")
	f.BoolVar(&u.finish, "finish", false, "finish an update whose trial succeeded (a systemd unit runs this at each boot)")
	f.BoolVar(&u.plugged, "plugged", false, "update from a stick that was plugged in (a systemd unit runs this)")
	f.BoolVar(&u.fromOrder, "order", false, "carry out the update that the cluster orders, if there is one (a systemd timer runs this every few minutes)")
	for _, flag := range []string{"finish", "plugged", "order"} {
		if err := cmd.Flags().MarkHidden(flag); err != nil {
			panic("BUG: " + err.Error())
		}
	}
	return cmd
}

func (u *updateFlags) checkArgs(_ *cobra.Command, args []string) error {
	if u.finish || u.plugged || u.fromOrder {
		return noArgs(nil, args)
	}
	if len(args) != 1 {
		return usageError{errors.New("want one image: a file, an http or https URL, oci://REGISTRY/REPOSITORY:TAG, or stick")}
	}
	if _, golden, ok := cutGolden(args[0]); ok {
		if err := order.CheckGolden(golden); err != nil {
			return usageError{err}
		}
	}
	return nil
}

// cutGolden splits URL@sha256:GOLDEN, the form of an order. It does not split oci:// references, in
// which the digest is that of the manifest.
func cutGolden(text string) (image, golden string, found bool) {
	image, golden, ok := order.CutGolden(text)
	if !ok || !strings.Contains(image, "://") || order.InRegistry(image) {
		return text, "", false
	}
	return image, golden, true
}

func (u *updateFlags) run(cmd *cobra.Command, m target, log io.Writer, args []string) error {
	o := u.options
	var err1, err2 error
	o.Rate, err1 = parseBytes("--limit-rate", u.rate)
	o.MaxBytes, err2 = parseBytes("--max-bytes", u.most)
	if err := errors.Join(err1, err2); err != nil {
		return usageError{err}
	}
	tuneMemory()
	if err := m.needRoot("update", "writes this machine's disk"); err != nil {
		return err
	}
	ctx, out := cmd.Context(), cmd.OutOrStdout()
	switch {
	case u.finish:
		return update.Finish(ctx, m.env(log))
	case u.plugged:
		return update.FromStick(ctx, m.env(log))
	case u.fromOrder:
		return update.CarryOutOrder(ctx, m.env(log), printStep(out))
	}
	m.insist()
	o.Image, o.Golden, _ = cutGolden(args[0])
	if !strings.Contains(o.Image, "://") && o.Image != update.Stick {
		abs, err := filepath.Abs(o.Image)
		if err != nil {
			return err
		}
		o.Image = abs
	}
	err := update.Update(ctx, m.env(log), o, printStep(out))
	if err == nil && o.NoReboot {
		fmt.Fprintln(out, "updated; the new system runs after the next restart.")
	}
	return err
}

// tuneMemory keeps the heap small, at the cost of some processor time, because pods run during an
// update. GOGC overrides it.
func tuneMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

// parseBytes parses a number of bytes; "" is 0.
func parseBytes(flag, text string) (int64, error) {
	if text == "" {
		return 0, nil
	}
	n, err := forms.ParseSize(text)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", flag, err)
	}
	return n, nil
}
