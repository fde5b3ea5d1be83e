// Package forms validates single values in documents: names, hosts, addresses, labels, URLs, keys.
// The functions Bad... return a message that follows the name of the field or the value, or "" for
// a valid value.
package forms

import (
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"github.com/edgebake/edgebake/configs/strict"
)

// Patterns of single values. SizeForm matches a number with a unit, such as 512Mi or 2G.
var (
	DNSLabel   = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	labelName  = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	SizeForm   = regexp.MustCompile(`^([1-9][0-9]*)(k|[MGT]i?)B?$`)
	Token      = regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`) // bootstrap token
	CAHash     = regexp.MustCompile(`^sha256:[0-9a-fA-F]{64}$`)    // hash of a CA's public key
	nearlySize = regexp.MustCompile(`^\s*([1-9][0-9]{0,9})\s*([mMgGtT]?)[iI]?[bB]?\s*$`)
)

// TokenWords describes the format of a Token, for messages.
const TokenWords = "6 letters or digits, a dot, 16 letters or digits, all in lower case"

// Placeholders in the Site that `edgebake init` writes. Validation rejects them. Otherwise, a
// forgotten placeholder would be noticed only when a machine in the field cannot join.
const (
	PlaceholderKey    = "ssh-ed25519 xxxxxxxx admin@example.com"
	PlaceholderToken  = "xxxxxx.xxxxxxxxxxxxxxxx"
	PlaceholderCAHash = "sha256:xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
)

// ParseSize returns the number of bytes in a size, which has the format of a Kubernetes quantity
// (512Mi, 2G, 500k) and optionally ends in B.
func ParseSize(s string) (int64, error) {
	m := SizeForm.FindStringSubmatch(s)
	if m == nil {
		hint := ""
		if n := nearlySize.FindStringSubmatch(s); n != nil {
			hint = fmt.Sprintf("; did you mean %q?", n[1]+strings.ToUpper(cmp.Or(n[2], "G"))+"i")
		}
		return 0, fmt.Errorf("reading size %q: write a whole number with Mi, Gi or Ti (or k, M, G or T), e.g. 512Mi or 3Gi%s", strict.Shorten(s), hint)
	}
	unit := map[string]int64{"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}[m[2]]
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil || n > 64<<40/unit {
		return 0, fmt.Errorf("reading size %q: more than 64Ti", strict.Shorten(s))
	}
	return n * unit, nil
}

// CheckNodeName returns an error if a Node cannot have this name. The name is also the value of the
// label kubernetes.io/hostname, which may have 63 characters.
func CheckNodeName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("a node's name cannot be empty")
	case IsLoopbackName(name):
		return fmt.Errorf("%q always refers to the machine itself; give the node its own name", name)
	case len(name) > 63:
		return fmt.Errorf("%q has %d letters; a node's name has at most 63", strict.Shorten(name), len(name))
	case !IsDNSName(name):
		return fmt.Errorf("%q cannot name a node: lower-case letters, digits, - and . only, each part between dots beginning and ending with a letter or digit", name)
	}
	return nil
}

// IsDNSName reports whether s is an RFC 1123 subdomain in lower case.
func IsDNSName(s string) bool {
	if s == "" || len(s) > 253 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if !DNSLabel.MatchString(label) {
			return false
		}
	}
	return true
}

// CheckHost returns an error unless s is an IP address or a DNS name.
func CheckHost(s string) error {
	if bad := BadHost(s); bad != "" {
		return errors.New(bad)
	}
	return nil
}

// BadHost returns why s is neither an IP address nor a DNS name, or "".
func BadHost(s string) string {
	if a, err := netip.ParseAddr(s); err == nil {
		if a.Zone() != "" {
			return fmt.Sprintf("%q names an interface; a server needs an address that is valid on more than one link", strict.Shorten(s))
		}
		return ""
	}
	lower := strings.ToLower(s)
	last := lower[strings.LastIndexByte(lower, '.')+1:]
	if !IsDNSName(lower) || hexNumber.MatchString(last) {
		return fmt.Sprintf("%q is neither an IP address nor a DNS name", strict.Shorten(s))
	}
	return ""
}

// BadHostPort returns why s is not "host:port", or "". For common mistakes, the message contains a
// fix.
func BadHostPort(s string) string {
	if bad := notHostPort(s); bad != "" {
		return bad
	}
	host, port, ok := cutLast(s, ":")
	if !ok {
		return fmt.Sprintf("%q has no port; write %q", strict.Shorten(s), s+":6443")
	}
	if badPort(port) {
		return fmt.Sprintf("%q: the port must be a number from 1 to 65535", strict.Shorten(s))
	}
	inner, brackets := strings.CutPrefix(host, "[")
	if brackets {
		host, ok = strings.CutSuffix(inner, "]")
	}
	a, err := netip.ParseAddr(host)
	switch {
	case brackets && (!ok || err != nil || !a.Is6()):
		return fmt.Sprintf("%q: the part in brackets is not an IPv6 address", strict.Shorten(s))
	case !brackets && strings.Contains(host, ":"):
		return fmt.Sprintf("%q: write an IPv6 address in brackets, as in [fd00::1]:6443", strict.Shorten(s))
	case err == nil && BadServer(a) != "":
		return fmt.Sprintf("%s %s", a, BadServer(a))
	case IsLoopbackName(host):
		return fmt.Sprintf("%q always refers to the machine itself; give the control-plane node's address", host)
	}
	return BadHost(host)
}

// notHostPort returns a message for values other than "host:port", such as a URL, a list, or an
// address without a port. Otherwise, it returns "".
func notHostPort(s string) string {
	switch {
	case s == "":
		return "is empty; write host:port"
	case strings.Contains(s, "://"):
		u, err := url.Parse(s)
		if err != nil || u.Host == "" {
			return fmt.Sprintf("%q: leave the scheme out; write host:port", strict.Shorten(s))
		}
		return fmt.Sprintf("%q: leave the scheme out; write %q", strict.Shorten(s), withPort(u.Host))
	case strings.Contains(s, ","):
		return fmt.Sprintf("%q contains several addresses; write each as its own item", strict.Shorten(s))
	case strings.ContainsFunc(s, unicode.IsSpace):
		return fmt.Sprintf("%q contains a space", strict.Shorten(s))
	case strings.Contains(s, "/"):
		return fmt.Sprintf("%q contains a path; write host:port", strict.Shorten(s))
	case strings.ContainsFunc(s, unicode.IsControl):
		return fmt.Sprintf("%q contains a control character", strict.Shorten(s))
	}
	a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"))
	switch {
	case err != nil || strings.Contains(a.Zone(), "]"):
		return ""
	case BadServer(a) != "":
		return fmt.Sprintf("%s %s", a, BadServer(a))
	case a.Is6() && !strings.HasPrefix(s, "["): // any of the colons might be the one before the port
		return fmt.Sprintf("%q: write an IPv6 address in brackets, followed by a port, as in [fd00::1]:6443", s)
	}
	return fmt.Sprintf("%q has no port; write %q", s, netip.AddrPortFrom(a, 6443))
}

func badPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err != nil || n == 0 || strconv.FormatUint(n, 10) != s
}

func withPort(hostport string) string {
	if strings.HasSuffix(hostport, "]") || !strings.Contains(hostport, ":") {
		return hostport + ":6443"
	}
	return hostport
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// BadLabelKey returns why k is not valid as the key of a label or taint, or "".
func BadLabelKey(k string) string {
	prefix, name, ok := strings.Cut(k, "/")
	if !ok {
		prefix, name = "", k
	} else if !IsDNSName(prefix) {
		return fmt.Sprintf("%q: the part before the / must be a DNS name in lower case", strict.Shorten(k))
	}
	if !labelName.MatchString(name) {
		return fmt.Sprintf("%q is not a valid key: [DNS-NAME/]NAME, the name of at most 63 letters, digits, -, _ and ., with a letter or digit at both ends", strict.Shorten(k))
	}
	return ""
}

// BadLabelValue returns why v is not valid as the value of a label or taint, or "".
func BadLabelValue(v string) string {
	if v != "" && !labelName.MatchString(v) {
		return fmt.Sprintf("%q is not a valid value: at most 63 letters, digits, -, _ and ., with a letter or digit at both ends", strict.Shorten(v))
	}
	return ""
}

// BadURL returns why s is not a URL with one of the schemes, or "".
func BadURL(s string, schemes ...string) string {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || strings.ContainsFunc(s, unicode.IsSpace) {
		return fmt.Sprintf("is not a URL of the form %s://host/path", schemes[0])
	}
	ok := false
	for _, scheme := range schemes {
		ok = ok || u.Scheme == scheme
	}
	switch {
	case !ok:
		return fmt.Sprintf("the URL begins with %s://; write %s://", u.Scheme, strings.Join(schemes, ":// or "))
	case u.User != nil:
		// Messages may print this value, since the field is not a Secret.
		return "the URL contains a user name or password, which logs would show; leave them out"
	case BadHost(u.Hostname()) != "":
		return "the URL's host is neither an IP address nor a DNS name"
	case strings.HasSuffix(u.Host, ":") || u.Port() != "" && badPort(u.Port()):
		return "the URL's port must be a number from 1 to 65535"
	}
	return ""
}

// BadSSHKey returns why line is not a valid line of authorized_keys, or "". The line may contain
// options before the key.
func BadSSHKey(line string) string {
	switch {
	case line == PlaceholderKey:
		return "replace the example with your public key (a file that ends in .pub), or remove the user"
	case strings.Contains(line, "PRIVATE KEY"):
		return "is a private key; give the public one, the file that ends in .pub"
	case strings.ContainsAny(line, "\r\n"):
		return "contains more than one line; write each key as its own item"
	}
	// Options may contain words that look like a type of key, so one valid key is enough.
	fields := strings.Fields(line)
	why := "is not a public key in the format of authorized_keys (ssh-ed25519 AAAA… comment)"
	for i := range len(fields) - 1 {
		kind := fields[i]
		if !strings.HasPrefix(kind, "ssh-") && !strings.HasPrefix(kind, "ecdsa-") && !strings.HasPrefix(kind, "sk-") {
			continue
		}
		if why = badKeyBlob(kind, fields[i+1]); why == "" {
			return ""
		}
	}
	return why
}

func badKeyBlob(kind, encoded string) string {
	blob, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil || len(blob) < 4 {
		return "is truncated or damaged: the key is not base64"
	}
	// The blob begins with the type of the key (RFC 4253, section 6.6).
	n := binary.BigEndian.Uint32(blob)
	if uint64(n) > uint64(len(blob)-4) || string(blob[4:4+n]) != kind {
		return fmt.Sprintf("is damaged: its type is %s, but the key is of another type", kind)
	}
	// The rest of the blob consists of fields, each after its length.
	rest, fields := blob[4+n:], 0
	for ; len(rest) >= 4; fields++ {
		n := binary.BigEndian.Uint32(rest)
		if uint64(n) > uint64(len(rest)-4) {
			break
		}
		rest = rest[4+n:]
	}
	if fields == 0 || len(rest) > 0 {
		return "is truncated: the key is incomplete"
	}
	return ""
}

// BadFilePath returns why p cannot be the path of a file on the node, or "".
func BadFilePath(p string) string {
	switch {
	case !strings.HasPrefix(p, "/"):
		return fmt.Sprintf("%q must be absolute", strict.Shorten(p))
	case p == "/" || strings.HasSuffix(p, "/"):
		return fmt.Sprintf("%q names a directory, not a file", strict.Shorten(p))
	case strings.ContainsFunc(p, unicode.IsControl):
		return fmt.Sprintf("%q contains a line break or control character", strict.Shorten(p))
	case len(p) > 4095:
		return "is longer than 4095 bytes"
	}
	for part := range strings.SplitSeq(p[1:], "/") {
		switch {
		case part == "" || part == "." || part == "..":
			return fmt.Sprintf("%q must be clean: no empty part, no . and no ..", strict.Shorten(p))
		case len(part) > 255:
			return fmt.Sprintf("%q: a part is longer than 255 bytes", strict.Shorten(p))
		}
	}
	return ""
}

// CheckSSHKey returns the message of BadSSHKey as an error.
func CheckSSHKey(line string) error {
	if bad := BadSSHKey(line); bad != "" {
		return errors.New(bad)
	}
	return nil
}

// BadVersion returns the message for a version that does not match form.
func BadVersion(v string, form *regexp.Regexp, example string) string {
	if form.MatchString("v" + v) {
		return fmt.Sprintf("%q must start with \"v\": v%s", v, v)
	}
	if bare, ok := strings.CutPrefix(v, "v"); ok && form.MatchString(bare) {
		return fmt.Sprintf("%q must not start with \"v\": %s", v, bare)
	}
	return fmt.Sprintf("%q is not a version, e.g. %s", strict.Shorten(v), example)
}
