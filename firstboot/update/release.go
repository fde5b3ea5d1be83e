package update

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// noteOffline notes whether an API server can be reached. Where none can, the new system
// need not reach one either.
func (u *job) noteOffline(ctx context.Context, e *machine.Env) error {
	if u.sys.active != nil {
		if _, err := network.Reach(ctx, e, member.MastersOf(e, u.sys.active.Site)); ctx.Err() != nil {
			return ctx.Err()
		} else if err != nil {
			return e.WriteFile(offlineFile, nil, machine.Mode(0o600))
		}
	}
	return e.Remove(offlineFile)
}

// ProvenOffline judges a boot in which no API server is in reach, and nothing else is wrong.
// On trial that proves the system only if the machine was offline when it was updated.
func ProvenOffline(e *machine.Env) error {
	if !run.OnTrial(e) || e.Exists(offlineFile) {
		return nil
	}
	return run.ErrUnproven
}

// Release ends an update once the machine keeps its system, the new one or the former. The
// EFI system partition then describes the one that runs, by which Sites are judged that are
// stamped later, and what was fetched is removed. Container images that the system does not
// list are kubelet's to remove. UnitRelease runs it at each boot, on trial once systemd has
// marked the boot entry as good.
func Release(ctx context.Context, e *machine.Env) error {
	plan := e.Text(planFile)
	if plan == "" {
		return nil
	}
	image, err := site.ImageInfo(e)
	if err != nil {
		return err
	}
	release, err := run.Exclusive(ctx, e)
	if err != nil {
		return err
	}
	defer release()
	if plan == image.Plan {
		if err := releaseImages(ctx, e, image); err != nil {
			return err
		}
		if err := describe(ctx, e, image); err != nil {
			return fmt.Errorf("describing the new system on the EFI system partition: %w", err)
		}
		return e.RemoveAll(Dir)
	}
	if s := Status(e); s == nil || s.Status != ondisk.UpdateFailed {
		return nil // the same command continues it, or the next restart does
	}
	// The plan stays, so that the status tells what became of the update.
	return errors.Join(releaseImages(ctx, e, image), sweep(e, ""), e.Remove(spoolFile), e.Remove(offlineFile))
}

// describe replaces image.json on the EFI system partition by that of the running system.
// The partitions stay as they are.
func describe(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	var flashed ondisk.ImageInfo
	name := path.Join(espDir, ondisk.ESPImageInfo)
	b, err := e.Read(name)
	if err == nil {
		err = json.Unmarshal(b, &flashed)
	}
	if err != nil {
		return err
	}
	image.Partitions = flashed.Partitions
	if b, err = json.MarshalIndent(image, "", "  "); err != nil {
		return err
	}
	// That of the former system.
	if err := e.Remove(path.Join(espDir, ondisk.ESPSBOM)); err != nil {
		return err
	}
	return install(ctx, e, []espFile{{name, 0, func(w io.Writer) error {
		_, err := w.Write(append(b, '\n'))
		return err
	}}})
}

// progressFile has the UpdateState of an update that runs.
const progressFile = ondisk.RunMark + "update.json"

// stale is a state that an update which still runs would have renewed.
const stale = 10 * time.Minute

// begin notes which phase is at work; out gets what it waits for.
func (u *job) begin(phase string, out func(text string)) {
	u.out, u.state.Phase, u.state.Detail = out, phase, ""
	u.save()
}

// say tells how it goes: the person who asked, and `firstboot status`.
func (u *job) say(format string, args ...any) {
	u.state.Detail = fmt.Sprintf(format, args...)
	if f := u.fetch; f != nil {
		u.state.Fetched, u.state.Total, u.state.LeftSeconds = f.fetched, f.total, int64(f.left.Seconds())
	}
	u.save()
	u.out(u.state.Detail)
}

func (u *job) save() {
	u.state.Updated = u.e.Now()
	b, err := json.Marshal(u.state)
	if err == nil {
		err = u.e.WriteFile(progressFile, b, machine.Mode(0o600))
	}
	if err != nil {
		u.e.Log.Warn("noting how far the update is", "error", err)
	}
}

// forget removes the state: the update does not run any more.
func (u *job) forget() {
	if err := u.e.Remove(progressFile); err != nil {
		u.e.Log.Warn("noting that the update does not run any more", "error", err)
	}
}

// Status is how far an update of this machine is; nil: there is none to speak of.
func Status(e *machine.Env) *ondisk.UpdateState {
	var s ondisk.UpdateState
	if err := json.Unmarshal(e.Contents(progressFile), &s); err == nil {
		if e.Now().Sub(s.Updated) > stale {
			s.Status = ondisk.UpdateInterrupted
		}
		return &s
	}
	plan := e.Text(planFile)
	if plan == "" {
		return nil
	}
	image, err := site.ImageInfo(e)
	root := rootOf(e)
	if err != nil || root == "" {
		return nil
	}
	if plan == image.Plan {
		if run.OnTrial(e) {
			return &ondisk.UpdateState{Status: ondisk.UpdateTrial, Root: root}
		}
		return nil
	}
	s = ondisk.UpdateState{Status: ondisk.UpdateInterrupted, Root: otherRoot(root)}
	all, err := entries(e)
	if err != nil {
		return nil
	}
	for _, x := range of(all, s.Root) {
		switch {
		case x.Trial && x.Left == 0:
			s.Status = ondisk.UpdateFailed
		case x.Trial:
			s.Status = ondisk.UpdatePending
		}
	}
	return &s
}

// rootOf is the label of the partition that the system runs from; "": there is none.
func rootOf(e *machine.Env) string {
	d, err := e.LookUpRootDisk()
	if err != nil {
		return ""
	}
	return rootOn(d)
}

func rootOn(d *machine.Disk) string {
	for _, p := range d.Parts {
		if p.Name == d.Root {
			return p.Label
		}
	}
	return ""
}
