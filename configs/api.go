package configs

import (
	"github.com/edgebake/edgebake/configs/strict"
)

// The engine's types, under the names that those who read documents use.
type (
	Problem    = strict.Problem
	Problems   = strict.Problems
	FieldError = strict.FieldError
	Secret     = strict.Secret
)

// Mask stands for every Secret that is printed.
const Mask = strict.Mask

// NewSecret hides s.
func NewSecret(s string) Secret { return strict.NewSecret(s) }

// FileName returns a file's name for people: "-" is standard input.
func FileName(name string) string { return strict.FileName(name) }

// DidYouMean suggests one of the known names for an unknown one, as the end of a message.
func DidYouMean(name string, known []string) string { return strict.DidYouMean(name, known) }

// repeats are the texts that a list had so far.
type repeats map[string]bool

// again reports whether a text was there before.
func (r repeats) again(text string) bool {
	was := r[text]
	r[text] = true
	return was
}
