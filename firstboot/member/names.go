package member

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// EveryAPIServerIsNamed reports whether every API server answers with a certificate that has the
// endpoint's name. Only then may kubelet join through the endpoint: at a join, kubelet drops
// tls-server-name.
func EveryAPIServerIsNamed(ctx context.Context, e *machine.Env, masters []string, ca []byte, endpoint string) bool {
	return errors.Join(CheckServerNames(ctx, e, masters, ca, endpoint)...) == nil
}

// CheckServerNames checks in parallel whether each API server's certificate has one of names. The
// errors are in the order of masters.
func CheckServerNames(ctx context.Context, e *machine.Env, masters []string, ca []byte, names ...string) []error {
	ctx, cancel := e.ForProbe(ctx)
	defer cancel()
	errs := make([]error, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		wg.Go(func() { _, errs[i] = e.APIDialer().ServerName(ctx, m, ca, names) })
	}
	wg.Wait()
	return errs
}

// ServerNames caches which names the API servers' certificates have. Each name is checked on a
// separate connection, because an API server may have several certificates.
type ServerNames struct {
	endpoint string
	masters  []string
	ca       []byte
	answers  map[string][]error // by name, in the order of masters
}

// ServerNamesOf returns the ServerNames of the API servers of a Site.
func ServerNamesOf(e *machine.Env, site *configs.Site) *ServerNames {
	return &ServerNames{site.Endpoint, MastersOf(e, site), e.Contents(ondisk.KubeCA), map[string][]error{}}
}

func (c *ServerNames) check(ctx context.Context, e *machine.Env, name string) []error {
	if _, known := c.answers[name]; !known {
		c.answers[name] = CheckServerNames(ctx, e, c.masters, c.ca, name)
	}
	return c.answers[name]
}

// count returns the number of API servers whose certificate has name. The error joins the errors of
// the others.
func (c *ServerNames) count(ctx context.Context, e *machine.Env, name string) (int, error) {
	errs := c.check(ctx, e, name)
	n := 0
	for _, err := range errs {
		if err == nil {
			n++
		}
	}
	return n, errors.Join(errs...)
}

// Choose returns kubelet's tls-server-name for the endpoint: "" (the endpoint's own name) if all
// certificates have that name, otherwise the more frequent of the endpoint's name and kubeadm's
// shared name.
func (c *ServerNames) Choose(ctx context.Context, e *machine.Env) (string, error) {
	endpoint, endpointErr := c.count(ctx, e, c.endpoint)
	if endpoint == len(c.masters) && endpoint > 0 {
		return "", nil // no other name is in more certificates
	}
	shared, sharedErr := c.count(ctx, e, kubeapi.SharedName)
	switch {
	case endpoint > 0 && endpoint >= shared:
		return "", nil
	case shared > 0:
		return kubeapi.SharedName, nil
	}
	err := errors.Join(sharedErr, endpointErr)
	if joined.AllAre(sharedErr, kubeapi.ErrServerName) { // API servers that do not answer may have one of these names
		return "", run.NeedsPerson(err, "add "+c.endpoint+" to the API servers' certSANs")
	}
	return "", fmt.Errorf("reading the names in the API servers' certificates: %w", sharedErr)
}

// MayKeep reports whether kubelet may keep name: all API servers that answer have it, or no other
// name is more frequent. Once all have the endpoint's name, kubeapi.SharedName does not fit.
func (c *ServerNames) MayKeep(ctx context.Context, e *machine.Env, name string) bool {
	if name == kubeapi.SharedName && c.endpoint != name {
		if n, _ := c.count(ctx, e, c.endpoint); n == len(c.masters) && n > 0 {
			return false
		}
	}
	have, err := c.count(ctx, e, name)
	if !errors.Is(err, kubeapi.ErrServerName) {
		return true
	}
	for _, other := range []string{kubeapi.SharedName, c.endpoint} {
		if n, _ := c.count(ctx, e, other); n > have {
			return false
		}
	}
	return true
}

// CountAnswers counts the API servers that respond with a certificate of the CA, whatever its
// names, and those that do not.
func (c *ServerNames) CountAnswers(ctx context.Context, e *machine.Env, name string) (answer, away int) {
	for _, err := range c.check(ctx, e, name) {
		if err == nil || errors.Is(err, kubeapi.ErrServerName) {
			answer++
		} else {
			away++
		}
	}
	return answer, away
}
