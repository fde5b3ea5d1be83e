package lab

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

const podsPath = "/api/v1/namespaces/default/pods"

// LetLogsBeRead allows API servers to read pods' logs from kubelets. `kubeadm init` does that in a
// later phase.
func (c *Cluster) LetLogsBeRead(ctx context.Context) error {
	return c.Create(ctx, bindingPath, map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
		"metadata": map[string]any{"name": "kubeadm:cluster-admins"},
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "kubeadm:cluster-admins"}},
	})
}

// Greeter creates a pod of the hello image on the node's network. Every few seconds it prints its
// running time on the node's console, which shows that it runs while the node is offline. Like most
// pods it has a service account's token, which kubelet must get again when the pod restarts.
func (c *Cluster) Greeter(ctx context.Context, name, image, node string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	// The API server rejects the pod until the controller manager has created the service account.
	return c.lab.poll(ctx, "pod "+name+" to be accepted", c.other, func(ctx context.Context) (bool, error) {
		err := c.Create(ctx, podsPath, map[string]any{
			"apiVersion": "v1", "kind": "Pod",
			"metadata": map[string]any{"name": name},
			"spec": map[string]any{
				"nodeName": node, "terminationGracePeriodSeconds": 1, "hostNetwork": true,
				// Tolerate everything: unlike a cluster with OpenYurt, this one evicts pods from a
				// node that has been silent for five minutes.
				"tolerations": Stays(),
				"containers": []any{map[string]any{
					"name": name, "image": image, "imagePullPolicy": "Never", "args": []string{"/dev/ttyS0"},
					"securityContext": map[string]any{"privileged": true, "runAsUser": 0},
				}},
			},
		})
		return err == nil, err
	})
}

// SetOff makes the node run a shell script as root. It does not wait, because the script may remove
// the node from the cluster. Like OpenYurt's own tools, it uses a privileged pod that enters the
// node's namespaces. The pod runs the node's programs, so any image on the node is suitable. The
// script ends with its pod; longer work needs systemd-run.
func (c *Cluster) SetOff(ctx context.Context, vm *VM, name, image, script string) error {
	loader, libraries := "/node/usr/lib64/ld-linux-x86-64.so.2", "/node/usr/lib/x86_64-linux-gnu"
	if vm.mach.Arch == "arm64" {
		loader, libraries = "/node/usr/lib/aarch64-linux-gnu/ld-linux-aarch64.so.1", "/node/usr/lib/aarch64-linux-gnu"
	}
	err := c.Create(ctx, podsPath, map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"nodeName": vm.Node, "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "tolerations": Stays(),
			"hostNetwork": true, "hostPID": true, "automountServiceAccountToken": false,
			"volumes": []any{map[string]any{"name": "node", "hostPath": map[string]any{"path": "/"}}},
			"containers": []any{map[string]any{
				"name": name, "image": image, "imagePullPolicy": "Never",
				"command": []string{loader, "--library-path", libraries,
					"/node/usr/bin/nsenter", "--target", "1", "--mount", "--uts", "--ipc", "--net", "--pid", "--",
					"/usr/bin/env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "HOME=/root", "/bin/bash", "-c", script},
				"securityContext": map[string]any{"privileged": true, "runAsUser": 0},
				"volumeMounts":    []any{map[string]any{"name": "node", "mountPath": "/node"}},
			}},
		},
	})
	if err != nil {
		return fmt.Errorf("running %s on %s: %w", name, vm.Node, err)
	}
	return nil
}

// OnNode is like SetOff, but waits for the script and returns its output.
func (c *Cluster) OnNode(ctx context.Context, vm *VM, name, image, script string) (string, error) {
	if err := c.SetOff(ctx, vm, name, image, script); err != nil {
		return "", err
	}
	phase := ""
	err := c.pollGuest(ctx, vm, "the script "+name+" on "+vm.Node, func(ctx context.Context) (bool, error) {
		var pod Object
		if err := c.Get(ctx, podsPath+"/"+name, &pod); err != nil {
			return false, err
		}
		phase = pod.Status.Phase
		why := "its pod is " + phase
		for _, cs := range pod.Status.ContainerStatuses {
			for state, s := range cs.State {
				why += fmt.Sprintf("; %s %s %s", state, s.Reason, s.Message)
			}
		}
		return phase == "Succeeded" || phase == "Failed", errors.New(why)
	})
	if err != nil {
		return "", err
	}
	var out string
	logs, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = c.lab.poll(logs, "what "+name+" printed", c.other, func(ctx context.Context) (bool, error) {
		var err error
		out, err = c.Kubectl(ctx, "logs", name)
		return err == nil, err
	})
	if err != nil {
		return "", err
	}
	if phase == "Failed" {
		return out, fmt.Errorf("the script %s on %s failed:\n%s", name, vm.Node, strings.TrimSpace(out))
	}
	return out, c.Delete(ctx, podsPath+"/"+name)
}
