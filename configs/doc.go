// Package configs has the documents that people write: Image (what is baked), Site (one
// machine's identity and join data) and Inventory (many Sites), all edgebake.io/v1alpha1.
// The Cluster, which contains parts of Sites, is in clusterdoc.
//
// Package strict reads them: names, defaults, allowed values and forms of the fields are in
// the struct tags, and checks.go has the functions that the tag check names. The validate
// functions check rules for several fields. Tests generate the JSON schemas (schema/) and
// docs/reference.md from the tags and the comments. A parsed document is valid and has its
// defaults; Validate does not change it.
package configs
