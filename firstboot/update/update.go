// Package update replaces the system of a machine with that of another image. It reads the image in
// ranges: chunks that are on the machine's disk are copied, the others are downloaded. It writes
// the new system to the other root partition, which boots on trial: if the Node does not become
// Ready, the old system boots again.
//
// The files of the running system are not changed. The other root's boot entry is removed before
// that root is changed. From the moment the new boot entry exists, the loader prefers the new
// system.
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

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Dir is the directory with the files of an update, on DATA. Finish removes it.
const Dir = ondisk.StateDir + "/update"

const (
	// spoolFile contains the downloaded chunks of the image's EFI system partition, each at its own
	// offset.
	spoolFile = Dir + "/esp"
	// planFile contains the plan of the new image.
	planFile = Dir + "/plan"
	// failedFile lists the plans of failed updates, one per line. No automatic update installs them
	// again.
	failedFile = ondisk.StateDir + "/update-failed"
	// offlineFile exists if no API server was reachable when the update made the new system the
	// next one to boot.
	offlineFile = Dir + "/offline"
)

// ResetFiles lists the files that a reset removes in addition to Dir.
var ResetFiles = []string{OrderFile, failedFile}

// Options are the options of an update.
type Options struct {
	// Image is a file, an http or https URL, or Stick.
	Image string
	// Unsigned accepts an image without a signature, if the machine's own image has no keys.
	Unsigned bool
	// NoReboot leaves the restart into the new system to the operator.
	NoReboot bool
	// NoDrain skips the drain before a restart with another minor version of Kubernetes.
	NoDrain bool
	// byItself marks an automatic update. It rejects older, equal and failed images, respects the
	// update window, and announces the restart.
	byItself bool
	// Rate is the maximum number of bytes downloaded per second, MaxBytes the maximum in total. 0
	// means no limit. A metered Site requires MaxBytes.
	Rate, MaxBytes int64
	// Spent is the part of MaxBytes that earlier attempts have downloaded. Record, which may be
	// nil, is called before more bytes than the recorded number are downloaded, and at the end.
	Spent  int64
	Record func(spent int64) error
	// Golden is the golden digest that the image must have. If empty, any digest is accepted.
	Golden string
	// Admit and Commit are set if the cluster has ordered the update. Admit is called with the
	// description of the signed image, and may reject it.
	Admit func(next ondisk.ImageInfo) error
	// Commit is called with the image's plan after the download. If it fails, no
	// boot entry is written. It calls say every few minutes.
	Commit func(ctx context.Context, plan string, say func(format string, args ...any)) error
}

// ordered reports whether the cluster has ordered the update.
func (o Options) ordered() bool { return o.Commit != nil }

// remote reports whether the image is on a server.
func (o Options) remote() bool { return strings.Contains(o.Image, "://") }

// busy means that an update cannot start or continue now, but may do so later.
type busy struct{ error }

func (b *busy) Unwrap() error { return b.error }

// Update writes the system of an image to the other root partition and restarts the machine. If it
// is killed at any point, running it again continues the update.
func Update(ctx context.Context, e *machine.Env, o Options, tell func(run.Step)) error {
	unlock, err := run.Exclusive(ctx, e)
	if err != nil {
		return &busy{err}
	}
	err = updateLocked(ctx, e, o, tell)
	var unfinished error
	if err != nil {
		unfinished = endUpdate(context.WithoutCancel(ctx), e, endingOf(e))
	}
	unlock()
	if unfinished != nil {
		e.Log.Warn("ending the update", "error", unfinished)
		// systemd restarts UnitUpdateFinish until the Node is schedulable and the Lease is
		// released.
		if err := e.BoundedUnit(context.WithoutCancel(ctx), machine.JobTimeout, "start", ondisk.UnitUpdateFinish); err != nil {
			e.Log.Warn("ending the update", "error", err)
		}
	}
	return err
}

// updateLocked is Update, while the lock of run.Exclusive is held. After an error, the caller
// calls endUpdate.
func updateLocked(ctx context.Context, e *machine.Env, o Options, tell func(run.Step)) error {
	if !o.byItself { // an automatic update has waited for first boot, and may be offline
		if err := run.Idle(ctx, e); err != nil {
			return &busy{err}
		}
	}
	sys, err := readSystem(e)
	if err != nil {
		return err
	}
	if o.remote() && o.MaxBytes == 0 && sys.active != nil && sys.active.Site.IPVS.Profile == "metered" {
		return run.Advise(errors.New("this machine's Site has a metered link (ipvs.profile), so an update needs a limit"), "set one, e.g. --max-bytes 20M (`edgebake update cost OLD NEW` computes the need), or update from a file")
	}
	take := openNamed
	if o.Image == Stick {
		take = openStick
	}
	u, err := take(ctx, e, sys, o, tell)
	if errors.Is(err, run.ErrAlready) && pending(e) {
		// Remove the pending system's boot entry; otherwise that system would boot at the next
		// restart.
		if err := retire(e, sys.target.Label, sys.image.Plan); err != nil {
			return err
		}
		err = fmt.Errorf("%w; the update that waited for a restart is cancelled", err)
	}
	if err != nil {
		return err
	}
	defer u.close()
	c := run.NewChange(e, "update", run.Recorded{}, tell)
	c.Onward = true
	u.note = func(text string) { c.Record(run.Step{Name: u.state.Phase, Status: "note", Detail: text}) }
	return c.CarryOut(ctx, u.phases())
}

// openNamed opens the image that the operator names, and checks that this machine accepts it.
func openNamed(ctx context.Context, e *machine.Env, sys *system, o Options, tell func(run.Step)) (*job, error) {
	return open(ctx, e, sys, o, tell, func(u *job) (Source, error) { return openSource(ctx, e, o, u.allow, sys.proxy(), u.say) })
}

// open opens an image and checks that this machine accepts it.
func open(ctx context.Context, e *machine.Env, sys *system, o Options, tell func(run.Step), source func(*job) (Source, error)) (u *job, err error) {
	u = &job{ctx: ctx, e: e, sys: sys, o: o, allow: newAllowance(o), out: func(text string) { tell(run.Step{Name: "admit", Status: "waiting", Detail: text}) }}
	u.state = ondisk.UpdateState{Status: ondisk.UpdateRunning, Root: sys.target.Label, Image: o.Image, Phase: "admit"}
	if u.src, err = source(u); err == nil {
		err = u.checkImage(ctx)
	}
	if err != nil {
		u.close()
		return nil, fmt.Errorf("image %s: %w", o.Image, err)
	}
	return u, nil
}

// proxy returns the Site's environment variables for the proxy.
func (s *system) proxy() []string {
	if s.active == nil {
		return nil
	}
	return siteconf.ProxyEnv(s.active.Site)
}

// job is an update in progress.
type job struct {
	ctx   context.Context // the context of the whole update: views live longer than the phase that made them
	e     *machine.Env
	sys   *system
	o     Options
	allow *allowance
	src   Source
	next  ondisk.ImageInfo
	image *update.Image
	root  *chunk.Part
	esp   *chunk.Part
	fetch *fetcher
	new   *newImages // nil if the machine has all container images
	open  []machine.Device
	spool *spool              // of the EFI system partition
	boot  *update.SystemFiles // nil until they are read

	state ondisk.UpdateState
	out   func(text string) // receives status messages of the current phase
	note  func(text string)
}

// checkImage reads the image's description. It returns an error if this machine does not accept the
// image.
func (u *job) checkImage(ctx context.Context) (err error) {
	if u.image, err = openIndex(ctx, u.src, u.e.Now, u.say); err != nil {
		return err
	}
	switch keys := u.sys.image.UpdateKeys; {
	case len(keys) > 0:
		if _, err := slot.VerifyIndex(u.image.Body, u.image.Signature, keys); err != nil {
			return err
		}
	case !u.o.Unsigned:
		return run.Advise(errors.New("this machine's image names no keys (updates.keys), so the image's signature cannot be verified"), "add --unsigned if you trust its source")
	}
	if err := u.image.Decode(); err != nil {
		return err
	}
	if is := u.image.Index.Golden; u.o.Golden != "" && is != u.o.Golden {
		return fmt.Errorf("its golden digest is %s, and must be %s", is, u.o.Golden)
	}
	if err := json.Unmarshal(u.image.Index.ImageInfo, &u.next); err != nil || u.next.Version < 1 {
		return errors.New("its image.json is damaged: build it again")
	}
	if v := u.next.Version; v > ondisk.ImageInfoVersion {
		return fmt.Errorf("it was made by a newer edgebake: its image.json has version %d, but this machine supports %d", v, ondisk.ImageInfoVersion)
	}
	u.root, u.esp = u.image.Index.Find(ondisk.LabelRootA), u.image.Index.Find(ondisk.LabelESP)
	if u.root == nil || u.esp == nil {
		return fmt.Errorf("its index lacks partition %s or %s: build it again", ondisk.LabelRootA, ondisk.LabelESP)
	}
	if err := u.takesByItself(); err != nil {
		return err
	}
	if u.next.Plan == u.sys.image.Plan {
		return fmt.Errorf("%w: this machine already runs this image", run.ErrAlready)
	}
	if u.o.ordered() {
		if err := u.o.Admit(u.next); err != nil {
			return err
		}
	}
	fits, takes := u.sys.checkMachine(u.next, u.root.Size), u.sys.checkCluster(ctx, u.e, u.next)
	if fits != nil && errors.As(takes, new(*busy)) {
		takes = nil // there is no reason to wait for an image that does not fit
	}
	if err := errors.Join(fits, takes); err != nil {
		return err
	}
	if u.fetch, err = newFetcher(u.e, u.image, u.src, u.say); err == nil {
		u.fetch.fetched = u.image.Head
	}
	return err
}

func (u *job) close() {
	if u.src != nil {
		u.src.Close()
	}
	if u.fetch != nil {
		u.fetch.close()
	}
	if u.spool != nil {
		u.spool.close()
	}
	if u.new != nil {
		u.new.spool.close()
	}
	for _, d := range u.open {
		d.Close()
	}
	if err := u.allow.settle(); err != nil {
		u.e.Log.Warn("recording how much was fetched", "error", err)
	}
	u.forget()
}

// device opens a partition of the machine's disk by its label.
func (u *job) device(label string, write bool) (machine.Device, error) {
	p := u.sys.disk.Part(label)
	if p == nil {
		return nil, fmt.Errorf("disk %s has no partition %s", u.sys.disk.Name, label)
	}
	d, err := u.e.OpenDevice("/dev/"+p.Name, write)
	if err == nil {
		u.open = append(u.open, d)
	}
	return d, err
}

// phases returns the steps of an update. The machine can boot after each of them. An interrupted
// update starts again at the first step, but keeps everything that is in place.
func (u *job) phases() []run.Phase {
	target := u.sys.target.Label
	phases := []run.Phase{
		{Name: "cost", Doc: "the size of the download is known", Timeout: time.Hour, Run: u.cost},
		{Name: "retire", Doc: "no boot entry names " + target + " while it is written", Timeout: 5 * time.Minute,
			Run: func(_ context.Context, e *machine.Env) error {
				if err := noteFailed(e); err != nil {
					return err
				}
				// Do this before planFile is written: a failed system's boot entry must not count
				// as that of the new plan.
				if err := retire(e, target, u.next.Plan); err != nil {
					return err
				}
				if _, err := e.Write(planFile, []byte(u.next.Plan+"\n"), machine.Mode(0o600)); err != nil {
					return fmt.Errorf("recording the plan of the update: %w", err)
				}
				return nil
			}},
		{Name: "root", Doc: target + " has the root file system of the image", Timeout: 24 * time.Hour, Run: u.writeRoot},
	}
	if len(update.Lacks(u.sys.image, u.next)) > 0 {
		phases = append(phases,
			run.Phase{Name: "data", Doc: "the container images that this machine lacks are on its disk", Timeout: 24 * time.Hour, Run: u.stageImages},
			run.Phase{Name: "merge", Doc: "containerd has the new container images, in addition to those of the running system", Timeout: time.Hour, Run: u.mergeImages})
	}
	if u.o.ordered() {
		phases = append(phases, run.Phase{Name: "order", Doc: "the order was not withdrawn", Timeout: 48 * time.Hour, Run: u.commit})
	}
	if u.sys.controlPlane() {
		// These come after all steps that take long or wait for a person, because the other nodes
		// wait for this machine.
		phases = append(phases, run.Phase{Name: "update-lease", Doc: "no other control-plane node is being updated, and etcd is healthy", Timeout: 5 * time.Minute, Run: u.acquireLease},
			run.Phase{Name: "snapshot", Doc: "a snapshot of etcd exists", Timeout: 30 * time.Minute, Run: u.snapshot})
	}
	phases = append(phases, run.Phase{Name: "esp", Doc: "the new system boots next, on trial", Timeout: 24 * time.Hour, Run: u.writeBoot})
	if u.sys.anotherMinor(u.next) && !u.o.NoDrain && !u.o.NoReboot {
		phases = append(phases, run.Phase{Name: "drain", Doc: "the pods that have a controller are evicted", Timeout: drainPatience + 5*time.Minute, Run: u.drain})
	}
	if u.o.byItself {
		phases = append(phases, run.Phase{Name: "announce", Doc: "the restart is announced on the console", Timeout: 2 * restartDelay, Run: u.announce})
	}
	if !u.o.NoReboot {
		phases = append(phases, run.Phase{Name: "reboot", Doc: "the machine restarts", Timeout: time.Minute,
			Run: func(ctx context.Context, e *machine.Env) error {
				return e.Run(ctx, machine.Cmd{Args: []string{"systemctl", "reboot"}})
			}})
	}
	for i := range phases {
		p := &phases[i]
		carryOut := p.Run
		p.Run = func(ctx context.Context, e *machine.Env) error {
			u.begin(p.Name, func(text string) { e.Waiting("%s", text) })
			return carryOut(ctx, e)
		}
	}
	return phases
}

// scan finds the chunks on the machine's own disk.
func (u *job) scan(ctx context.Context) error {
	// Of equal chunks, the last one found is used. The target is first, because it is overwritten.
	for _, label := range []string{u.sys.target.Label, ondisk.LabelESP, u.sys.root} {
		u.say("reading %s", label)
		d, err := u.device(label, false)
		if err != nil {
			return err
		}
		if err := u.fetch.onDisk.scan(ctx, d, u.sys.disk.Part(label).Size); err != nil {
			return fmt.Errorf("reading %s: %w", label, err)
		}
	}
	return nil
}

// cost computes the size of the download. It returns an error if that exceeds Options.MaxBytes. The
// few bytes that cost itself downloads are kept.
func (u *job) cost(ctx context.Context, e *machine.Env) error {
	if err := u.scan(ctx); err != nil {
		return err
	}
	if err := u.readBootFiles(e); err != nil {
		return err
	}
	chunks, err := u.boot.Chunks(u.esp)
	if err != nil {
		return err
	}
	spans := append(u.image.Spans(u.root, u.fetch.onDisk.missing(u.root, "/dev/"+u.sys.target.Name)), u.image.Spans(u.esp, u.spool.missing(chunks))...)
	if err := u.lookAtImages(); err != nil {
		return err
	}
	if n := u.new; n != nil {
		spans = append(spans, u.image.Spans(n.spool.part, n.spool.missing(n.chunks))...)
	}
	need := update.Bytes(spans)
	u.fetch.total = u.fetch.fetched + need
	if !u.o.remote() {
		return nil
	}
	if all := u.allow.spent + u.allow.cost(spans); u.o.MaxBytes > 0 && all > u.o.MaxBytes {
		return fmt.Errorf("the update needs %s, but --max-bytes allows %s", bytesize.MB(all), bytesize.MB(u.o.MaxBytes))
	}
	u.note(fmt.Sprintf("up to %s of %s will be fetched", bytesize.MB(need), bytesize.MB(u.src.Size())))
	return nil
}

func (u *job) writeRoot(ctx context.Context, _ *machine.Env) error {
	d, err := u.device(u.sys.target.Label, true)
	if err != nil {
		return err
	}
	return u.fetch.assemble(ctx, u.root, d)
}

// entryFile returns the path of the new system's boot entry.
func (u *job) entryFile() string {
	letter := strings.ToLower(strings.TrimPrefix(u.sys.target.Label, "ROOT-"))
	return fmt.Sprintf("%s/edgebake-%s+%d.conf", entriesDir, letter, tries)
}

// readBootFiles lists the new system's files on the image's EFI system partition. The chunks that
// it downloads stay in the spool.
func (u *job) readBootFiles(e *machine.Env) (err error) {
	if err := e.Mkdir(Dir, machine.Mode(0o700)); err != nil {
		return err
	}
	if u.spool, err = newSpool(e, u.fetch, u.esp, spoolFile); err != nil {
		return err
	}
	if u.boot, err = update.ReadSystem(u.spool.view(u.ctx), u.next.Plan); err != nil {
		return fmt.Errorf("reading the image's EFI system partition: %w", err)
	}
	return nil
}

// fetchBoot downloads the chunks of the kernel, the initrd and the boot entry that are missing.
func (u *job) fetchBoot(ctx context.Context) error {
	chunks, err := u.boot.Chunks(u.esp)
	if err != nil {
		return err
	}
	return u.spool.fill(ctx, chunks)
}

// commit completes the download and calls Options.Commit, which decides whether the new system may
// boot next.
func (u *job) commit(ctx context.Context, _ *machine.Env) error {
	if err := u.fetchBoot(ctx); err != nil {
		return err
	}
	return u.o.Commit(ctx, u.next.Plan, u.say)
}

// writeBoot installs the kernel, the initrd and, last, the boot entry.
func (u *job) writeBoot(ctx context.Context, e *machine.Env) error {
	files := u.boot
	if err := u.fetchBoot(ctx); err != nil {
		return err
	}
	var list []espFile
	for _, f := range files.Files {
		list = append(list, espFile{path.Join(espDir, f.Path), f.Size, func(w io.Writer) error { return files.Copy(w, f) }})
	}
	if err := install(ctx, e, list); err != nil {
		return err
	}
	text, err := files.Read(files.Entry)
	if err != nil {
		return err
	}
	entry, err := u.makeEntry(e, string(text))
	if err != nil {
		return err
	}
	if err := u.noteOffline(ctx, e); err != nil {
		return err
	}
	if u.sys.anotherMinor(u.next) {
		// The new system reads from this record that /var/lib/kubelet has files of the old kubelet.
		if err := member.SaveKubelet(e, kubeadm.Minor(u.sys.image.Kubernetes)); err != nil {
			return err
		}
	}
	write := func(w io.Writer) error {
		_, err := io.WriteString(w, entry)
		return err
	}
	// As soon as this entry is complete, the loader prefers the new system.
	return install(ctx, e, []espFile{{u.entryFile(), 0, write}})
}

// roomOnESP returns an error if need bytes do not fit on the EFI system partition.
func roomOnESP(e *machine.Env, need int64) error {
	if need == 0 {
		return nil
	}
	need += 1 << 20
	free, err := e.FSFree(espDir)
	if err != nil {
		return fmt.Errorf("reading the free space on the EFI system partition: %w", err)
	}
	if free < need {
		return fmt.Errorf("the EFI system partition has %s free, but the new kernel and initrd need %s: make them smaller, or flash the machine with the new image", bytesize.MiB(free), bytesize.MiB(need))
	}
	return nil
}

// makeEntry returns the boot entry for this machine's disk.
func (u *job) makeEntry(e *machine.Env, text string) (string, error) {
	guids := map[string]string{}
	for _, p := range u.next.Partitions {
		label := p.Label
		switch label {
		case ondisk.LabelRootA:
			label = u.sys.target.Label
		case ondisk.LabelESP, ondisk.LabelData:
		default:
			continue
		}
		own := u.sys.disk.Part(label)
		if own == nil {
			return "", fmt.Errorf("disk %s has no partition %s", u.sys.disk.Name, label)
		}
		if guids[p.GUID] = guidOf(e, own); guids[p.GUID] == "" {
			return "", fmt.Errorf("finding the GUID of partition %s: neither the kernel nor /dev/disk/by-partuuid has it", own.Name)
		}
	}
	all, err := entries(e)
	if err != nil {
		return "", err
	}
	return makeEntry(text, guids, nextVersion(all))
}
