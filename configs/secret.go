package configs

import (
	"encoding/json"
	"fmt"
)

// Mask stands for every Secret that is printed.
const Mask = "***"

// Secret is a string that never shows itself: printing, logging and encoding
// give the mask. The one way out is Reveal, for the code that hands the
// secret to where it belongs.
type Secret struct{ s string }

// NewSecret hides s.
func NewSecret(s string) Secret { return Secret{s} }

// Reveal returns what is hidden.
func (s Secret) Reveal() string { return s.s }

// IsZero reports whether there is nothing to hide.
func (s Secret) IsZero() bool { return s.s == "" }

func (s Secret) shown() string {
	if s.s == "" {
		return ""
	}
	return Mask
}

func (s Secret) String() string   { return s.shown() }
func (s Secret) GoString() string { return s.shown() }

// Format covers every verb: %q or %x would print the field otherwise.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.shown()) }

func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.shown()) }

func (s *Secret) UnmarshalJSON(b []byte) error { return json.Unmarshal(b, &s.s) }

func (s Secret) MarshalYAML() (any, error) { return s.shown(), nil }

func (s *Secret) UnmarshalYAML(unmarshal func(any) error) error { return unmarshal(&s.s) }
