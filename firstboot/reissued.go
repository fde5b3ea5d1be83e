package firstboot

import (
	"context"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// A CA ends after ten years. It is issued again with its own key: pins, and all
// certificates that it has signed, stay good. A control-plane node gets it with its
// Site's keys; the first of them publishes it in cluster-info, where workers find it. It
// proves itself by its key, which they have trusted so far.

// endsInYears reports whether CAs, PEM, end so soon that they should have been issued
// again.
func endsInYears(e *Env, cas []byte) (time.Time, bool) {
	end, err := api.FirstEnd(cas)
	return end, err == nil && e.Now().Add(api.CAWarning).After(end)
}

// newerCA is the CA that this node is enrolled with as it was issued again, from the
// Site or from whoever answers for the API servers; nil: none is due, or there is none.
func newerCA(ctx context.Context, e *Env, site *configs.Site) []byte {
	have := e.contents(ondisk.KubeCA)
	if _, due := endsInYears(e, have); !due {
		return nil
	}
	if ca := api.Reissued(have, []byte(site.CACert), e.Now()); ca != nil {
		return ca
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	masters := mastersOf(e, site)
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

// takeCA has kubelet, yurthub and first boot trust a CA that was issued again. The file
// that tells that it was done goes last; ipvscare reads it by itself.
func takeCA(ctx context.Context, e *Env, ca []byte) error {
	const doing = "taking the cluster's CA, which was issued again"
	end, err := api.FirstEnd(ca)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	var changes []func(*Env) error
	for _, f := range []string{ondisk.KubeletConf, openyurt.Identity} {
		conf, err := e.read(f)
		if err != nil {
			continue // it is not there, or is made anew
		}
		k, err := e.parseKubeconfig(conf)
		if err != nil {
			continue
		}
		if c, err := k.Cluster(); err != nil || c.CAData == "" {
			continue // it names the file
		}
		next, err := api.SetCA(conf, ca)
		if err != nil {
			return fmt.Errorf("%s: %s: %w", doing, f, err)
		}
		changes = append(changes, writing(f, next, 0o600))
	}
	changes = append(changes, func(e *Env) error {
		state, err := e.UnitState(ctx, openyurt.Unit)
		if err == nil && state == "active" {
			err = e.Unit(ctx, "restart", openyurt.Unit)
		}
		return err
	})
	if err := restartFor(ctx, e, doing, changes...); err != nil {
		return err
	}
	if _, err := e.write(ondisk.KubeCA, ca, Mode(fs.FileMode(0o644))); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	e.Log.Info("the cluster's CA was issued again", "end", end.UTC())
	return nil
}

// remarkEndOfCA says that the cluster's CA ends, and that nobody has issued it again.
func remarkEndOfCA(e *Env, file string) {
	if end, due := endsInYears(e, e.contents(file)); due {
		e.Note("%s is valid until %s. To fix: `edgebake cluster new` with the Cluster's document issues it again; then stamp the Sites of the control-plane nodes and restart these one by one", file, end.UTC().Format(time.DateOnly))
	}
}
