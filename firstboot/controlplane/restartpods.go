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

// PodsRestart says that the control plane's pods run with kubeconfigs that were
// made anew. It is of this boot: the next one starts all pods anyway.
const PodsRestart = "/run/edgebake-restart-control-plane"

// kubeletToo is what PodsRestart holds where kubelet's certificate is another, too.
const kubeletToo = "kubelet"

// renewedAnnotation of a static pod: kubelet starts a pod anew that it differs
// in.
const renewedAnnotation = "edgebake.io/certificates"

// restartReaders restarts what has read the former certificates. The mark goes
// last: killed before that, the next run does all of it again.
func restartReaders(ctx context.Context, e *machine.Env) error {
	state, err := e.UnitState(ctx, ondisk.UnitKubelet)
	if err == nil {
		err = restartPods(e)
	}
	if err == nil && state == "active" && string(e.Contents(PodsRestart)) == kubeletToo { // else it starts with what is there now
		err = e.Unit(ctx, "restart", ondisk.UnitKubelet)
	}
	if err != nil {
		return err
	}
	return e.Remove(PodsRestart)
}

// restartPods has kubelet start the control plane's pods anew, but for etcd,
// which reads its certificates at each connection. A controller manager and a
// scheduler read their kubeconfigs once. Where kubelet does not run, they may run
// all the same: it leaves pods alone when it ends, and takes them over as they are.
func restartPods(e *machine.Env) error {
	when := e.Now().UTC().Format(time.RFC3339)
	for _, p := range Pods {
		pod, err := e.Read(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it is made later, and starts with what is there then
		}
		if err == nil {
			pod, err = annotated(pod, renewedAnnotation, when)
			if err != nil { // cut off: kubelet runs none of it, and it is made anew
				e.Log.Warn("a pod of the control plane is not restarted", "manifest", p, "error", err)
				continue
			}
			_, err = e.Write(p, pod, machine.Mode(0o600))
		}
		if err != nil {
			return fmt.Errorf("having kubelet restart %s: %w", p, err)
		}
	}
	return nil
}

// annotated is a pod with an annotation, and all else as it was.
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
