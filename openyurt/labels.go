package openyurt

import "strconv"

// Labels of a Node that is OpenYurt's.
const (
	LabelEdgeWorker = "openyurt.io/is-edge-worker"
	LabelNodePool   = "apps.openyurt.io/nodepool"
)

// Labels are the two that make a Node OpenYurt's.
func Labels(pool string, cloud bool) map[string]string {
	return map[string]string{LabelEdgeWorker: strconv.FormatBool(!cloud), LabelNodePool: pool}
}

// IsLabel reports whether a label is one of the two.
func IsLabel(label string) bool { return label == LabelEdgeWorker || label == LabelNodePool }
