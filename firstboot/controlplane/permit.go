package controlplane

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/etcdmember"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// A bootstrap permit and a request to restore can be used once. MembershipFile records their use in
// case etcd's data is lost; UEFI variables record it in case the disk is rewritten.
const (
	BootstrappedVar = "/sys/firmware/efi/efivars/EdgebakeBorn-0c8f3d4e-6d1b-4f0e-9d0a-7c5e1f2a9b63"
	RestoredVar     = "/sys/firmware/efi/efivars/EdgebakeRestored-0c8f3d4e-6d1b-4f0e-9d0a-7c5e1f2a9b63"
)

// permitState returns the state of the Site's bootstrap permit.
func permitState(e *machine.Env, site *configs.Site) etcdmember.Permit {
	switch until := site.ControlPlane.BootstrapEnd(); {
	case until.IsZero():
		return etcdmember.NoPermit
	case !e.Now().Before(until):
		return etcdmember.ExpiredPermit
	}
	key, note := PermitKey(site), ReadMembership(e)
	// A permit is not used if its bootstrap on this disk was interrupted before etcd served.
	if note.Served == key || firmwareRecord(e, BootstrappedVar) == key && note.Bootstrapped != key {
		return etcdmember.UsedPermit
	}
	return etcdmember.ValidPermit
}

// permitDates describes the dates on which the permit's state depends. It omits the clock's time of
// day, because each change of the text is logged.
func permitDates(e *machine.Env, site *configs.Site) string {
	return fmt.Sprintf("%s; this machine's clock shows %s", site.ControlPlane.BootstrapEnd().UTC().Format(time.RFC3339), e.Now().UTC().Format(time.DateOnly))
}

// NoPermitID is the PermitID for a Site without a bootstrap permit.
const NoPermitID = "none"

// PermitID identifies a bootstrap permit within its cluster.
func PermitID(site *configs.Site) string {
	if until := site.ControlPlane.BootstrapEnd(); !until.IsZero() {
		return until.UTC().Format(time.RFC3339)
	}
	return NoPermitID
}

// PermitKey identifies a bootstrap permit across all clusters.
func PermitKey(site *configs.Site) string { return site.ControlPlane.ID + " " + PermitID(site) }

// firmwareRecord returns the key that this machine last recorded in a UEFI variable.
func firmwareRecord(e *machine.Env, variable string) string {
	b := e.Contents(variable)
	if len(b) < 4 { // the variable's attributes come first
		return ""
	}
	return string(b[4:])
}

// usePermit records that this machine bootstraps the cluster, on the disk and then in the firmware.
// A failure to write the firmware is only logged.
func (t *etcdStarter) usePermit() error {
	key := PermitKey(t.site)
	note := membership{Cluster: t.site.ControlPlane.ID, Bootstrapped: key, RequestedAt: ReadMembership(t.e).RequestedAt}
	if err := note.write(t.e); err != nil {
		return err
	}
	saveInFirmware(t.e, BootstrappedVar, key)
	return nil
}

// saveInFirmware records value in the firmware, in case the disk is rewritten.
func saveInFirmware(e *machine.Env, variable, value string) {
	if firmwareRecord(e, variable) == value {
		return
	}
	switch err := e.SetFirmwareVar(variable, []byte(value)); {
	case errors.Is(err, errors.ErrUnsupported):
		e.Log.Info("this machine has no UEFI variables to record that it bootstrapped or restored etcd")
	case err != nil:
		e.Log.Warn("recording in the firmware that this machine bootstrapped or restored etcd", "error", err)
	}
}

// restoreRequest returns the text that identifies a restore in the firmware: the cluster's ID and
// the time of the request.
func restoreRequest(site *configs.Site) string {
	return site.ControlPlane.ID + " " + site.ControlPlane.RequestTime().UTC().Format(time.RFC3339)
}

// restoredBefore reports whether this machine has carried out the Site's request to restore, or a
// later one. It returns false if the requested restore was interrupted, or its data is still there.
func restoredBefore(e *machine.Env, site *configs.Site) bool {
	c, note := site.ControlPlane, ReadMembership(e)
	if c.Restore == "" || c.ContinueFrom != site.Self().Name {
		return false
	}
	if note.Continued == continueRequest(site) && (note.Served == "" || !isBlank(e)) {
		return false
	}
	last := note.RequestedAt
	if id, at, _ := strings.Cut(firmwareRecord(e, RestoredVar), " "); id == c.ID {
		if t, err := time.Parse(time.RFC3339, at); err == nil && t.After(last) {
			last = t
		}
	}
	return !last.Before(c.RequestTime())
}
