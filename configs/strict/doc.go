// Package strict reads YAML documents into Go structs. It knows nothing about particular documents.
//
// The machines that use a document are unattended, so mistakes must be found before a machine gets
// the document. Nothing is ignored: unknown fields, wrong types and repeated keys are problems. All
// problems are reported at once, each with file, line, column and field.
//
// The struct tags define everything about a field except its description:
//   - yaml: its name; without omitempty, the field is required
//   - jsonschema: default=V, enum=V (repeated), minimum=N, maximum=N
//   - check: the name of a function in Checks for its text, or for each item of a list
//   - unique: "yes": all items of a list differ; otherwise: the items differ in these fields
//   - oneof: exactly one of the struct's fields with this tag is set; with "atmost", one or none
//   - path: the field names a file or directory; package documents uses it
//   - text: "lines" or "tabs": the control characters that its text may have
//
// Only Reveal and Encode show the value of a Secret, and no problem quotes one.
package strict
