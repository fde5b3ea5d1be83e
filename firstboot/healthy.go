package firstboot

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
)

// A system that was just installed boots on trial: edgebake-healthy.service
// holds boot-complete.target until HealthyFile is there, and with it the mark
// that makes the system the one to boot from now on. A boot without it ends
// after a while, and after the last try the former system boots again.

// saveHealthy says that this boot is as good as the last one.
func saveHealthy(e *Env) error {
	if e.exists(ondisk.HealthyFile) {
		return nil
	}
	if err := e.WriteFile(ondisk.HealthyFile, nil, Mode(0o644)); err != nil {
		return fmt.Errorf("noting that this boot went well: %w", err)
	}
	return nil
}

// offlineHealthy judges a boot of a node that was Ready before and reaches no
// API server now: kubelet and ipvscare run, and a network of the site leads
// towards the API servers. A system whose network driver is missing has that
// no more than one without a cable; neither is proof enough.
func offlineHealthy(ctx context.Context, e *Env, site *configs.Site) error {
	var errs []error
	units := []string{ondisk.UnitKubelet}
	if !site.IPVS.Disabled {
		units = append(units, ondisk.UnitIPVSCare)
	}
	for _, u := range units {
		if state, err := e.UnitState(ctx, u); err != nil || state != "active" {
			errs = append(errs, errors.Join(fmt.Errorf("%s is %s", u, state), err))
		}
	}
	return errors.Join(append(errs, hasRoute(ctx, e, mastersOf(e, site)))...)
}

// hasRoute returns nil if this machine has an address and a route for any of
// the API servers.
func hasRoute(ctx context.Context, e *Env, masters []string) error {
	var errs []error
	try := func(addr string) bool {
		_, err := e.Source(ctx, addr)
		if err != nil {
			errs = append(errs, fmt.Errorf("no way to %s: %w", addr, err))
		}
		return err == nil
	}
	named := false
	for _, m := range masters {
		host, _, err := net.SplitHostPort(m)
		if err != nil {
			return fmt.Errorf("reading the API server %q: %w", m, err)
		}
		if _, err := netip.ParseAddr(host); err != nil {
			named = true
		} else if try(m) {
			return nil
		}
	}
	// An API server whose name nobody resolves now may be anywhere: addresses that
	// only a default route leads to (RFC 5737, RFC 3849).
	if named && (try("192.0.2.1:6443") || try("[2001:db8::1]:6443")) {
		return nil
	}
	return errors.Join(errs...)
}
