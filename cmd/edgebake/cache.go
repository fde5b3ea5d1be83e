package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/spf13/cobra"
)

func newCacheCommand(s streams) *cobra.Command {
	var dir string
	var output console.Form
	c := &cobra.Command{
		Use:   "cache",
		Short: "Show the size of the cache, and free space",
		Long: `Cache shows the size of the downloaded and generated inputs, and when builds last used them.
Nothing is removed automatically; edgebake cache prune frees space.`,
		Example: `  edgebake cache
  edgebake cache --output json
  edgebake cache prune --older-than 30d`,
		Args: cli.Subcommand,
		RunE: func(c *cobra.Command, _ []string) error {
			cache, err := openFilled(dir)
			if err != nil {
				return err
			}
			defer cache.Close()
			blobs, err := cache.List()
			if err != nil {
				return err
			}
			notes, err := cache.Notes()
			if err != nil {
				return err
			}
			v := struct {
				Dir   string         `json:"dir"`
				Bytes int64          `json:"bytes"` // size of the whole cache in bytes
				Notes int64          `json:"notes"` // bytes of the cache's metadata
				Blobs []fetch.Stored `json:"blobs"`
			}{Dir: cache.Dir(), Bytes: notes, Notes: notes, Blobs: blobs}
			for _, b := range blobs {
				v.Bytes += b.Size
			}
			return output.Print(s, v, func() {
				fmt.Fprintf(s.Out, "%s: %s in %s, and %s of metadata\n", v.Dir, bytesize.Human(v.Bytes-v.Notes), configs.Count(len(blobs), "input"), bytesize.Human(v.Notes))
				printAges(s, blobs, time.Now())
			})
		},
	}
	cacheFlag(c.PersistentFlags(), &dir)
	output.Flag(c)
	c.AddCommand(newPrune(s, &dir), newCacheVerify(s, &dir))
	return c
}

// openFilled opens a cache that earlier builds have filled. A directory without a cache is an
// error, because --cache may be misspelled.
func openFilled(dir string) (*fetch.Cache, error) {
	if dir != "" {
		if _, err := os.Stat(filepath.Join(dir, "blobs")); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("--cache %s: no build has used this directory", dir)
		}
	}
	return openCache(dir)
}

// printAges prints the sizes of blobs by the time of their last use.
func printAges(s streams, blobs []fetch.Stored, now time.Time) {
	const day = 24 * time.Hour
	from := time.Duration(0)
	for _, to := range []struct {
		name string
		age  time.Duration
	}{{"in the last day", day}, {"in the last week", 7 * day}, {"in the last 30 days", 30 * day}, {"longer ago", 1<<63 - 1}} {
		n, size := 0, int64(0)
		for _, b := range blobs {
			if age := max(0, now.Sub(b.Used)); age >= from && age < to.age {
				n++
				size += b.Size
			}
		}
		if n > 0 {
			fmt.Fprintf(s.Out, "  used %-20s %9s in %s\n", to.name, bytesize.Human(size), configs.Count(n, "input"))
		}
		from = to.age
	}
}

func newPrune(s streams, dir *string) *cobra.Command {
	var (
		olderThan time.Duration
		keep      string
		limits    fetch.Limits
	)
	c := &cobra.Command{
		Use:   "prune",
		Short: "Remove old inputs from the cache",
		Long: `Prune removes inputs that no build has used for some time (--older-than), or the
least recently used ones until the rest fits a size (--keep). With both, it removes
an input that either of them selects. Prune may run beside builds: inputs in use
stay. A build that needs a removed input fetches or makes it again.

A Debian base cannot be made again once the packages in Debian's archive have
changed. If a lock pins it, export it first (edgebake build --export-base).`,
		Example: `  edgebake cache prune --older-than 30d
  edgebake cache prune --keep 10Gi
  edgebake cache prune --keep 10Gi --dry-run`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			given := c.Flags().Changed
			if !given("older-than") && !given("keep") {
				return cli.Usage(errors.New("choose the inputs to remove: --older-than TIME (e.g. 30d), --keep SIZE (e.g. 10Gi), or both"))
			}
			if given("older-than") {
				limits.UsedSince = time.Now().Add(-olderThan)
			}
			if given("keep") {
				n, err := forms.ParseSize(keep)
				if keep == "0" {
					n, err = 0, nil
				}
				if err != nil {
					return cli.Usage(fmt.Errorf("--keep: %w", err))
				}
				limits.Keep = &n
			}
			cache, err := openFilled(*dir)
			if err != nil {
				return err
			}
			defer cache.Close()
			p, err := cache.Prune(limits)
			verb := "freed"
			if limits.DryRun {
				verb = "would free"
			}
			s.Note("%s %s in %s; %s in %s remain in %s\n", verb,
				bytesize.Human(p.Freed.Bytes), configs.Count(p.Freed.Blobs, "input"), bytesize.Human(p.Left.Bytes), configs.Count(p.Left.Blobs, "input"), cache.Dir())
			if p.InUse.Blobs > 0 {
				s.Note("kept %s in %s that a running build may need\n", bytesize.Human(p.InUse.Bytes), configs.Count(p.InUse.Blobs, "input"))
			}
			return err
		},
	}
	f := c.Flags()
	f.Var((*cli.Span)(&olderThan), "older-than", "remove inputs that no build has used for this time, e.g. 30d or 12h")
	f.StringVar(&keep, "keep", "", "shrink the cache to this size, e.g. 10Gi (0: remove everything); the least recently used inputs are removed first")
	f.BoolVarP(&limits.DryRun, "dry-run", "n", false, "remove nothing, print what would be removed")
	return c
}

func newCacheVerify(s streams, dir *string) *cobra.Command {
	var output console.Form
	var dryRun bool
	c := &cobra.Command{
		Use:   "verify",
		Short: "Compare every cached input with its digest, and remove damaged ones",
		Long: `Verify reads every cached input and compares it with its digest. Damaged inputs
are removed; the next build that needs one fetches or makes it again. It exits
with 1 if anything was damaged.

A build does the same for every input that has changed since it was last
hashed, and with --locked for every input that it uses.`,
		Example: `  edgebake cache verify
  edgebake cache verify --dry-run --output json`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cache, err := openFilled(*dir)
			if err != nil {
				return err
			}
			defer cache.Close()
			v, verr := cache.Verify(c.Context(), dryRun, nil)
			// Print the removed blobs even if some could not be read.
			if err := output.Print(s, v, func() {
				for _, b := range v.Damaged {
					fmt.Fprintf(s.Out, "damaged: %s (%s)\n", b.SHA256, bytesize.Human(b.Size))
				}
				s.Note("%s: %s in %s verified\n", cache.Dir(), bytesize.Human(v.Sound.Bytes), configs.Count(v.Sound.Blobs, "input"))
			}); err != nil {
				return errors.Join(verr, err)
			}
			switch n := len(v.Damaged); {
			case verr != nil || n == 0:
				return verr
			case dryRun:
				return fmt.Errorf("verifying cache %s: %s damaged; run the command without --dry-run to remove damaged inputs", cache.Dir(), configs.Count(n, "input"))
			default:
				return fmt.Errorf("verifying cache %s: %s damaged and removed; the next build that needs one fetches or makes it again", cache.Dir(), configs.Count(n, "input"))
			}
		},
	}
	output.Flag(c)
	c.Flags().BoolVarP(&dryRun, "dry-run", "n", false, "remove nothing")
	return c
}
