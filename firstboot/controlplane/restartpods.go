package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// PodsRestart exists while the control plane's pods still use former certificates. It is in /run,
// because a reboot restarts all pods anyway.
const PodsRestart = "/run/edgebake-restart-control-plane"

// kubeletToo is the contents of PodsRestart if kubelet has a new certificate too.
const kubeletToo = "kubelet"

// renewedAnnotation is changed in a static pod's manifest to make kubelet recreate the pod.
const renewedAnnotation = "edgebake.io/certificates"

// restartReaders restarts the programs that still use former certificates. It removes PodsRestart
// last, so that an interrupted run is repeated.
func restartReaders(ctx context.Context, e *machine.Env) error {
	state, err := e.UnitState(ctx, ondisk.UnitKubelet)
	if err == nil {
		err = restartPods(e)
	}
	if err == nil && state == "active" && string(e.Contents(PodsRestart)) == kubeletToo { // an inactive kubelet reads the new one when it starts
		err = e.Unit(ctx, "restart", ondisk.UnitKubelet)
	}
	if err != nil {
		return err
	}
	return e.Remove(PodsRestart)
}

// restartPods makes kubelet recreate the control plane's pods, except etcd, which rereads its
// certificates. Restarting kubelet would not be enough, because pods keep running.
func restartPods(e *machine.Env) error {
	when := e.Now().UTC().Format(time.RFC3339)
	for _, p := range Pods {
		pod, err := e.Read(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it is made later, with the new files
		}
		if err == nil {
			pod, err = annotated(pod, renewedAnnotation, when)
			if err != nil { // incomplete: a later phase makes it again, and kubelet does not run it
				e.Log.Warn("a pod of the control plane is not restarted", "manifest", p, "error", err)
				continue
			}
			_, err = e.Write(p, pod, machine.Mode(0o600))
		}
		if err != nil {
			return fmt.Errorf("making kubelet restart %s: %w", p, err)
		}
	}
	return nil
}

// annotated returns a pod's manifest with one more annotation.
func annotated(pod []byte, name, value string) ([]byte, error) {
	doc, err := yamltree.Parse(pod)
	if err != nil {
		return nil, errors.New("it is not YAML")
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("it is not a pod")
	}
	metadata := yamltree.Child(doc.Content[0], "metadata", yaml.MappingNode)
	yamltree.Set(yamltree.Child(metadata, "annotations", yaml.MappingNode), name, yamltree.String(value))
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	err = errors.Join(enc.Encode(doc), enc.Close())
	return b.Bytes(), err
}
