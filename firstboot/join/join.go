package join

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// Phase runs kubeadm join, and then redirects kubelet to the endpoint.
func Phase(active *site.Active) run.Phase {
	p := &joinPhase{active: active}
	return run.Phase{
		Name: "join", Doc: "kubeadm joins, kubelet talks to the endpoint", Timeout: 12 * time.Minute,
		Check: p.check, Run: p.run, Undo: p.undo,
	}
}

// joinPhase is the phase join of one pass.
type joinPhase struct {
	active *site.Active
	asked  *member.ServerNames // set by run for the next check
}

func (p *joinPhase) check(ctx context.Context, e *machine.Env) (run.Verdict, error) {
	cert, err := member.Enrolment(e)
	if err != nil {
		return run.Todo, nil
	}
	if err := errors.Join(member.OtherForm(e, false), member.SameName(cert, p.active.Node, member.ResetForName)); err != nil {
		return run.Todo, err
	}
	if p.active.Site.NodeType == configs.NodeNative && member.Redirected(e) {
		// This happens after a convert, or after nodeType was changed in the Site. No phase
		// maintains yurthub now.
		e.Note("this node uses yurthub, but its Site has nodeType: native. To fix: set nodeType to edge or cloud, or run `firstboot revert`")
	}
	server, name, err := member.KubeletServer(e)
	if err != nil {
		return run.Todo, err
	}
	names := p.asked
	if p.asked = nil; names == nil {
		names = member.ServerNamesOf(e, p.active.Site)
	}
	if server != p.active.Site.EndpointURL() || e.Exists(kubeadm.KubeletRestart) || !names.MayKeep(ctx, e, cmp.Or(name, p.active.Site.Endpoint)) {
		return run.Todo, nil
	}
	if later, running := runAgainLater(ctx, e, p.active.Site, names); later != running {
		return run.Todo, nil
	}
	return run.Done, nil
}

func (p *joinPhase) run(ctx context.Context, e *machine.Env) error {
	if err := member.Enrolled(e); err != nil {
		if err := join(ctx, e, p.active); err != nil {
			return err
		}
	}
	names := member.ServerNamesOf(e, p.active.Site)
	if err := toEndpoint(ctx, e, p.active.Site, names); err != nil {
		return err
	}
	p.asked = names
	later, running := runAgainLater(ctx, e, p.active.Site, names)
	switch {
	case later && !running:
		return e.Unit(ctx, "start", ondisk.UnitAgain)
	case running && !later:
		return e.Unit(ctx, "stop", ondisk.UnitAgain)
	}
	return nil
}

func (p *joinPhase) undo(ctx context.Context, e *machine.Env) error {
	if member.Enrolled(e) == nil {
		return nil // the join succeeded: the next attempt continues from there
	}
	// Discover again next time: the join may have failed because this is the wrong cluster.
	return errors.Join(kubeadm.UndoJoin(ctx, e, member.PendingKey), e.Remove(member.DiscoveryFile))
}

func join(ctx context.Context, e *machine.Env, active *site.Active) error {
	s := *active.Site
	s.KubeletExtraArgs = kubeadm.SiteArgs(active)
	if err := member.SaveJoin(e, &s, active.Node); err != nil {
		return err
	}
	if err := kubeadm.WriteConfDir(e, s.KubeletExtraArgs); err != nil {
		return err
	}
	if err := kubeadm.UndoJoin(ctx, e, member.PendingKey); err != nil { // undo an interrupted join
		return err
	}
	if err := kubeadm.Join(ctx, e, active, s); err != nil {
		return err
	}
	return member.SaveRecord(e)
}
