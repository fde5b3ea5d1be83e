package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/edgebake/edgebake/firstboot/update"
)

func newUpdate(m target, log io.Writer) *cobra.Command {
	var o update.Options
	cmd := &cobra.Command{
		Use: "update FILE|URL", Short: "Replace this machine's system by that of another image",
		Example: "  firstboot update https://images.example.com/my-edge.raw.zst\n  firstboot update /mnt/my-edge.raw.zst --no-reboot",
		Long: `update writes the root file system, kernel and initrd of a compressed image
(.raw.zst) beside those that run, and restarts the machine with them. What is on
this machine's disk already is not fetched. Interrupted, the same command
continues.

The new system boots on trial. If the Node is not Ready within 15 minutes, three
times in a row, the machine returns to the system that runs now.

The image must be signed by a key that this machine's image names (updates.keys),
and keep the minor version of Kubernetes. Container images are not updated, and
control-plane nodes are rejected.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{errors.New("want one image: a file, or an http or https URL")}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := m.needRoot("update", "writes this machine's disk"); err != nil {
				return err
			}
			m.insist()
			o.Image = args[0]
			if !strings.Contains(o.Image, "://") {
				abs, err := filepath.Abs(o.Image)
				if err != nil {
					return err
				}
				o.Image = abs
			}
			err := update.Update(cmd.Context(), m.env(log), o, printStep(cmd.OutOrStdout()))
			if errors.Is(err, update.ErrAlready) {
				fmt.Fprintln(cmd.OutOrStdout(), err)
				return nil
			}
			if err == nil && o.NoReboot {
				fmt.Fprintln(cmd.OutOrStdout(), "updated; the new system runs after the next restart.")
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&o.Unsigned, "unsigned", false, "accept an image without a signature, if this machine's image names no keys")
	cmd.Flags().BoolVar(&o.NoReboot, "no-reboot", false, "do not restart the machine")
	return cmd
}
