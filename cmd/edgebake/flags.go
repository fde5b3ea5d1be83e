package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// cacheFlag declares --cache.
func cacheFlag(f *pflag.FlagSet, dir *string) {
	f.StringVar(dir, "cache", "", "directory for downloaded and generated inputs (default $EDGEBAKE_CACHE, else edgebake in the user's cache directory)")
}

func openCache(dir string) (*fetch.Cache, error) {
	if dir == "" {
		var err error
		if dir, err = fetch.DefaultDir(); err != nil {
			return nil, err
		}
	}
	return fetch.Open(dir)
}

func undatedFlag(c *cobra.Command, undated *bool) {
	c.Flags().BoolVar(undated, "undated", false, "do not record the time of stamping in the slot, if this computer's clock cannot be trusted")
}

// isImageName reports whether a file has the name of a disk image.
func isImageName(name string) bool {
	return strings.HasSuffix(name, ".raw") || strings.HasSuffix(name, ".raw.zst")
}

// imageFirst rejects operands in the wrong order, because the image could be overwritten. For flash
// it also rejects a document in place of the disk.
func imageFirst(c *cobra.Command, a []string) error {
	if len(a) == 2 && isImageName(a[1]) && !isImageName(a[0]) {
		return cli.Usage(fmt.Errorf("%s is an image, and the image comes first: %s %s %s", a[1], c.CommandPath(), a[1], a[0]))
	}
	if len(a) == 2 && c.Name() == "flash" && slices.Contains(documents.Extensions, strings.TrimPrefix(filepath.Ext(a[1]), ".")) {
		return cli.Usage(fmt.Errorf("%s is a document and not a disk: %s %s /dev/sdX --site %[1]s", a[1], c.CommandPath(), a[0]))
	}
	return nil
}
