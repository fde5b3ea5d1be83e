// Package strict reads YAML documents into Go structs, and knows no document itself.
//
// A mistake in a document that hundreds of unattended machines act on is found at a desk
// or not at all. So nothing is ignored (unknown fields, wrong types, repeated keys), and
// all problems are reported at once, each with file, line, column and field.
//
// The struct tags hold everything about a field but its comment:
//   - yaml: its name; without omitempty, the field is required
//   - jsonschema: default=V, enum=V (repeated), minimum=N, maximum=N
//   - check: the name of a function in Checks that judges its text, or each item's
//   - unique: a list has no two equal items, or items with equal fields of these names
//   - oneof: of the struct's fields with this tag exactly one is set (atmost: or none)
//   - path: the field names a file or directory; documents use it
//   - instead: "VALUE=WHY", why a value that people may expect is not allowed
//   - text: "lines" or "tabs": the control characters that its text may have
//
// A Secret shows itself nowhere but through Reveal and Encode, and no problem quotes one.
package strict
