package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/installer"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/outputs"
	"github.com/edgebake/edgebake/builder/signing"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/spf13/cobra"
)

// installFlags are the flags of commands that make an installer.
type installFlags struct {
	installer.Settings
	cache string
}

func (o *installFlags) declare(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.Disk, "disk", device.OnlyDisk, "disk of the machine to install on: only, smallest, largest, smallest-nvme, bus=, model=, serial=, size>=, size<= (several conditions: separate them with commas), or a path below /dev")
	f.StringVar(&o.Then, "then", ondisk.ThenPowerOff, "what the machine does afterwards: poweroff or reboot")
	f.BoolVar(&o.Reinstall, "reinstall", false, "overwrite a disk that already has an edgebake image, or is part of LVM or a RAID; each installer overwrites such a disk only once")
	cacheFlag(f, &o.cache)
	cli.Complete(c, "disk", device.OnlyDisk, "smallest", "largest", "smallest-nvme", "smallest-sata")
	cli.Complete(c, "then", ondisk.ThenPowerOff, ondisk.ThenReboot)
}

func newInstaller(s streams) *cobra.Command {
	var (
		slot    slotFlags
		install installFlags
		out     installer.Output
	)
	c := &cobra.Command{
		Use:               "installer IMAGE (--iso FILE | --netboot DIR --url URL)",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Make an ISO, or files for network boot, that install an image on a machine",
		Long: `Installer makes the installer of flash --installer as an ISO image: for machines
without a free USB port, for example through the virtual drive of a remote console.
The machine must boot it with UEFI. Copied to a stick with dd, the same file boots
there. xorriso writes it.

With --netboot it makes the files for UEFI HTTP boot: boot.img, which firmware
fetches and starts, and image.raw.zst, which the installer reads from the URL of
the directory. The server must answer ranges. Use https://, with the server's CA in
the firmware and in --ca-cert: over http:// anybody on the network can replace
boot.img, and the firmware does not verify it.

ISO and image contain the Site's token: keep them secret.`,
		Example: `  edgebake installer my-edge.raw.zst --iso install.iso --inventory stores.yaml --disk smallest-nvme
  edgebake installer my-edge.raw.zst --iso install.iso --site site.yaml --then reboot
  edgebake installer my-edge.raw.zst --netboot www --url https://boot.example.com/edge --ca-cert ca.crt --then reboot`,
		Args: cli.Args(1, 1, "an image"),
		RunE: func(c *cobra.Command, a []string) error {
			if err := errors.Join(slot.check(c), install.Check(), out.Check()); err != nil {
				return cli.Usage(err)
			}
			return makeInstaller(c.Context(), s, a[0], &out, &slot, &install)
		},
	}
	cli.FileFlag(c, &out.ISO, "iso", "write the installer as an ISO to this file", "iso")
	cli.DirFlag(c, &out.Netboot, "netboot", "", "write the files for UEFI HTTP boot to this directory")
	c.Flags().StringVar(&out.URL, "url", "", "URL at which a web server serves that directory, http:// or https://")
	cli.FileFlag(c, &out.CACert, "ca-cert", "`file` with the certificate (PEM) of the CA that signed the certificate of the server in --url; no other CA is accepted then (default: the CAs of the image)", "crt", "pem")
	c.Flags().BoolVar(&out.Force, "force", false, "replace an existing output")
	slot.declare(c)
	install.declare(c)
	return c
}

// makeInstaller makes an ISO image, or the files for network boot.
func makeInstaller(ctx context.Context, s streams, image string, out *installer.Output, slot *slotFlags, install *installFlags) error {
	undo, err := out.Prepare(image)
	defer undo()
	errs := []error{err}
	for _, f := range out.Files() {
		errs = append(errs, slot.NotInput(out.Flag(), f, media.SiteSource{Name: slot.site, Ignition: slot.Ignition}))
	}
	ca, err := out.ReadCA()
	errs = append(errs, err)
	p, err := slot.payload(s, image)
	if p != nil {
		defer p.Close()
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	hintCompression(s, image, p)
	show := s.Display(false)
	defer show.Close()
	parts, err := install.options(ctx, p, show)
	if err != nil {
		return err
	}
	parts.CACert = ca
	progress := console.Steps(show)
	if err := p.Verify(ctx, progress); err != nil {
		return err
	}
	if err := out.Write(ctx, parts, func(done, total int64) { progress("make", done, total) }); err != nil {
		return err
	}
	show.Close()
	s.Note("%s installs %s: on disk %s, then %s\n", out.Files()[0], slot.describe(image, p.Image, p.State), install.Disk, install.Then)
	if out.Netboot != "" {
		s.Hint("Only you can read %s: give the web server permission to read it\n", out.Files()[1])
	}
	hintNoSite(s, p)
	return nil
}

func hintNoSite(s streams, p *media.Payload) {
	if p.State == media.SlotGolden {
		s.Hint("The installer has no Site: after the installation, each machine waits for one in its slot or on a stick\n")
	}
}

// hintCompression recommends a compressed image: any other image is compressed again for each
// installer.
func hintCompression(s streams, image string, p *media.Payload) {
	if !p.Compressed() {
		s.Hint("%s is compressed first, which takes minutes; to avoid this for each installer, build it compressed: edgebake build --output %s.raw.zst\n", image, outputs.Stem(image))
	}
}

// flashInstaller makes an installer on a stick.
func (o *flashFlags) flashInstaller(ctx context.Context, s streams, image string) error {
	if err := o.install.Check(); err != nil {
		return cli.Usage(err)
	}
	show := s.Display(false)
	defer show.Close()
	stick, diskErr := chooseDisk(ctx, image, o.stick)
	if stick != nil {
		defer stick.Close()
	}
	p, err := o.payload(s, image)
	if p != nil {
		defer p.Close()
	}
	if err := errors.Join(diskErr, err); err != nil {
		return err
	}
	if w := installer.Warn(p); w != "" {
		s.Warn("%s: %s", image, w)
	}
	hintCompression(s, image, p)
	text := o.describe(image, p.Image, p.State)
	if o.dryRun {
		show.Close()
		s.Note("would write an installer of %s to %s, %s\n", text, stick.Disk, bytesize.Human(stick.Disk.Size))
		return nil
	}
	if err := o.confirm(s, stick.Disk, "an installer of "+text); err != nil {
		return err
	}
	done, err := o.writeInstaller(ctx, stick, p, show)
	if err != nil {
		return err
	}
	show.Close()
	s.Note("%s installs %s: on disk %s, then %s; %s written, read back and verified\n", stick.Disk, text, o.install.Disk, o.install.Then, bytesize.Human(done.Written))
	hintNoSite(s, p)
	return nil
}

// writeInstaller makes the installer in a temporary file, and then writes it to the stick.
func (o *flashFlags) writeInstaller(ctx context.Context, stick *device.Chosen, p *media.Payload, show console.Display) (*media.Flashed, error) {
	parts, err := o.install.options(ctx, p, show)
	if err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp("", "edgebake-installer-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	progress := console.Steps(show)
	if err := p.Verify(ctx, progress); err != nil {
		return nil, err
	}
	name, d := filepath.Join(tmp, "stick.raw"), stick.Disk
	if err := installer.Stick(ctx, name, d.Sector, parts, func(done, total int64) { progress("make", done, total) }); err != nil {
		if errors.Is(err, syscall.ENOSPC) {
			err = fmt.Errorf("%w; set TMPDIR to a directory with more free space", err)
		}
		return nil, err
	}
	f, err := media.PrepareInstaller(name, media.FlashOptions{Size: d.Size, Sector: d.Sector, Progress: progress})
	if err != nil {
		return nil, fmt.Errorf("flashing %s: %w", d, err)
	}
	defer f.Close()
	return writeDisk(ctx, stick, f, p.State)
}

// payload opens the image, and checks that the image and the Site fit together.
func (o *slotFlags) payload(s streams, image string) (*media.Payload, error) {
	keys, keyErr := signing.PublicKeys(o.keys)
	site, siteErr := o.readSite(s)
	p, err := media.OpenPayload(image, site, media.StampOptions{Now: time.Now(), Undated: o.undated}, keys)
	if err := errors.Join(keyErr, siteErr, err); err != nil {
		if p != nil {
			p.Close()
		}
		return nil, err
	}
	return p, nil
}

// options returns the installer program and its configuration.
func (o *installFlags) options(ctx context.Context, p *media.Payload, show console.Display) (installer.Options, error) {
	cache, err := openCache(o.cache)
	if err != nil {
		return installer.Options{}, err
	}
	program, err := builder.Program(ctx, "installer", p.Image.Arch, builder.Options{Cache: cache, Version: version.String(), Published: version.Published(), Events: show.Event})
	if err != nil {
		return installer.Options{}, err
	}
	in, err := o.Install()
	return installer.Options{Payload: p, Program: program, Install: in}, err
}
