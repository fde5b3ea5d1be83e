package member

import (
	"context"
	"encoding/base64"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// StaleCA reports whether the CA on a machine that is not a node is outdated, so that it must not
// verify API servers: the CA was discovered for another Site or, if the Site pins no CA, in an
// earlier boot.
func StaleCA(e *machine.Env, site *configs.Site) bool {
	pem := e.Contents(ondisk.KubeCA)
	if pem == nil {
		return false
	}
	if pins := site.CAPins(); len(pins) > 0 && !Unpinned(site) {
		return !allPinned(pem, pins)
	}
	return !Discovered(e, site)
}

// Unpinned reports whether the Site accepts any cluster that answers.
func Unpinned(site *configs.Site) bool { return site.UnsafeSkipCAVerification && site.CACert == "" }

// AnyPinned reports whether at least one of the CAs in pem is pinned. While a cluster replaces its
// CA, a node may trust more than one.
func AnyPinned(pem []byte, pins []string) bool {
	return slices.ContainsFunc(CAPins(pem), func(has string) bool { return IsPinned(has, pins) })
}

// allPinned reports whether pem has at least one CA, and all of them are pinned.
func allPinned(pem []byte, pins []string) bool {
	have := CAPins(pem)
	return len(have) > 0 && !slices.ContainsFunc(have, func(has string) bool { return !IsPinned(has, pins) })
}

// IsPinned reports whether the pin of a certificate is among pins.
func IsPinned(has string, pins []string) bool {
	return slices.ContainsFunc(pins, func(p string) bool { return strings.EqualFold(strings.TrimSpace(p), has) })
}

// EnrolledCA returns the CA in the node's own kubeconfig, or else the one in ondisk.KubeCA.
func EnrolledCA(e *machine.Env) []byte {
	if k, err := Credentials(e); err == nil {
		if c, err := k.Cluster(); err == nil {
			if pem, err := c.CA(e.Root); err == nil && len(pem) > 0 {
				return pem
			}
		}
	}
	return e.Contents(ondisk.KubeCA)
}

// EnrolledPins returns the pins of the CA that the machine enrolled with.
func EnrolledPins(e *machine.Env) []string { return CAPins(EnrolledCA(e)) }

// CAPins returns the pins of the CAs in pem, or none if pem contains anything else.
func CAPins(pem []byte) []string {
	pins, err := kubeapi.Pins(pem)
	if err != nil {
		return nil
	}
	return pins
}

// Discovered reports whether this boot's discovery is valid for the Site: it used the Site's token,
// and found the CA that is on the disk and that the Site pins.
func Discovered(e *machine.Env, site *configs.Site) bool {
	conf, ca := e.Contents(DiscoveryFile), e.Contents(ondisk.KubeCA)
	if conf == nil || ca == nil || !Unpinned(site) && !allPinned(ca, site.CAPins()) {
		return false
	}
	k, err := e.ParseKubeconfig(conf)
	if err != nil {
		return false
	}
	c, err := k.Cluster()
	if err != nil || c.CAData != base64.StdEncoding.EncodeToString(ca) {
		return false
	}
	u, err := k.User()
	return err == nil && u.Token == site.Credentials.Token.Reveal()
}

// A CA is valid for ten years. It is reissued with the same key, so that pins and certificates stay
// valid. Control-plane nodes publish it in cluster-info, where workers find it.

// CAExpiresSoon returns the earliest expiry of these CAs (PEM), and whether it is within
// kubeapi.CAWarning.
func CAExpiresSoon(e *machine.Env, cas []byte) (time.Time, bool) {
	end, err := kubeapi.FirstExpiry(cas)
	return end, err == nil && e.Now().Add(kubeapi.CAWarning).After(end)
}

// NewerCA returns the reissued CA of this node, from the Site or from an API server's cluster-info,
// or nil if the CA does not expire soon or was not reissued.
func NewerCA(ctx context.Context, e *machine.Env, site *configs.Site) []byte {
	have := e.Contents(ondisk.KubeCA)
	if _, due := CAExpiresSoon(e, have); !due {
		return nil
	}
	if ca := kubeapi.Reissued(have, []byte(site.CACert), e.Now()); ca != nil {
		return ca
	}
	ctx, cancel := e.ForProbe(ctx)
	defer cancel()
	masters := MastersOf(e, site)
	found := make([][]byte, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		wg.Go(func() {
			if ca, err := kubeapi.PublishedCA(ctx, e.Dial, m); err == nil {
				found[i] = kubeapi.Reissued(have, ca, e.Now())
			}
		})
	}
	wg.Wait()
	for _, ca := range found {
		if ca != nil {
			return ca
		}
	}
	return nil
}

// NoteCAExpiry adds a note if a CA in file expires soon.
func NoteCAExpiry(e *machine.Env, file string) {
	if end, due := CAExpiresSoon(e, e.Contents(file)); due {
		e.Note("%s is valid until %s. To fix: issue it again with `edgebake cluster new` and the Cluster document; then stamp the Sites of the control-plane nodes, and restart these nodes one by one", file, end.UTC().Format(time.DateOnly))
	}
}
