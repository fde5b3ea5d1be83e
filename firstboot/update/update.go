// Package update replaces the system of a machine by that of another image. The image is
// read by ranges: chunks that are on the machine's own disk are copied, and the others are
// fetched. The new system is written beside the one that runs, into the other root
// partition, and boots on trial: one that does not make the Node Ready is left again.
//
// Nothing that the running system needs is changed. The single point from which on the
// loader prefers the new system is when its boot entry appears. Before the first byte of
// the other root changes, that root's own boot entry goes.
package update

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/overlays/node"
)

// Files of an update, on DATA.
const (
	stateDir = ondisk.StateDir + "/update"
	// spoolFile has what was fetched of the image's EFI system partition, each chunk in its
	// place.
	spoolFile = stateDir + "/esp"
	lockFile  = "/run/edgebake-update.lock"
)

// Options of an update.
type Options struct {
	// Image is a file, or an http or https URL.
	Image string
	// Unsigned accepts an image without a signature where the machine's own names no keys.
	Unsigned bool
	// NoReboot leaves the restart, with which the new system begins, to a person.
	NoReboot bool
}

// ErrAlready is an image that the machine runs.
var ErrAlready = errors.New("there is nothing to do")

// Update writes the system of an image into the other root partition and restarts the
// machine with it. It may be killed at any point; run again, it continues.
func Update(ctx context.Context, e *machine.Env, o Options, tell func(run.Step)) error {
	release, err := e.Lock(ctx, lockFile)
	if err != nil {
		return run.Advise(fmt.Errorf("another update is at work on this machine: %w", err), "wait until it is done")
	}
	defer release()
	if err := run.Idle(ctx, e); err != nil {
		return err
	}
	sys, err := lookAt(e)
	if err != nil {
		return err
	}
	var src Source
	err = retry(ctx, e, func() (err error) {
		src, err = openSource(ctx, e, o.Image, sys.proxy())
		return err
	})
	if err != nil {
		return err
	}
	defer src.Close()
	u, err := open(ctx, e, sys, src, o)
	if err != nil {
		return fmt.Errorf("image %s: %w", o.Image, err)
	}
	defer u.close()
	c := run.NewChange(e, "update", run.Evidence{}, tell)
	c.Onward = true
	return c.CarryOut(ctx, u.phases(o))
}

// proxy is how the machine reaches servers.
func (s *system) proxy() []string {
	if s.active == nil {
		return nil
	}
	return node.ProxyEnv(s.active.Site)
}

// job is one update on its way.
type job struct {
	e     *machine.Env
	sys   *system
	src   Source
	next  ondisk.ImageInfo
	image *update.Image
	root  *chunk.Part
	esp   *chunk.Part
	fetch *fetcher
	open  []machine.Device
	ready bool // seeds are known
}

// open reads what the image says of itself, and rejects one that this machine does not take.
func open(ctx context.Context, e *machine.Env, sys *system, src Source, o Options) (*job, error) {
	u := &job{e: e, sys: sys, src: src}
	err := retry(ctx, e, func() (err error) {
		u.image, err = update.Open(readerAt{ctx, src}, src.Size())
		return err
	})
	if err != nil {
		return nil, err
	}
	switch keys := sys.image.UpdateKeys; {
	case len(keys) > 0:
		if _, err := slot.VerifyIndex(u.image.Body, u.image.Signature, keys); err != nil {
			return nil, err
		}
	case !o.Unsigned:
		return nil, run.Advise(errors.New("this machine's image names no keys (updates.keys), so nobody can tell whose image this is"), "take it all the same with --unsigned, if you know where it comes from")
	}
	if err := u.image.Decode(); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(u.image.Index.ImageInfo, &u.next); err != nil || u.next.Version < 1 {
		return nil, errors.New("its image.json is damaged: build it again")
	}
	if v := u.next.Version; v > ondisk.ImageInfoVersion {
		return nil, fmt.Errorf("a newer edgebake made it: its image.json has version %d, and this machine knows %d", v, ondisk.ImageInfoVersion)
	}
	u.root, u.esp = u.image.Index.Find(ondisk.LabelRootA), u.image.Index.Find(ondisk.LabelESP)
	if u.root == nil || u.esp == nil {
		return nil, fmt.Errorf("its index lacks partition %s or %s: build it again", ondisk.LabelRootA, ondisk.LabelESP)
	}
	if u.next.Plan == sys.image.Plan {
		return nil, fmt.Errorf("%w: this machine runs it", ErrAlready)
	}
	if err := sys.admit(u.next, u.root.Size); err != nil {
		return nil, err
	}
	u.fetch, err = newFetcher(e, u.image, src)
	return u, err
}

// retry calls f until it succeeds, fails for good, or was tried often.
func retry(ctx context.Context, e *machine.Env, f func() error) error {
	pause := time.Second
	for n := 0; ; n++ {
		err := f()
		if err == nil || ctx.Err() != nil || n == 5 || errors.As(err, new(*final)) || errors.Is(err, update.ErrNoIndex) {
			return err
		}
		if err := e.Sleep(ctx, pause); err != nil {
			return err
		}
		pause *= 2
	}
}

func (u *job) close() {
	u.fetch.close()
	for _, d := range u.open {
		d.Close()
	}
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

// phases are the steps of an update, in an order that leaves a machine that boots after
// each. An update that was interrupted begins with the first again: what is in place by
// then stays, and is not fetched again.
func (u *job) phases(o Options) []run.Phase {
	target := u.sys.target.Label
	phases := []run.Phase{
		{Name: "retire", Doc: "no boot entry names " + target + " while it is written", Timeout: 5 * time.Minute,
			Run: func(_ context.Context, e *machine.Env) error { return retire(e, target, u.next.Plan) }},
		{Name: "root", Doc: target + " has the root file system of the image", Timeout: 24 * time.Hour, Run: u.writeRoot},
		{Name: "esp", Doc: "the new system boots on trial, before the one that runs", Timeout: 24 * time.Hour, Run: u.writeBoot},
	}
	if !o.NoReboot {
		phases = append(phases, run.Phase{Name: "reboot", Doc: "the machine restarts", Timeout: time.Minute,
			Run: func(ctx context.Context, e *machine.Env) error {
				return e.Run(ctx, machine.Cmd{Args: []string{"systemctl", "reboot"}})
			}})
	}
	return phases
}

// scan finds the chunks on the machine's own disk, once.
func (u *job) scan(ctx context.Context) error {
	if u.ready {
		return nil
	}
	for _, label := range []string{u.sys.target.Label, ondisk.LabelESP, u.sys.root} { // what comes last is kept
		u.e.Waiting("reading %s", label)
		d, err := u.device(label, false)
		if err != nil {
			return err
		}
		if err := u.fetch.seeds.scan(ctx, d, u.sys.disk.Part(label).Size); err != nil {
			return fmt.Errorf("reading %s: %w", label, err)
		}
	}
	u.ready = true
	return nil
}

func (u *job) writeRoot(ctx context.Context, e *machine.Env) error {
	u.fetch.tell = e.Waiting
	if err := u.scan(ctx); err != nil {
		return err
	}
	d, err := u.device(u.sys.target.Label, true)
	if err != nil {
		return err
	}
	return u.fetch.assemble(ctx, u.root, d)
}

// entryFile is the boot entry of the new system.
func (u *job) entryFile() string {
	letter := strings.ToLower(strings.TrimPrefix(u.sys.target.Label, "ROOT-"))
	return fmt.Sprintf("%s/edgebake-%s+%d.conf", entriesDir, letter, tries)
}

// writeBoot brings kernel, initrd and boot entry. The entry comes last.
func (u *job) writeBoot(ctx context.Context, e *machine.Env) error {
	u.fetch.tell = e.Waiting
	if err := u.scan(ctx); err != nil {
		return err
	}
	if err := e.Mkdir(stateDir, machine.Mode(0o700)); err != nil {
		return err
	}
	spool, err := e.OpenDevice(spoolFile, true)
	if err != nil {
		return err
	}
	defer spool.Close()
	view := update.NewView(u.esp, func(k int) ([]byte, error) { return u.espChunk(ctx, spool, k) })
	files, err := update.ReadSystem(view, u.next.Plan)
	if err != nil {
		return fmt.Errorf("reading the image's EFI system partition: %w", err)
	}
	if err := u.spoolFiles(ctx, spool, files); err != nil {
		return err
	}
	if err := u.roomOnESP(e, files); err != nil {
		return err
	}
	var list []espFile
	for _, f := range files.Files {
		list = append(list, espFile{path.Join(espDir, f.Path), func(w io.Writer) error { return files.Copy(w, f) }})
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
	// From here on the loader prefers the new system.
	write := func(w io.Writer) error {
		_, err := io.WriteString(w, entry)
		return err
	}
	if err := install(ctx, e, []espFile{{u.entryFile(), write}}); err != nil {
		return err
	}
	return e.Remove(spoolFile)
}

// espChunk returns a chunk of the image's EFI system partition, from this machine's disk,
// from what was fetched before, or from where the image is.
func (u *job) espChunk(ctx context.Context, spool machine.Device, k int) ([]byte, error) {
	c := u.esp.Chunks[k]
	if b, ok := u.fetch.local(c); ok {
		return bytes.Clone(b), nil
	}
	off := u.offset(k)
	if there, err := u.fetch.inPlace(spool, off, c); err == nil && there {
		return bytes.Clone(u.fetch.buf[:c.Size]), nil
	}
	var out []byte
	err := u.fetch.fetch(ctx, u.esp, []int{k}, func(_ int, b []byte) error {
		out = bytes.Clone(b)
		_, err := spool.WriteAt(b, off)
		return err
	})
	return out, err
}

// offset is where chunk k of the image's EFI system partition begins.
func (u *job) offset(k int) (off int64) {
	for _, c := range u.esp.Chunks[:k] {
		off += c.Size
	}
	return off
}

// spoolFiles fetches what this machine lacks of the system's files, in ranges.
func (u *job) spoolFiles(ctx context.Context, spool machine.Device, files *update.SystemFiles) error {
	chunks, err := files.Chunks(u.esp)
	if err != nil {
		return err
	}
	var need []int
	for _, k := range chunks {
		c := u.esp.Chunks[k]
		if _, ok := u.fetch.local(c); ok {
			continue
		}
		if there, err := u.fetch.inPlace(spool, u.offset(k), c); err == nil && there {
			continue
		}
		need = append(need, k)
	}
	u.fetch.expect(u.esp, need)
	return u.fetch.fetch(ctx, u.esp, need, func(k int, b []byte) error {
		_, err := spool.WriteAt(b, u.offset(k))
		return err
	})
}

// roomOnESP checks that the system's files fit.
func (u *job) roomOnESP(e *machine.Env, files *update.SystemFiles) error {
	need := int64(1 << 20)
	for _, f := range files.Files {
		need += f.Size // beside one of that name, which it replaces once it is whole
	}
	free, err := e.FSFree(espDir)
	if err != nil {
		return fmt.Errorf("reading the room on the EFI system partition: %w", err)
	}
	if free < need {
		return fmt.Errorf("the EFI system partition has %d MiB free, and the new kernel and initrd need %d MiB", free>>20, need>>20)
	}
	return nil
}

// makeEntry makes the boot entry for this machine's disk.
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
			return "", fmt.Errorf("the kernel does not tell the GUID of partition %s", own.Name)
		}
	}
	all, err := entries(e)
	if err != nil {
		return "", err
	}
	return makeEntry(text, guids, nextVersion(all))
}
