// Package strict reads YAML documents into Go structs. It is independent of
// particular documents.
//
// The machines that use a document are unattended, so mistakes must be found
// before a machine gets it. Nothing is ignored (unknown fields, wrong types,
// repeated keys), and all problems are reported at once, each with file, line,
// column and field.
//
// The struct tags contain everything about a field except its comment:
//   - yaml: its name; without omitempty, the field is required
//   - jsonschema: default=V, enum=V (repeated), minimum=N, maximum=N
//   - check: the name of a function in Checks for its text, or for each item of a list
//   - unique: no two items of a list are equal, or equal in these fields
//   - oneof: of the struct's fields with this tag exactly one is set (atmost: or none)
//   - path: the field names a file or directory; package documents uses it
//   - text: "lines" or "tabs": the control characters that its text may have
//
// Only Reveal and Encode show the value of a Secret, and no problem quotes one.
package strict
