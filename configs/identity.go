package configs

import (
	"fmt"
	"net"
	"regexp"
	"strings"
	"unicode"

	"github.com/edgebake/edgebake/configs/strict"
)

// Identity returns a vendor's serial number, UUID or asset tag, trimmed, and
// nothing for the junk that firmware carries instead: the same on every board
// of a kind, it would make two machines one.
func Identity(s string) string {
	s = strings.Trim(s, "\x00 \t\r\n")
	low := strings.Join(strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return strings.ContainsRune(" _-.:/", r) }), " ")
	for _, junk := range []string{
		"to be filled by o e m", "to be filled", "default string", "system serial", "serial number", "chassis serial", "base board serial", "board serial",
		"no asset tag", "no asset information", "chassis asset", "base board asset", "system asset", "fill by oem",
		"not specified", "not applicable", "not available", "not present", "not settable", "not provided", "no serial", "o e m", "oem", "invalid", "unknown", "empty",
	} {
		// One word can begin a real number: OEM-4711.
		if low == junk || strings.Contains(junk, " ") && strings.HasPrefix(low, junk+" ") {
			return ""
		}
	}
	switch digits := strings.ReplaceAll(low, " ", ""); digits {
	case "", "none", "na", "n a", "null", "nil", "test", "sn", "default", "undefined", "tbd", "xxxx",
		"serialnumber", "assettag", "assettagnumber", "noassettag", "tobefilledbyoem", "defaultstring", "notspecified",
		"systemserialnumber", "chassisserialnumber",
		"12345678", "123456789", "0123456789", "1234567890", "0123456789abcdef", "123456789abcdef",
		"asset1234567890", "atn12345678901234567890",
		"03000200040005000006000700080009", // UUIDs that whole series of boards carry
		"00020003000400050006000700080009",
		"12345678123456789012345678901234",
		"123456781234567890123456789abcde",
		"123456781234567890abcddeefaabbcc",
		"123456781234123412341234567890ab":
		return ""
	default:
		if len(digits) < 2 || strings.Trim(digits, digits[:1]) == "" { // 0000…, FFFF…, xxxx…
			return ""
		}
	}
	return s
}

var (
	uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	bareMAC  = regexp.MustCompile(`^[0-9A-Fa-f]{12}$`)
)

// CardMAC returns the address of one network card as Linux writes it
// (52:54:00:12:34:56). It takes dashes, dots and none at all, as on labels;
// "" is what cannot be a card's own address.
func CardMAC(s string) string {
	s = strings.TrimSpace(s)
	if bareMAC.MatchString(s) {
		s = fmt.Sprintf("%s:%s:%s:%s:%s:%s", s[:2], s[2:4], s[4:6], s[6:8], s[8:10], s[10:])
	}
	mac, err := net.ParseMAC(s)
	if err != nil || len(mac) != 6 || mac[0]&1 == 1 { // a group's: ff:ff:ff:ff:ff:ff is one
		return ""
	}
	text := mac.String()
	if strings.Trim(text, "0:") == "" {
		return ""
	}
	return text
}

// IsZero reports whether nothing is to be matched.
func (m Match) IsZero() bool {
	return len(m.MACs) == 0 && m.Serial == "" && m.UUID == "" && m.AssetTag == ""
}

// String names the machine, for messages.
func (m Match) String() string {
	var all []string
	for _, k := range m.keys() {
		all = append(all, k.key)
	}
	return strings.Join(all, ", ")
}

// keys are what the match is made of, each with its field, in a form in which
// two that mean the same are the same.
func (m Match) keys() []matchKey {
	var out []matchKey
	for i, mac := range m.MACs {
		if c := CardMAC(mac); c != "" {
			out = append(out, matchKey{fmt.Sprintf("match.macs[%d]", i), "MAC address " + c})
		}
	}
	for _, k := range []struct{ field, what, value string }{
		{"match.serial", "serial number ", m.Serial}, {"match.uuid", "UUID ", m.UUID}, {"match.assetTag", "asset tag ", m.AssetTag},
	} {
		if v := Identity(k.value); v != "" {
			out = append(out, matchKey{k.field, k.what + strings.ToLower(v)})
		}
	}
	return out
}

// unseen is the first character that a screen does not show, as web pages and
// spreadsheets leave some in what is copied out of them; 0: none.
func unseen(s string) rune {
	for _, r := range strings.TrimSpace(s) {
		if !unicode.IsPrint(r) {
			return r
		}
	}
	return 0
}

type matchKey struct{ field, key string }

// validate reports what is wrong with the match at path.
func (m Match) validate(path string, probs *Problems) {
	if m.IsZero() {
		probs.Add(path, "must say which machine the Site is for: give macs, serial, uuid or assetTag (a machine without a Site prints its own)")
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
		case Identity(k.value) == "":
			probs.Add(path+"."+k.field, "%q never matches: firmware has it where no %s was filled in, so many machines carry it; use another member, e.g. macs", strict.Shorten(k.value), k.what)
		case strict.BadText(k.value) != "":
			probs.Add(path+"."+k.field, "%s", strict.BadText(k.value))
		case unseen(k.value) != 0:
			probs.Add(path+"."+k.field, "contains an invisible character (%U), which no machine has there: type it again", unseen(k.value))
		case k.field == "uuid" && !uuidForm.MatchString(strings.ToLower(strings.TrimSpace(k.value))):
			probs.Add(path+"."+k.field, "%q is not a UUID, e.g. 4c4c4544-0042-3510-8052-c7c04f4e4232", strict.Shorten(k.value))
		}
	}
}
