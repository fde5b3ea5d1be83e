// Package configs has the documents that people write: Image (what is baked), Site (one
// machine's identity and join data), Inventory (many Sites) and Cluster (control-plane
// nodes, workers and what is minted for them), all edgebake.io/v1alpha1.
//
// Package strict reads them: names, defaults, allowed values and forms of the fields are in
// the struct tags, and checks.go has the functions that they name. The validate functions
// add what concerns several fields. JSON schemas (schema/) and docs/reference.md are made
// from the tags and the comments. A document that was parsed is valid and has its defaults;
// Validate never changes it.
package configs
