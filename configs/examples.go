package configs

import (
	_ "embed"
)

//go:embed examples/image.yaml
var exampleImage string

//go:embed examples/site.yaml
var exampleSite string

//go:embed examples/cluster.yaml
var exampleCluster string

//go:embed examples/openyurt.yaml
var exampleOpenYurt string

// ExampleImage is a commented Image to start from.
func ExampleImage() []byte { return []byte(exampleImage) }
