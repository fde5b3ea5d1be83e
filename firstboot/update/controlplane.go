package update

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// controlPlane reports whether edgebake made this machine a control-plane node. First boot writes
// the static pods of the control plane with the versions of the booted image, so each root file
// system has its own versions.
func (s *system) controlPlane() bool { return s.active != nil && s.active.Site.ControlPlane != nil }

// checkControlPlane returns all reasons why a control-plane node cannot run the image, or could not
// return from it to the current image.
func (s *system) checkControlPlane(next ondisk.ImageInfo) error {
	if !s.controlPlane() {
		return nil
	}
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if s.anotherMinor(next) {
		bad("the image has Kubernetes %s and this control-plane node %s: a failed update must be able to return to the old system, but an API server cannot return to an earlier minor version; use an image with the same minor version", next.Kubernetes, s.image.Kubernetes)
	}
	is, was := siteconf.EtcdTag(next, s.active.Site), siteconf.EtcdTag(s.image, s.active.Site)
	if is != was && (etcdMinor(is) == "" || etcdMinor(is) != etcdMinor(was)) {
		bad("the image has etcd %s and this control-plane node %s: a failed update must be able to return to the old system, but etcd cannot read data that another minor version has written; build the image with etcd of the same minor version", is, was)
	}
	if !next.ControlPlaneUpdates {
		bad("the image was made by an older edgebake, whose first boot does not support updates of control-plane nodes: build it again")
	}
	return errors.Join(errs...)
}

var etcdForm = regexp.MustCompile(`^v?([0-9]+\.[0-9]+)\.[0-9]+(?:[-+.]|$)`)

// etcdMinor returns the minor version of an image tag, such as 3.6 for 3.6.8-0, or "" if it has
// none.
func etcdMinor(tag string) string {
	if m := etcdForm.FindStringSubmatch(tag); m != nil {
		return m[1]
	}
	return ""
}

// checkCluster returns the reason why the cluster does not permit the image on this machine. A
// *busy error is temporary.
func (s *system) checkCluster(ctx context.Context, e *machine.Env, next ondisk.ImageInfo) error {
	if !s.controlPlane() {
		return s.checkKubelet(ctx, e, next)
	}
	if err := controlplane.NewUpdateLease(e, s.active.Site).CheckFree(ctx); err != nil {
		return &busy{err}
	}
	return nil
}

// acquireLease prevents updates of other control-plane nodes until releaseLease.
func (u *job) acquireLease(ctx context.Context, e *machine.Env) error {
	lease := controlplane.NewUpdateLease(e, u.sys.active.Site)
	err := lease.Acquire(ctx)
	if err == nil {
		err = lease.CheckEtcd(ctx) // while this machine has the Lease, no other machine stops its etcd member
	}
	if err != nil {
		return &busy{err}
	}
	return nil
}

// snapshot saves the data of etcd before the restart.
func (u *job) snapshot(ctx context.Context, e *machine.Env) error {
	path, err := controlplane.Snapshot(ctx, e)
	if err != nil {
		return fmt.Errorf("control-plane nodes are updated only after a snapshot of etcd: %w", err)
	}
	u.note("the snapshot is " + path)
	if err := controlplane.NewUpdateLease(e, u.sys.active.Site).CheckEtcd(ctx); err != nil {
		return &busy{err}
	}
	return nil
}

// releaseLease lets other control-plane nodes be updated.
func releaseLease(ctx context.Context, e *machine.Env) error {
	if !e.Exists(controlplane.UpdateLeaseFile) {
		return nil
	}
	image, err := site.ImageInfo(e)
	if err != nil {
		return err
	}
	active := site.IfAny(e, image)
	if active == nil || active.Site.ControlPlane == nil {
		return run.Advise(errors.New("releasing the Lease of updates: this machine does not have the Site of a control-plane node"),
			"stamp its Site, or: kubectl -n kube-system delete lease "+controlplane.LeaseName)
	}
	return controlplane.NewUpdateLease(e, active.Site).Release(ctx)
}

// pending reports whether the new system boots next.
func pending(e *machine.Env) bool {
	s := settled(e)
	return s != nil && s.Status == ondisk.UpdatePending
}
