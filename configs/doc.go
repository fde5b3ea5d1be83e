// Package configs defines the documents that people write: Image (the contents of an image), Site
// (the identity and the join data of one machine) and Inventory (the Sites of many machines). The
// Cluster, which contains parts of Sites, is in package clusterdoc. All of them have the apiVersion
// edgebake.io/v1alpha1.
//
// Package strict reads the documents. Struct tags contain the names, defaults, allowed values and
// formats of fields; checks.go contains the functions for the tag check. The validate functions
// check rules about several fields. Tests generate the JSON schemas (schema/) and docs/reference.md
// from the tags and comments. A parsed document is valid and has its defaults; Validate does not
// change it.
package configs
