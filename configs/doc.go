// Package configs holds what a person writes: the Image (what is baked), the
// Site (one machine's identity and join data) and the Cluster (control-plane
// nodes, workers and what is minted for them), all edgebake.io/v1alpha1.
//
// Why it is more than structs: a mistake in these documents is found at a
// desk or not at all, since hundreds of machines act on them unattended. So
// reading is strict (version first, then no unknown field, no wrong type),
// and every problem is reported at once, with file, line, column and field.
//
// Invariants:
//   - What Parse returns is defaulted and valid; Validate never changes it.
//   - Field names, defaults and allowed values stand in one place, the struct
//     tags; decoding, validation, the JSON schemas (schema/) and
//     docs/reference.md are all derived from them and from the comments.
//     The jsonschema tag reads: default=V, enum=V (repeated), and in words
//     what schema and reference should say beyond.
//   - A field without omitempty is required.
//   - A Secret shows itself nowhere but through Reveal, EncodeSlot and
//     EncodeSlotInventory, and no problem quotes one.
package configs
