package member

import (
	"context"
	"encoding/base64"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// StaleCA reports whether a machine that is not a node has the CA of a discovery
// that does not hold any more: of another site, or of an earlier boot of one that
// pins none. API servers are verified with it.
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

// Unpinned reports whether the site takes whatever cluster answers.
func Unpinned(site *configs.Site) bool { return site.UnsafeSkipCAVerification && site.CACert == "" }

// AnyPinned reports whether one of the CAs in pem is pinned. That tells whose a machine
// is: its CA may be one of several while the cluster exchanges it.
func AnyPinned(pem []byte, pins []string) bool {
	return slices.ContainsFunc(CAPins(pem), func(has string) bool { return IsPinned(has, pins) })
}

// allPinned reports whether the CAs in pem, at least one, are pinned all: one that is not
// may be anybody's.
func allPinned(pem []byte, pins []string) bool {
	have := CAPins(pem)
	return len(have) > 0 && !slices.ContainsFunc(have, func(has string) bool { return !IsPinned(has, pins) })
}

// IsPinned reports whether the pin of a certificate is among pins.
func IsPinned(has string, pins []string) bool {
	return slices.ContainsFunc(pins, func(p string) bool { return strings.EqualFold(strings.TrimSpace(p), has) })
}

// EnrolledCA is what the node's own kubeconfig trusts, else the file beside it.
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

// EnrolledPins are the pins of the CA that the machine enrolled with.
func EnrolledPins(e *machine.Env) []string { return CAPins(EnrolledCA(e)) }

// CAPins are the pins of the CAs in pem, none where something else is in it.
func CAPins(pem []byte) []string {
	pins, err := api.Pins(pem)
	if err != nil {
		return nil
	}
	return pins
}

// Discovered reports whether the discovery of this boot holds for the site:
// it has its token, and found the CA that is on the disk, and no other, which it pins.
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

// A CA ends after ten years. It is issued again with its own key: pins, and all
// certificates that it has signed, stay good. A control-plane node gets it with its
// Site's keys; the first of them publishes it in cluster-info, where workers find it. It
// proves itself by its key, which they have trusted so far.

// CAEndsSoon reports whether CAs, PEM, end so soon that they should have been issued
// again.
func CAEndsSoon(e *machine.Env, cas []byte) (time.Time, bool) {
	end, err := api.FirstEnd(cas)
	return end, err == nil && e.Now().Add(api.CAWarning).After(end)
}

// NewerCA is the CA that this node is enrolled with as it was issued again, from the
// Site or from whoever answers for the API servers; nil: none is due, or there is none.
func NewerCA(ctx context.Context, e *machine.Env, site *configs.Site) []byte {
	have := e.Contents(ondisk.KubeCA)
	if _, due := CAEndsSoon(e, have); !due {
		return nil
	}
	if ca := api.Reissued(have, []byte(site.CACert), e.Now()); ca != nil {
		return ca
	}
	ctx, cancel := context.WithTimeout(ctx, machine.ProbeTimeout)
	defer cancel()
	masters := MastersOf(e, site)
	found := make([][]byte, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		wg.Go(func() {
			if ca, err := api.PublishedCA(ctx, e.Dial, m); err == nil {
				found[i] = api.Reissued(have, ca, e.Now())
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

// RemarkEndOfCA says that the cluster's CA ends, and that nobody has issued it again.
func RemarkEndOfCA(e *machine.Env, file string) {
	if end, due := CAEndsSoon(e, e.Contents(file)); due {
		e.Note("%s is valid until %s. To fix: `edgebake cluster new` with the Cluster's document issues it again; then stamp the Sites of the control-plane nodes and restart these one by one", file, end.UTC().Format(time.DateOnly))
	}
}
