package firstboot

import (
	"context"
	"fmt"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/openyurt"
)

// hubLabels is a change that makes the Node's labels of OpenYurt's what they
// are now.
func hubLabels(ctx context.Context, e *machine.Env, name string) (map[string]any, error) {
	n, err := readNode(ctx, e, name)
	if err != nil {
		return nil, err
	}
	out := noLabels()
	for k := range out {
		if v, ok := n.Metadata.Labels[k]; ok {
			out[k] = v
		}
	}
	return out, nil
}

func anyOf(labels map[string]string) map[string]any {
	out := map[string]any{}
	for k, v := range labels {
		out[k] = v
	}
	return out
}

// noLabels is a change that takes OpenYurt's labels from a Node.
func noLabels() map[string]any {
	out := map[string]any{}
	for _, k := range openyurt.LabelKeys() {
		out[k] = nil
	}
	return out
}

// checkLabels looks whether the Node's labels of OpenYurt's are those; nil: none.
func checkLabels(ctx context.Context, e *machine.Env, name string, want map[string]string) (run.Verdict, error) {
	n, err := readNode(ctx, e, name)
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

func patchLabels(ctx context.Context, e *machine.Env, name string, labels map[string]any) error {
	c, err := nodeClient(e)
	if err != nil {
		return err
	}
	patch := map[string]any{"metadata": map[string]any{"labels": labels}}
	if err := c.MergePatch(ctx, "/api/v1/nodes/"+name, patch); err != nil {
		return fmt.Errorf("labelling Node %s: %w", name, err)
	}
	return nil
}
