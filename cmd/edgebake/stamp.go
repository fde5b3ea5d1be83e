package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// stampFlags are the flags of `edgebake stamp`.
type stampFlags struct {
	media.StampOptions
	cli.DocumentFlags
	inPlace, each, slots bool
	slot                 string
}

func newStamp(s streams) *cobra.Command {
	var o stampFlags
	c := &cobra.Command{
		Use:               "stamp IMAGE SITE|INVENTORY",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions, documents.Extensions),
		Short:             "Write Sites into a golden image",
		Long: `Stamp writes a Site document into the slot of a copy of an image (--output), of the
image itself (--in-place), or of a device that an image was written to. Images are
.raw or .raw.zst. The size of the image, and everything outside the slot, stay as
they are. A Site that the image does not support is rejected.

An Inventory document goes into the slot as a whole: each machine uses the Site
that matches it and wipes the other Sites from its disk.

With --each, every Site of an Inventory gets its own copy of the image, DIR/NAME.raw
(DIR/NAME.raw.zst if it is compressed). With --slots, every Site gets only a slot of
16 MiB, DIR/NAME.slot, with the Site, its token and Ignition config. --slot writes a
slot into an image or a device; dd copies it to a USB stick, which then has that Site.

The stamped image holds the join token: treat it as a secret until the
machine is Ready. edgebake unstamp makes it a golden image again.`,
		Example: `  edgebake stamp my-edge.raw site.yaml --output berlin-7.raw
  edgebake stamp my-edge.raw.zst site.yaml --output berlin-7.raw.zst
  edgebake stamp my-edge.raw inventory.yaml --output stores.raw
  edgebake stamp my-edge.raw inventory.yaml --slots --output out/
  edgebake stamp /dev/sdX --slot out/berlin-7.slot`,
		Args: cli.Args(1, 2, "an image and a Site or Inventory document"),
		RunE: func(c *cobra.Command, a []string) error {
			o.Now = time.Now()
			m := o.mode()
			if err := m.check(c, a, o); err != nil {
				return err
			}
			return m.run(c, s, a, o)
		},
	}
	f := c.Flags()
	cli.FileFlag(c, &o.Output, "output", "write a stamped copy here and leave the image as it is; with --each or --slots, a directory", cli.ImageExtensions...)
	f.BoolVar(&o.inPlace, "in-place", false, "stamp the image itself, which then is no longer golden")
	f.BoolVar(&o.Force, "force", false, "replace existing outputs")
	undatedFlag(c, &o.Undated)
	f.BoolVar(&o.each, "each", false, "stamp each Site of the Inventory onto its own copy in the directory --output")
	f.BoolVar(&o.slots, "slots", false, "write a slot (16 MiB) for each Site of the Inventory into the directory --output, and no image")
	cli.FileFlag(c, &o.slot, "slot", "write this slot, made by --slots, into the image or device", strings.TrimPrefix(media.SlotExtension, "."))
	o.Stamped(c)
	cli.TakesDocument(s, c, 1, nil)
	return c
}

// The names of the modes, as messages show them.
const (
	modeSite  = "SITE"
	modeEach  = "--each"
	modeSlots = "--slots"
	modeSlot  = "--slot"
)

// stampMode is one way to use stamp.
type stampMode struct {
	name  string
	flags []string // the flags that have an effect; all others are rejected
	run   func(c *cobra.Command, s streams, a []string, o stampFlags) error
}

// stampModes returns all modes.
func stampModes() []stampMode {
	document := []string{"filename", "output", "force", "undated", "ignition", "token-file", "identity"}
	return []stampMode{
		{modeSite, append([]string{"in-place"}, document...), stampOne},
		{modeEach, append([]string{"each"}, document...), stampMany},
		{modeSlots, append([]string{"each", "slots"}, document...), stampMany},
		// The slot already contains the token and Ignition config of its document.
		{modeSlot, []string{"slot", "in-place", "output", "force", "undated"}, stampSlot},
	}
}

// mode returns the mode that the flags select.
func (o *stampFlags) mode() stampMode {
	name := modeSite
	switch {
	case o.slot != "":
		name = modeSlot
	case o.slots:
		name = modeSlots
	case o.each:
		name = modeEach
	}
	modes := stampModes()
	return modes[slices.IndexFunc(modes, func(m stampMode) bool { return m.name == name })]
}

// check returns all errors of the command line.
func (m *stampMode) check(c *cobra.Command, a []string, o stampFlags) error {
	rest := cli.Unused{Purpose: fmt.Sprintf("documents, but %s is a finished slot: stamp the document, or make the slot again: edgebake stamp %s INVENTORY --slots --output DIR", o.slot, a[0])}
	c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(m.flags, f.Name) {
			rest.Flags = append(rest.Flags, f.Name)
		}
	})
	if o.slot == "" {
		rest.Purpose = fmt.Sprintf("one image, and %s writes a file for each Site", m.name)
	}
	errs := []error{cli.RejectUnused(c, rest)}
	switch {
	case o.slot != "" && len(a) == 2:
		errs = append(errs, cli.Usage(fmt.Errorf("give either %s or %s", a[1], m.name)))
	case o.slot != "":
	case len(a) == 2:
		errs = append(errs, imageFirst(c, a))
	case errs[0] == nil:
		errs = append(errs, cli.Usage(fmt.Errorf("%s requires an image and a Site or Inventory document; see %s --help", c.CommandPath(), c.CommandPath())))
	}
	if (o.each || o.slots) && o.slot == "" && o.Output == "" {
		errs = append(errs, cli.Usage(fmt.Errorf("%s requires a directory to write to: --output DIR", m.name)))
	}
	switch {
	case o.inPlace && o.Output != "":
		errs = append(errs, cli.Usage(errors.New("--in-place and --output exclude each other")))
	case errors.Join(errs...) == nil && !o.inPlace && o.Output == "" && slices.Contains(m.flags, "in-place") && !isDevice(a[0]):
		errs = append(errs, cli.Usage(fmt.Errorf("the Site's token would be written into %s:\n  --output FILE stamps a copy\n  --in-place changes %[1]s itself", a[0])))
	}
	return errors.Join(errs...)
}

// stampOne stamps the document, either in place or onto a copy of the image.
func stampOne(c *cobra.Command, s streams, a []string, o stampFlags) error {
	doc, err := o.Reader(s).Sites(a[1])
	if err != nil {
		return err
	}
	if o.Output != "" {
		if st, err := os.Stat(o.Output); strings.HasSuffix(o.Output, "/") || err == nil && st.IsDir() {
			hint := ""
			if doc.Inventory != nil {
				hint = ", or add --each or --slots to write a copy or a slot for each Site"
			}
			return cli.Usage(fmt.Errorf("--output %s is a directory: name a file in it%s", o.Output, hint))
		}
		if err := o.NotInput("--output", o.Output, doc.Source); err != nil {
			return err
		}
	}
	done, err := media.Stamp(c.Context(), a[0], doc, o.StampOptions)
	if err != nil {
		return err
	}
	with := configs.FileName(a[1])
	if doc.Inventory != nil {
		with += fmt.Sprintf(" (%s)", configs.Count(len(doc.Inventory.Sites), "site"))
	}
	printStamped(s, done, with, o)
	return nil
}

// stampMany writes a stamped copy of the image, or with --slots only a slot, for each Site of an
// Inventory.
func stampMany(c *cobra.Command, s streams, a []string, o stampFlags) error {
	image, document := a[0], a[1]
	doc, err := o.Reader(s).Sites(document)
	if err != nil {
		return err
	}
	if doc.Inventory == nil {
		return fmt.Errorf("%s is a Site, not an Inventory: stamp it with edgebake stamp %s %s --output FILE", configs.FileName(document), image, document)
	}
	out, err := media.StampMany(c.Context(), image, doc.Each(), o.Output, media.ManyOptions{StampOptions: o.StampOptions, Source: doc.Source, Slots: o.slots})
	if err != nil {
		return err
	}
	what := "image"
	if o.slots {
		what = "slot"
	}
	s.Note("stamped %s with the Sites of %s: %s in %s\n", image, configs.FileName(document), configs.Count(len(out), what), o.Output)
	return nil
}

// stampSlot writes a slot made with --slots into an image or a device. It checks that the image
// supports the slot's documents, because the slot may have been made for another image.
func stampSlot(c *cobra.Command, s streams, a []string, o stampFlags) error {
	if o.Output != "" {
		if err := file.NotInput("--output", o.Output, "the slot", o.slot); err != nil {
			return err
		}
	}
	contents, err := media.ReadSlotFile(o.slot)
	if err != nil {
		return err
	}
	// Source has no text for the positions of errors, because nobody edits documents inside a slot.
	site := media.Site{Files: contents.Files, Source: media.SiteSource{Name: o.slot, Ignition: o.slot}}
	if b, ok := contents.Files[ondisk.SlotInventory]; ok {
		site.Inventory, err = configs.ParseInventory(o.slot, b)
	} else {
		site.Doc, err = configs.ParseSite(o.slot, contents.Files[ondisk.SlotSite])
	}
	delete(site.Files, ondisk.SlotSite)
	delete(site.Files, ondisk.SlotInventory)
	if err != nil {
		return err
	}
	done, err := media.Stamp(c.Context(), a[0], site, o.StampOptions)
	if err != nil {
		return err
	}
	printStamped(s, done, o.slot, o)
	return nil
}

func printStamped(s streams, done *media.Stamped, with string, o stampFlags) {
	s.Note("stamped %s (%s, Kubernetes %s) with %s\n", done.Path, done.Image.Name, done.Image.Kubernetes, with)
	if o.inPlace {
		s.Hint("%s now contains the token: edgebake unstamp %[1]s removes it\n", done.Path)
	}
}

// isDevice reports whether a file is a device. A device is stamped without --in-place, because a
// flashed disk belongs to only one machine.
func isDevice(name string) bool {
	fi, err := os.Stat(name)
	return err == nil && fi.Mode()&fs.ModeDevice != 0
}

func newUnstamp(s streams) *cobra.Command {
	return &cobra.Command{
		Use:               "unstamp IMAGE",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Remove the Site from an image",
		Long: `Unstamp removes a Site or Inventory, with its token and Ignition config, from an
image or a device, and overwrites its blocks. The image is the golden image again,
byte for byte, unless a machine has booted it.`,
		Example: `  edgebake unstamp my-edge.raw`,
		Args:    cli.Args(1, 1, "one image"),
		RunE: func(_ *cobra.Command, a []string) error {
			done, err := media.Unstamp(a[0])
			if err != nil {
				return err
			}
			if done.Before == media.SlotGolden {
				s.Note("%s had no Site\n", done.Path)
			} else {
				s.Note("%s now has no Site\n", done.Path)
			}
			if done.Slot.Golden == "" {
				s.Warn("the slot of %s was damaged, and the golden digest in it is lost, so edgebake verify cannot check this image", done.Path)
			}
			return nil
		},
	}
}
