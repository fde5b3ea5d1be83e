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

// PodsRestart marks that the control plane's pods run with former kubeconfigs. It is on /run:
// the next boot starts all pods anyway.
const PodsRestart = "/run/edgebake-restart-control-plane"

// kubeletToo is the contents of PodsRestart if kubelet's certificate is new, too.
const kubeletToo = "kubelet"

// renewedAnnotation is changed in a static pod to make kubelet re-create it.
const renewedAnnotation = "edgebake.io/certificates"

// restartReaders restarts the programs that have read former certificates. The mark is removed
// last, so that an interrupted run is repeated.
func restartReaders(ctx context.Context, e *machine.Env) error {
	state, err := e.UnitState(ctx, ondisk.UnitKubelet)
	if err == nil {
		err = restartPods(e)
	}
	if err == nil && state == "active" && string(e.Contents(PodsRestart)) == kubeletToo { // otherwise it reads the new one when it starts
		err = e.Unit(ctx, "restart", ondisk.UnitKubelet)
	}
	if err != nil {
		return err
	}
	return e.Remove(PodsRestart)
}

// restartPods makes kubelet re-create the control plane's pods, except etcd, which reads its
// certificates at each connection. Controller manager and scheduler read their kubeconfigs
// once. The pods may run without kubelet: it leaves them running when it ends, and keeps them
// as they are.
func restartPods(e *machine.Env) error {
	when := e.Now().UTC().Format(time.RFC3339)
	for _, p := range Pods {
		pod, err := e.Read(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it is made later, and starts with the new files
		}
		if err == nil {
			pod, err = annotated(pod, renewedAnnotation, when)
			if err != nil { // incomplete: kubelet does not run it, and it is made again
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
