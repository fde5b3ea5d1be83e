package member

import (
	"context"
	"fmt"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/openyurt"
)

// HubLabels returns a patch that would restore the Node's present OpenYurt labels.
func HubLabels(ctx context.Context, e *machine.Env, name string) (map[string]any, error) {
	n, err := ReadNode(ctx, e, name)
	if err != nil {
		return nil, err
	}
	out := NoLabels()
	for k := range out {
		if v, ok := n.Metadata.Labels[k]; ok {
			out[k] = v
		}
	}
	return out, nil
}

// AnyOf converts labels to a patch.
func AnyOf(labels map[string]string) map[string]any {
	out := map[string]any{}
	for k, v := range labels {
		out[k] = v
	}
	return out
}

// NoLabels returns a patch that removes OpenYurt's labels from a Node.
func NoLabels() map[string]any {
	out := map[string]any{}
	for _, k := range openyurt.LabelKeys() {
		out[k] = nil
	}
	return out
}

// CheckLabels returns Done if the Node's OpenYurt labels are those in want, which may be nil.
func CheckLabels(ctx context.Context, e *machine.Env, name string, want map[string]string) (run.Verdict, error) {
	n, err := ReadNode(ctx, e, name)
	if err != nil {
		return run.Todo, err
	}
	for _, k := range openyurt.LabelKeys() {
		if n.Metadata.Labels[k] != want[k] {
			return run.Todo, nil
		}
	}
	return run.Done, nil
}

// PatchLabels changes labels of a Node with the node's own credentials. A nil value removes a
// label.
func PatchLabels(ctx context.Context, e *machine.Env, name string, labels map[string]any) error {
	c, err := NodeClient(e)
	if err != nil {
		return err
	}
	patch := map[string]any{"metadata": map[string]any{"labels": labels}}
	if err := c.MergePatch(ctx, "/api/v1/nodes/"+name, patch); err != nil {
		return fmt.Errorf("labelling Node %s: %w", name, err)
	}
	return nil
}
