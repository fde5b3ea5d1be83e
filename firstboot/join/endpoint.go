package join

import (
	"cmp"
	"context"
	"fmt"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
)

// toEndpoint turns kubelet.conf from the one API server it joined through to
// the endpoint, which outlives any of them.
func toEndpoint(ctx context.Context, e *machine.Env, site *configs.Site, names *member.Names) error {
	server, name, err := member.KubeletServer(e)
	if err == nil && server == site.EndpointURL() && !e.Exists(kubeadm.KubeletRestart) && names.Fit(ctx, e, cmp.Or(name, site.Endpoint)) {
		return nil // it joined through the endpoint
	}
	conf, err := e.Read(ondisk.KubeletConf)
	if err != nil {
		return fmt.Errorf("reading kubelet's credentials: %w", err)
	}
	if name, err = names.Shared(ctx, e); err != nil {
		return err
	}
	next, err := api.SetServer(conf, site.EndpointURL(), name)
	if err != nil {
		return err
	}
	return kubeadm.RestartFor(ctx, e, "turning kubelet to the endpoint", kubeadm.Writing(ondisk.KubeletConf, next, 0o600))
}

// runAgainLater reports whether first boot is to run once more while this machine is
// on, and whether its timer runs: an API server that is away now may come back
// with a certificate that lacks kubelet's name for it, and new API servers that
// are still to come prove themselves only then.
func runAgainLater(ctx context.Context, e *machine.Env, site *configs.Site, names *member.Names) (later, running bool) {
	state, err := e.UnitState(ctx, ondisk.UnitAgain)
	if err != nil {
		e.Log.Warn("asking for the state of "+ondisk.UnitAgain, "error", err)
		return false, false
	}
	running = state == "active"
	_, name, _ := member.KubeletServer(e) // unreadable: any name will do
	answer, away := names.Away(ctx, e, cmp.Or(name, site.Endpoint))
	if answer == 0 {
		return running, running // offline: first boot itself stays and looks
	}
	_, due := member.CAEndsSoon(e, e.Contents(ondisk.KubeCA)) // until it was issued again
	return away > 0 || due || len(member.FormerMasters(e, site)) > 0, running
}
