package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/spf13/cobra"
)

func newDevices(s streams) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:               "devices",
		ValidArgsFunction: cobra.NoFileCompletions,
		Short:             "List the disks that an image can be flashed to",
		Long: `Devices lists the disks of this computer: first those that flash would write
to, then the others, with the reason why it would not.`,
		Example: `  edgebake devices
  edgebake devices --output json`,
		Args: args(0, 0, "no arguments"),
		RunE: func(c *cobra.Command, _ []string) error {
			found, err := device.List(c.Context())
			if err != nil {
				return err
			}
			disks := found.Disks()
			return printAs(s, output, disks, func() { printDisks(s, disks) })
		},
	}
	outputFlag(c, &output)
	return c
}

func printDisks(s streams, disks []device.Disk) {
	w := s.Out
	if len(disks) == 0 {
		fmt.Fprintln(s.Err, "No disk found.")
		return
	}
	wide := 0
	for _, d := range disks {
		wide = max(wide, len(d.Path))
	}
	for _, d := range disks {
		words := strings.Fields(strings.Join([]string{d.Bus, d.Model, serialOf(&d)}, " "))
		if d.Sector == 4096 {
			words = append(words, "(4Kn)")
		}
		line := fmt.Sprintf("%-*s  %9s  %s", wide, d.Path, configs.HumanSize(d.Size), strings.Join(words, " "))
		fmt.Fprintln(w, strings.TrimRight(line, " "))
		for _, h := range d.Holds {
			fmt.Fprintf(w, "%-*s  %9s    holds %s\n", wide, "", "", h)
		}
		for _, r := range d.Refusals {
			fmt.Fprintf(w, "%-*s  %9s    NO: %s\n", wide, "", "", r)
		}
	}
}

func serialOf(d *device.Disk) string {
	if d.Serial == "" {
		return ""
	}
	return "serial " + d.Serial
}

// flashOptions are the flags of flash.
type flashOptions struct {
	site, ignition string
	inventory      string
	secrets        secretFlags
	undated        bool
	yes, noVerify  bool
	dryRun         bool
	log            string
	keys           []string
	stick          string // to make an installer of
	install        installFlags
}

func newFlash(s streams) *cobra.Command {
	var o flashOptions
	c := &cobra.Command{
		Use: "flash IMAGE (DEVICE | --installer STICK)",
		ValidArgsFunction: func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return completeDevices(c, word)
			}
			return completeFiles(imageEndings)(c, args, word)
		},
		Short: "Write an image to a disk, with a Site",
		Long: `Flash writes an image (.raw or .raw.zst) to a disk in one pass, stamps the Site
on the way, gives the disk GUIDs of its own, reads everything back and compares
it with the golden digest. It rejects a disk that is in use, and asks before it
writes. Until all of it is verified the disk has no partition table: one that was
not finished does not boot, and inspect says why.

DEVICE is a disk (edgebake devices lists them) or a file that is there. No root
is required where the user may write to it.

With --installer the STICK gets an installer: a machine that boots it installs
the image with the Site on its own disk, the one that --disk says, and verifies
it. It does not overwrite an edgebake disk, and waits where the rule leaves two.
With an Inventory each machine gets the Site that matches it.`,
		Example: `  edgebake flash my-edge.raw.zst /dev/sdX --site site.yaml
  edgebake flash my-edge.raw.zst /dev/sdX --inventory stores.yaml
  edgebake flash my-edge.raw.zst /dev/sdX --site site.yaml --key office.pub
  edgebake flash my-edge.raw.zst --installer /dev/sdX --inventory stores.yaml --disk smallest-nvme
  edgebake flash my-edge.raw /dev/disk/by-id/usb-SanDisk_Ultra-0:0 --site site.yaml --yes --log flashed.jsonl`,
		Args: args(1, 2, "an image and a disk, or an image and --installer STICK"),
		RunE: func(c *cobra.Command, a []string) error {
			switch {
			case o.stick != "" && len(a) == 2:
				return usageError{fmt.Errorf("give either the disk %s or --installer %s", a[1], o.stick)}
			case o.stick == "" && len(a) == 1:
				return usageError{errors.New("edgebake flash requires an image and a disk, or an image and --installer STICK; see edgebake flash --help")}
			}
			disks := idle{flags: []string{"disk", "then", "reinstall", "cache"}, purpose: "--installer STICK"}
			if o.stick != "" {
				disks = idle{flags: []string{"log", "no-verify"}, purpose: "disks, not for --installer"}
			}
			if err := errors.Join(rejectIdle(c, disks), o.checkSite(c), imageFirst(c, a)); err != nil {
				return usageError{err}
			}
			if (o.site == "-" || o.secrets.tokenFile == "-") && !o.yes && !o.dryRun {
				return usageError{errors.New("a Site or token from standard input leaves nobody to ask: add --yes")}
			}
			if o.stick != "" {
				return flashInstaller(c.Context(), s, a[0], o)
			}
			return flash(c.Context(), s, a[0], a[1], o)
		},
	}
	f := c.Flags()
	o.siteFlags(c)
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask, for scripts")
	f.BoolVarP(&o.dryRun, "dry-run", "n", false, "check disk, image and Site, say what would be written, and write nothing")
	f.BoolVar(&o.noVerify, "no-verify", false, "do not read back what was written")
	f.StringVar(&o.stick, "installer", "", "make this stick (or file) an installer of the image")
	_ = c.RegisterFlagCompletionFunc("installer", func(c *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
		return completeDevices(c, word)
	})
	o.install.flags(c)
	f.StringVar(&o.log, "log", "", "append a line of JSON to this file: the disk, its serial number, Site and digest")
	_ = c.MarkFlagFilename("log")
	return c
}

// siteFlags add what goes into the slot.
func (o *flashOptions) siteFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.site, "site", "", "Site or Inventory to stamp on the way (default: the image's slot as it is)")
	_ = c.MarkFlagFilename("site", documentEndings...)
	f.StringVar(&o.inventory, "inventory", "", "Inventory to put into the slot: the machine takes the Site that matches it")
	_ = c.MarkFlagFilename("inventory", documentEndings...)
	o.secrets.flags(c)
	f.StringVar(&o.ignition, "ignition", "", "Ignition v3 config to put beside the Site (default: the Site's ignitionFile)")
	f.BoolVar(&o.undated, "undated", false, "leave the time of stamping out of the slot, where this computer's clock cannot be trusted")
	keyFlag(c, &o.keys)
}

// checkSite takes an Inventory where a Site could be. Without both nothing is
// stamped.
func (o *flashOptions) checkSite(c *cobra.Command) error {
	switch {
	case o.site != "" && o.inventory != "":
		return usageError{errors.New("--site and --inventory cannot be given together")}
	case o.inventory != "":
		o.site = o.inventory
	case o.site == "":
		return rejectIdle(c, idle{
			flags:   []string{"ignition", "token-file", "identity"},
			purpose: "--site or --inventory, without which the image's slot stays as it is: name the document, e.g. --site site.yaml",
		})
	}
	return nil
}

// completeDevices offers the disks that may be written to.
func completeDevices(c *cobra.Command, word string) ([]string, cobra.ShellCompDirective) {
	found, err := device.List(c.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveDefault
	}
	var out []string
	for _, d := range found.Disks() {
		if len(d.Refusals) == 0 && strings.HasPrefix(d.Path, word) {
			out = append(out, fmt.Sprintf("%s\t%s %s %s", d.Path, configs.HumanSize(d.Size), d.Model, d.Serial))
		}
	}
	if len(out) == 0 {
		return nil, cobra.ShellCompDirectiveDefault // files are targets too
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// flash checks everything, asks, writes and keeps the record.
func flash(ctx context.Context, s streams, image, path string, o flashOptions) error {
	show := newDisplay(s, false)
	f, t, err := prepareFlash(ctx, s, image, path, o, steps(show))
	if err != nil {
		return err
	}
	defer f.Close()
	defer t.Close()
	if o.dryRun {
		show.close()
		s.note("would write %s to %s\n", described(image, f.Image, f.State, o.site), t.disk.Describe())
		return nil
	}
	if !o.yes {
		if err := t.confirm(s, described(image, f.Image, f.State, o.site)); err != nil {
			return err
		}
	}
	// Whoever wants a record does not want a disk without one.
	var log *os.File
	if o.log != "" {
		if log, err = os.OpenFile(o.log, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o666); err != nil {
			return fmt.Errorf("opening the log: %w: nothing was written to %s", err, path)
		}
		defer log.Close()
	}
	begun := time.Now()
	done, err := t.write(ctx, f, f.State)
	show.close()
	if err != nil {
		return err
	}
	r := newRecord(image, o, f, t.disk, done, begun)
	verified := "read back and verified"
	if !done.Verified {
		verified = "not verified"
	}
	if log != nil {
		if err := r.addTo(log); err != nil {
			return fmt.Errorf("%s is flashed, %s, but writing the log %s: %w", t.disk, verified, o.log, err)
		}
	}
	s.note("flashed %s with %s%s: %s in %.0f s, %s, golden %.16s\n",
		t.disk, image, siteWords(f.State, o.site), configs.HumanSize(done.Written), r.Seconds, verified, done.Golden)
	if f.Shared {
		fmt.Fprintf(s.Err, "WARNING: %s names its partitions in a way that cannot be changed, so this disk has the same GUIDs as other copies of the image: never put two of them into one machine\n", image)
	}
	if f.State == media.SlotGolden {
		s.hint("It has no Site: stamp one (edgebake stamp %s SITE), or bring one on a stick\n", t.disk.Path)
	}
	return nil
}

// unfinished says what an interrupt left.
type unfinished struct{ error }

// described names an image and its Site.
func described(image string, info ondisk.ImageInfo, state, site string) string {
	return fmt.Sprintf("%s (%s, Kubernetes %s)%s", image, info.Name, info.Kubernetes, siteWords(state, site))
}

// siteWords say which Site comes with an image: the one named on the command
// line, the one in its slot, or none.
func siteWords(state, site string) string {
	switch {
	case site != "":
		return " and " + configs.FileName(site)
	case state == media.SlotGolden:
		return " (no Site)"
	}
	return " and the Site in it"
}

// prepareFlash finds everything that is wrong with the disk, the image and
// the Site before anything is written.
func prepareFlash(ctx context.Context, s streams, image, path string, o flashOptions, progress func(step string, done, total int64)) (*media.Flash, *flashTarget, error) {
	var errs []error
	t, err := openTarget(ctx, image, path)
	if t == nil {
		return nil, nil, err
	}
	if err != nil {
		errs = append(errs, err)
	}
	fo := media.FlashOptions{
		Stamp: media.StampOptions{Now: time.Now(), Undated: o.undated},
		Size:  t.disk.Size, Sector: t.disk.Sector, SkipVerify: o.noVerify, Progress: progress,
	}
	if _, err := rand.Read(fo.Random[:]); err != nil {
		errs = append(errs, err)
	}
	if fo.Keys, err = publicKeys(o.keys); err != nil {
		errs = append(errs, err)
	}
	if fo.Site, err = o.readSite(s); err != nil {
		errs = append(errs, err)
	}
	if o.log != "" {
		errs = append(errs,
			notInput("--log", o.log, "the image", image),
			notInput("--log", o.log, "the disk", path),
			o.secrets.notRead("--log", o.log, media.Read{Name: o.site, Ignition: o.ignition}))
	}
	f, err := media.PrepareFlash(image, fo)
	if err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		if f != nil {
			f.Close()
		}
		t.Close()
		return nil, nil, err
	}
	return f, t, nil
}

// stillThere looks again at the disk that was opened: between the list and the
// opening another may have been plugged in under its name. Nobody can take its
// place from here on.
func stillThere(ctx context.Context, t *device.Target, d *device.Disk) error {
	if t.IsFile() {
		return nil
	}
	found, err := device.List(ctx)
	if err != nil {
		return err
	}
	now, err := found.Find(d.Path)
	if err != nil {
		return err
	}
	if !d.Same(now) {
		return fmt.Errorf("now it is %s: %w", now, device.ErrChanged)
	}
	return device.Users("/proc", d.Path)
}

// readSite reads what is to be stamped; nil where nothing is.
func (o *flashOptions) readSite(s streams) (*media.Site, error) {
	if o.site == "" {
		return nil, nil
	}
	site, err := readSites(s, o.site, o.ignition, o.secrets)
	if err == nil && o.inventory != "" && site.Inventory == nil {
		err = fmt.Errorf("%s is a Site: name it with --site", configs.FileName(o.site))
	}
	if err != nil {
		return nil, err
	}
	return &site, nil
}

// flashTarget is a disk, or the file that plays one, that is to be written.
type flashTarget struct {
	path string // as the person wrote it
	disk *device.Disk
	out  *device.Target // nil: it must not be overwritten
}

// openTarget finds the disk and opens it. Where it must not be overwritten, it
// returns the target, not opened, and why.
func openTarget(ctx context.Context, image, path string) (*flashTarget, error) {
	d, err := findTarget(ctx, image, path)
	if err != nil {
		return nil, fmt.Errorf("flashing %s: %w", path, err)
	}
	t := &flashTarget{path: path, disk: d}
	var errs []error
	for _, r := range d.Refusals {
		errs = append(errs, fmt.Errorf("flashing %s: %s", d, r))
	}
	if len(errs) > 0 { // opening it would say the same once more
		return t, errors.Join(errs...)
	}
	out, err := device.Open(d.Path)
	if err != nil {
		return t, fmt.Errorf("flashing %s: %w", d, err)
	}
	if isFile := d.Sector == 0; out.IsFile() != isFile {
		out.Close()
		// Nobody has asked what is on it.
		return t, fmt.Errorf("flashing %s: %w", d, device.ErrChanged)
	}
	d.Size, d.Sector = out.Size, out.Sector
	if err := stillThere(ctx, out, d); err != nil {
		out.Close()
		return t, fmt.Errorf("flashing %s: %w", d, err)
	}
	t.out = out
	return t, nil
}

// Close closes it, if it was opened.
func (t *flashTarget) Close() {
	if t.out != nil {
		t.out.Close()
	}
}

// write writes f, an image or an installer whose slot is in that state, and says
// what an interrupt leaves.
func (t *flashTarget) write(ctx context.Context, f *media.Flash, state string) (*media.Flashed, error) {
	if state != media.SlotGolden {
		if err := t.out.Hide(); err != nil {
			return nil, fmt.Errorf("flashing %s: nothing was written, since others could read the Site's secrets in the file: %w", t.path, err)
		}
	}
	done, err := f.Write(ctx, t.out)
	switch {
	case errors.Is(err, media.ErrUntouched):
		return nil, unfinished{fmt.Errorf("interrupted, nothing was written to %s", t.disk.Path)}
	case err != nil && ctx.Err() != nil:
		return nil, unfinished{fmt.Errorf("interrupted; %s has no partition table now: flash it again", t.disk.Path)}
	case err != nil:
		return nil, fmt.Errorf("flashing %s: %w", t.disk, err)
	}
	t.out.Reread()
	return done, nil
}

// findTarget finds the disk, or the file that plays one.
func findTarget(ctx context.Context, image, path string) (*device.Disk, error) {
	isFile, err := device.IsFile(path)
	if err != nil {
		return nil, err
	}
	if isOneOf(path, []string{image}) {
		return nil, errors.New("it is the image itself: name a disk")
	}
	if isFile {
		fi, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		return &device.Disk{Path: path, Size: fi.Size()}, nil
	}
	found, err := device.List(ctx)
	if err != nil {
		return nil, err
	}
	return found.Find(path)
}

// confirm names the disk, and asks whether it is to get something else.
func (t *flashTarget) confirm(s streams, gets string) error {
	d := t.disk
	w := s.Err
	fmt.Fprintf(w, "%s, %s\n", d, configs.HumanSize(d.Size))
	for _, h := range d.Holds {
		fmt.Fprintf(w, "  holds %s\n", h)
	}
	fmt.Fprintf(w, "Everything on it will be lost. It gets %s.\nWrite it? [y/N] ", gets)
	answer, err := bufio.NewReader(s.In).ReadString('\n')
	if err != nil { // nobody has typed an end of the line
		fmt.Fprintln(w)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return fmt.Errorf("flashing %s: not confirmed, nothing was written: answer y, or add --yes in scripts", d.Path)
}

// steps shows progress as a build's.
func steps(d display) func(step string, done, total int64) {
	var begun time.Time
	current, over := "", false
	return func(step string, done, total int64) {
		if step != current {
			current, begun, over = step, time.Now(), false
			d.event(builder.Event{Step: step, State: builder.StateStart, Text: configs.HumanSize(total)})
		}
		d.event(builder.Event{Step: step, State: builder.StateProgress, Done: done, Total: total})
		if done >= total && !over {
			over = true
			d.event(builder.Event{Step: step, State: builder.StateDone, Seconds: time.Since(begun).Seconds()})
		}
	}
}

// record is a line of the log: which disk got what.
type record struct {
	Time       time.Time `json:"time"`
	Device     string    `json:"device"`
	Model      string    `json:"model,omitempty"`
	Serial     string    `json:"serial,omitempty"`
	Size       int64     `json:"size"`
	Image      string    `json:"image"`
	Name       string    `json:"name"`
	Plan       string    `json:"plan"`
	Site       string    `json:"site,omitempty"`
	NodeName   string    `json:"nodeName,omitempty"`
	Seconds    float64   `json:"seconds"`
	Kubernetes string    `json:"kubernetes"`
	*media.Flashed
}

func newRecord(image string, o flashOptions, f *media.Flash, d *device.Disk, done *media.Flashed, begun time.Time) *record {
	return &record{
		Time: begun.UTC(), Device: d.Path, Model: d.Model, Serial: d.Serial, Size: d.Size, Image: image, Name: f.Image.Name,
		Plan: f.Image.Plan, Site: configs.FileName(o.site), NodeName: f.NodeName, Seconds: time.Since(begun).Seconds(), Kubernetes: f.Image.Kubernetes, Flashed: done,
	}
}

// addTo writes one line at once, so that several programs may share a log.
func (r *record) addTo(f *os.File) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if _, err := f.Write(append(line, '\n')); err != nil {
		return err
	}
	return f.Sync()
}
