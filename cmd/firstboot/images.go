package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/store/merge"
	"github.com/spf13/cobra"
)

// containerdRoot is the directory of this machine's containerd store.
const containerdRoot = "/" + store.Root

func newImages(m target) *cobra.Command {
	cmd := &cobra.Command{
		Use: "images", Short: "Manage the container images of the disk image",
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newImagesMerge(m), newImagesVerify())
	return cmd
}

func newImagesMerge(m target) *cobra.Command {
	var o merge.Options
	var output string
	cmd := &cobra.Command{
		Use: "merge --from DIR", Short: "Add the images of a new system to the store in use", Args: noArgs,
		Long: `Merge adds the images of the containerd store in DIR, which comes from a disk image,
to this machine's store. Stop containerd first. If merge is interrupted, run it
again. DIR is not changed: remove it afterwards.`,
		Example: `  firstboot images merge --from /mnt/var/lib/containerd`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.From == "" {
				return usageError{errors.New("--from is required: the containerd directory with the images to add")}
			}
			if output != "text" && output != "json" {
				return usageError{fmt.Errorf("unknown output %q: want text or json", output)}
			}
			if _, err := os.Stat(filepath.Join(o.From, store.MetaDB)); errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%s is not an edgebake image store: %w; --from names lib/containerd of a disk image's DATA partition", o.From, err)
			}
			if err := m.needRoot("merge", "copies files of any owner"); err != nil {
				return err
			}
			r, err := merge.Merge(cmd.Context(), o)
			if err != nil {
				return err
			}
			if output == "json" {
				return json.NewEncoder(printable.JSON(cmd.OutOrStdout())).Encode(r)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d image records added, %d layers added, %d shared\n",
				len(r.Added), r.Snapshots, r.Shared)
			return err
		},
	}
	cmd.Flags().StringVar(&o.From, "from", "", "containerd's directory with the images to add")
	cmd.Flags().StringVar(&o.Into, "into", containerdRoot, "containerd's directory on this machine")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func newImagesVerify() *cobra.Command {
	root := containerdRoot
	cmd := &cobra.Command{
		Use: "verify", Short: "Check that every baked image can run without a registry", Args: noArgs,
		Long: `Verify checks databases, blobs and layer directories against each other. Stop
containerd first. If an image is damaged, restore it with firstboot images merge,
or flash the machine's disk again.`,
		Example: `  firstboot images verify
  firstboot images verify --root /mnt/var/lib/containerd`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := store.DirFiles(root)
			f.InUse = true
			s, err := store.Verify(f, ".")
			if err != nil {
				if _, gone := os.Stat(filepath.Join(root, store.MetaDB)); errors.Is(gone, fs.ErrNotExist) {
					return fmt.Errorf("no containerd store in %s: name containerd's directory with --root", filepath.Clean(root))
				}
				return fmt.Errorf("%s: %w", filepath.Clean(root), err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d images, %d layers: valid\n%s\n", len(s.Images), s.Snapshots, strings.Join(s.Images, "\n"))
			return err
		},
	}
	cmd.Flags().StringVar(&root, "root", root, "containerd directory")
	return cmd
}
