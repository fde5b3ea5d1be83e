package configs

import (
	"fmt"
	"net"
	"net/netip"
	"path"
	"regexp"
	"strings"
	"time"
	"unicode"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/configs/strict"
)

// FieldChecks contains the functions for the tag check. Those for secrets do not quote the value.
var FieldChecks = strict.Checks{
	"imageName":       matching(imageName, "is not an image's name: lower-case letters, digits, -, _ and ., at most 63, with a letter or digit at both ends"),
	"suite":           matching(suiteName, "is not the name of a suite, e.g. trixie"),
	"aptSource":       matching(regexp.MustCompile(`^deb(-src)? .`), "is not a line of sources.list: deb [OPTIONS] URI SUITE COMPONENT"),
	"path":            notEmpty("give a path"),
	"command":         notEmpty("give a shell command"),
	"package":         badPackage,
	"imageRef":        badImageRef,
	"digest":          badDigest,
	"sha256":          badSHA256,
	"download":        func(s string) string { return forms.BadURL(s, "https", "http") },
	"https":           func(s string) string { return forms.BadURL(s, "https") },
	"registry":        matching(hostForm, "is not host or host:port"),
	"mirror":          badMirror,
	"manifestPattern": badPattern("is not a path or pattern, e.g. manifests/*.yaml"),
	"imagePattern":    badPattern("is not an image reference or pattern, e.g. quay.io/prometheus/*"),
	"mode":            matching(octalMode, "is not a mode in octal, e.g. 0644"),
	"console":         matching(consoleForm, "is not a console, e.g. tty0 or ttyS0,115200"),
	"module":          matching(moduleName, "is not the name of a kernel module"),
	"size":            func(s string) string { return badSize(s, 1) },
	"partition":       func(s string) string { return badSize(s, 64<<20) },
	"podCIDR":         badPodCIDR,

	"domain":       badDomain,
	"dns":          badDNSServer,
	"ntp":          badTimeServer,
	"noProxy":      badNoProxy,
	"cardMAC":      badCardMAC,
	"country":      matching(countryCode, "is not a country code of two capital letters, e.g. DE"),
	"psk":          badPSK,
	"ca":           func(s string) string { return errorText(forms.ParseCA(s)) },
	"certificates": func(s string) string { return errorText(forms.ParseCertificates(s)) },
	"user":         matching(userName, "is not a user's name: lower-case letters, digits, - and _, at most 32, beginning with a letter"),
	"group":        matching(userName, "is not a group's name"),
	"sshKey":       forms.BadSSHKey,
	"passwordHash": badPasswordHash,
	"filePath":     forms.BadFilePath,
	"token":        badToken,
	"caHash":       badCAHash,
	"nodeName":     func(s string) string { return errorText(0, forms.CheckNodeName(s)) },
	"nodeIP":       badNodeSubnets,
	"nodePool":     badNodePool,
	"labelKey":     forms.BadLabelKey,
	"labelValue":   forms.BadLabelValue,
	"namespace":    badNamespace,
	"probePath":    matching(regexp.MustCompile(`^/[^\s[:cntrl:]]*$`), "must begin with / and contain no space"),
	"criSocket":    badSocket,
	"joinPhase":    badJoinPhase,
	"preflight":    badPreflight,
	"organization": badOrganization,
	"mintID":       matching(regexp.MustCompile(`^[A-Za-z0-9]{1,64}$`), "is not an ID of `edgebake cluster new`"),
	"date":         badDate,
	"window":       forms.BadWindow,
	"timeZone":     forms.BadTimeZone,
	"endpoint":     badEndpoint,
}

// matching returns a check that a value matches a pattern. Its message is the quoted value,
// followed by words.
func matching(form *regexp.Regexp, words string) func(string) string {
	return func(s string) string {
		if form.MatchString(s) {
			return ""
		}
		return fmt.Sprintf("%q %s", strict.Shorten(s), words)
	}
}

func notEmpty(fix string) func(string) string {
	return func(s string) string {
		if strings.TrimSpace(s) == "" {
			return "is empty; " + fix
		}
		return ""
	}
}

func badPattern(words string) func(string) string {
	return func(s string) string {
		if _, err := path.Match(s, ""); err != nil || s == "" {
			return fmt.Sprintf("%q %s", strict.Shorten(s), words)
		}
		return ""
	}
}

func errorText(_ any, err error) string {
	if err != nil {
		return err.Error()
	}
	return ""
}

func badPackage(s string) string {
	if by := packageName.FindString(s); networkManagers[by] {
		return by + " would configure the network in addition to systemd-networkd, which applies the Site's network: remove it"
	}
	return matching(packageSpec, "is not a package, e.g. vim, vim=2:9.1-1 or vim/trixie-backports")(s)
}

func badDigest(s string) string {
	if sha256Hex.MatchString(s) {
		return "write the algorithm too: sha256:" + s
	}
	if _, err := imageref.ParseDigest(s); err != nil {
		return fmt.Sprintf("%q is not sha256: followed by 64 hexadecimal digits in lower case", strict.Shorten(s))
	}
	return ""
}

func badSHA256(s string) string {
	if bare, ok := strings.CutPrefix(s, "sha256:"); ok && sha256Hex.MatchString(bare) {
		return "write only the digits, without sha256:"
	}
	return matching(sha256Hex, "is not a SHA-256: 64 hexadecimal digits in lower case")(s)
}

func badMirror(s string) string {
	if !mirrorForm.MatchString(s) && forms.BadURL(s, "https", "http") != "" {
		return fmt.Sprintf("%q is not host, host:port, host/path or a URL", strict.Shorten(s))
	}
	return ""
}

func badSize(s string, least int64) string {
	if n, err := forms.ParseSize(s); err != nil {
		return err.Error()
	} else if n < least {
		return fmt.Sprintf("%s is too small for a file system that grows; want at least %dMi", s, least>>20)
	}
	return ""
}

func badDomain(s string) string {
	if !forms.IsDNSName(strings.ToLower(s)) {
		return fmt.Sprintf("%q is not a domain", strict.Shorten(s))
	}
	return ""
}

func badDNSServer(s string) string {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return fmt.Sprintf("%q is not the IP address of a DNS server", strict.Shorten(s))
	}
	if bad := forms.BadMachine(a.WithZone("")); bad != "" {
		return fmt.Sprintf("%s is not the address of a DNS server: it %s", strict.Shorten(s), bad)
	}
	if a.Zone() != "" && !ifaceName.MatchString(a.Zone()) {
		return fmt.Sprintf("%q: the part after %% is not the name of an interface", strict.Shorten(s))
	}
	return ""
}

func badTimeServer(s string) string {
	a, err := netip.ParseAddr(s)
	switch bad := forms.BadHost(s); {
	case bad != "":
		return bad
	case err == nil && forms.BadServer(a) != "":
		return fmt.Sprintf("%s %s", a, forms.BadServer(a))
	case forms.IsLoopbackName(s):
		return fmt.Sprintf("%q always refers to the machine itself; name a time server", s)
	}
	return ""
}

func badNoProxy(s string) string {
	if s == "" || strings.ContainsAny(s, ", \"'\\$%") || strict.BadText(s) != "" {
		return fmt.Sprintf("%q: each item must be one host, .domain or CIDR, without commas, spaces and quotes", strict.Shorten(s))
	}
	if _, err := netip.ParsePrefix(s); err != nil && strings.Contains(s, "/") {
		return fmt.Sprintf("%q is neither a host, a .domain nor a CIDR, e.g. example.com or 10.0.0.0/8", strict.Shorten(s))
	}
	return ""
}

func badMAC(s string) string {
	if forms.CardMAC(s) == "" {
		return fmt.Sprintf("%q is not the MAC address of one network card, e.g. 52:54:00:12:34:56", strict.Shorten(s))
	}
	return ""
}

// badCardMAC is like badMAC, but also requires that systemd can parse the address.
func badCardMAC(s string) string {
	if _, err := net.ParseMAC(s); err != nil {
		return fmt.Sprintf("%q is not the MAC address of an interface, e.g. 52:54:00:12:34:56", strict.Shorten(s))
	}
	return badMAC(s)
}

// badPSK returns why s is neither a passphrase nor a key of IEEE 802.11, or "" if it is one of
// them.
func badPSK(s string) string {
	if !pskHex.MatchString(s) && (len(s) < 8 || len(s) > 63 || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r > 0x7e })) {
		return "must be 8 to 63 printable ASCII characters, or 64 hexadecimal digits"
	}
	return ""
}

func badPasswordHash(s string) string {
	switch {
	case !hashedPasswd.MatchString(s):
		return "is not a crypt(3) hash ($y$… or $6$…; `mkpasswd` prints one); clear-text passwords are rejected"
	case !wholeHash.MatchString(s):
		return "is truncated or damaged, so no password would match it; copy the whole line that `mkpasswd` prints"
	}
	return ""
}

func badToken(s string) string {
	switch {
	case s == forms.PlaceholderToken:
		return "replace the example: `kubeadm token create --print-join-command` prints a token (`edgebake init --join` accepts its whole line)"
	case !forms.Token.MatchString(s):
		return "is not a bootstrap token: " + forms.TokenWords + " (`kubeadm token create` makes one)"
	}
	return ""
}

func badCAHash(s string) string {
	switch {
	case s == forms.PlaceholderCAHash:
		return "replace the example: `kubeadm token create --print-join-command` prints the hash (`edgebake init --join` accepts its whole line)"
	case sha256Hex.MatchString(strings.ToLower(s)):
		return fmt.Sprintf("write the algorithm too: \"sha256:%s\"", s)
	}
	return matching(forms.CAHash, "is not sha256: followed by 64 hexadecimal digits")(s)
}

// badNodePool returns why s is not the name of a node pool, or "". CheckHub uses it for a flag of
// firstboot convert.
func badNodePool(s string) string {
	if forms.IsDNSName(s) && len(s) <= 63 {
		return ""
	}
	return fmt.Sprintf("%q is not the name of a node pool: lower-case letters, digits, - and ., at most 63", strict.Shorten(s))
}

func badNamespace(s string) string {
	if forms.DNSLabel.MatchString(s) {
		return ""
	}
	return fmt.Sprintf("%q is not the name of a namespace", strict.Shorten(s))
}

func badSocket(s string) string {
	if p, ok := strings.CutPrefix(s, "unix://"); !ok || forms.BadFilePath(p) != "" || badArgument(p) != "" {
		return fmt.Sprintf("%q is not of the form unix:///run/containerd/containerd.sock", strict.Shorten(s))
	}
	return ""
}

func badJoinPhase(s string) string {
	if s == "kubelet-start" {
		return "kubelet-start cannot be skipped: it is the phase that joins the node"
	}
	return matching(skipPhase, "is not the name of a phase of kubeadm join, e.g. preflight or kubelet-wait-bootstrap")(s)
}

// oneWord reports whether s can be an item of a comma-separated list on a command line.
func oneWord(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r == ',' || unicode.IsSpace(r) || unicode.IsControl(r) })
}

func badPreflight(s string) string {
	if !oneWord(s) {
		return fmt.Sprintf("%q: each item must be one check, e.g. Swap or NumCPU, or all", strict.Shorten(s))
	}
	return ""
}

func badOrganization(s string) string {
	switch {
	case !oneWord(s):
		return fmt.Sprintf("%q: each item must be one organization, without spaces or commas", strict.Shorten(s))
	case strings.HasPrefix(s, "system:"):
		return fmt.Sprintf("%q: only the cluster may assign groups that begin with system:", strict.Shorten(s))
	}
	return ""
}

func badDate(s string) string {
	if _, err := time.Parse(time.RFC3339, s); err != nil {
		return fmt.Sprintf("%q is not a date, e.g. 2026-12-24T12:00:00Z", strict.Shorten(s))
	}
	return ""
}

func badEndpoint(s string) string {
	switch _, err := netip.ParseAddr(s); {
	case err == nil || !forms.IsDNSName(s) || forms.BadHost(s) != "":
		return fmt.Sprintf("%q is not a DNS name in lower case", strict.Shorten(s))
	case forms.IsLoopbackName(s):
		return fmt.Sprintf("%q always refers to the machine itself; use the cluster's own name, e.g. apiserver.cluster.local", s)
	}
	return ""
}

// repeats is the set of texts that have occurred in a list.
type repeats map[string]bool

// again reports whether text has occurred before. It also records text.
func (r repeats) again(text string) bool {
	was := r[text]
	r[text] = true
	return was
}
