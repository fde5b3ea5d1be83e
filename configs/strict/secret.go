package strict

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"unique"
)

// Mask is printed in place of a Secret.
const Mask = "***"

// Secret is a string that prints, logs and encodes as Mask. Only Reveal returns it. Two
// Secrets are equal (==) if their strings are.
//
// A unique.Handle holds the string because package fmt cannot call the methods of a value
// in an unexported field: it prints the handle's address.
type Secret struct{ h unique.Handle[string] }

// NewSecret hides s.
func NewSecret(s string) Secret {
	if s == "" {
		return Secret{}
	}
	return Secret{unique.Make(s)}
}

// Reveal returns the string.
func (s Secret) Reveal() string {
	if s.IsZero() {
		return ""
	}
	return s.h.Value()
}

// IsZero reports whether the secret is empty.
func (s Secret) IsZero() bool { return s == Secret{} }

func (s Secret) shown() string {
	if s.IsZero() {
		return ""
	}
	return Mask
}

func (s Secret) String() string   { return s.shown() }
func (s Secret) GoString() string { return s.shown() }

// Format prints the mask for every verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.shown()) }

// LogValue gives log handlers the mask.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.shown()) }

// MarshalText gives other encoders than JSON and YAML the mask.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.shown()), nil }

func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.shown()) }

// UnmarshalJSON reads the secret from a string.
func (s *Secret) UnmarshalJSON(b []byte) error {
	var v string
	if err := json.Unmarshal(b, &v); err != nil {
		// The error of package json may quote the value.
		return fmt.Errorf("decoding a secret: not a string")
	}
	*s = NewSecret(v)
	return nil
}

func (s Secret) MarshalYAML() (any, error) { return s.shown(), nil }

// UnmarshalYAML reads the secret from a string.
func (s *Secret) UnmarshalYAML(unmarshal func(any) error) error {
	var v string
	if err := unmarshal(&v); err != nil {
		return fmt.Errorf("decoding a secret: not a string")
	}
	*s = NewSecret(v)
	return nil
}
