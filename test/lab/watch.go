package lab

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// Object has the fields of a Node or Pod that tests read.
type Object struct {
	Metadata struct {
		Name              string
		UID               string
		Labels            map[string]string
		Annotations       map[string]string
		CreationTimestamp time.Time
	}
	Spec struct {
		NodeName string
		Taints   []struct{ Key, Value, Effect string }
	}
	Status struct {
		Phase      string
		PodIP      string
		Conditions []struct {
			Type, Status, Reason, Message string
			LastTransitionTime            time.Time
		}
		Addresses []struct{ Type, Address string }
		NodeInfo  struct {
			KubeletVersion, ContainerRuntimeVersion, KernelVersion, OSImage, Architecture, BootID, MachineID string
		}
		ContainerStatuses []struct {
			Name         string
			Ready        bool
			RestartCount int
			State        map[string]struct{ Reason, Message string }
		}
	}
}

// Condition returns the status of a condition, and its reason as text.
func (o *Object) Condition(kind string) (status, why string) {
	for _, c := range o.Status.Conditions {
		if c.Type == kind {
			return c.Status, strings.TrimSpace(c.Reason + ": " + c.Message)
		}
	}
	return "", "there is no condition " + kind
}

// Node reads a Node.
func (c *Cluster) Node(ctx context.Context, name string) (*Object, error) {
	var o Object
	if err := c.Get(ctx, "/api/v1/nodes/"+name, &o); err != nil {
		return nil, err
	}
	return &o, nil
}

// WaitNode waits until want accepts a Node; otherwise want returns the reason. If the guest gives
// up or a process of the cluster ends, WaitNode fails at once.
func (c *Cluster) WaitNode(ctx context.Context, vm *VM, name string, want func(*Object) (ok bool, why string)) (*Object, error) {
	var node *Object
	err := c.pollGuest(ctx, vm, "node "+name, func(ctx context.Context) (bool, error) {
		var err error
		if node, err = c.Node(ctx, name); err != nil {
			return false, err
		}
		ok, why := want(node)
		if !ok {
			return false, errors.New(why)
		}
		return true, nil
	})
	return node, err
}

// pollGuest is like poll, but also fails if the guest gives up.
func (c *Cluster) pollGuest(ctx context.Context, vm *VM, what string, ready func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	return c.lab.poll(ctx, what, append([]*Process{vm.proc}, c.other...), func(ctx context.Context) (bool, error) {
		if err := vm.Serial.Broken(); err != nil {
			cancel(err)
			return false, err
		}
		ok, err := ready(ctx)
		var end hopeless
		if errors.As(err, &end) {
			cancel(err)
		}
		return ok, err
	})
}

// hopeless is an error for which waiting is useless.
type hopeless struct{ error }

// Ready is a condition for WaitNode: the Node is Ready.
func Ready(o *Object) (bool, string) {
	status, why := o.Condition("Ready")
	return status == "True", why
}

// Stays returns tolerations for a pod that no controller would recreate. A machine that takes
// minutes to boot seems dead, so without them the cluster would remove the pod.
func Stays() []any {
	return []any{map[string]any{"operator": "Exists", "effect": "NoExecute"}}
}

// Pod creates a pod of one container. Its image must be on the node, because there is no registry.
func (c *Cluster) Pod(ctx context.Context, name, image, node string) error {
	// Wait for the default service account, which the admission plugin requires. The controller
	// manager creates it some seconds after the namespace.
	err := c.lab.poll(ctx, "the default service account", c.other, func(ctx context.Context) (bool, error) {
		var o Object
		err := c.Get(ctx, "/api/v1/namespaces/default/serviceaccounts/default", &o)
		return err == nil, err
	})
	if err != nil {
		return err
	}
	pod := map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"nodeName": node, "terminationGracePeriodSeconds": 1,
			"tolerations": Stays(),
			"containers":  []any{map[string]any{"name": name, "image": image, "imagePullPolicy": "Never"}},
		},
	}
	asked := false // the answer to an earlier request may have been lost
	var rejected error
	err = c.lab.poll(ctx, "making pod "+name, c.other, func(ctx context.Context) (bool, error) {
		err := c.Create(ctx, "/api/v1/namespaces/default/pods", pod)
		var se *StatusError
		if err != nil && (!errors.As(err, &se) || se.Code >= 500) {
			asked = true
			return false, err
		}
		if err != nil && !(se.Code == http.StatusConflict && asked) {
			rejected = err
		}
		return true, nil
	})
	return errors.Join(err, rejected)
}

// WaitPod waits until a pod runs and is ready.
func (c *Cluster) WaitPod(ctx context.Context, vm *VM, name string) (*Object, error) {
	var pod Object
	err := c.pollGuest(ctx, vm, "pod "+name, func(ctx context.Context) (bool, error) {
		pod = Object{}
		err := c.Get(ctx, "/api/v1/namespaces/default/pods/"+name, &pod)
		if NotFound(err) {
			return false, hopeless{fmt.Errorf("pod %s was removed, and no controller creates it again", name)}
		}
		if err != nil {
			return false, err
		}
		if status, _ := pod.Condition("Ready"); status == "True" && pod.Status.Phase == "Running" {
			return true, nil
		}
		why := "it is " + pod.Status.Phase
		for _, cs := range pod.Status.ContainerStatuses {
			for state, s := range cs.State {
				why += fmt.Sprintf("; %s is %s %s %s", cs.Name, state, s.Reason, s.Message)
			}
		}
		return false, errors.New(why)
	})
	return &pod, err
}
