package update

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// Stick, instead of the name of an image, means the image on a USB stick or
// card.
const Stick = "stick"

// sticksDir contains the mount points of sticks.
const sticksDir = ondisk.RunMark + "sticks"

// maxImages is the maximum number of images that are considered.
const maxImages = 16

// openStick opens the image on the sticks in this machine that it accepts;
// there must be one.
func openStick(ctx context.Context, e *machine.Env, sys *system, o Options, tell func(run.Step)) (*job, error) {
	var found *job
	var errs []error
	names, unmount := imagesOnSticks(ctx, e)
	fail := func(err error) (*job, error) {
		if found != nil {
			found.close()
		}
		unmount()
		return nil, err
	}
	if len(names) == 0 {
		return fail(run.Advise(errors.New("no stick in this machine has an image"), "copy one (.raw.zst) to the top directory of a stick with FAT32 or ext4, and plug it in"))
	}
	for _, name := range names {
		own := o
		own.Image = name
		u, err := open(ctx, e, sys, own, tell)
		switch {
		case ctx.Err() != nil:
			return fail(ctx.Err())
		case err != nil:
			errs = append(errs, err)
		case found != nil:
			u.close()
			return fail(fmt.Errorf("this machine takes two of the images on its sticks, %s and %s: leave one", filepath.Base(found.o.Image), filepath.Base(name)))
		default:
			found = u
		}
	}
	if found == nil {
		return fail(errors.Join(errs...))
	}
	found.unmount = unmount
	return found, nil
}

// imagesOnSticks mounts all sticks and lists the compressed images on them.
func imagesOnSticks(ctx context.Context, e *machine.Env) (names []string, unmount func()) {
	var mounted []string
	unmount = func() {
		for _, dir := range mounted {
			if err := e.Run(context.WithoutCancel(ctx), machine.Cmd{Args: []string{"umount", dir}}); err != nil {
				e.Log.Warn("unmounting a stick", "error", err)
			}
		}
	}
	for _, dev := range e.RemovableParts() {
		dir := filepath.Join(sticksDir, filepath.Base(dev))
		err := e.Mkdir(dir, machine.Mode(0o700))
		if err == nil {
			err = e.Run(ctx, machine.Cmd{Args: []string{"mount", "-o", "ro,nosuid,nodev,noexec", dev, dir}})
		}
		if err != nil {
			e.Log.Info("not a stick with an image", "device", dev, "error", err)
			continue
		}
		mounted = append(mounted, dir)
		found, err := filepath.Glob(filepath.Join(e.Path(dir), "*.raw.zst"))
		if err != nil {
			panic("BUG: " + err.Error()) // the pattern is invalid
		}
		for _, f := range found {
			if len(names) < maxImages {
				names = append(names, filepath.Join(dir, filepath.Base(f)))
			}
		}
	}
	return names, unmount
}
