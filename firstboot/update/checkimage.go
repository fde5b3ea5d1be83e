package update

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// system is the state of the machine before an update.
type system struct {
	image  ondisk.ImageInfo // of the running system
	disk   *machine.Disk
	root   string // label of its root partition
	target *machine.Partition
	boot   []entry
	active *site.Active // nil if there is no Site
}

// readSystem reads the machine's state. If the machine cannot be updated, the error joins the reasons,
// as far as they can be found.
func readSystem(e *machine.Env) (*system, error) {
	s := &system{}
	var err error
	if s.image, err = site.ImageInfo(e); err != nil {
		return nil, err
	}
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if s.image.Plan == "" {
		return nil, errors.New("this machine was not booted from an edgebake image")
	}
	if len(s.image.Boards) > 0 {
		bad("this machine is a board whose own firmware starts the kernel (%s), and such boards cannot be updated: flash it again", strings.Join(s.image.Boards, ", "))
	}
	if s.active = site.IfAny(e, s.image); e.Exists(controlplane.Pods[0]) && !s.controlPlane() {
		bad("this machine runs a control plane without the Site of a control-plane node: first boot would not write its pods for the new system; update it with kubeadm, or flash it again")
	}
	if s.disk, err = e.LookUpRootDisk(); err != nil {
		return nil, err
	}
	s.root = rootOn(s.disk)
	if s.root != ondisk.LabelRootA && s.root != ondisk.LabelRootB {
		return nil, fmt.Errorf("the system runs from partition %s (%q), which is neither %s nor %s", s.disk.Root, s.root, ondisk.LabelRootA, ondisk.LabelRootB)
	}
	if s.target = s.disk.Part(otherRoot(s.root)); s.target == nil {
		bad("the disk has no partition %s (disk.reserve of the Image): flash it with an image that has one", otherRoot(s.root))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if s.boot, err = entries(e); err != nil {
		return nil, err
	}
	own := entriesFor(s.boot, s.root)
	switch {
	case len(own) == 0:
		bad("there is no boot entry for %s, from which this system runs: after a failed update, the machine could not return to it", s.root)
	case own[0].Trial:
		return nil, run.Advise(fmt.Errorf("the running system is still on trial (%s)", own[0].Name), "wait until the Node is Ready: the machine then keeps this system")
	case own[0].Version < 0:
		bad("the boot entry %s has no version line as edgebake writes it, so the loader would prefer this system to a new one: add the line `version 1` to it", own[0].Name)
	}
	if member.Redirected(e) && (s.active == nil || !s.active.Site.OpenYurt()) {
		bad("this node was converted to an OpenYurt node, but nodeType in its Site is native: the new system would have no yurthub; set nodeType and nodePool in the Site, or run `firstboot revert` first")
	}
	return s, errors.Join(errs...)
}

// checkMachine returns all reasons why the machine cannot be updated to an image.
func (s *system) checkMachine(next ondisk.ImageInfo, size int64) error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	switch {
	case !planForm.MatchString(next.Plan):
		bad("the image's plan ID %q is invalid", next.Plan)
	case ondisk.ESPSystemDir(next.Plan) == ondisk.ESPSystemDir(s.image.Plan):
		bad("the image's plan ID %s begins like the running system's, so its kernel would replace the running one: build the image again with another name", next.Plan)
	}
	if next.Arch != s.image.Arch {
		bad("the image is for %s, this machine is %s", next.Arch, s.image.Arch)
	}
	if len(next.Boards) > 0 {
		bad("the image is for boards whose own firmware starts the kernel (%s)", strings.Join(next.Boards, ", "))
	}
	if next.UpdateSerial < s.image.UpdateSerial {
		bad("the image has serial %d, but this machine rejects serials below %d, that of its own image: build it with a higher updates.serial", next.UpdateSerial, s.image.UpdateSerial)
	}
	if size > s.target.Size {
		bad("the image's root file system has %s, but partition %s has only %s: make it smaller, or flash the machine again", bytesize.MiB(size), s.target.Label, bytesize.MiB(s.target.Size))
	}
	if form(next) != form(s.image) {
		bad("the image runs yurthub in another form (%s) than this machine (%s): flash the machine again", form(next), form(s.image))
	}
	if s.active != nil {
		errs = append(errs, s.checkSite(next), s.checkControlPlane(next))
	}
	return errors.Join(errs...)
}

// planForm is the format of a plan's ID, which is the name of a directory on the EFI system
// partition.
var planForm = regexp.MustCompile(`^[0-9a-f]{16,64}$`)

// checkSite returns an error if the image does not support this machine's Site.
func (s *system) checkSite(next ondisk.ImageInfo) error {
	own := s.active.Site
	version := strings.TrimPrefix(own.APIVersion, "edgebake.io/")
	if !slices.Contains(next.SiteVersions, version) {
		return fmt.Errorf("the image supports Sites of version %s, but this machine's Site has version %s", strings.Join(next.SiteVersions, ", "), version)
	}
	if next.SiteFields != nil {
		if beyond := own.FieldsBeyond(next.SiteFields); len(beyond) > 0 {
			return fmt.Errorf("the image does not know these fields of this machine's Site: %s", strings.Join(beyond, ", "))
		}
	}
	return siteconf.CheckSite(siteconf.Image{Info: next}, own, nil).Err()
}

func form(i ondisk.ImageInfo) string {
	if i.Yurthub == nil {
		return "none"
	}
	return i.Yurthub.Form
}
