// Package strict reads YAML documents into Go structs. It does not depend on particular documents.
//
// Machines that use a document are unattended, so mistakes must be found before the machines get
// it. Nothing is ignored: unknown fields, wrong types and repeated keys are problems. All problems
// are reported together, each with its file, line, column and field.
//
// Struct tags define everything about a field except its description:
//   - yaml: the name of the field; without omitempty, the field is required
//   - jsonschema: default=V, enum=V (repeated), minimum=N, maximum=N
//   - check: the function in Checks for the text of the field, or for each item of a list
//   - unique: "yes": all items of a list differ; otherwise: the items differ in these fields
//   - oneof: exactly one of the struct's fields with this tag is set; with "atmost", at most one
//   - path: the field names a file or directory; package builder/documents uses the tag
//   - text: "lines" or "tabs": control characters that the text may contain; "any": a cell of an
//     imported table may have any text
//   - list: "too": the field also allows a list of values
//
// Only Reveal and Encode show the value of a Secret, and no problem quotes it.
package strict
