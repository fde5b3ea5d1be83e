package configs

import "github.com/edgebake/edgebake/configs/strict"

// Types of package strict, for readers of documents.
type (
	Problem    = strict.Problem
	Problems   = strict.Problems
	FieldError = strict.FieldError
	Secret     = strict.Secret
)

// Mask is printed instead of a Secret.
const Mask = strict.Mask

// NewSecret returns a Secret with the value s.
func NewSecret(s string) Secret { return strict.NewSecret(s) }

// FileName returns the name of a file for messages: "-" becomes "standard input".
func FileName(name string) string { return strict.FileName(name) }
