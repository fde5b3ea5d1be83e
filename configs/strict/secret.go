package strict

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"unique"
)

// Mask stands for every Secret that is printed.
const Mask = "***"

// Secret is a string that never shows itself: printing, logging and encoding
// give the mask. The one way out is Reveal, for the code that hands the
// secret to where it belongs. Two are equal (==) if they hide the same.
//
// The string sits behind a unique.Handle because package fmt cannot call the
// methods of a value in an unexported field: such a Secret prints as an
// address, not as what it hides.
type Secret struct{ h unique.Handle[string] }

// NewSecret hides s.
func NewSecret(s string) Secret {
	if s == "" {
		return Secret{}
	}
	return Secret{unique.Make(s)}
}

// Reveal returns what is hidden.
func (s Secret) Reveal() string {
	if s.IsZero() {
		return ""
	}
	return s.h.Value()
}

// IsZero reports whether there is nothing to hide.
func (s Secret) IsZero() bool { return s == Secret{} }

func (s Secret) shown() string {
	if s.IsZero() {
		return ""
	}
	return Mask
}

func (s Secret) String() string   { return s.shown() }
func (s Secret) GoString() string { return s.shown() }

// Format covers every verb: %q or %x would print the field otherwise.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.shown()) }

// LogValue keeps log handlers from looking inside.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.shown()) }

// MarshalText covers encoders that know neither JSON nor YAML.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.shown()), nil }

func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.shown()) }

// UnmarshalJSON takes the secret in.
func (s *Secret) UnmarshalJSON(b []byte) error {
	var v string
	if err := json.Unmarshal(b, &v); err != nil {
		// The library's error could quote the value.
		return fmt.Errorf("decoding a secret: not a string")
	}
	*s = NewSecret(v)
	return nil
}

func (s Secret) MarshalYAML() (any, error) { return s.shown(), nil }

// UnmarshalYAML takes the secret in.
func (s *Secret) UnmarshalYAML(unmarshal func(any) error) error {
	var v string
	if err := unmarshal(&v); err != nil {
		return fmt.Errorf("decoding a secret: not a string")
	}
	*s = NewSecret(v)
	return nil
}
