package join

import (
	"cmp"
	"context"
	"fmt"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
)

// toEndpoint changes the server in kubelet.conf from the API server used by the join to the
// endpoint.
func toEndpoint(ctx context.Context, e *machine.Env, site *configs.Site, names *member.ServerNames) error {
	server, name, err := member.KubeletServer(e)
	if err == nil && server == site.EndpointURL() && !e.Exists(kubeadm.KubeletRestart) && names.MayKeep(ctx, e, cmp.Or(name, site.Endpoint)) {
		return nil // kubelet already uses the endpoint
	}
	conf, err := e.Read(ondisk.KubeletConf)
	if err != nil {
		return fmt.Errorf("reading kubelet's credentials: %w", err)
	}
	if name, err = names.Choose(ctx, e); err != nil {
		return err
	}
	next, err := kubeapi.SetServer(conf, site.EndpointURL(), name)
	if err != nil {
		return err
	}
	return kubeadm.RestartFor(ctx, e, "redirecting kubelet to the endpoint", kubeadm.Writing(ondisk.KubeletConf, next, 0o600))
}

// runAgainLater reports whether first boot must run periodically, and whether its timer runs. It
// must run if an API server has not shown a certificate of the CA, if former API servers are still
// in use, or if a CA expires soon.
func runAgainLater(ctx context.Context, e *machine.Env, site *configs.Site, names *member.ServerNames) (later, running bool) {
	state, err := e.UnitState(ctx, ondisk.UnitAgain)
	if err != nil {
		e.Log.Warn("asking for the state of "+ondisk.UnitAgain, "error", err)
		return false, false
	}
	running = state == "active"
	_, name, _ := member.KubeletServer(e) // after an error, any name is sufficient
	answer, away := names.CountAnswers(ctx, e, cmp.Or(name, site.Endpoint))
	if answer == 0 {
		return running, running // offline: keep the timer as it is
	}
	_, due := member.CAExpiresSoon(e, e.Contents(ondisk.KubeCA)) // until the CA is reissued
	return away > 0 || due || len(member.FormerMasters(e, site)) > 0, running
}
