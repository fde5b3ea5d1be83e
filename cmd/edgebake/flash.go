package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/signing"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/spf13/cobra"
)

func newDevices(s streams) *cobra.Command {
	var output console.Form
	c := &cobra.Command{
		Use:               "devices",
		ValidArgsFunction: cobra.NoFileCompletions,
		Short:             "List the disks that an image can be flashed to",
		Long: `Devices lists the disks of this computer: first the disks that flash would
overwrite, then the disks that it rejects, with the reason.`,
		Example: `  edgebake devices
  edgebake devices --output json`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			found, err := device.List(c.Context())
			if err != nil {
				return err
			}
			disks := found.Disks()
			return output.Print(s, disks, func() { printDisks(s, disks) })
		},
	}
	output.Flag(c)
	return c
}

func printDisks(s streams, disks []device.Disk) {
	if len(disks) == 0 {
		fmt.Fprintln(s.Err, "No disk found.")
		return
	}
	wide := 0
	for _, d := range disks {
		wide = max(wide, len(d.Path))
	}
	for _, d := range disks {
		words := strings.Fields(d.Bus + " " + d.Model)
		if d.Serial != "" {
			words = append(words, "serial "+d.Serial)
		}
		if d.Sector == 4096 {
			words = append(words, "(4Kn)")
		}
		line := fmt.Sprintf("%-*s  %9s  %s", wide, d.Path, bytesize.Human(d.Size), strings.Join(words, " "))
		fmt.Fprintln(s.Out, strings.TrimRight(line, " "))
		for _, h := range d.Holds {
			fmt.Fprintf(s.Out, "%-*s  %9s    contains %s\n", wide, "", "", h)
		}
		for _, r := range d.Refusals {
			fmt.Fprintf(s.Out, "%-*s  %9s    NO: %s\n", wide, "", "", r)
		}
	}
}

// completeDevices offers the disks that may be overwritten, for completion.
func completeDevices(c *cobra.Command, word string) ([]string, cobra.ShellCompDirective) {
	found, err := device.List(c.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveDefault
	}
	var out []string
	for _, d := range found.Disks() {
		if len(d.Refusals) == 0 && strings.HasPrefix(d.Path, word) {
			out = append(out, fmt.Sprintf("%s\t%s %s %s", d.Path, bytesize.Human(d.Size), d.Model, d.Serial))
		}
	}
	if len(out) == 0 {
		return nil, cobra.ShellCompDirectiveDefault // files can be flashed too
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// slotFlags are the flags of commands that write an image with a Site to a disk or into
// an installer.
type slotFlags struct {
	cli.DocumentFlags
	site, inventory string
	undated         bool
	keys            []string
}

func (o *slotFlags) declare(c *cobra.Command) {
	cli.FileFlag(c, &o.site, "site", "Site or Inventory to stamp (default: the slot of the image is not changed)", documents.Extensions...)
	cli.FileFlag(c, &o.inventory, "inventory", "Inventory to put into the slot; each machine uses the Site that matches it", documents.Extensions...)
	o.Stamped(c)
	undatedFlag(c, &o.undated)
	keyFlag(c, &o.keys)
}

// check validates the flags, and copies --inventory to the field site. If neither flag is set,
// nothing is stamped.
func (o *slotFlags) check(c *cobra.Command) error {
	switch {
	case o.site != "" && o.inventory != "":
		return cli.Usage(errors.New("--site and --inventory cannot be given together"))
	case o.inventory != "":
		o.site = o.inventory
	case o.site == "":
		return cli.RejectUnused(c, cli.Unused{
			Flags:   []string{"ignition", "token-file", "identity"},
			Purpose: "a Site or Inventory, and none is named: add one, e.g. --site site.yaml",
		})
	}
	return nil
}

// readSite reads the Site or Inventory. It returns nil if none is named.
func (o *slotFlags) readSite(s streams) (*media.Site, error) {
	if o.site == "" {
		return nil, nil
	}
	site, err := o.Reader(s).Sites(o.site)
	if err == nil && o.inventory != "" && site.Inventory == nil {
		err = fmt.Errorf("%s is a Site: name it with --site", configs.FileName(o.site))
	}
	if err != nil {
		return nil, err
	}
	return &site, nil
}

// describe describes an image and its Site in one text. state is the state of the image's slot.
func (o *slotFlags) describe(image string, info ondisk.ImageInfo, state string) string {
	return fmt.Sprintf("%s (%s, Kubernetes %s)%s", image, info.Name, info.Kubernetes, o.siteText(state))
}

// siteText describes the Site that the disk will have: the one on the command line, the one in the
// image's slot, or none.
func (o *slotFlags) siteText(state string) string {
	switch {
	case o.site != "":
		return " and " + configs.FileName(o.site)
	case state == media.SlotGolden:
		return " (no Site)"
	}
	return " and its Site"
}

// flashFlags are the flags of flash.
type flashFlags struct {
	slotFlags
	yes, noVerify, dryRun bool
	log                   string
	stick                 string // the disk that becomes an installer stick
	install               installFlags
}

func newFlash(s streams) *cobra.Command {
	var o flashFlags
	c := &cobra.Command{
		Use: "flash IMAGE (DEVICE | --installer STICK)",
		ValidArgsFunction: func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return completeDevices(c, word)
			}
			return cli.CompleteFiles(cli.ImageExtensions)(c, args, word)
		},
		Short: "Write an image to a disk, with a Site",
		Long: `Flash writes an image (.raw or .raw.zst) to a disk in one pass, stamps the Site,
gives the disk its own GUIDs, reads everything back and compares it with the golden
digest. It rejects a disk that is in use, and asks before it writes. Until everything
is verified, the disk has no partition table: an unfinished disk does not boot, and
inspect shows why.

DEVICE is a disk (edgebake devices lists them) or an existing file. Root is not
required if the user may write to it.

With --installer, the STICK becomes an installer: a machine that boots it installs
the image with the Site on its own disk, which --disk selects, and verifies it. The
installer does not overwrite an edgebake disk, and waits if --disk matches several.
With an Inventory each machine gets the Site that matches it.`,
		Example: `  edgebake flash my-edge.raw.zst /dev/sdX --site site.yaml
  edgebake flash my-edge.raw.zst /dev/sdX --inventory stores.yaml
  edgebake flash my-edge.raw.zst /dev/sdX --site site.yaml --key office.pub
  edgebake flash my-edge.raw.zst --installer /dev/sdX --inventory stores.yaml --disk smallest-nvme
  edgebake flash my-edge.raw /dev/disk/by-id/usb-SanDisk_Ultra-0:0 --site site.yaml --yes --log flashed.jsonl`,
		Args: cli.Args(1, 2, "an image and a disk, or an image and --installer STICK"),
		RunE: func(c *cobra.Command, a []string) error {
			if err := o.check(c, a); err != nil {
				return err
			}
			if o.stick != "" {
				return o.flashInstaller(c.Context(), s, a[0])
			}
			return o.flash(c.Context(), s, a[0], a[1])
		},
	}
	f := c.Flags()
	o.slotFlags.declare(c)
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask, for scripts")
	f.BoolVarP(&o.dryRun, "dry-run", "n", false, "check disk, image and Site, print what would be written, and write nothing")
	f.BoolVar(&o.noVerify, "no-verify", false, "do not read back what was written")
	f.StringVar(&o.stick, "installer", "", "make this stick (or file) an installer of the image")
	_ = c.RegisterFlagCompletionFunc("installer", func(c *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
		return completeDevices(c, word)
	})
	o.install.declare(c)
	cli.FileFlag(c, &o.log, "log", "append a line of JSON to this file: the disk, its serial number, Site and digest")
	return c
}

// check checks the command line.
func (o *flashFlags) check(c *cobra.Command, a []string) error {
	switch {
	case o.stick != "" && len(a) == 2:
		return cli.Usage(fmt.Errorf("give either the disk %s or --installer %s", a[1], o.stick))
	case o.stick == "" && len(a) == 1:
		return cli.Usage(errors.New("edgebake flash requires an image and a disk, or an image and --installer STICK; see edgebake flash --help"))
	}
	other := cli.Unused{Flags: []string{"disk", "then", "reinstall", "cache"}, Purpose: "installers: add --installer STICK"}
	if o.stick != "" {
		other = cli.Unused{Flags: []string{"log", "no-verify"}, Purpose: "disks, not to installers"}
	}
	if err := errors.Join(cli.RejectUnused(c, other), o.slotFlags.check(c), imageFirst(c, a)); err != nil {
		return err
	}
	if (o.site == "-" || o.TokenFile == "-") && !o.yes && !o.dryRun {
		return cli.Usage(errors.New("the Site or token uses standard input, so flash cannot ask: add --yes"))
	}
	return nil
}

// flash checks everything, asks for confirmation, writes the disk, and adds a line to the log.
func (o *flashFlags) flash(ctx context.Context, s streams, image, path string) error {
	show := s.Display(false)
	f, disk, err := o.prepare(ctx, s, image, path, console.Steps(show))
	if err != nil {
		return err
	}
	defer f.Close()
	defer disk.Close()
	if o.dryRun {
		show.Close()
		s.Note("would write %s to %s, %s\n", o.describe(image, f.Image, f.State), disk.Disk, bytesize.Human(disk.Disk.Size))
		return nil
	}
	if err := o.confirm(s, disk.Disk, o.describe(image, f.Image, f.State)); err != nil {
		return err
	}
	// Open the log first, so that no disk is written without a line in the log.
	var log *os.File
	if o.log != "" {
		if log, err = os.OpenFile(o.log, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o666); err != nil {
			return fmt.Errorf("opening the log: %w; nothing was written to %s", err, path)
		}
		defer log.Close()
	}
	begun := time.Now()
	done, err := writeDisk(ctx, disk, f, f.State)
	show.Close()
	if err != nil {
		return err
	}
	seconds := time.Since(begun).Seconds()
	verified := "read back and verified"
	if !done.Verified {
		verified = "not verified"
	}
	if log != nil {
		d := disk.Disk
		err := (&media.Record{
			Time: begun.UTC(), Device: d.Path, Model: d.Model, Serial: d.Serial, Size: d.Size, Image: image, Name: f.Image.Name,
			Plan: f.Image.Plan, Site: configs.FileName(o.site), NodeName: f.NodeName, Seconds: seconds, Kubernetes: f.Image.Kubernetes, Flashed: done,
		}).AddTo(log)
		if err != nil {
			return fmt.Errorf("%s is flashed (%s), but the log has no record of it: writing %s: %w", d, verified, o.log, err)
		}
	}
	s.Note("flashed %s with %s%s: %s in %.0f s, %s, golden %.16s\n",
		disk.Disk, image, o.siteText(f.State), bytesize.Human(done.Written), seconds, verified, done.Golden)
	if f.Shared {
		s.Warn("%s refers to its partitions by GUIDs that flash cannot change, so this disk has the same GUIDs as other copies of the image: never put two such disks into one machine", image)
	}
	if f.State == media.SlotGolden {
		inPlace := ""
		if !isDevice(path) {
			inPlace = " --in-place"
		}
		s.Hint("The disk has no Site: stamp one (edgebake stamp %s SITE%s), or give the machine one on a stick\n", path, inPlace)
	}
	return nil
}

// prepare checks the disk, the image and the Site. It reports all errors before anything is
// written.
func (o *flashFlags) prepare(ctx context.Context, s streams, image, path string, progress func(step string, done, total int64)) (*media.Flash, *device.Chosen, error) {
	var errs []error
	fo := media.FlashOptions{
		Stamp: media.StampOptions{Now: time.Now(), Undated: o.undated}, SkipVerify: o.noVerify, Progress: progress,
	}
	disk, err := chooseDisk(ctx, image, path)
	errs = append(errs, err)
	_, err = rand.Read(fo.Random[:])
	errs = append(errs, err)
	fo.Keys, err = signing.PublicKeys(o.keys)
	errs = append(errs, err)
	fo.Site, err = o.readSite(s)
	errs = append(errs, err)
	if o.log != "" {
		errs = append(errs,
			file.NotInput("--log", o.log, "the image", image),
			file.NotInput("--log", o.log, "the disk", path),
			o.NotInput("--log", o.log, media.SiteSource{Name: o.site, Ignition: o.Ignition}))
	}
	if disk == nil {
		return nil, nil, errors.Join(errs...)
	}
	fo.Size, fo.Sector = disk.Disk.Size, disk.Disk.Sector
	f, err := media.PrepareFlash(image, fo)
	if err := errors.Join(append(errs, err)...); err != nil {
		if f != nil {
			f.Close()
		}
		disk.Close()
		return nil, nil, err
	}
	return f, disk, nil
}

// chooseDisk opens the disk. If the disk must not be overwritten, chooseDisk returns it without
// opening it, and an error with the reasons.
func chooseDisk(ctx context.Context, image, path string) (*device.Chosen, error) {
	if file.Same(path, image) {
		return nil, fmt.Errorf("flashing %s: this is the image itself; name a disk", path)
	}
	return device.Choose(ctx, path)
}

// confirm shows the disk and asks whether it may be overwritten.
func (o *flashFlags) confirm(s streams, d *device.Disk, gets string) error {
	if o.yes {
		return nil
	}
	fmt.Fprintf(s.Err, "%s, %s\n", d, bytesize.Human(d.Size))
	for _, h := range d.Holds {
		fmt.Fprintf(s.Err, "  contains %s\n", h)
	}
	fmt.Fprintf(s.Err, "Everything on it will be lost. Flash writes %s.\n", gets)
	if !s.Confirm("Write it?") {
		return fmt.Errorf("flashing %s: not confirmed, nothing was written; answer y, or add --yes in scripts", d.Path)
	}
	return nil
}

// writeDisk writes f, an image or an installer, to the disk. state is the state of f's slot. After
// an interrupt, the error describes the state of the disk.
func writeDisk(ctx context.Context, disk *device.Chosen, f *media.Flash, state string) (*media.Flashed, error) {
	if state != media.SlotGolden {
		if err := disk.Out.Hide(); err != nil {
			return nil, fmt.Errorf("flashing %s: making the file readable only by you, since it gets the Site's secrets: %w; nothing was written", disk.Path, err)
		}
	}
	done, err := f.Write(ctx, disk.Out)
	switch {
	case errors.Is(err, media.ErrUntouched):
		return nil, unfinished{fmt.Errorf("interrupted, nothing was written to %s", disk.Disk.Path)}
	case err != nil && ctx.Err() != nil:
		return nil, unfinished{fmt.Errorf("interrupted; %s has no partition table now: flash it again", disk.Disk.Path)}
	case err != nil:
		return nil, fmt.Errorf("flashing %s: %w", disk.Disk, err)
	}
	disk.Out.Reread()
	return done, nil
}
