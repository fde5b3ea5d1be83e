// Package examples contains commented documents, from which `edgebake init` makes its documents. A
// test validates each of them.
package examples

import _ "embed"

// Examples of documents.
var (
	//go:embed image.yaml
	Image string
	//go:embed site.yaml
	Site string
	//go:embed cluster.yaml
	Cluster string
	//go:embed openyurt.yaml
	OpenYurt string // an Image for OpenYurt nodes
)
