package update

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
)

// Stick as the name of an image means the image on a USB stick or card.
const Stick = "stick"

// maxImages is the maximum number of images on sticks that are examined.
const maxImages = 16

// openStick opens the image on a stick that this machine accepts. It is an error if there is none,
// or more than one.
func openStick(ctx context.Context, e *machine.Env, sys *system, o Options, tell func(run.Step)) (*job, error) {
	var found *job
	var errs []error
	fail := func(err error) (*job, error) {
		if found != nil {
			found.close()
		}
		return nil, err
	}
	images := imagesOnSticks(e)
	if len(images) == 0 {
		return fail(run.Advise(errNoStick, "copy one (.raw.zst) to the top directory of a stick with FAT32, and plug it in"))
	}
	for _, i := range images {
		own := o
		own.Image = i.name
		u, err := open(ctx, e, sys, own, tell, func(*job) (Source, error) { return i.open(ctx, e) })
		switch {
		case ctx.Err() != nil:
			return fail(ctx.Err())
		case err != nil:
			errs = append(errs, err)
		case found != nil:
			u.close()
			return fail(fmt.Errorf("this machine accepts two of the images on its sticks, %s and %s: remove one", filepath.Base(found.o.Image), filepath.Base(i.name)))
		default:
			found = u
		}
	}
	if found == nil {
		return fail(errors.Join(errs...))
	}
	return found, nil
}

var errNoStick = errors.New("no stick in this machine has an image")

// stickImage is a compressed image on a stick.
type stickImage struct {
	name  string // for people: the device and the file
	dev   string
	entry fat.Entry
}

// imagesOnSticks lists the compressed images in the top directories of all sticks. It does not
// mount them, because the kernel's file systems are not safe with hostile media.
func imagesOnSticks(e *machine.Env) (out []stickImage) {
	for _, dev := range e.RemovableParts() {
		images, err := imagesOn(e, dev)
		if err != nil {
			e.Log.Info("not a stick with an image", "device", dev, "error", err)
		}
		out = append(out, images...)
	}
	return out[:min(len(out), maxImages)]
}

func imagesOn(e *machine.Env, dev string) (out []stickImage, err error) {
	d, err := e.OpenDevice(dev, false)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	r, err := fat.Open(d)
	if err != nil {
		return nil, err
	}
	err = r.Each(r.Top(), func(f fat.Entry) bool {
		if !f.Dir && strings.HasSuffix(strings.ToLower(f.Path), ".raw.zst") {
			out = append(out, stickImage{filepath.Join(dev, f.Name()), dev, f})
		}
		return len(out) < maxImages
	})
	return out, err
}

// maxExtents is the maximum number of extents of an image on a stick.
const maxExtents = 65536

func (i stickImage) open(ctx context.Context, e *machine.Env) (Source, error) {
	d, err := e.OpenDevice(i.dev, false)
	if err != nil {
		return nil, fmt.Errorf("opening the stick: %w", err)
	}
	s := &extentReader{Device: d}
	r, err := fat.Open(d)
	if err == nil {
		err = r.EachExtent(i.entry, func(x fat.Extent) (bool, error) {
			if n := len(s.offs); n == 0 || s.offs[n-1]+s.size-s.starts[n-1] != x.Off {
				s.starts, s.offs = append(s.starts, s.size), append(s.offs, x.Off)
			}
			s.size += x.Len
			if len(s.offs) > maxExtents {
				return false, run.Advise(fmt.Errorf("it is in more than %d pieces on the stick", maxExtents), "copy it to an empty stick")
			}
			return true, ctx.Err()
		})
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return &file{s, i.name, i.entry.Size}, nil
}

// extentReader reads a file from its extents on the device.
type extentReader struct {
	machine.Device
	starts, offs []int64 // offsets of each extent, in the file and on the device
	size         int64
}

func (s *extentReader) ReadAt(b []byte, off int64) (n int, err error) {
	for n < len(b) {
		if off < 0 || off >= s.size {
			return n, io.EOF
		}
		i := sort.Search(len(s.starts), func(i int) bool { return s.starts[i] > off }) - 1
		end := s.size
		if i+1 < len(s.starts) {
			end = s.starts[i+1]
		}
		k, err := s.Device.ReadAt(b[n:n+int(min(int64(len(b)-n), end-off))], s.offs[i]+off-s.starts[i])
		n, off = n+k, off+int64(k)
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

const (
	// stickPatience limits how long an automatic update waits for first boot and for another
	// update.
	stickPatience = 2 * time.Hour
	// restartDelay is the time between the announcement of a restart and the restart.
	restartDelay = time.Minute
)

// errOld: an automatic update ignores the image, because its serial is not higher than the running
// image's.
var errOld = errors.New("its serial is not higher than that of the image that this machine runs")

// FromStick updates the machine from a stick that somebody has plugged in, and reports that on the
// console. The image on it must be signed with a key of the running image, and must have a higher
// serial.
func FromStick(ctx context.Context, e *machine.Env) error {
	image, err := site.ImageInfo(e)
	if err != nil {
		return err
	}
	if image.Removable == ondisk.SitesNever || len(image.UpdateKeys) == 0 || len(imagesOnSticks(e)) == 0 {
		return nil
	}
	over := func() error {
		if !e.Exists(ondisk.HealthyFile) || run.OnTrial(e) {
			return errors.New("first boot has not finished")
		}
		return nil
	}
	if err := e.Retry(ctx, machine.Wait{Every: 5 * time.Second, For: stickPatience}, over); err != nil {
		return fmt.Errorf("waiting to update from a stick: %w", err)
	}
	lastLine := ""
	tell := func(s run.Step) {
		if line := fmt.Sprintf("update from the stick: %s %s", s.Name, s.Status); s.Status != "waiting" && s.Status != "note" && line != lastLine {
			lastLine = line
			e.Console(line)
		}
	}
	err = updateFromStick(ctx, e, tell)
	if errors.Is(err, errClosed) {
		e.Console("update from the stick: " + machine.OneLine(err))
		open := func() error { return closed(e, image, site.IfAny(e, image)) }
		if err = e.Retry(ctx, machine.Wait{Every: time.Minute, For: windowPatience}, open); err == nil {
			err = updateFromStick(ctx, e, tell)
		}
	}
	switch {
	case errors.Is(err, errNoStick) || err != nil && allOld(err):
		return nil // the stick was removed, or its image is old
	case err != nil:
		e.Console("update from the stick: " + machine.OneLine(err))
	}
	return err
}

// updateFromStick runs an automatic update as soon as the machine is not busy.
func updateFromStick(ctx context.Context, e *machine.Env, tell func(run.Step)) error {
	// final is the last result of Update. err matters only if Update was never called.
	var final error
	err := e.Retry(ctx, machine.Wait{Every: 5 * time.Second, For: stickPatience}, func() error {
		final = Update(ctx, e, Options{Image: Stick, byItself: true}, tell)
		if errors.As(final, new(*busy)) {
			return final
		}
		return nil
	})
	return cmp.Or(final, err)
}

// errClosed means that the Site's update window is closed.
var errClosed = errors.New("the update window is closed")

// windowPatience is the maximum wait for an update window. It is longer than a day.
const windowPatience = 25 * time.Hour

// closed returns the reason why the update window is closed, or nil. With a clock behind the
// image's date, which is certainly wrong, the window counts as closed.
func closed(e *machine.Env, image ondisk.ImageInfo, active *site.Active) error {
	if active == nil || active.Site.Updates.Window == "" {
		return nil
	}
	u, now := active.Site.Updates, e.Now()
	switch {
	case now.Before(time.Unix(image.SourceDate, 0)):
		return fmt.Errorf("%w: updates.window of the machine's Site is %s, and the machine's clock is wrong (%s)", errClosed, u, now.UTC().Format(time.DateTime))
	case !u.Open(now):
		return fmt.Errorf("%w: updates.window of the machine's Site is %s", errClosed, u)
	}
	return nil
}

// allOld reports whether every image was ignored because of its serial.
func allOld(err error) bool {
	return joined.AllAre(err, errOld)
}

// takesByItself returns an error if an automatic update may not install the image.
func (u *job) takesByItself() error {
	if !u.o.byItself {
		return nil
	}
	failed, err := failedPlans(u.e)
	switch {
	case err != nil:
		return err
	case u.next.UpdateSerial <= u.sys.image.UpdateSerial:
		return errOld
	case slices.Contains(failed, u.next.Plan):
		return run.Advise(errors.New("this machine has tried this image and returned to the previous system"), "`firstboot update stick` on the machine tries it once more")
	}
	return closed(u.e, u.sys.image, u.sys.active)
}

// maxFailed is the maximum number of plans in failedFile.
const maxFailed = 16

// failedPlans lists the plans of images that failed on this machine, oldest first. If the list
// cannot be read, any image may have failed.
func failedPlans(e *machine.Env) ([]string, error) {
	b, err := e.ReadIfExists(failedFile)
	if err != nil {
		return nil, run.Advise(fmt.Errorf("reading which images have failed on this machine: %w", err), "check the disk (`journalctl -k`)")
	}
	plans := strings.Fields(string(b))
	if s := settled(e); s != nil && s.Status == ondisk.UpdateFailed {
		plan := e.Text(planFile)
		plans = append(slices.DeleteFunc(plans, func(p string) bool { return p == plan }), plan)
	}
	return plans[max(0, len(plans)-maxFailed):], nil
}

// noteFailed records the plan of a failed update, before another update overwrites planFile.
func noteFailed(e *machine.Env) error {
	plans, err := failedPlans(e)
	if err != nil || len(plans) == 0 {
		return err
	}
	if _, err := e.Write(failedFile, []byte(strings.Join(plans, "\n")+"\n"), machine.Mode(0o600)); err != nil {
		return fmt.Errorf("recording that the update has failed: %w", err)
	}
	return nil
}

func (u *job) announce(ctx context.Context, e *machine.Env) error {
	e.Console(fmt.Sprintf("the system of %s (serial %d, Kubernetes %s) is installed: remove the stick. The machine restarts into the new system in %s", u.next.Name, u.next.UpdateSerial, u.next.Kubernetes, restartDelay))
	return e.Sleep(ctx, restartDelay)
}
