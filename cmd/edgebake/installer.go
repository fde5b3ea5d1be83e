package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/installer"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/spf13/cobra"
)

// installFlags say what an installer does on the machine.
type installFlags struct {
	disk, then string
	reinstall  bool
	cache      string
}

func (f *installFlags) flags(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&f.disk, "disk", device.OnlyDisk, "which disk of the machine is installed: only, smallest, largest, smallest-nvme, bus=, model=, serial=, size>=, size<= (with commas: all of them), or a path below /dev")
	s.StringVar(&f.then, "then", ondisk.ThenPowerOff, "what follows: poweroff or reboot")
	s.BoolVar(&f.reinstall, "reinstall", false, "overwrite a disk that has an edgebake image already, or is part of LVM or a RAID; once for each installer")
	cacheFlag(c, &f.cache)
	complete(c, "disk", device.OnlyDisk, "smallest", "largest", "smallest-nvme", "smallest-sata")
	complete(c, "then", ondisk.ThenPowerOff, ondisk.ThenReboot)
}

// check says all that is wrong with the flags.
func (f *installFlags) check() error {
	var errs []error
	_, err := device.ParseRule(f.disk)
	for _, e := range builder.SplitErrors(err) {
		errs = append(errs, fmt.Errorf("--disk: %w", e))
	}
	if f.then != ondisk.ThenPowerOff && f.then != ondisk.ThenReboot {
		errs = append(errs, fmt.Errorf("--then %q: want %s or %s", f.then, ondisk.ThenPowerOff, ondisk.ThenReboot))
	}
	return errors.Join(errs...)
}

// install makes what the installer is told, with an id of its own.
func (f *installFlags) install() (ondisk.Install, error) {
	id := make([]byte, 16)
	_, err := rand.Read(id)
	return ondisk.Install{ID: hex.EncodeToString(id), Disk: f.disk, Then: f.then, Reinstall: f.reinstall}, err
}

func newInstaller(s streams) *cobra.Command {
	var (
		o   flashOptions
		out installerOutput
	)
	c := &cobra.Command{
		Use:               "installer IMAGE (--iso FILE | --netboot DIR --url URL)",
		ValidArgsFunction: completeFiles(imageEndings),
		Short:             "Make an ISO, or files for network boot, that install an image on a machine",
		Long: `Installer makes the installer of flash --installer as an image for optical
drives: for machines without a free USB port, through the virtual drive of a
remote console for example. The machine must boot it with UEFI. The same file
boots from a stick, with dd. xorriso writes it.

With --netboot it makes the files for UEFI HTTP boot: boot.img, which firmware
fetches and starts, and image.raw.zst, which the installer reads from the URL of
the directory. The server must answer ranges. Use https://, with the server's CA in
the firmware and in --ca-cert: over http:// anybody on the network can exchange
boot.img, which nothing verifies.

ISO and image contain the Site's token: keep them like one.`,
		Example: `  edgebake installer my-edge.raw.zst --iso install.iso --inventory stores.yaml --disk smallest-nvme
  edgebake installer my-edge.raw.zst --iso install.iso --site site.yaml --then reboot
  edgebake installer my-edge.raw.zst --netboot www --url https://boot.example.com/edge --ca-cert ca.crt --then reboot`,
		Args: args(1, 1, "an image"),
		RunE: func(c *cobra.Command, a []string) error {
			if err := errors.Join(o.checkSite(c), o.install.check(), out.check()); err != nil {
				return usageError{err}
			}
			return makeInstaller(c.Context(), s, a[0], out, o)
		},
	}
	f := c.Flags()
	f.StringVar(&out.iso, "iso", "", "write the installer as an ISO to this file")
	_ = c.MarkFlagFilename("iso", "iso")
	f.StringVar(&out.netboot, "netboot", "", "write the files for UEFI HTTP boot to this directory")
	_ = c.MarkFlagDirname("netboot")
	f.StringVar(&out.url, "url", "", "where a web server shows that directory, http:// or https://")
	f.StringVar(&out.caCert, "ca-cert", "", "`file` with the certificate (PEM) of the CA of the --url's server; none other is accepted then (default: the CAs that the image knows)")
	_ = c.MarkFlagFilename("ca-cert", "crt", "pem")
	f.BoolVar(&out.force, "force", false, "replace an output that is there")
	o.siteFlags(c)
	o.install.flags(c)
	return c
}

// installerOutput is what installer makes.
type installerOutput struct {
	iso, netboot, url string
	caCert            string // a file
	force             bool
}

// check says what is wrong with the flags.
func (out *installerOutput) check() error {
	switch {
	case out.iso != "" && out.netboot != "":
		return errors.New("--iso and --netboot cannot be given together")
	case out.iso == "" && out.netboot == "":
		return errors.New("say what to make: --iso FILE or --netboot DIR")
	case (out.netboot == "") != (out.url == ""):
		return errors.New("--netboot DIR and --url URL go together: the installer reads the image from there")
	case out.caCert != "" && !strings.HasPrefix(out.url, "https://"):
		return errors.New("--ca-cert is for a --url that begins with https://")
	case out.url == "":
		return nil
	}
	u, err := url.Parse(out.url)
	if err == nil && u.User != nil {
		// Not the URL: it has a password.
		return errors.New("--url has a user name: boot.img, which anybody on that network can fetch, and the consoles would show it: leave it out, and let the server show the directory to the machines' network alone")
	}
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("--url %s: want the address of a directory, e.g. http://10.0.0.1/edge", out.url)
	}
	return nil
}

// files are those to be written.
func (out *installerOutput) files() []string {
	if out.iso != "" {
		return []string{out.iso}
	}
	return []string{filepath.Join(out.netboot, ondisk.InstallBootImage), filepath.Join(out.netboot, ondisk.InstallImage)}
}

// readCA reads the certificates of --ca-cert; nil: the flag is not set.
func (out *installerOutput) readCA() ([]byte, error) {
	if out.caCert == "" {
		return nil, nil
	}
	text, err := os.ReadFile(out.caCert)
	if err != nil {
		return nil, fmt.Errorf("--ca-cert: %w", err)
	}
	if err := forms.CheckCertificates(string(text)); err != nil {
		return nil, fmt.Errorf("--ca-cert: %s %w", out.caCert, err)
	}
	return text, nil
}

// writable finds what must not be replaced, and makes the directory; undo is
// MakeDirectory's.
func (out *installerOutput) writable(image string, o *flashOptions) (undo func(), err error) {
	var errs []error
	undo = func() {}
	if out.netboot != "" {
		if undo, err = disk.MakeDirectory(out.netboot); err != nil {
			return func() {}, err
		}
	}
	for _, f := range out.files() {
		err := builder.CheckFile(f, out.force)
		if err == nil && isOneOf(f, []string{image}) {
			err = fmt.Errorf("%s is the image itself: name another file", f)
		}
		flag := "--iso"
		if out.netboot != "" {
			flag = "--netboot"
		}
		errs = append(errs, err, o.secrets.notRead(flag, f, media.Read{Name: o.site, Ignition: o.ignition}))
	}
	return undo, errors.Join(errs...)
}

// write makes it.
func (out *installerOutput) write(ctx context.Context, o installer.Options, progress func(done, total int64)) error {
	if out.iso != "" {
		return installer.ISO(ctx, out.iso, o, progress)
	}
	return installer.Netboot(ctx, out.netboot, strings.TrimRight(out.url, "/")+"/"+ondisk.InstallImage, o, progress)
}

// makeInstaller makes an ISO, or files for network boot.
func makeInstaller(ctx context.Context, s streams, image string, out installerOutput, o flashOptions) error {
	undo, fileErr := out.writable(image, &o)
	defer undo()
	ca, caErr := out.readCA()
	p, err := o.payload(s, image)
	if p != nil {
		defer p.Close()
	}
	if err := errors.Join(fileErr, caErr, err); err != nil {
		return err
	}
	show := newDisplay(s, false)
	defer show.close()
	parts, err := o.install.options(ctx, p, show)
	if err != nil {
		return err
	}
	parts.CACert = ca
	progress := steps(show)
	if err := p.Verify(ctx, func(done, total int64) { progress("image", done, total) }); err != nil {
		return err
	}
	if err := out.write(ctx, parts, func(done, total int64) { progress("make", done, total) }); err != nil {
		return err
	}
	show.close()
	s.note("%s installs %s: on disk %s, then %s\n", out.files()[0], described(image, p.Image, p.State, o.site), o.install.disk, o.install.then)
	if out.netboot != "" {
		s.hint("Only you may read %s: give the web server the right to\n", out.files()[1])
	}
	o.install.tell(s, p)
	return nil
}

// full says what to do where there was no room to put an installer together.
func full(err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("%w; TMPDIR names another directory to put the installer together in", err)
	}
	return err
}

// tell says what is left to others.
func (f *installFlags) tell(s streams, p *media.Payload) {
	if p.State == media.SlotGolden {
		s.hint("It has no Site: the machines wait for one, on their disk or on a stick\n")
	}
}

// flashInstaller makes a stick that installs.
func flashInstaller(ctx context.Context, s streams, image string, o flashOptions) error {
	if err := o.install.check(); err != nil {
		return usageError{err}
	}
	show := newDisplay(s, false)
	defer show.close()
	t, targetErr := openTarget(ctx, image, o.stick)
	if t != nil {
		defer t.Close()
	}
	p, payloadErr := o.payload(s, image)
	if p != nil {
		defer p.Close()
	}
	if err := errors.Join(targetErr, payloadErr); err != nil {
		return err
	}
	if w := installer.Warn(p); w != "" {
		fmt.Fprintf(s.Err, "WARNING: %s: %s\n", image, w)
	}
	words := described(image, p.Image, p.State, o.site)
	if o.dryRun {
		show.close()
		s.note("would write an installer of %s to %s\n", words, t.disk.Describe())
		return nil
	}
	if !o.yes {
		if err := t.confirm(s, "an installer of "+words); err != nil {
			return err
		}
	}
	parts, err := o.install.options(ctx, p, show)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "edgebake-installer-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	progress := steps(show)
	if err := p.Verify(ctx, func(done, total int64) { progress("image", done, total) }); err != nil {
		return err
	}
	file := filepath.Join(tmp, "stick.raw")
	if err := installer.Stick(ctx, file, t.disk.Sector, parts, func(done, total int64) { progress("make", done, total) }); err != nil {
		return full(err)
	}
	f, err := media.PrepareInstaller(file, media.FlashOptions{Size: t.disk.Size, Sector: t.disk.Sector, Progress: progress})
	if err != nil {
		return fmt.Errorf("flashing %s: %w", t.disk, err)
	}
	defer f.Close()
	done, err := t.write(ctx, f, p.State)
	if err != nil {
		return err
	}
	show.close()
	s.note("%s installs %s: on disk %s, then %s; %s written, read back and verified\n", t.disk, words, o.install.disk, o.install.then, configs.HumanSize(done.Written))
	o.install.tell(s, p)
	return nil
}

// payload holds image and Site against each other.
func (o *flashOptions) payload(s streams, image string) (*media.Payload, error) {
	var errs []error
	keys, err := publicKeys(o.keys)
	errs = append(errs, err)
	site, err := o.readSite(s)
	errs = append(errs, err)
	p, err := media.OpenPayload(image, site, media.StampOptions{Now: time.Now(), Undated: o.undated}, keys)
	if err := errors.Join(append(errs, err)...); err != nil {
		if p != nil {
			p.Close()
		}
		return nil, err
	}
	return p, nil
}

// options brings the program that installs.
func (f *installFlags) options(ctx context.Context, p *media.Payload, show display) (installer.Options, error) {
	cache, err := openCache(f.cache)
	if err != nil {
		return installer.Options{}, err
	}
	program, err := builder.Program(ctx, "installer", p.Image.Arch, builder.Options{Cache: cache, Version: version.String(), Published: version.Published(), Events: show.event})
	if err != nil {
		return installer.Options{}, err
	}
	in, err := f.install()
	return installer.Options{Payload: p, Program: program, Install: in}, err
}
