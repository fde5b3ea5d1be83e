package network

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

const clockDoc = "the clock shows a plausible time"

// ClockPhase sets a clock that is behind to the latest time that has certainly passed: the image's
// date, the Site's date (stamped, in seconds since the epoch), or the start of a certificate of the
// cluster. It does not set a clock that follows a time server.
func ClockPhase(site *configs.Site, image ondisk.ImageInfo, stamped func(*machine.Env) int64) run.Phase {
	ask := func(e *machine.Env) bool {
		first := site.NodeType == configs.NodeControlPlane && !e.Exists(member.ControlPlaneMark)
		return (first || member.OutOfTime(member.Enrolled(e))) && !e.Exists(AskedNTP)
	}
	return run.Phase{
		Name: "clock", Doc: clockDoc, Timeout: 3 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			if clockSynced(ctx, e) {
				return run.Done, nil
			}
			if e.Now().Before(clockFloor(image, stamped(e))) || e.Now().Before(begun(ctx, e, site)) || ask(e) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			if err := raiseClock(e, clockFloor(image, stamped(e))); err != nil {
				return err
			}
			if err := raiseClock(e, begun(ctx, e, site)); err != nil {
				return err
			}
			if e.Exists(AskedNTP) {
				return nil
			}
			patience := NTPTimeout
			if site.NodeType == configs.NodeControlPlane && !member.OutOfTime(member.Enrolled(e)) {
				patience = ntpFirst
			}
			WaitForNTP(ctx, e, patience)
			if err := e.WriteFile(AskedNTP, nil, machine.Mode(0o600)); err != nil {
				return fmt.Errorf("recording that a time server was queried: %w", err)
			}
			return nil
		},
	}
}

// raiseClock sets the clock to floor if the clock is behind it.
func raiseClock(e *machine.Env, floor time.Time) error {
	if !e.Now().Before(floor) {
		return nil
	}
	e.Log.Info("the clock is behind a date that has certainly passed: setting it", "clock", e.Now().UTC(), "floor", floor.UTC())
	if err := e.SetClock(floor); err != nil {
		return fmt.Errorf("setting the clock to %s: %w", floor.UTC().Format(time.RFC3339), err)
	}
	return nil
}

// AskedNTP exists if first boot has waited for time servers in this boot.
const AskedNTP = ondisk.RunMark + "asked-ntp"

// clockFloor returns the latest time that has certainly passed.
func clockFloor(image ondisk.ImageInfo, stamped int64) time.Time {
	return time.Unix(max(image.SourceDate, CredibleStamp(image, stamped)), 0)
}

// LearnTime sets the clock to the start of a certificate that is not valid yet, if discovery met
// one, and reports whether it did. It requires a pinned CA: otherwise anybody could set the clock.
func LearnTime(ctx context.Context, e *machine.Env, d kubeapi.Discovery, discovered error) (bool, error) {
	early := (*kubeapi.EarlyError)(nil)
	if !errors.As(discovered, &early) || d.SkipPins && len(d.CA) == 0 || clockSynced(ctx, e) {
		return false, nil
	}
	return true, raiseClock(e, early.From)
}

// beganTimeout limits the requests of the function begun.
const beganTimeout = 2 * time.Second

// begun returns the latest start of a certificate that is not valid yet, or zero. It checks the
// certificates of this node and of the cluster's servers, verified with the CA of the Site or of
// the enrolment.
func begun(ctx context.Context, e *machine.Env, site *configs.Site) time.Time {
	ctx, cancel := context.WithTimeout(ctx, beganTimeout)
	defer cancel()
	type server struct {
		addr string
		ca   []byte
	}
	var all []server
	ca, etcdCA := clusterCAs(e, site)
	for _, m := range member.MastersOf(e, site) {
		if len(ca) > 0 && !(etcdCA != nil && m == OwnHostPort(site)) {
			all = append(all, server{m, ca})
		}
	}
	if len(etcdCA) > 0 {
		for _, m := range site.ControlPlane.Members {
			if m.Name != site.NodeName {
				all = append(all, server{net.JoinHostPort(m.Address, configs.EtcdPeerPort), etcdCA})
			}
		}
	}
	from := make([]time.Time, len(all))
	var wg sync.WaitGroup
	for i, s := range all {
		wg.Go(func() {
			_, err := e.APIDialer().ServerName(ctx, s.addr, s.ca, []string{kubeapi.SharedName})
			if early := (*kubeapi.EarlyError)(nil); errors.As(err, &early) {
				from[i] = early.From
			}
		})
	}
	wg.Wait()
	// A control-plane node signs its own certificate, so that certificate shows only its own clock.
	if cert, err := member.Enrolment(e); errors.Is(err, member.ErrEarly) && site.NodeType != configs.NodeControlPlane && validAt(cert, ca, cert.NotBefore) {
		from = append(from, cert.NotBefore)
	}
	return slices.MaxFunc(append(from, time.Time{}), time.Time.Compare)
}

// clusterCAs returns the trusted CAs (PEM) of the cluster and of its etcd, or nil if this machine
// has none.
func clusterCAs(e *machine.Env, site *configs.Site) (ca, etcdCA []byte) {
	switch keys := site.Credentials.Keys; {
	case member.HasCredentials(e):
		ca = member.EnrolledCA(e)
	case site.CACert != "":
		ca = []byte(site.CACert)
	case keys != nil:
		ca = []byte(keys.CA.Cert)
	}
	if site.NodeType == configs.NodeControlPlane {
		etcdCA = e.Contents(member.PKIDir + "/etcd/ca.crt")
		if keys := site.Credentials.Keys; keys != nil {
			etcdCA = []byte(keys.EtcdCA.Cert)
		}
	}
	return ca, etcdCA
}

// validAt reports whether this CA signed a client certificate, and both were valid at that time.
func validAt(cert *x509.Certificate, ca []byte, at time.Time) bool {
	pool, err := kubeapi.Pool(ca)
	if err != nil {
		return false
	}
	_, err = cert.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err == nil
}

// CredibleStamp returns the date of stamping, or 0 if this image cannot have been stamped at that
// date.
func CredibleStamp(image ondisk.ImageInfo, stamped int64) int64 {
	first, last := image.StampDates()
	if t := time.Unix(stamped, 0); t.Before(first) || t.After(last) {
		return 0
	}
	return stamped
}

// clockSynced reports whether the clock follows a time server. If that is unknown, it returns
// false.
func clockSynced(ctx context.Context, e *machine.Env) bool {
	synced, err := e.ClockSynced(ctx)
	if err != nil {
		e.Log.Warn("asking for the state of the clock", "error", err)
	}
	return err == nil && synced
}

// NTPTimeout limits the wait for a time server before a certificate is judged, because there may be
// no time server. ntpFirst is the limit for a control-plane node without certificates.
const (
	NTPTimeout = time.Minute
	ntpFirst   = 30 * time.Second
	ntpRetry   = 10 // number of checks, 2 s apart, after which the time client is restarted
	Timesyncd  = "systemd-timesyncd.service"
)

// WaitForNTP waits, at most for patience, until the clock follows a time server. It reports whether
// the clock does.
func WaitForNTP(ctx context.Context, e *machine.Env, patience time.Duration) bool {
	e.Waiting("a time server, since the clock may be wrong")
	end := e.Now().Add(patience)
	synced := false
	tries := 0
	err := e.Poll(ctx, 2*time.Second, func() (bool, error) {
		synced = clockSynced(ctx, e)
		tries++
		if !synced && tries%ntpRetry == 0 {
			// Without a restart, the time client would wait five minutes before it tries again.
			if err := e.Unit(ctx, "try-restart", Timesyncd); err != nil {
				return false, fmt.Errorf("restarting the time client: %w", err)
			}
		}
		// The number of tries counts too, because the clock may jump.
		return synced || e.Now().After(end) || tries > int(patience/(2*time.Second)), nil
	})
	if err != nil || !synced {
		e.Log.Warn("no time server answers; continuing without one", "clock", e.Now().UTC())
		return false
	}
	e.Log.Info("the clock follows a time server", "clock", e.Now().UTC())
	return true
}

// JudgeOutOfTime judges a certificate that has expired or is not valid yet. It returns nil if the
// clock was corrected. An expired one needs a person only if the clock follows a time server.
func JudgeOutOfTime(ctx context.Context, e *machine.Env) error {
	const newToken = "put a new token into site.yaml (`kubeadm token create`), in the slot or on a stick"
	synced := clockSynced(ctx, e) // do this before the clock is read again
	err := member.Enrolled(e)
	switch {
	case err == nil:
		return nil
	case synced && errors.Is(err, member.ErrEarly):
		return run.Advise(err, "a clock of the control plane was ahead when it was signed: wait until it is valid; or "+newToken)
	case synced:
		return run.NeedsPerson(err, newToken)
	}
	return run.Advise(fmt.Errorf("%w (this machine's clock shows %s and follows no time server)", err, e.Now().UTC().Format(time.DateOnly)),
		"if the clock is wrong, name a reachable time server in the Site (network.ntp); if it is right, "+newToken)
}
