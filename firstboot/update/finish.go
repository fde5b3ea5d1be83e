package update

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// offlinePatience: if no API server answers for this long, the machine counts as offline.
const offlinePatience = time.Minute

// noteOffline records whether no API server is reachable. If so, the new system need not reach
// one either. An API server has confirmed an order, so a machine with an order is not offline.
func (u *job) noteOffline(ctx context.Context, e *machine.Env) error {
	if u.sys.active != nil && !u.o.ordered() {
		err := e.Retry(ctx, machine.Wait{Every: 5 * time.Second, For: offlinePatience}, func() error {
			_, err := network.Reach(ctx, e, member.MastersOf(e, u.sys.active.Site))
			return err
		})
		if ctx.Err() != nil {
			return ctx.Err()
		} else if err != nil {
			return e.WriteFile(offlineFile, nil, machine.Mode(0o600))
		}
	}
	return e.Remove(offlineFile)
}

// ProvenOffline returns nil if a boot without a reachable API server counts as successful,
// otherwise run.ErrUnproven. During a trial, the machine must have been offline before the update
// too.
func ProvenOffline(e *machine.Env) error {
	if !run.OnTrial(e) || e.Exists(offlineFile) {
		return nil
	}
	return run.ErrUnproven
}

// ending is the way in which an update ends on a machine.
type ending int

const (
	restarting  ending = iota // the new system boots at the next restart
	interrupted               // the same command continues the update
	fellBack                  // the new system failed, and the machine runs the former one
	kept                      // the machine keeps the new system
)

// endUpdate ends an update that is not running any more. Every ending makes the Node schedulable;
// every ending except restarting releases the Lease. If endUpdate is killed, it can be run again.
func endUpdate(ctx context.Context, e *machine.Env, how ending) error {
	err := uncordon(ctx, e) // first, even if the rest fails
	if how == restarting {
		return err
	}
	err = errors.Join(err, releaseLease(ctx, e))
	if how == interrupted {
		return err
	}
	image, unread := site.ImageInfo(e)
	if unread != nil {
		return errors.Join(err, unread)
	}
	err = errors.Join(err, pinRunningImages(ctx, e, image))
	if how == fellBack {
		// Keep planFile: Status needs it to report the result.
		return errors.Join(err, noteFailed(e), sweep(e, ""), e.Remove(spoolFile), e.Remove(offlineFile))
	}
	undescribed := e.Retry(ctx, machine.Wait{Every: 15 * time.Second, For: describePatience}, func() error { return describe(ctx, e, image) })
	switch {
	case ctx.Err() != nil:
		return errors.Join(err, ctx.Err())
	case undescribed != nil:
		e.Console("the update is complete, but the system's description on the EFI system partition cannot be replaced, so edgebake stamp and inspect do not see the new system: " + machine.OneLine(undescribed) + "; the next boot tries again. If the EFI system partition is damaged, flash the disk again")
		return errors.Join(err, sweep(e, ""), e.Remove(spoolFile), e.Remove(offlineFile)) // keep planFile, so that Finish runs
	case err != nil:
		return err
	}
	return e.RemoveAll(Dir)
}

// describePatience limits the tries to replace the description on the EFI system partition. The
// machine runs without the description.
const describePatience = time.Minute

// Finish ends an update once the machine keeps a system, new or old. It uncordons the Node,
// releases the Lease, unpins unlisted container images, updates image.json on the EFI system
// partition for `stamp`, and removes downloads. UnitUpdateFinish runs it at each boot; during a
// trial, it runs once systemd has marked the boot entry as good.
func Finish(ctx context.Context, e *machine.Env) error {
	plan, err := readPlan(e)
	if err != nil || plan == "" {
		return err
	}
	unlock, err := run.Exclusive(ctx, e)
	if err != nil {
		return err
	}
	defer unlock()
	image, err := site.ImageInfo(e)
	how := endingOf(e)
	if err == nil && plan == image.Plan {
		how = kept
	}
	return errors.Join(endUpdate(ctx, e, how), err)
}

// endingOf returns the ending of an update that was not kept. If the boot entries cannot be read,
// it returns restarting, because the new system may boot next.
func endingOf(e *machine.Env) ending {
	s := settled(e)
	switch {
	case s != nil && s.Status == ondisk.UpdateInterrupted:
		return interrupted
	case s != nil && s.Status == ondisk.UpdateFailed:
		return fellBack
	}
	return restarting
}

// describe replaces image.json on the EFI system partition with that of the running system, but
// keeps its list of partitions.
func describe(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	var flashed ondisk.ImageInfo
	name := path.Join(espDir, ondisk.ESPImageInfo)
	b, err := e.Read(name)
	if err == nil {
		err = json.Unmarshal(b, &flashed)
	}
	if err != nil {
		return fmt.Errorf("reading %s: %w", name, err)
	}
	image.Partitions = flashed.Partitions
	if b, err = json.MarshalIndent(image, "", "  "); err != nil {
		return err
	}
	// Remove the SBOM of the old system.
	if err := e.Remove(path.Join(espDir, ondisk.ESPSBOM)); err != nil {
		return err
	}
	return install(ctx, e, []espFile{{name, 0, func(w io.Writer) error {
		_, err := w.Write(append(b, '\n'))
		return err
	}}})
}

// progressFile contains the UpdateState of a running update.
const progressFile = ondisk.RunMark + "update.json"

// stale is the age from which progressFile counts as left by an interrupted update.
const stale = 10 * time.Minute

// begin records the current phase. out receives the phase's status messages.
func (u *job) begin(phase string, out func(text string)) {
	u.out, u.state.Phase, u.state.Detail = out, phase, ""
	u.save()
}

// say reports progress to the operator and to `firstboot status`.
func (u *job) say(format string, args ...any) {
	u.state.Detail = fmt.Sprintf(format, args...)
	if f := u.fetch; f != nil {
		u.state.Fetched, u.state.Total, u.state.LeftSeconds = f.fetched, f.total, int64(f.remaining.Seconds())
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
		u.e.Log.Warn("recording the progress of the update", "error", err)
	}
}

// forget removes progressFile when the update ends.
func (u *job) forget() {
	if err := u.e.Remove(progressFile); err != nil {
		u.e.Log.Warn("removing the progress of the update", "error", err)
	}
}

// Status returns the state of this machine's update, or nil if there is nothing to report.
func Status(e *machine.Env) *ondisk.UpdateState {
	var s ondisk.UpdateState
	if err := json.Unmarshal(e.Contents(progressFile), &s); err == nil {
		if e.Now().Sub(s.Updated).Abs() > stale { // a clock that was ahead may have been set since
			s.Status = ondisk.UpdateInterrupted
		}
		return &s
	}
	return settled(e)
}

// readPlan returns the plan of the last update, or "" if there is none. An unreadable one may
// belong to an update that is not finished.
func readPlan(e *machine.Env) (string, error) {
	b, err := e.ReadIfExists(planFile)
	if err != nil {
		return "", run.Advise(fmt.Errorf("reading which image was installed last: %w", err), "check the disk (`journalctl -k`)")
	}
	return strings.TrimSpace(string(b)), nil
}

// settled returns the state of the last update. It ignores a running one.
func settled(e *machine.Env) *ondisk.UpdateState {
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
	s := ondisk.UpdateState{Status: ondisk.UpdateInterrupted, Root: otherRoot(root)}
	all, err := entries(e)
	if err != nil {
		return nil
	}
	for _, x := range entriesFor(all, s.Root) {
		switch {
		case x.Trial && x.Left == 0:
			s.Status = ondisk.UpdateFailed
		case x.Trial:
			s.Status = ondisk.UpdatePending
		}
	}
	return &s
}

// rootOf returns the label of the running system's root partition, or "".
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
