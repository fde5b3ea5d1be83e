package configs

import (
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
)

// The forms of the values that documents hold. Each check returns what is
// wrong in words that follow "FIELD: ", or "".

var (
	dnsLabel     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	labelName    = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	sha256Hex    = regexp.MustCompile(`^[0-9a-f]{64}$`)
	digestForm   = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	caHashForm   = regexp.MustCompile(`^sha256:[0-9a-fA-F]{64}$`)
	tokenForm    = regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`)
	userName     = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
	flagName     = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)
	k8sVersion   = regexp.MustCompile(`^v1\.([0-9]+)\.([0-9]+)(-(alpha|beta|rc)\.[0-9]+)?$`)
	sizeForm     = regexp.MustCompile(`^([1-9][0-9]*)(MiB|GiB|TiB)$`)
	nearlySize   = regexp.MustCompile(`^\s*([1-9][0-9]{0,9})\s*([mMgGtT])([iI]?[bB])?\s*$`)
	octalMode    = regexp.MustCompile(`^0?[0-7]{3,4}$`)
	hashedPasswd = regexp.MustCompile(`^\$(1|2[abxy]|5|6|7|y|gy)\$[./0-9A-Za-z$=,]{8,}$`)
	wholeHash    = regexp.MustCompile(`^(\$1\$.*\$.{22}|\$2[abxy]\$[0-9]{2}\$.{53}|\$(5|7|y|gy)\$.*\$.{43}|\$6\$.*\$.{86})$`)
	ifacePattern = regexp.MustCompile(`^!?[A-Za-z0-9_.*?\[\]-]{1,31}$`)
	ifaceName    = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,15}$`)
	countryCode  = regexp.MustCompile(`^[A-Z]{2}$`)
	pskHex       = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)
	packageSpec  = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+|/[a-z0-9-]+)?( \[(amd64|arm64)\])?$`)
	moduleName   = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)
	sysctlKey    = regexp.MustCompile(`^[A-Za-z0-9_*-]+([./][A-Za-z0-9_*-]+)+$`)
	consoleForm  = regexp.MustCompile(`^(tty[A-Za-z0-9]*|hvc[0-9]+)(,[0-9]+[noe]?[78]?r?)?$`)
)

// tokenWords say what tokenForm is.
const tokenWords = "6 letters or digits, a dot, 16 letters or digits, all in lower case"

// ParseSize reads a size like "512MiB" or "3GiB".
func ParseSize(s string) (int64, error) {
	m := sizeForm.FindStringSubmatch(s)
	if m == nil {
		hint := ""
		if n := nearlySize.FindStringSubmatch(s); n != nil {
			hint = fmt.Sprintf("; did you mean %q?", n[1]+strings.ToUpper(n[2])+"iB")
		}
		return 0, fmt.Errorf("reading size %q: write a whole number with MiB, GiB or TiB, e.g. 512MiB or 3GiB%s", shorten(s), hint)
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading size %q: more than 64TiB", shorten(s))
	}
	shift := map[string]uint{"MiB": 20, "GiB": 30, "TiB": 40}[m[2]]
	if n > 64<<40>>shift {
		return 0, fmt.Errorf("reading size %q: more than 64TiB", s)
	}
	return n << shift, nil
}

// CheckNodeName returns why name cannot name a Node, or nil. The limit of 63
// is that of the label kubernetes.io/hostname.
func CheckNodeName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("a node's name cannot be empty")
	case isLoopbackName(name):
		return fmt.Errorf("%q is every machine's name for itself; give the node a name of its own", name)
	case len(name) > 63:
		return fmt.Errorf("%q has %d letters; a node's name has at most 63", shorten(name), len(name))
	case !isDNSName(name):
		return fmt.Errorf("%q cannot name a node: lower-case letters, digits, - and . only, each part between dots beginning and ending with a letter or digit", name)
	}
	return nil
}

// isDNSName reports whether s is an RFC 1123 subdomain in lower case.
func isDNSName(s string) bool {
	if s == "" || len(s) > 253 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if !dnsLabel.MatchString(label) {
			return false
		}
	}
	return true
}

// CheckHost returns why s is neither an IP address nor a DNS name, or nil.
func CheckHost(s string) error {
	if bad := badHost(s); bad != "" {
		return errors.New(bad)
	}
	return nil
}

// badHost says what is wrong with s as an IP address or DNS name.
func badHost(s string) string {
	if a, err := netip.ParseAddr(s); err == nil {
		if a.Zone() != "" {
			return fmt.Sprintf("%q names an interface, which means nothing to others: a server needs an address that is valid on more than one link", shorten(s))
		}
		return ""
	}
	lower := strings.ToLower(s)
	last := lower[strings.LastIndexByte(lower, '.')+1:]
	if !isDNSName(lower) || hexNumber.MatchString(last) {
		return fmt.Sprintf("%q is neither an IP address nor a DNS name", shorten(s))
	}
	return ""
}

// badHostPort says what is wrong with s as "host:port", with the fix for
// the mistakes people make.
func badHostPort(s string) string {
	switch {
	case s == "":
		return "is empty; write host:port"
	case strings.Contains(s, "://"):
		u, err := url.Parse(s)
		if err != nil || u.Host == "" {
			return fmt.Sprintf("%q: leave the scheme out; write host:port", shorten(s))
		}
		return fmt.Sprintf("%q: leave the scheme out; write %q", shorten(s), withPort(u.Host))
	case strings.Contains(s, ","):
		return fmt.Sprintf("%q holds several addresses; give each an item of its own", shorten(s))
	case strings.ContainsFunc(s, unicode.IsSpace):
		return fmt.Sprintf("%q contains a space", shorten(s))
	case strings.Contains(s, "/"):
		return fmt.Sprintf("%q: a path has no place here; write host:port", shorten(s))
	}
	if strings.ContainsFunc(s, unicode.IsControl) {
		return fmt.Sprintf("%q contains a control character", shorten(s))
	}
	if a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")); err == nil && !strings.Contains(a.Zone(), "]") {
		if bad := badServer(a); bad != "" {
			return fmt.Sprintf("%s %s", a, bad)
		}
		if a.Is6() && !strings.HasPrefix(s, "[") { // where the port begins is anybody's guess
			return fmt.Sprintf("%q: write an IPv6 address in brackets, and a port behind them, as [fd00::1]:6443", s)
		}
		return fmt.Sprintf("%q has no port; write %q", s, netip.AddrPortFrom(a, 6443))
	}
	host, port, ok := cutLast(s, ":")
	if !ok {
		return fmt.Sprintf("%q has no port; write %q", shorten(s), s+":6443")
	}
	if badPort(port) {
		return fmt.Sprintf("%q: the port must be a number from 1 to 65535", shorten(s))
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		inner, ok = strings.CutSuffix(inner, "]")
		if a, err := netip.ParseAddr(inner); !ok || err != nil || !a.Is6() {
			return fmt.Sprintf("%q: the part in brackets is not an IPv6 address", shorten(s))
		}
		if a, err := netip.ParseAddr(inner); err == nil && badServer(a) != "" {
			return fmt.Sprintf("%s %s", a, badServer(a))
		}
		host = inner
	} else if strings.Contains(host, ":") {
		return fmt.Sprintf("%q: write an IPv6 address in brackets, as in [fd00::1]:6443", shorten(s))
	}
	if bad := badHost(host); bad != "" {
		return bad
	}
	if a, err := netip.ParseAddr(host); err == nil {
		if bad := badServer(a); bad != "" {
			return fmt.Sprintf("%s %s", a, bad)
		}
	}
	if isLoopbackName(host) {
		return fmt.Sprintf("%q is every machine's name for itself; give the control-plane node's address", host)
	}
	return ""
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

// badLabelKey says what is wrong with k as the key of a label or taint.
func badLabelKey(k string) string {
	prefix, name, ok := strings.Cut(k, "/")
	if !ok {
		prefix, name = "", k
	} else if !isDNSName(prefix) {
		return fmt.Sprintf("%q: what stands before the / must be a DNS name in lower case", shorten(k))
	}
	if !labelName.MatchString(name) {
		return fmt.Sprintf("%q is not a valid key: [DNS-NAME/]NAME, the name of at most 63 letters, digits, -, _ and ., with a letter or digit at both ends", shorten(k))
	}
	return ""
}

// badLabelValue says what is wrong with v as the value of a label or taint.
func badLabelValue(v string) string {
	if v != "" && !labelName.MatchString(v) {
		return fmt.Sprintf("%q is not a valid value: at most 63 letters, digits, -, _ and ., with a letter or digit at both ends", shorten(v))
	}
	return ""
}

// badURL says what is wrong with s as a URL of one of the schemes.
func badURL(s string, schemes ...string) string {
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
		return fmt.Sprintf("the URL begins with %s://; wanted: %s://", u.Scheme, strings.Join(schemes, ":// or "))
	case u.User != nil:
		// Not a Secret: it would be printed.
		return "the URL holds a user name or password, which would show in logs; leave them out"
	case badHost(u.Hostname()) != "":
		return "the URL's host is neither an IP address nor a DNS name"
	case strings.HasSuffix(u.Host, ":") || u.Port() != "" && badPort(u.Port()):
		return "the URL's port must be a number from 1 to 65535"
	}
	return ""
}

// badSSHKey says what is wrong with an authorized_keys line; options in
// front of the key are allowed.
func badSSHKey(line string) string {
	switch {
	case line == placeholderKey:
		return "replace the example by your public key (a file that ends in .pub), or remove the user"
	case strings.Contains(line, "PRIVATE KEY"):
		return "is a private key; give the public one, the file that ends in .pub"
	case strings.ContainsAny(line, "\r\n"):
		return "holds more than one line; give each key an item of its own"
	}
	// Options in front may themselves hold words that look like a key's type:
	// one whole key is enough.
	fields := strings.Fields(line)
	why := "is not a public key as authorized_keys holds it (ssh-ed25519 AAAA… comment)"
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
		return "is cut short or damaged: the key is not base64"
	}
	// The blob begins with its own type (RFC 4253, section 6.6).
	n := binary.BigEndian.Uint32(blob)
	if uint64(n) > uint64(len(blob)-4) || string(blob[4:4+n]) != kind {
		return fmt.Sprintf("is damaged: it says %s, but its contents do not", kind)
	}
	// What follows is a row of fields, each with its length in front.
	rest, fields := blob[4+n:], 0
	for ; len(rest) >= 4; fields++ {
		n := binary.BigEndian.Uint32(rest)
		if uint64(n) > uint64(len(rest)-4) {
			break
		}
		rest = rest[4+n:]
	}
	if fields == 0 || len(rest) > 0 {
		return "is cut short: its contents end in the middle"
	}
	return ""
}

// badFilePath says what is wrong with p as the place of a file on the node.
func badFilePath(p string) string {
	switch {
	case !strings.HasPrefix(p, "/"):
		return fmt.Sprintf("%q must be absolute", shorten(p))
	case p == "/" || strings.HasSuffix(p, "/"):
		return fmt.Sprintf("%q names a directory, not a file", shorten(p))
	case strings.ContainsFunc(p, unicode.IsControl):
		return fmt.Sprintf("%q contains a line break or control character", shorten(p))
	case len(p) > 4095:
		return "is longer than 4095 bytes"
	}
	for part := range strings.SplitSeq(p[1:], "/") {
		switch {
		case part == "" || part == "." || part == "..":
			return fmt.Sprintf("%q must be clean: no empty part, no . and no ..", shorten(p))
		case len(part) > 255:
			return fmt.Sprintf("%q: a part is longer than 255 bytes", shorten(p))
		}
	}
	return ""
}

// badText says what is wrong with s as one line of text.
func badText(s string) string {
	if strings.ContainsFunc(s, unicode.IsControl) {
		return "contains a line break or control character"
	}
	return ""
}
