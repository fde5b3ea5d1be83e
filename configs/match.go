package configs

import (
	"fmt"
	"regexp"
	"strings"
	"unicode"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

var uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// IsZero reports whether the match is empty.
func (m Match) IsZero() bool {
	return len(m.MACs) == 0 && m.Serial == "" && m.UUID == "" && m.AssetTag == ""
}

// String describes the match, for messages.
func (m Match) String() string {
	var all []string
	for _, k := range m.Keys() {
		all = append(all, k.Key)
	}
	return strings.Join(all, ", ")
}

// Keys returns the members of the match, normalized.
func (m Match) Keys() []MatchKey {
	var out []MatchKey
	for i, mac := range m.MACs {
		if c := forms.CardMAC(mac); c != "" {
			out = append(out, MatchKey{fmt.Sprintf("match.macs[%d]", i), "MAC address " + c})
		}
	}
	for _, k := range []struct{ field, what, value string }{
		{"match.serial", "serial number ", m.Serial}, {"match.uuid", "UUID ", m.UUID}, {"match.assetTag", "asset tag ", m.AssetTag},
	} {
		if v := forms.Identity(k.value); v != "" {
			out = append(out, MatchKey{k.field, k.what + strings.ToLower(v)})
		}
	}
	return out
}

// unseen returns the first invisible character of s, or 0. Text copied from web pages and
// spreadsheets may contain such characters.
func unseen(s string) rune {
	for _, r := range strings.TrimSpace(s) {
		if !unicode.IsPrint(r) {
			return r
		}
	}
	return 0
}

// MatchKey is one member of a match, with the field that contains it.
type MatchKey struct{ Field, Key string }

// Validate reports the problems of the match at path.
func (m Match) Validate(path string, probs *Problems) {
	if m.IsZero() {
		probs.Add(path, "must name the Site's machine: set macs, serial, uuid or assetTag (a machine without a Site prints its own)")
	}
	for i, mac := range m.MACs {
		if bad := badMAC(mac); bad != "" {
			probs.Add(fmt.Sprintf("%s.macs[%d]", path, i), "%s", bad)
		}
	}
	for _, k := range []struct{ field, what, value string }{
		{"serial", "serial number", m.Serial}, {"uuid", "UUID", m.UUID}, {"assetTag", "asset tag", m.AssetTag},
	} {
		switch {
		case k.value == "":
		case forms.Identity(k.value) == "":
			probs.Add(path+"."+k.field, "%q never matches: it is a placeholder for a missing %s, which many machines have; use another field, e.g. macs", strict.Shorten(k.value), k.what)
		case strict.BadText(k.value) != "":
			probs.Add(path+"."+k.field, "%s", strict.BadText(k.value))
		case unseen(k.value) != 0:
			probs.Add(path+"."+k.field, "contains an invisible character (%U); type the value again", unseen(k.value))
		case k.field == "uuid" && !uuidForm.MatchString(strings.ToLower(strings.TrimSpace(k.value))):
			probs.Add(path+"."+k.field, "%q is not a UUID, e.g. 4c4c4544-0042-3510-8052-c7c04f4e4232", strict.Shorten(k.value))
		}
	}
}
