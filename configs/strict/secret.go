package strict

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"unique"
)

// Mask is printed instead of a Secret.
const Mask = "***"

// Secret is a string that is printed, logged and encoded as Mask. Only Reveal returns it. Two
// Secrets are equal (==) if their strings are.
//
// The string is in a unique.Handle: package fmt does not call methods of values in unexported
// fields, but then it prints only the address of the handle.
type Secret struct{ h unique.Handle[string] }

// NewSecret returns a Secret with the value s.
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

// Format prints the mask, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.shown()) }

// LogValue returns the mask, for log handlers.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.shown()) }

// MarshalText returns the mask, for encoders other than JSON and YAML.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.shown()), nil }

func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.shown()) }

// UnmarshalJSON sets the secret from a string.
func (s *Secret) UnmarshalJSON(b []byte) error {
	var v string
	if err := json.Unmarshal(b, &v); err != nil {
		// The error of package json may quote the secret.
		return fmt.Errorf("decoding a secret: not a string")
	}
	*s = NewSecret(v)
	return nil
}

func (s Secret) MarshalYAML() (any, error) { return s.shown(), nil }

// UnmarshalYAML sets the secret from a string.
func (s *Secret) UnmarshalYAML(unmarshal func(any) error) error {
	var v string
	if err := unmarshal(&v); err != nil {
		return fmt.Errorf("decoding a secret: not a string")
	}
	*s = NewSecret(v)
	return nil
}
