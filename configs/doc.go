// Package configs defines the documents that people write: Image (the content
// of an image), Site (one machine's identity and join data) and Inventory (many
// Sites), all edgebake.io/v1alpha1. The Cluster, which contains parts of Sites,
// is in clusterdoc.
//
// Package strict reads the documents: names, defaults, allowed values and formats of the fields are
// in the struct tags, and checks.go has the functions for the tag check. The validate functions
// check rules that involve several fields. Tests generate the JSON schemas (schema/) and
// docs/reference.md from the tags and comments. A parsed document is valid and has its defaults
// set; Validate does not change it.
package configs
