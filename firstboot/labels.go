package firstboot

import (
	"context"
	"fmt"

	"github.com/edgebake/edgebake/openyurt"
)

// hubLabels is a change that makes the Node's labels of OpenYurt's what they
// are now.
func hubLabels(ctx context.Context, e *Env, name string) (map[string]any, error) {
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

func noLabels() map[string]any {
	return map[string]any{openyurt.LabelEdgeWorker: nil, openyurt.LabelNodePool: nil}
}

func checkLabels(ctx context.Context, e *Env, name string, want map[string]string) (Verdict, error) {
	n, err := readNode(ctx, e, name)
	if err != nil {
		return Todo, err
	}
	for k, v := range want {
		if n.Metadata.Labels[k] != v {
			return Todo, nil
		}
	}
	return Done, nil
}

func patchLabels(ctx context.Context, e *Env, name string, labels map[string]any) error {
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
