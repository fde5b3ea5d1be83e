package forms

import (
	"testing"
)

func TestIdentity(t *testing.T) {
	for _, junk := range []string{
		"", " ", "\x00\x00", "To be filled by O.E.M.", "to be filled by o.e.m", "Default string", "DEFAULT STRING", "System Serial Number",
		"Not Specified", "Not Applicable", "N/A", "None", "NULL", "Unknown", "INVALID", "O.E.M.", "0", "0000000000", "00000000-0000-0000-0000-000000000000",
		"FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", "xxxxxxxx", "123456789", "0123456789", "03000200-0400-0500-0006-000700080009", "........",
		"Chassis Serial Number", "................",
	} {
		if got := Identity(junk); got != "" {
			t.Errorf("%q was accepted as an identity: %q", junk, got)
		}
	}
	for _, good := range []string{"PF3X99", "VMware-56 4d 1a", "100000009d1d4a3c", "CZC1234567", "6ba7b810-9dad-41d1-80b4-00c04fd430c8", "NONE-42X", "S1234", "OEM-4711"} {
		want := good
		if got := Identity(good + "\x00\n"); got != want {
			t.Errorf("%q became %q", good, got)
		}
	}
}
