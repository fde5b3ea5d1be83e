package firstboot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/update"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/openyurt"
)

// Reset makes this machine leave its cluster. It cannot delete the Node, and returns its name, or ""
// if that is unknown. The image's contents and the Site's settings stay, so that the machine stays
// reachable. tell receives each step.
func Reset(ctx context.Context, e *machine.Env, tell func(run.Step)) (node string, err error) {
	cert, _ := member.KubeletCert(e)
	node = member.CertNodeName(cert)
	if s, err := run.LoadState(e.Root); node == "" && err == nil {
		node = s.Node
	}
	if e.Exists(ondisk.ManifestsDir + "/kube-apiserver.yaml") {
		return node, errors.New("this machine runs a control plane, which a reset does not remove; run `kubeadm reset`, which also removes the etcd member")
	}
	unlock, err := run.ExclusiveSettled(ctx, e)
	if err != nil {
		return node, err
	}
	defer unlock()
	image, err := site.ImageInfo(e)
	if err != nil {
		return node, err
	}
	c := run.NewChange(e, "reset", hub.Recorded, tell)
	c.Onward = true
	return node, c.CarryOut(ctx, (&reset{image: image, record: c.Record}).steps())
}

// reset is the state of one Reset.
type reset struct {
	image  ondisk.ImageInfo
	active *site.Active // read after first boot was stopped; nil if there is no Site
	record func(run.Step)
}

// steps returns the steps of a reset. After an interruption, a reset runs all of them again.
func (r *reset) steps() []run.Phase {
	steps := []run.Phase{
		{Name: "firstboot", Run: func(ctx context.Context, e *machine.Env) error {
			// Stop the timer first, because it starts the service.
			for _, unit := range []string{ondisk.UnitAgain, ondisk.UnitFirstboot} {
				if err := e.Unit(ctx, "stop", unit); err != nil {
					return err
				}
			}
			r.active = site.IfAny(e, r.image)
			return nil
		}},
		{Name: "token", Run: func(_ context.Context, e *machine.Env) error { return resetToken(e, r.active) }}, // before kubeadm's files: with the token, an interrupted reset would end in a join
		{Name: "kubeadm", Run: func(ctx context.Context, e *machine.Env) error { return resetKubeadm(ctx, e, r.active) }},
		{Name: "yurthub", Run: func(ctx context.Context, e *machine.Env) error { return hub.Remove(ctx, e, r.image) }},
		{Name: "ipvs", Run: func(ctx context.Context, e *machine.Env) error {
			var s *configs.Site
			if r.active != nil {
				s = r.active.Site
			}
			return resetIPVS(ctx, e, s)
		}},
		{Name: "sticks", Run: func(_ context.Context, e *machine.Env) error {
			return site.ResetSticks(e, r.image, r.active, func(what string) { r.record(run.Step{Name: "sticks", Status: "note", Detail: what}) })
		}},
		{Name: "files", Run: resetFiles}, // last: a reset that was interrupted reads the node's name from state.json
	}
	for i := range steps {
		steps[i].Timeout = 5 * time.Minute
	}
	return steps
}

// resetKubeadm undoes kubeadm's work, and restores the image's static pods, which kubeadm reset
// removes.
func resetKubeadm(ctx context.Context, e *machine.Env, active *site.Active) error {
	if err := keepManifests(e); err != nil {
		return err
	}
	if e.Exists(ondisk.KubeletConf) || e.Exists(ondisk.KubeletConfig) {
		if err := kubeadm.Reset(ctx, e, active); err != nil {
			return err
		}
	}
	if err := kubeadm.UndoJoin(ctx, e); err != nil {
		return err
	}
	if err := e.Remove(ondisk.KubeCA); err != nil {
		return fmt.Errorf("removing the cluster's CA: %w", err)
	}
	// kubeadm reset is skipped if kubeadm has not made anything yet, so remove these files here.
	for _, f := range controlplane.Files() {
		if err := e.Remove(f); err != nil {
			return fmt.Errorf("removing the cluster's keys: %w", err)
		}
	}
	if err := e.RemoveAll(controlplane.RenewalDir); err != nil {
		return fmt.Errorf("removing the cluster's keys: %w", err)
	}
	return restoreManifests(e)
}

// keepManifests copies the image's static pods, which kubeadm reset removes.
func keepManifests(e *machine.Env) error {
	entries, err := os.ReadDir(e.Path(ondisk.ManifestsDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("reading %s: %w", ondisk.ManifestsDir, err)
	}
	for _, en := range entries {
		p := filepath.Join(ondisk.ManifestsDir, en.Name())
		if p == openyurt.Manifest {
			continue // written by first boot, not by the image
		}
		if !en.Type().IsRegular() {
			continue
		}
		b, err := e.Read(p)
		if err == nil {
			// The copies must survive a power cut during the reset.
			err = e.WriteFile(keptManifests+"/"+en.Name(), b, machine.Mode(0o600))
		}
		if err != nil {
			return fmt.Errorf("copying %s: %w", p, err)
		}
	}
	return nil
}

// restoreManifests restores the files that keepManifests copied.
func restoreManifests(e *machine.Env) error {
	kept, err := os.ReadDir(e.Path(keptManifests))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("reading %s: %w", keptManifests, err)
	}
	for _, en := range kept {
		b, err := e.Read(keptManifests + "/" + en.Name())
		if err == nil {
			_, err = e.Write(ondisk.ManifestsDir+"/"+en.Name(), b, machine.Mode(0o600))
		}
		if err != nil {
			return fmt.Errorf("restoring %s/%s: %w", ondisk.ManifestsDir, en.Name(), err)
		}
	}
	return e.RemoveAll(keptManifests)
}

const keptManifests = ondisk.StateDir + "/manifests"

// resetToken removes the token of an interrupted join, which would make the machine join again. It
// keeps the token of a newer Site, with which the machine joins after the reset.
func resetToken(e *machine.Env, active *site.Active) error {
	if active == nil {
		return nil // no Site to write into the slot
	}
	j, joining := member.ReadJoinedAs(e)
	switch {
	case joining && j.TokenForgotten:
		return nil
	case !joining && !active.IsApplied(e):
		return nil // first boot has not applied this Site
	}
	if err := site.SecretsUnreadable(active.Rejected); err != nil {
		return err
	}
	blank := errors.Is(active.Rejected, slot.ErrBlank)
	if active.Rejected != nil && !blank {
		return nil // keep a person's half-written correction
	}
	if cert, err := member.KubeletCert(e); err == nil && member.CertNodeName(cert) != active.Node {
		return nil // the Site gives another node name, so its token is for a join after the reset
	}
	if err := site.RemoveCredentials(e, active, blank); err != nil {
		return err
	}
	return member.SaveForgotten(e)
}

// resetIPVS stops ipvscare and removes its rules, its files and first boot's lines in /etc/hosts.
// s may be nil.
func resetIPVS(ctx context.Context, e *machine.Env, s *configs.Site) error {
	if err := e.Unit(ctx, "stop", ondisk.UnitIPVSCare); err != nil {
		return fmt.Errorf("stopping ipvscare: %w", err)
	}
	if err := join.CleanIPVS(ctx, e, s); err != nil {
		return err
	}
	return errors.Join(e.Remove(ondisk.IPVSConfig), e.Remove(ondisk.IPVSLearned), e.SetHosts(ctx, network.EndpointOwner), e.SetHosts(ctx, network.NodeOwner))
}

// resetList returns the files that the last step of a reset removes. StateFile comes last, because an
// interrupted reset needs the node's name in it.
func resetList(e *machine.Env) []string {
	return slices.Concat(member.ResetFiles, site.ResetFiles, clusterFiles(e), controlplane.ResetFiles, kubeadm.ResetFiles, update.ResetFiles,
		[]string{member.LeavingFile, ondisk.StateFile})
}

// resetFiles removes the files of resetList. The Site's settings in /etc stay, so that the machine
// stays reachable.
func resetFiles(_ context.Context, e *machine.Env) error {
	for _, p := range resetList(e) {
		if err := e.Remove(p); err != nil {
			return fmt.Errorf("removing the records of the cluster: %w", err)
		}
	}
	if err := e.RemoveAll(update.Dir); err != nil {
		return fmt.Errorf("removing the downloads of an update: %w", err)
	}
	return nil
}
