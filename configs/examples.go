package configs

import _ "embed" // the examples

//go:embed examples/image.yaml
var exampleImage string

//go:embed examples/site.yaml
var exampleSite string

//go:embed examples/cluster.yaml
var exampleCluster string

// ExampleImage is a commented Image to start from.
func ExampleImage() []byte { return []byte(exampleImage) }

// ExampleSite is a commented Site to start from.
func ExampleSite() []byte { return []byte(exampleSite) }

// ExampleCluster is a commented Cluster to start from.
func ExampleCluster() []byte { return []byte(exampleCluster) }
