package member

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// EveryAPIServerIsNamed reports whether the certificate of every API server has the
// endpoint's name. kubelet drops tls-server-name when it writes its kubeconfig,
// so only then may it begin with the endpoint. An API server that does not
// answer may come back with a certificate that has not.
func EveryAPIServerIsNamed(ctx context.Context, e *machine.Env, masters []string, ca []byte, endpoint string) bool {
	return errors.Join(AskNames(ctx, e, masters, ca, endpoint)...) == nil
}

// AskNames asks all API servers at once whether their certificate has one of
// names.
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

// Names are the names in the certificates of all API servers. They are
// asked for each name once: an API server may show another certificate for
// another name.
type Names struct {
	endpoint string
	masters  []string
	ca       []byte
	answers  map[string][]error // by name, one of each API server
}

// NamesOf prepares the names to verify the API servers of a Site by.
func NamesOf(e *machine.Env, site *configs.Site) *Names {
	return &Names{site.Endpoint, MastersOf(e, site), e.Contents(ondisk.KubeCA), map[string][]error{}}
}

func (c *Names) ask(ctx context.Context, e *machine.Env, name string) []error {
	if _, known := c.answers[name]; !known {
		c.answers[name] = AskNames(ctx, e, c.masters, c.ca, name)
	}
	return c.answers[name]
}

// named counts the API servers whose certificate has name; the error is what
// the others said.
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

// Shared is kubelet's tls-server-name for the endpoint: empty, which stands for the
// endpoint itself, where the API servers that answer have its name in their
// certificates; otherwise the name that kubeadm puts there, which yurthubs of other
// nodes have too. Where no name is in all of them it is the one that most have.
func (c *Names) Shared(ctx context.Context, e *machine.Env) (string, error) {
	endpoint, endpointErr := c.named(ctx, e, c.endpoint)
	if endpoint == len(c.masters) && endpoint > 0 {
		return "", nil // no name can be in more of them
	}
	shared, sharedErr := c.named(ctx, e, api.SharedName)
	switch {
	case endpoint > 0 && endpoint >= shared:
		return "", nil
	case shared > 0:
		return api.SharedName, nil
	}
	err := errors.Join(sharedErr, endpointErr)
	if machine.EveryErrorIs(sharedErr, api.ErrServerName) { // those that do not answer may have a name
		return "", run.NeedsPerson(err, "add "+c.endpoint+" to the API servers' certSANs")
	}
	return "", fmt.Errorf("asking the API servers for their certificates' names: %w", sharedErr)
}

// Fit reports whether kubelet may keep name: it is in the certificate of every API
// server that answers, or no other name is in more of them. The shared name gives way
// to the endpoint once every API server is known to have that.
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

// Away counts the API servers that answer with a certificate of the CA,
// whatever its names, and those that do not.
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
