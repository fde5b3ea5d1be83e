package hub

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// Revert makes an OpenYurt node native again. Its pods keep running.
func Revert(ctx context.Context, e *machine.Env, tell func(run.Step)) error {
	unlock, err := run.ExclusiveSettled(ctx, e)
	if err != nil {
		return err
	}
	defer unlock()
	this, err := changeableNode(ctx, e)
	if err != nil {
		return err
	}
	steps := (&reversion{node: this.node, image: this.image}).steps()
	if all, err := allDone(ctx, e, steps); err != nil {
		return err
	} else if all {
		return fmt.Errorf("%s is a native node already: %w", this.node, run.ErrAlready)
	}
	if active := this.active; active != nil && active.Site.OpenYurt() {
		return run.Advise(fmt.Errorf("this machine's Site has nodeType: %s, so the next boot would convert it again", active.Site.NodeType),
			"set nodeType: native in site.yaml, in the slot or on a stick, and remove nodePool; then run `firstboot revert` again")
	}
	c := run.NewChange(e, "revert", Recorded, tell)
	c.ChangedAt = ReadyStep
	return c.WithoutTimer(ctx, steps)
}

func allDone(ctx context.Context, e *machine.Env, steps []run.Phase) (bool, error) {
	for _, s := range steps {
		if s.Name == ReadyStep {
			continue // this step only checks the result of a change
		}
		v, err := s.Look(ctx, e)
		if err != nil {
			return false, fmt.Errorf("checking the step %s: %w", s.Name, err)
		}
		if v != run.Done {
			return false, nil
		}
	}
	return true, nil
}

// reversion is the state of one revert.
type reversion struct {
	node             string
	image            ondisk.ImageInfo
	labelsBefore     map[string]any    // the OpenYurt labels that the Node had
	registeredBefore map[string]string // the OpenYurt labels that kubelet registered with
}

// steps returns the steps in order. The labels come first: while the Node has the pool's label, the
// cluster would convert the node again.
func (r *reversion) steps() []run.Phase {
	return []run.Phase{r.unlabel(), r.redirectStep(), stillReady(r.node, false), r.yurthub()}
}

func (r *reversion) unlabel() run.Phase {
	return run.Phase{
		Name: "labels", Doc: "the Node has no label of OpenYurt", Timeout: time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			return member.CheckLabels(ctx, e, r.node, nil)
		},
		Run: func(ctx context.Context, e *machine.Env) (err error) {
			if r.labelsBefore, err = member.HubLabels(ctx, e, r.node); err != nil {
				return err
			}
			return member.PatchLabels(ctx, e, r.node, member.NoLabels())
		},
		Undo: func(ctx context.Context, e *machine.Env) error {
			if r.labelsBefore == nil || !member.Redirected(e) {
				return nil // the labels were not read, or kubelet is direct and the Node needs none
			}
			return member.PatchLabels(ctx, e, r.node, r.labelsBefore)
		},
	}
}

func (r *reversion) redirectStep() run.Phase {
	return run.Phase{
		Name: "kubelet-direct", Doc: "kubelet talks to the API server", Timeout: 2 * time.Minute,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			flags := e.Contents(member.KubeadmFlags)
			if e.Exists(kubeadm.KubeletRestart) || e.Exists(openyurt.KubeletConf) || member.Redirected(e) || string(withRegistration(flags, nil)) != string(flags) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			r.registeredBefore = registeredAs(e.Contents(member.KubeadmFlags))
			return redirectToServer(ctx, e, nil)
		},
		Undo: func(ctx context.Context, e *machine.Env) error {
			if err := hubReady(ctx, e); err != nil {
				e.Log.Warn("kubelet is not redirected to yurthub again, since yurthub does not serve", "error", err)
				return nil
			}
			return redirectToHub(ctx, e, r.image.Kubernetes, r.registeredBefore)
		},
	}
}

func (r *reversion) yurthub() run.Phase {
	return run.Phase{
		Name: "yurthub", Doc: "yurthub is removed", Timeout: 2 * time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			state, err := e.UnitState(ctx, openyurt.Unit)
			if err != nil {
				return run.Todo, err
			}
			if state == "active" || hubLeft(e) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error { return Remove(ctx, e, r.image) },
	}
}

// ReadyStep is the name of the step that waits until the node is Ready.
const ReadyStep = "node-ready"

// stillReady waits until the running kubelet has reported the node as Ready. kubelet must connect
// through yurthub if through is set, and directly to the API server if not.
func stillReady(name string, through bool) run.Phase {
	return run.Phase{
		Name: ReadyStep, Doc: "the cluster sees the node Ready", Timeout: 3 * time.Minute,
		Run: func(ctx context.Context, e *machine.Env) error {
			err := e.Retry(ctx, machine.Wait{Every: 2 * time.Second}, func() error {
				n, err := member.ReadNode(ctx, e, name)
				if err != nil {
					return err
				}
				return member.ReadyNow(ctx, e, n)
			})
			if err != nil {
				return err
			}
			return ensureKubelet(ctx, e, through)
		},
	}
}

// ensureKubelet checks that kubelet runs with the arguments written for it. On a node that edgebake
// did not build, kubelet's unit may read its arguments from another file.
func ensureKubelet(ctx context.Context, e *machine.Env, through bool) error {
	var out strings.Builder
	if err := e.Run(ctx, machine.Cmd{Args: []string{"systemctl", "show", "--property", "MainPID", "--value", ondisk.UnitKubelet}, Output: &out}); err != nil {
		return fmt.Errorf("looking for kubelet: %w", err)
	}
	pid := strings.TrimSpace(out.String())
	if pid == "0" {
		return errors.New("kubelet is not running (journalctl -u kubelet shows why)")
	}
	args, err := e.Read("/proc/" + pid + "/cmdline")
	if err != nil {
		return fmt.Errorf("reading kubelet's arguments: %w", err)
	}
	conf := "" // the last one applies
	argv := strings.Split(string(args), "\x00")
	for i, arg := range argv {
		if v, ok := strings.CutPrefix(arg, "--kubeconfig="); ok {
			conf = v
		} else if arg == "--kubeconfig" && i+1 < len(argv) {
			conf = argv[i+1]
		}
	}
	if (conf == openyurt.KubeletConf) == through {
		return nil
	}
	return run.Advise(fmt.Errorf("kubelet runs with --kubeconfig=%s, and ignores %s", conf, member.KubeadmFlags),
		"see `systemctl cat kubelet`: its unit must pass $KUBELET_KUBEADM_ARGS on, and KUBELET_EXTRA_ARGS (/etc/default/kubelet, /etc/sysconfig/kubelet) must not set --kubeconfig")
}
