// Package installer runs on a machine that was booted from an installer: a stick, an ISO or the
// network. It selects the internal disk by the installer's rule, writes and verifies the image with
// this machine's Site, and prints each step on every console.
//
// It never guesses. If the rule matches two disks, or an Inventory has no Site for the machine, it
// waits and shows the disks or the machine. It overwrites an edgebake disk only if the installer
// was built to do so, and only once: if the stick stays in the machine, the installed disk is
// started.
package installer

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Env is the installer's access to the machine.
type Env struct {
	// Say prints a line on every console.
	Say func(line string)
	// Sleep waits, or returns the context's error.
	Sleep func(context.Context, time.Duration) error
	// Source returns the image that came with the installer, and the disk that contains it.
	Source func(context.Context) (Source, error)
	// Disks lists the machine's disks.
	Disks func(context.Context) ([]device.Disk, error)
	// Machine returns the identity of this machine.
	Machine func() siteconf.Machine
	// BootNext makes the firmware boot that disk at the next start only.
	BootNext func(path string, found media.DiskContent) error
	// PowerOff and Reboot return only if they fail.
	PowerOff, Reboot func() error
	// Gone reports whether the installer's own medium was removed.
	Gone func(Source) bool
}

// Source is the installer's image and the disk that contains it.
type Source struct {
	Image media.ImageSource
	Disk  string // the disk that contains the image; "" if none does
}

// The installer's times.
const (
	poll = 3 * time.Second
	// again is the time after which an unchanged message is repeated.
	again = time.Minute
	// steady is how long the list of disks must stay the same before the rule is applied:
	// controllers find their disks one by one.
	steady = 9 * time.Second
	// grace is the time for a person to switch the machine off.
	grace = 10 * time.Second
	// retry is the pause after an attempt has failed.
	retry = time.Minute
)

// waiting is the error for a condition that ends when a person acts or time passes.
type waiting struct {
	lines []string
	after time.Duration
}

func (w *waiting) Error() string { return strings.Join(w.lines, "; ") }

func wait(lines ...string) error { return &waiting{lines, poll} }

// installation is the state of one installer.
type installation struct {
	*Env
	c    ondisk.Install
	rule device.Rule
	// begun is the disk on which writing began. If it fails, no other disk may be chosen, because
	// that could hold the machine's data.
	begun *device.Disk
	// clock is the time spent waiting; shown is the last message, and shownAt its
	// time on clock.
	clock   time.Duration
	shown   string
	shownAt time.Duration
}

// sleep waits, and adds the duration to the clock.
func (r *installation) sleep(ctx context.Context, d time.Duration) error {
	r.clock += d
	return r.Sleep(ctx, d)
}

// Run installs the image and then powers off or restarts the machine. It retries forever, and
// returns an error only for an invalid configuration or when ctx ends.
func Run(ctx context.Context, c ondisk.Install, e *Env) error {
	r := &installation{Env: e, c: c}
	if c.Version != ondisk.InstallVersion {
		return fmt.Errorf("%s has version %d, but this installer supports only version %d: make the installer again", ondisk.InstallConfig, c.Version, ondisk.InstallVersion)
	}
	var err error
	if r.rule, err = device.ParseRule(c.Disk); err != nil {
		return err
	}
	r.Say(fmt.Sprintf("installer of image %s (golden %.16s); disk: %s; then: %s", c.Image, c.Golden, c.Disk, c.Then))
	for {
		err := r.attempt(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		var w *waiting
		if err == nil {
			return nil
		}
		if !errors.As(err, &w) {
			w = &waiting{[]string{"FAILED: " + err.Error()}, retry}
		}
		r.show(w)
		if err := r.sleep(ctx, w.after); err != nil {
			return err
		}
	}
}

// show prints the reason why the installer waits: when it is new, and then every minute.
func (r *installation) show(w *waiting) {
	text := strings.Join(w.lines, "\n")
	if text == r.shown && r.clock-r.shownAt < again {
		return
	}
	r.shown, r.shownAt = text, r.clock
	for _, l := range w.lines {
		r.Say(l)
	}
}

// attempt makes one attempt at the installation. It uses no findings of earlier attempts except
// begun, because the machine may have changed.
func (r *installation) attempt(ctx context.Context) error {
	src, err := r.Source(ctx)
	if err != nil {
		return wait(fmt.Sprintf("waiting for the image %s that this installer carries: %v", r.c.Image, err))
	}
	disks, err := r.allDisks(ctx, src)
	if err != nil {
		return err
	}
	target, err := r.choose(disks)
	if err != nil {
		return err
	}
	if target.done != nil {
		return r.start(ctx, src, *target.done)
	}
	if r.begun != nil && !isSame(r.begun, &target.disk) {
		return wait(r.list(fmt.Sprintf("the disk %s is gone. Its installation had begun, so no other disk is used instead. Replace it, then switch the machine off and on. Disks:", r.begun.Describe()), disks)...)
	}
	return r.install(ctx, src, target.disk)
}

// allDisks returns the disks except the installer's own, once their list is
// stable.
func (r *installation) allDisks(ctx context.Context, src Source) ([]foundDisk, error) {
	var before []string
	for same := time.Duration(0); ; same += poll {
		disks, err := r.others(ctx, src)
		if err != nil {
			return nil, err
		}
		var now []string
		for i := range disks {
			now = append(now, disks[i].Describe())
		}
		if !slices.Equal(now, before) {
			before, same = now, 0
		}
		if same >= steady {
			return readDisks(disks), nil
		}
		if err := r.sleep(ctx, poll); err != nil {
			return nil, err
		}
	}
}

// others returns the current disks except the installer's own.
func (r *installation) others(ctx context.Context, src Source) ([]device.Disk, error) {
	disks, err := r.Disks(ctx)
	return slices.DeleteFunc(disks, func(d device.Disk) bool { return d.Path == src.Disk }), err
}

// isSame reports whether two listings show the same disk. A disk that was reconnected may have
// another path.
func isSame(a, b *device.Disk) bool {
	now := *b
	if a.Serial != "" {
		now.Path = a.Path
	}
	return a.Same(&now) && a.Size == b.Size
}

// foundDisk is a disk with its content.
type foundDisk struct {
	device.Disk
	media.DiskContent
	unreadable error
}

func readDisks(disks []device.Disk) (out []foundDisk) {
	for _, d := range disks {
		s := foundDisk{Disk: d}
		s.DiskContent, s.unreadable = media.ReadDiskContent(d.Path)
		out = append(out, s)
	}
	return out
}

// line describes a disk for a person who must choose.
func (s *foundDisk) line(c ondisk.Install) string {
	text := "  " + s.Describe()
	switch {
	case s.unreadable != nil:
		text += fmt.Sprintf(": it cannot be read: %v", s.unreadable)
	case s.Unfinished:
		text += ": an installation of it was interrupted"
	case s.Ours && s.Name != "":
		text += ": has the edgebake image " + s.Name
	case s.Ours:
		text += ": has an edgebake image"
	}
	if why := s.unfit(c); why != "" {
		text += ": " + why
	}
	for _, no := range s.Refusals {
		text += ": " + no
	}
	if !s.IsInternal() {
		text += ": removable"
	}
	return text
}

// unfit returns the reason why the image does not fit on a disk, or "".
func (s *foundDisk) unfit(c ondisk.Install) string {
	switch {
	case s.Size < c.Need:
		return "too small: the image needs " + bytesize.MiB(c.Need)
	case s.Disk.Sector != 0 && s.Disk.Sector != c.Sector:
		return fmt.Sprintf("has sectors of %d bytes, but the image is for sectors of %d (disk.sector)", s.Disk.Sector, c.Sector)
	}
	return ""
}

// mark returns the bytes from which a disk's GUIDs are made. The first half identifies the
// installer, so that it recognizes its disks. install fills the second half at random, because one
// installer serves many machines.
func (r *installation) mark() (b [16]byte) {
	sum := sha256.Sum256([]byte("edgebake installer\x00" + r.c.ID))
	copy(b[:8], sum[:])
	return b
}

// isOwn reports whether this installer has written the disk.
func (r *installation) isOwn(s *foundDisk) bool {
	const half = len("01234567-0123-4567")
	return s.Ours && len(s.GUID) > half && s.GUID[:half] == media.DiskGUID(r.mark())[:half]
}

// choice is the disk to write to or, in done, a disk that already has the image.
type choice struct {
	disk device.Disk
	done *foundDisk
}

// choose selects a disk by the rule. If it selects none, the error tells a person why; only if the
// selected disk cannot be read, the error is not a *waiting.
func (r *installation) choose(disks []foundDisk) (choice, error) {
	switch installed, only := r.installed(disks); {
	case len(installed) == 1 && (only || !r.c.Reinstall):
		return choice{done: &installed[0]}, nil
	case len(installed) > 0 && (only || !r.c.Reinstall):
		return choice{}, wait(r.list("this machine already has disks with an edgebake image, so nothing is installed. Remove the installer and start one of these disks; or make an installer with --reinstall:", disks)...)
	}
	// Except for OnlyDisk, the rule also compares disks that are too small for the image: if the
	// smallest disk is too small, the second smallest may hold the machine's data.
	var candidates []device.Disk
	for i := range disks {
		if s := &disks[i]; r.c.Disk != device.OnlyDisk || s.unfit(r.c) == "" {
			candidates = append(candidates, s.Disk)
		}
	}
	left := r.rule.Pick(candidates)
	switch {
	case len(left) == 0:
		return choice{}, wait(r.list(fmt.Sprintf("no disk matches the rule %q. Attach one, or make an installer with another --disk. Disks:", r.c.Disk), disks)...)
	case len(left) > 1:
		return choice{}, wait(r.list(fmt.Sprintf("%d disks match the rule %q, but exactly one must match. Make an installer with a --disk that selects one, or remove the others. Disks:", len(left), r.c.Disk), disks)...)
	}
	d := left[0]
	i := slices.IndexFunc(disks, func(s foundDisk) bool { return s.Path == d.Path })
	if disks[i].Ours && !r.c.Reinstall { // an external disk, which installed ignores
		return choice{done: &disks[i]}, nil
	}
	if disks[i].unfit(r.c) != "" {
		return choice{}, wait(r.list(fmt.Sprintf("the rule %q selects a disk that cannot hold the image, and no other disk is used instead. Make an installer with another --disk (size>=32G,smallest for example). Disks:", r.c.Disk), disks)...)
	}
	if err := disks[i].unreadable; err != nil {
		return choice{}, fmt.Errorf("the disk %s cannot be read: %w: replace it", d.Describe(), err)
	}
	if lines := r.refusals(d); len(lines) > 0 {
		return choice{}, wait(append([]string{fmt.Sprintf("the rule %q selects %s, which is not overwritten:", r.c.Disk, d.Describe())}, lines...)...)
	}
	return choice{disk: d}, nil
}

// installed returns the disks that this installer has written, with own set. If there are none, it
// returns the internal disks with any edgebake image.
func (r *installation) installed(disks []foundDisk) (installed []foundDisk, own bool) {
	var others []foundDisk
	for _, s := range disks {
		switch {
		case !s.Ours:
		case r.isOwn(&s):
			installed = append(installed, s)
		case s.IsInternal():
			others = append(others, s)
		}
	}
	if len(installed) > 0 {
		return installed, true
	}
	return others, false
}

// refusals returns the reasons why a disk is not overwritten, one a line.
func (r *installation) refusals(d device.Disk) (lines []string) {
	for _, why := range d.Refusals {
		member := slices.Contains(d.Members, why)
		switch {
		case member && !r.c.Reinstall:
			lines = append(lines, "  "+why+", or make an installer with --reinstall")
		case !member:
			lines = append(lines, "  "+why)
		}
	}
	return lines
}

func (r *installation) list(head string, disks []foundDisk) []string {
	out := []string{head}
	for i := range disks {
		out = append(out, disks[i].line(r.c))
	}
	if len(disks) == 0 {
		out = append(out, "  none")
	}
	return append(out, "  This machine: "+r.Machine().String())
}

// install writes the image to a disk.
func (r *installation) install(ctx context.Context, src Source, d device.Disk) error {
	o, name, err := r.site(src.Image)
	if err != nil {
		return err
	}
	what := r.c.Image
	if name != "" {
		what += " for " + name
	}
	r.Say(fmt.Sprintf("installing %s on %s in %.0f seconds: everything on it will be lost; switch the machine off to keep it", what, d.Describe(), grace.Seconds()))
	if err := r.sleep(ctx, grace); err != nil {
		return err
	}
	o.Random = r.mark()
	if _, err := rand.Read(o.Random[8:]); err != nil {
		return err
	}
	done, err := r.write(ctx, src, d, o)
	if err != nil {
		return fmt.Errorf("installing on %s: %w", d.Describe(), err)
	}
	r.Say(fmt.Sprintf("INSTALLED %s on %s, read back and verified, golden %.16s", what, d.Describe(), done.Golden))
	if r.c.Then == ondisk.ThenPowerOff {
		r.Say("powering off: remove the installer, then switch the machine on")
		if err := r.sleep(ctx, grace); err != nil {
			return err
		}
		return r.PowerOff()
	}
	found, err := media.ReadDiskContent(d.Path)
	if err != nil {
		return err
	}
	return r.start(ctx, src, foundDisk{Disk: d, DiskContent: found})
}

// errForeign means that the image does not match the one named in the configuration.
var errForeign = errors.New("the image is not the one that this installer was made for: its slot or its golden digest differs: make the installer again")

// site returns the options that fill the slot: with the image's own slot or, from an Inventory,
// with this machine's Site. name is the name of that Site in the Inventory.
func (r *installation) site(image media.ImageSource) (o media.FlashOptions, name string, err error) {
	s, err := media.ReadImageSlot(image)
	if err != nil {
		return o, "", err
	}
	if sum := sha256.Sum256(s.Bytes); hex.EncodeToString(sum[:]) != r.c.Slot || s.Info.Golden != r.c.Golden {
		return o, "", errForeign
	}
	doc, ok := s.Files[ondisk.SlotInventory]
	machine := r.Machine()
	if !ok {
		o.Slot = s.Bytes
		site, err := configs.ParsePublicSite(ondisk.SlotSite, s.Files[ondisk.SlotSite])
		if err == nil && !site.Match.IsZero() && !siteconf.Matches(site.Match, machine) { // firstboot reports other errors
			return o, "", wait("the Site is for another machine (match), so nothing is installed. This machine: " + machine.String())
		}
		return o, "", nil
	}
	inv, err := configs.ParsePublicInventory(ondisk.SlotInventory, doc)
	if err != nil {
		return o, "", fmt.Errorf("the inventory has problems: %w: make the installer again", err)
	}
	found, err := siteconf.FindSite(inv, machine)
	if err != nil {
		return o, "", wait(err.Error() + ": let each machine match one Site, and make the installer again")
	}
	if found == nil {
		return o, "", wait("the inventory has no Site for this machine, so nothing is installed. This machine: " + machine.String())
	}
	files := maps.Clone(s.Files)
	delete(files, ondisk.SlotInventory)
	o.Site = &media.Site{Doc: &found.Site, Files: files, DefaultSpread: configs.DefaultSpread(len(inv.Sites))}
	o.Stamp = media.StampOptions{Now: time.Unix(s.Info.Stamped, 0), Undated: s.Info.Stamped == 0}
	return o, found.Name, nil
}

// write flashes the disk, as edgebake flash does.
func (r *installation) write(ctx context.Context, src Source, d device.Disk, o media.FlashOptions) (*media.Flashed, error) {
	t, err := device.Open(d.Path)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	if err := r.stillChosen(ctx, src, t, d); err != nil {
		return nil, err
	}
	o.Size, o.Sector, o.Progress = t.Size, t.Sector, r.progress()
	f, err := media.PrepareFlashFrom(src.Image, o)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// PrepareFlashFrom has read the slot again, and a server may have sent another one than for site.
	// Write verifies the image only against f.Slot.Golden, so compare that digest here.
	if f.Slot.Golden != r.c.Golden {
		return nil, errForeign
	}
	r.begun = &d
	done, err := f.Write(ctx, t)
	if err == nil {
		t.Reread()
	}
	return done, err
}

// stillChosen chooses again among all disks, now that the chosen one is open and cannot be
// replaced. During the countdown, another disk may have been attached under the same name, or a
// disk that the rule prefers.
func (r *installation) stillChosen(ctx context.Context, src Source, t *device.Target, d device.Disk) error {
	disks, err := r.others(ctx, src)
	if err != nil {
		return err
	}
	now, err := r.choose(readDisks(disks))
	if err != nil {
		return err
	}
	if now.done != nil || !d.Same(&now.disk) || now.disk.Size != d.Size || t.Size != d.Size {
		return wait("the disks of this machine changed during the countdown: nothing was written, checking them again")
	}
	return nil
}

// progress returns a function that prints a step's progress, one line for each tenth.
func (r *installation) progress() func(step string, done, total int64) {
	step, tenth := "", int64(-1)
	return func(s string, done, total int64) {
		if s != step {
			step, tenth = s, -1
		}
		if now := done * 10 / max(total, 1); now != tenth {
			tenth = now
			r.Say(fmt.Sprintf("%s: %d %%", s, now*10))
		}
	}
}

// start makes the firmware boot the installed disk.
func (r *installation) start(ctx context.Context, src Source, s foundDisk) error {
	what := "an edgebake image"
	if s.Name != "" {
		what = "the edgebake image " + s.Name
	}
	r.Say(fmt.Sprintf("this machine is installed: %s has %s", s.Describe(), what))
	err := r.BootNext(s.Path, s.DiskContent)
	if err == nil {
		r.Say("starting it now; the installer can be removed")
		if err := r.sleep(ctx, grace); err != nil {
			return err
		}
		return r.Reboot()
	}
	do := "remove the installer, then the machine restarts from its disk"
	if src.Disk == "" {
		do = "set the firmware to start its disk before the network, and switch the machine off and on"
	}
	for !r.Gone(src) {
		r.show(&waiting{[]string{fmt.Sprintf("%s (setting the firmware to start it failed: %v)", do, err)}, poll})
		if err := r.sleep(ctx, poll); err != nil {
			return err
		}
	}
	return r.Reboot()
}
