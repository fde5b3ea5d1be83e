package member

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// EveryAPIServerIsNamed reports whether the certificate of every API server has the endpoint's
// name. kubelet drops tls-server-name when it writes its kubeconfig, so only then may it join
// through the endpoint. An API server that does not answer may lack the name.
func EveryAPIServerIsNamed(ctx context.Context, e *machine.Env, masters []string, ca []byte, endpoint string) bool {
	return errors.Join(AskNames(ctx, e, masters, ca, endpoint)...) == nil
}

// AskNames asks all API servers at once whether their certificate has one of names. The errors
// are in the order of masters.
func AskNames(ctx context.Context, e *machine.Env, masters []string, ca []byte, names ...string) []error {
	ctx, cancel := context.WithTimeout(ctx, machine.ProbeTimeout)
	defer cancel()
	errs := make([]error, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		wg.Go(func() { _, errs[i] = api.ServerName(ctx, e.Dial, e.Now, m, ca, names) })
	}
	wg.Wait()
	return errs
}

// Names caches which names the certificates of the API servers have. Each name is asked for
// once: an API server may show another certificate for another name.
type Names struct {
	endpoint string
	masters  []string
	ca       []byte
	answers  map[string][]error // by name, in the order of masters
}

// NamesOf returns the Names of the API servers of a Site.
func NamesOf(e *machine.Env, site *configs.Site) *Names {
	return &Names{site.Endpoint, MastersOf(e, site), e.Contents(ondisk.KubeCA), map[string][]error{}}
}

func (c *Names) ask(ctx context.Context, e *machine.Env, name string) []error {
	if _, known := c.answers[name]; !known {
		c.answers[name] = AskNames(ctx, e, c.masters, c.ca, name)
	}
	return c.answers[name]
}

// named counts the API servers whose certificate has name. The error joins those of the
// others.
func (c *Names) named(ctx context.Context, e *machine.Env, name string) (int, error) {
	errs := c.ask(ctx, e, name)
	n := 0
	for _, err := range errs {
		if err == nil {
			n++
		}
	}
	return n, errors.Join(errs...)
}

// Shared returns kubelet's tls-server-name for the endpoint: "", which means the endpoint's
// own name, if the certificates have that; otherwise the name that kubeadm puts into all of
// them, and that the yurthubs of other nodes have too. If neither is in all certificates, it
// is the more frequent one.
func (c *Names) Shared(ctx context.Context, e *machine.Env) (string, error) {
	endpoint, endpointErr := c.named(ctx, e, c.endpoint)
	if endpoint == len(c.masters) && endpoint > 0 {
		return "", nil // no other name can be in more of them
	}
	shared, sharedErr := c.named(ctx, e, api.SharedName)
	switch {
	case endpoint > 0 && endpoint >= shared:
		return "", nil
	case shared > 0:
		return api.SharedName, nil
	}
	err := errors.Join(sharedErr, endpointErr)
	if joined.AllAre(sharedErr, api.ErrServerName) { // API servers that do not answer may have a name
		return "", run.NeedsPerson(err, "add "+c.endpoint+" to the API servers' certSANs")
	}
	return "", fmt.Errorf("reading the names in the API servers' certificates: %w", sharedErr)
}

// Fit reports whether kubelet may keep name: it is in the certificates of all API servers that
// answer, or no other name is in more of them. api.SharedName is given up once all API servers
// have the endpoint's name.
func (c *Names) Fit(ctx context.Context, e *machine.Env, name string) bool {
	if name == api.SharedName && c.endpoint != name {
		if n, _ := c.named(ctx, e, c.endpoint); n == len(c.masters) && n > 0 {
			return false
		}
	}
	have, err := c.named(ctx, e, name)
	if !errors.Is(err, api.ErrServerName) {
		return true
	}
	for _, other := range []string{api.SharedName, c.endpoint} {
		if n, _ := c.named(ctx, e, other); n > have {
			return false
		}
	}
	return true
}

// Away counts the API servers that answer with a certificate of the CA, whatever its names,
// and those that do not.
func (c *Names) Away(ctx context.Context, e *machine.Env, name string) (answer, away int) {
	for _, err := range c.ask(ctx, e, name) {
		if err == nil || errors.Is(err, api.ErrServerName) {
			answer++
		} else {
			away++
		}
	}
	return answer, away
}
