package site

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/apply"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Phase finds the Site, stores it in reader.Last for the pass, and applies its settings.
// beforeKubelet, which may be nil, runs before the start of a kubelet that has waited for the
// settings.
func Phase(reader *Reader, beforeKubelet func(context.Context, *machine.Env, *configs.Site) error) run.Phase {
	p := &sitePhase{reader: reader, beforeKubelet: beforeKubelet}
	return run.Phase{Name: "site-config", Doc: "the Site's settings are in place", Timeout: 5 * time.Minute, Check: p.check, Run: p.run}
}

// sitePhase is the phase site-config of one pass.
type sitePhase struct {
	reader        *Reader
	beforeKubelet func(context.Context, *machine.Env, *configs.Site) error
	// rewriteFailed means that the slot of an enrolled node could not be rewritten in this pass.
	rewriteFailed bool
}

func (p *sitePhase) run(ctx context.Context, e *machine.Env) error {
	err := rewriteSlot(e)
	if p.rewriteFailed = err != nil && member.HasCredentials(e); p.rewriteFailed {
		// The node has an active Site, and other work must go on.
		e.Log.Warn("the slot is not changed", "error", err)
	} else if err != nil {
		return err
	}
	a, ignored, err := takeSticks(e, p.reader)
	if ignored != nil {
		e.Note("%s", machine.OneLine(ignored))
	}
	if errors.Is(err, ErrNoSite) {
		a, err = waitForSite(ctx, e, p.reader, err)
	}
	if err != nil {
		return err
	}
	if err := applySite(ctx, e, a); err != nil {
		return err
	}
	return startHeldKubelet(ctx, e, a.Site, p.beforeKubelet)
}

func (p *sitePhase) check(ctx context.Context, e *machine.Env) (run.Verdict, error) {
	a, err := p.reader.read(e)
	if s, ignored := newStick(e, p.reader.Image, a); s != nil {
		return run.Todo, nil
	} else if ignored != nil {
		e.Note("%s", machine.OneLine(ignored))
	}
	if errors.Is(err, ErrNoSite) {
		return run.Todo, nil // Run waits for a Site
	}
	if !p.rewriteFailed && (err == nil && a.mustRewrite || err != nil && pendingRewrite(e) != nil) {
		return run.Todo, nil // wipe other machines' Sites, even if this machine's is invalid
	}
	if err != nil {
		return run.Todo, err
	}
	if !a.IsApplied(e) || !stampedSaved(e, a) || e.Text("/proc/sys/kernel/hostname") != a.Hostname {
		return run.Todo, nil
	}
	if held, err := kubeletHeld(ctx, e); held || err != nil {
		return run.Todo, err
	}
	noteFailedUnits(ctx, e)
	return run.Done, nil
}

// waitForSite waits until a Site is stamped or brought on a stick. none is the error of the slot,
// which has no Site.
func waitForSite(ctx context.Context, e *machine.Env, reader *Reader, none error) (*Active, error) {
	why := ""
	if isOthers(none) {
		why = "; " + machine.OneLine(none)
	}
	e.Waiting("a Site%s: stamp one onto this disk, or plug in a stick named EDGEBAKE that holds site.yaml or inventory.yaml. This machine: %s", why, e.Facts())
	var found *Active
	var siteErr error
	err := e.Poll(ctx, run.Standstill, func() (bool, error) {
		if err := rewriteSlot(e); err != nil {
			return false, err
		}
		var ignored error
		if found, ignored, siteErr = takeSticks(e, reader); ignored != nil {
			e.Waiting("a Site; %s. This machine: %s", machine.OneLine(ignored), e.Facts())
		}
		return !errors.Is(siteErr, ErrNoSite), nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		if err = ErrNoSite; isOthers(siteErr) {
			err = siteErr
		}
	}
	if err != nil {
		return nil, run.Advise(err, "stamp a Site: edgebake stamp IMAGE SITE; or plug in a stick named EDGEBAKE that holds site.yaml or inventory.yaml")
	}
	return found, siteErr
}

// applySite applies the Site's settings to the machine.
func applySite(ctx context.Context, e *machine.Env, a *Active) error {
	if !a.IsApplied(e) {
		if err := network.EndTrial(ctx, e, e.Exists(manifestFile)); err != nil {
			return err
		}
		if member.Enrolled(e) == nil {
			if err := a.otherMachine(e, member.NodeName(e)); err != nil {
				return err
			}
		}
		if err := fits(e, a); err != nil {
			return err
		}
		target := applier(e)
		target.Activate = func(ctx context.Context, c apply.Changes) error { return ActivateChanges(ctx, e, c) }
		if _, err := apply.Apply(ctx, target, a.config); err != nil {
			if bad := (*apply.Refused)(nil); errors.As(err, &bad) {
				return run.NeedsPerson(err, "correct the Site's users or its Ignition config, and stamp the Site again or bring it on a stick")
			}
			return fmt.Errorf("applying the Site's settings: %w", err)
		}
		if err := saveSite(e, a); err != nil {
			return err
		}
	} else if err := saveStamped(e, a); err != nil { // the Site was stamped again, unchanged
		return err
	}
	if err := e.SetHostname(a.Hostname); err != nil {
		return fmt.Errorf("setting the host name to %s: %w", a.Hostname, err)
	}
	// Write this file last: it tells Check that the settings are in place.
	if _, err := e.Write(AppliedFile, []byte(a.applied()+"\n"), machine.Mode(0o600)); err != nil {
		return fmt.Errorf("recording which Site is applied: %w", err)
	}
	return nil
}

// startHeldKubelet starts kubelet if it has waited for the Site's settings. It calls before first.
func startHeldKubelet(ctx context.Context, e *machine.Env, site *configs.Site, before func(context.Context, *machine.Env, *configs.Site) error) error {
	if held, err := kubeletHeld(ctx, e); !held || err != nil {
		return err
	}
	if before != nil {
		if err := before(ctx, e, site); err != nil {
			return err
		}
	}
	if err := e.Unit(ctx, "start", ondisk.UnitKubelet); err != nil {
		return fmt.Errorf("starting kubelet: %w", err)
	}
	return nil
}

// kubeletHeld reports whether the kubelet of an enrolled node is inactive. After an update, its unit
// waits for the Site's settings.
func kubeletHeld(ctx context.Context, e *machine.Env) (bool, error) {
	if !member.EnrolledOrEarly(e) {
		return false, nil
	}
	state, err := e.UnitState(ctx, ondisk.UnitKubelet)
	return err == nil && state == "inactive", err
}

// saveSite keeps a copy of the Site without its token, in case the slot is damaged. The copy
// contains the Wi-Fi key, which is also in the settings on this disk.
func saveSite(e *machine.Env, a *Active) error {
	if err := saveStamped(e, a); err != nil {
		return err
	}
	doc, err := withoutCredentials(a.Site)
	if err == nil {
		err = e.WriteFile(ondisk.SiteCopy, doc, machine.Mode(0o600))
	}
	if err == nil && a.ignition != nil {
		// The config.ign of an old slot may contain the token.
		err = e.WriteFile(IgnitionCopy, slot.Hide(a.ignition, a.Site.Credentials.Token.Reveal()), machine.Mode(0o600))
	} else if err == nil {
		err = e.Remove(IgnitionCopy)
	}
	if err != nil {
		return fmt.Errorf("keeping a copy of the Site: %w", err)
	}
	return nil
}

// stampedSaved reports whether StampedCopy has the Site's date.
func stampedSaved(e *machine.Env, a *Active) bool { return max(a.Stamped, 0) == copyStamped(e) }

// saveStamped saves the Site's date. Without the date, an older Site could replace the copy.
func saveStamped(e *machine.Env, a *Active) error {
	if stampedSaved(e, a) {
		return nil
	}
	if err := writeSeconds(e, StampedCopy, a.Stamped); err != nil {
		return fmt.Errorf("saving the date of the Site: %w", err)
	}
	return nil
}

// withoutCredentials encodes the Site as it stays in the slot after the join: without token and
// keys. The secrets of settings (a Wi-Fi key, a password hash) stay in it: otherwise the next boot
// would see a changed Site.
func withoutCredentials(site *configs.Site) ([]byte, error) {
	s := *site
	s.Credentials = configs.Credentials{}
	return configs.EncodeSlot(&s)
}

func applier(e *machine.Env) apply.Target {
	return apply.Target{
		Root: e.Root, Manifest: manifestFile, Originals: originalsDir,
		WriteFile: e.WriteFile, Mkdir: e.Mkdir, Symlink: e.Symlink, Link: e.Link, Remove: e.Remove,
		Unit: e.Unit,
	}
}

const (
	// jobsTimeout limits the wait for all jobs of one Apply.
	jobsTimeout = 2 * time.Minute
	// jobLeast is long enough for systemd to queue a job.
	jobLeast = 2 * time.Second
)

// jobs runs the jobs of units after one Apply. Each unit gets its job, even if earlier jobs took
// all the time.
type jobs struct {
	e   *machine.Env
	end time.Time
}

// unit runs the job verb of a unit. A failed job only adds a note, because the machine joins
// anyway; an error means that ctx ended.
func (j jobs) unit(ctx context.Context, verb, unit, failing string) error {
	patience := max(jobLeast, min(machine.JobTimeout, j.end.Sub(j.e.Now())))
	err := j.e.BoundedUnit(ctx, patience, verb, unit)
	if err != nil && ctx.Err() == nil {
		j.e.Log.Warn(failing, "unit", unit, "verb", verb, "error", err)
		j.e.Note("%s (%s): %s", failing, unit, machine.OneLine(err))
	}
	return ctx.Err()
}

// noteFailedUnits adds a note about the Site's units that have failed.
func noteFailedUnits(ctx context.Context, e *machine.Env) {
	units, err := applier(e).EnabledUnits()
	if err != nil {
		e.Log.Warn("looking for the units of the Site", "error", err)
	}
	for _, u := range units {
		if state, err := e.UnitState(ctx, u); err == nil && state == "failed" {
			e.Note("a unit of the Site has failed (%s): `journalctl -u %s` on the machine shows why", u, u)
		}
	}
}

// ActivateChanges puts changed files into effect on the running system. A failed unit only adds a
// note. An error means that ctx ended or that systemd cannot reload.
func ActivateChanges(ctx context.Context, e *machine.Env, c apply.Changes) error {
	j := jobs{e, e.Now().Add(jobsTimeout)}
	if len(c.Units) > 0 {
		if err := e.Unit(ctx, "daemon-reload", ""); err != nil {
			return fmt.Errorf("reloading systemd: %w", err)
		}
	}
	if err := j.restartServices(ctx, c.Paths); err != nil {
		return err
	}
	for _, p := range c.Paths {
		if (strings.HasPrefix(p, "/etc/sysctl.d/") || strings.HasPrefix(p, "/etc/modules-load.d/")) && !e.Exists(p) {
			e.Log.Warn("a removed file stays in effect until the next boot", "file", p)
		}
	}
	if isUnder(c.Paths, "/etc/systemd/network/") {
		network.DeleteDevices(ctx, e, c.Paths)
		if err := network.Reload(ctx, e); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			e.Log.Warn("networkd has not reloaded the network settings yet", "error", err) // the network phase tries again
		}
	}
	for _, u := range network.WPAUnits(c.Paths) {
		if err := j.unit(ctx, network.WPAVerb(e, u), u, "the Wi-Fi settings of the Site may take effect at the next boot only"); err != nil {
			return err
		}
	}
	for _, u := range c.Units {
		if verb := verbFor(u); verb != "" {
			if err := j.unit(ctx, verb, u.Name, "a unit of the Site is not in the state that the Site sets"); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// isUnder reports whether one of the paths is in one of the directories.
func isUnder(paths []string, dirs ...string) bool {
	return slices.ContainsFunc(paths, func(p string) bool {
		return slices.ContainsFunc(dirs, func(dir string) bool { return strings.HasPrefix(p, dir) })
	})
}

// restartServices restarts services whose settings have changed, except udev, which notices
// changes, and firewalls: reloading them would flush other rules, such as kube-proxy's.
func (j jobs) restartServices(ctx context.Context, changed []string) error {
	for _, r := range []struct {
		dirs       []string
		verb, unit string
	}{
		{[]string{"/etc/modules-load.d/"}, "restart", "systemd-modules-load.service"},
		{[]string{"/etc/sysctl.d/"}, "restart", "systemd-sysctl.service"},
		{[]string{"/etc/systemd/journald.conf"}, "restart", "systemd-journald.service"},
		{[]string{"/etc/systemd/resolved.conf"}, "restart", "systemd-resolved.service"},
		{[]string{"/etc/systemd/timesyncd.conf"}, "restart", "systemd-timesyncd.service"},
		{[]string{"/etc/containerd/config.toml", "/etc/containerd/conf.d/", ondisk.ProxyEnv}, "try-restart", ondisk.UnitContainerd},
		{[]string{ondisk.ProxyEnv}, "try-restart", ondisk.UnitKubelet},
	} {
		if !isUnder(changed, r.dirs...) {
			continue
		}
		if err := j.unit(ctx, r.verb, r.unit, "a setting of the Site may take effect at the next boot only"); err != nil {
			return err
		}
	}
	return nil
}

// verbFor returns the systemd job that a changed unit needs, or "" for none.
func verbFor(u apply.UnitChange) string {
	switch {
	case u.Name == ondisk.UnitFirstboot:
		return ""
	case u.Masked || u.Disabled:
		return "stop"
	case u.Enabled && u.Changed:
		return "restart"
	case u.Enabled:
		return "start"
	case u.Changed:
		return "try-restart"
	}
	return ""
}

// fits rejects a Site that requires something that this system lacks, before any part of the Site
// is applied.
func fits(e *machine.Env, a *Active) error {
	baked, err := apply.NewBaked(applier(e))
	if err != nil {
		return fmt.Errorf("checking the Site against this system: %w", err)
	}
	if probs := siteconf.CheckFiles(siteconf.Image{Info: a.Image, Root: baked}, a.Site, a.ignition); probs != nil {
		return rejectSite(probs)
	}
	return nil
}
