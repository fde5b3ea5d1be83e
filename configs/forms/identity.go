package forms

import (
	"fmt"
	"net"
	"regexp"
	"strings"
)

// Identity returns a serial number, UUID or asset tag without surrounding blanks. It returns "" for
// a vendor's placeholder, which many machines may have.
func Identity(s string) string {
	s = strings.Trim(s, "\x00 \t\r\n")
	low := strings.Join(strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return strings.ContainsRune(" _-.:/", r) }), " ")
	for _, junk := range []string{
		"to be filled by o e m", "to be filled", "default string", "system serial", "serial number", "chassis serial", "base board serial", "board serial",
		"no asset tag", "no asset information", "chassis asset", "base board asset", "system asset", "fill by oem",
		"not specified", "not applicable", "not available", "not present", "not settable", "not provided", "no serial", "o e m", "oem", "invalid", "unknown", "empty",
	} {
		// A real serial number may begin with a placeholder of one word, as in OEM-4711.
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
		"03000200040005000006000700080009", // UUIDs that all boards of a series have
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

var bareMAC = regexp.MustCompile(`^[0-9A-Fa-f]{12}$`)

// CardMAC returns the MAC address of a network card in Linux's format (52:54:00:12:34:56). The
// input may have colons, dashes, dots or no separators. CardMAC returns "" for an invalid address.
func CardMAC(s string) string {
	s = strings.TrimSpace(s)
	if bareMAC.MatchString(s) {
		s = fmt.Sprintf("%s:%s:%s:%s:%s:%s", s[:2], s[2:4], s[4:6], s[6:8], s[8:10], s[10:])
	}
	mac, err := net.ParseMAC(s)
	if err != nil || len(mac) != 6 || mac[0]&1 == 1 { // a multicast or broadcast address
		return ""
	}
	text := mac.String()
	if strings.Trim(text, "0:") == "" {
		return ""
	}
	return text
}
