package configs

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/templates"
	"github.com/edgebake/edgebake/openyurt"
)

// Node types.
const (
	NodeNative       = "native" // a plain kubeadm worker
	NodeEdge         = "edge"   // uses yurthub, and works without the cluster
	NodeCloud        = "cloud"  // uses yurthub, and is always online
	NodeControlPlane = "control-plane"
)

// Validate returns all problems of s, or nil. It does not change s, whose defaults must be set.
func (s *Site) Validate() Problems { return s.validate(true) }

// ValidatePublic is like Validate, for a Site that may lack its credentials.
func (s *Site) ValidatePublic() Problems { return s.validate(false) }

func (s *Site) validate(credentials bool) Problems {
	var probs Problems
	strict.Check(s, FieldChecks, &probs)
	s.validateRules(credentials, &probs)
	strict.CheckText(s, &probs)
	return probs
}

// ValidateRules reports violations of the rules that are not in struct tags, except missing
// credentials. It is for documents that contain parts of a Site.
func (s *Site) ValidateRules(probs *Problems) { s.validateRules(false, probs) }

func (s *Site) validateRules(credentials bool, probs *Problems) {
	if !s.Match.IsZero() {
		s.Match.Validate("match", probs)
	}
	s.validateCluster(credentials, probs)
	s.validateControlPlane(credentials, probs)
	s.validateNode(probs)
	s.Network.validate(probs)
	s.validateNames(probs)
	s.validateNodeIP(probs)
	s.validateVIPUse(probs)
	s.validateMasterUse(probs)
	s.validateServerUse(probs)
	if s.Report.CACert != "" && s.Report.URL == "" {
		probs.Add("report.caCert", "requires a receiver; name it in report.url")
	}
	if s.Updates.TimeZone != "" && s.Updates.Window == "" {
		probs.Add("updates.timeZone", "has no effect without updates.window; add a window, such as 22:00-05:00, or remove timeZone")
	}
	if !s.Ignition.IsZero() {
		if s.IgnitionFile != "" {
			probs.Add("ignition", "give either ignition or ignitionFile, not both")
		}
		if credentials && ignition.Holds([]byte(s.Ignition.Reveal()), s.Credentials.Token) {
			probs.Add("ignition", "contains the bootstrap token, which is wiped after the join: remove it here, and give programs on the node their own credentials")
		}
		if _, _, bad := ignition.Parse("", []byte(s.Ignition.Reveal())); bad != nil {
			for _, p := range bad {
				probs.Add("ignition", "%s", inner(p))
			}
		}
	}
}

// inner returns the message about a problem in an inline document. The line in it is relative to
// the inline document.
func inner(p Problem) string {
	at := ""
	if p.Line > 0 {
		at = fmt.Sprintf("line %d of the config, ", p.Line)
	}
	p.Line = 0
	return at + p.Error()
}

func (s *Site) validateCluster(credentials bool, probs *Problems) {
	v4, v6 := s.validateMasters(probs)
	s.validateVIP(v4, v6, probs)
	s.validateToken(credentials, probs)
	s.validateCAPins(probs)
	s.validateCA(credentials, probs)
}

// PlainMaster returns the normal form of an API server ("host:port"), in which ipvscare compares
// API servers. It returns an invalid text unchanged.
func PlainMaster(master string) string {
	host, port, err := net.SplitHostPort(master)
	if err != nil {
		return master
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return master
	}
	host = strings.ToLower(host)
	if a, err := netip.ParseAddr(host); err == nil {
		host = a.Unmap().String()
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10))
}

// validateMasters validates masters. It returns how many of them are IPv4 addresses, and how many
// IPv6 addresses.
func (s *Site) validateMasters(probs *Problems) (v4, v6 int) {
	seen := map[string]int{}
	for i, m := range s.Masters {
		path := fmt.Sprintf("masters[%d]", i)
		if bad := forms.BadHostPort(m); bad != "" {
			probs.Add(path, "%s", bad)
			continue
		}
		host, _, _ := net.SplitHostPort(m)
		key := PlainMaster(m)
		addr, err := netip.ParseAddr(host)
		if err == nil {
			addr = addr.Unmap()
			if addr.Is4() {
				v4++
			} else {
				v6++
			}
			if vip, err := netip.ParseAddr(s.VIP); err == nil && addr == vip.Unmap() {
				probs.Add(path, "%s is the VIP, which must be a free address; choose another VIP (vip)", addr)
			}
		} else if strings.EqualFold(host, s.Endpoint) {
			probs.Add(path, "%s is the endpoint, which the node maps to the VIP; write the API servers' addresses or other names", host)
		}
		if first, twice := seen[key]; twice {
			probs.Add(path, "%s is also masters[%d]", m, first)
			continue
		}
		seen[key] = i
	}
	if v4 > 0 && v6 > 0 {
		probs.Add("masters", "IPv4 and IPv6 addresses are mixed; IPVS balances one virtual address to real ones of the same family")
	}
	return v4, v6
}

func (s *Site) validateVIP(v4, v6 int, probs *Problems) {
	vip, err := netip.ParseAddr(s.VIP)
	switch {
	case err != nil && strings.Contains(s.VIP, ":") && forms.BadHostPort(s.VIP) == "":
		probs.Add("vip", "%q: write it without the port; the VIP has the port of the first API server", s.VIP)
	case err != nil:
		probs.Add("vip", "%q is not an IP address", strict.Shorten(s.VIP))
	case forms.BadMachine(vip.WithZone("")) != "":
		probs.Add("vip", "%s cannot be the VIP: it %s; choose a private address that nothing in the site's networks uses, e.g. 10.103.97.2", vip, forms.BadMachine(vip.WithZone("")))
	case forms.BadServer(vip) != "":
		probs.Add("vip", "%s is a link-local address, which is valid on one link only; choose a private address that nothing in the site's networks uses, e.g. 10.103.97.2", vip)
	case s.IPVS.Disabled:
	case forms.ServiceAddrs[vip] != "":
		probs.Add("vip", "%s is the address of %s (kubeadm's default), which kube-proxy uses on every node; choose a private address that nothing in the site's networks uses, e.g. 10.103.97.2", vip, forms.ServiceAddrs[vip])
	case vip.Is4() && v6 > 0 && v4 == 0:
		probs.Add("vip", "%s is IPv4 and the API servers are IPv6; choose an IPv6 address, e.g. fd00:ed6e::2", vip)
	case vip.Is6() && v4 > 0 && v6 == 0:
		probs.Add("vip", "%s is IPv6 and the API servers are IPv4; choose an IPv4 address, e.g. 10.103.97.2", vip)
	}
}

func (s *Site) validateToken(credentials bool, probs *Problems) {
	if s.Credentials.Token.IsZero() && credentials && s.NodeType != NodeControlPlane {
		probs.AddMissing("credentials.token", "is required")
	}
}

// validateCAPins checks that the Site identifies the cluster's CA without contradictions.
func (s *Site) validateCAPins(probs *Problems) {
	hasCA := s.CACert != "" || s.CAFile != ""
	switch {
	case len(s.CACertHashes) > 0 && s.UnsafeSkipCAVerification:
		probs.Add("unsafeSkipCAVerification", "contradicts caCertHashes; keep the hashes and remove this")
	case hasCA && s.UnsafeSkipCAVerification:
		probs.Add("unsafeSkipCAVerification", "contradicts caCert and caFile; keep the certificate and remove this")
	case len(s.CACertHashes) == 0 && !hasCA && !s.UnsafeSkipCAVerification:
		probs.AddMissing("caCertHashes", "is required to verify the cluster: sha256:<hex>, as `kubeadm token create --print-join-command` prints it; to join any cluster that answers, set unsafeSkipCAVerification: true")
	}
}

// kubeletMaySet reports whether kubelet accepts the label in --node-labels. Of the labels in
// kubernetes.io and k8s.io, it accepts only those listed below, and those in kubelet.kubernetes.io
// and node.kubernetes.io. With any other, kubelet exits; the admission plugin NodeRestriction would
// also reject it.
func kubeletMaySet(key string) bool {
	prefix, _, ok := strings.Cut(key, "/")
	if !ok {
		return true
	}
	if prefix == "node-restriction.kubernetes.io" || strings.HasSuffix(prefix, ".node-restriction.kubernetes.io") {
		return false
	}
	for _, domain := range []string{"kubernetes.io", "k8s.io"} {
		if prefix != domain && !strings.HasSuffix(prefix, "."+domain) {
			continue
		}
		for _, free := range []string{"kubelet.kubernetes.io", "node.kubernetes.io"} {
			if prefix == free || strings.HasSuffix(prefix, "."+free) {
				return true
			}
		}
		return slices.Contains([]string{
			"kubernetes.io/hostname", "kubernetes.io/os", "kubernetes.io/arch",
			"beta.kubernetes.io/os", "beta.kubernetes.io/arch", "beta.kubernetes.io/instance-type",
			"topology.kubernetes.io/zone", "topology.kubernetes.io/region",
			"failure-domain.beta.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/region",
		}, key)
	}
	return true
}

// managedKubeletArg returns advice for a kubelet flag that another field, kubeadm or first boot
// sets. It returns "" for other flags.
func managedKubeletArg(name string) string {
	switch name {
	case "node-labels":
		return "use labels"
	case "register-with-taints":
		return "use taints"
	case "hostname-override":
		return "use nodeName"
	case "container-runtime-endpoint", "image-service-endpoint":
		return "use criSocket"
	case "kubeconfig", "bootstrap-kubeconfig", "config", "cert-dir", "root-dir", "rotate-certificates", "pod-infra-container-image":
		return "kubeadm and first boot set it"
	}
	return ""
}

var skipPhase = regexp.MustCompile(`^[a-z]+(-[a-z]+)*(/[a-z]+(-[a-z]+)*)?$`)

// validateNode validates the fields about the node itself.
func (s *Site) validateNode(probs *Problems) {
	s.validateName(probs)
	s.validatePool(probs)
	s.validateYurthub(probs)
	s.validateOrganizations(probs)
	s.validateLabels(probs)
	s.validateKubeadm(probs)
	s.validateKubelet(probs)
}

func (s *Site) validateName(probs *Problems) {
	if bad := templates.BadNodeName(s.NodeName); bad != "" {
		probs.Add("nodeName", "%s", bad)
	} else if s.NodeName == s.Endpoint {
		probs.Add("nodeName", "is also the cluster's endpoint; choose another name")
	}
}

func (s *Site) validatePool(probs *Problems) {
	switch {
	case s.OpenYurt() && s.NodePool == "":
		probs.AddMissing("nodePool", "is required for nodeType %s: %s", s.NodeType, openyurt.Unpooled)
	case s.NodeType == NodeNative && s.NodePool != "":
		probs.Add("nodePool", "needs nodeType edge or cloud: OpenYurt would convert a native node that has the label of a pool")
	}
}

func (s *Site) validateYurthub(probs *Problems) {
	validateYurthubArgs("yurthub.extraArgs", s.Yurthub.ExtraArgs, "", probs)
	validateLocalClients("yurthub.localClients", s.Yurthub.LocalClients, probs)
	if !s.OpenYurt() && len(s.Yurthub.LocalClients) > 0 {
		probs.Add("yurthub.localClients", "needs nodeType edge or cloud; a native node runs no yurthub")
	}
	if !s.OpenYurt() && len(s.Yurthub.ExtraArgs) > 0 {
		probs.Add("yurthub.extraArgs", "needs nodeType edge or cloud; a native node runs no yurthub")
	}
}

// maxUser is the largest user ID. The next number means "no user".
const maxUser = 1<<32 - 2

func validateLocalClients(path string, uids []int, probs *Problems) {
	seen := repeats{}
	for i, uid := range uids {
		at := fmt.Sprintf("%s[%d]", path, i)
		switch {
		case uid == 0:
			probs.Add(at, "0 is root, who may always use yurthub: remove it")
		case uid < 0 || uid > maxUser:
			probs.Add(at, "%d is not a user ID: 1 to %d", uid, maxUser)
		case seen.again(strconv.Itoa(uid)):
			probs.Add(at, "%d is listed twice", uid)
		}
	}
}

func (s *Site) validateOrganizations(probs *Problems) {
	if !s.OpenYurt() && len(s.Organizations) > 0 {
		probs.Add("organizations", "needs nodeType edge or cloud: only yurthub's certificate has organizations")
	}
}

func (s *Site) validateLabels(probs *Problems) {
	for _, k := range slices.Sorted(maps.Keys(s.Labels)) {
		path := strict.KeyPath("labels", k)
		switch bad := forms.BadLabelKey(k); {
		case bad != "":
			probs.Add(path, "%s", bad)
		case openyurt.IsLabel(k):
			probs.Add(path, "follows from nodeType and nodePool; remove it")
		case !kubeletMaySet(k):
			probs.Add(path, "a kubelet may not set labels of kubernetes.io and k8s.io, except node.kubernetes.io/…, kubelet.kubernetes.io/… and topology.kubernetes.io/zone and /region; set it from the cluster: kubectl label node NODE %s=%s", k, s.Labels[k])
		}
		if bad := forms.BadLabelValue(s.Labels[k]); bad != "" {
			probs.Add(path, "%s", bad)
		}
	}
}

func (s *Site) validateKubeadm(probs *Problems) {
	for i, e := range s.IgnorePreflightErrors {
		if strings.EqualFold(e, "all") && len(s.IgnorePreflightErrors) > 1 {
			probs.Add(fmt.Sprintf("ignorePreflightErrors[%d]", i), "the check \"all\" includes every other check, so it must be the only item")
		}
	}
}

func (s *Site) validateKubelet(probs *Problems) {
	for _, k := range slices.Sorted(maps.Keys(s.KubeletExtraArgs)) {
		path := strict.KeyPath("kubeletExtraArgs", k)
		switch instead := managedKubeletArg(k); {
		case strings.HasPrefix(k, "-"):
			probs.Add(path, "leave the dashes out: %q", strings.TrimLeft(k, "-"))
		case !flagName.MatchString(k):
			probs.Add(path, "%q is not the name of a flag", strict.Shorten(k))
		case instead != "":
			probs.Add(path, "cannot be given here: %s", instead)
		}
		if bad := badArgument(s.KubeletExtraArgs[k]); bad != "" {
			probs.Add(path, "%s", bad)
		} else if bad := badNodeIP(s.KubeletExtraArgs[k]); k == "node-ip" && bad != "" {
			probs.Add(path, "%s", bad)
		}
	}
}

// badArgument returns why v cannot be the value of a kubelet flag, or "". kubeadm joins the flags
// with blanks. systemd splits them again, and interprets quotes and backslashes.
func badArgument(v string) string {
	switch {
	case strict.BadText(v) != "":
		return strict.BadText(v)
	case strings.ContainsFunc(v, unicode.IsSpace) || strings.ContainsAny(v, "\"'\\"):
		return fmt.Sprintf("%q contains a blank, quote or backslash, which would split kubelet's command line", strict.Shorten(v))
	}
	return ""
}

// badNodeIP returns why v is invalid for kubelet's --node-ip, or "". It rejects addresses that no
// machine can have, because kubelet would not start with them.
func badNodeIP(v string) string {
	addrs := strings.Split(v, ",")
	if len(addrs) > 2 {
		return fmt.Sprintf("%q has %d addresses; at most one IPv4 and one IPv6 address are possible", strict.Shorten(v), len(addrs))
	}
	for _, s := range addrs {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return fmt.Sprintf("%q is not an IP address", strict.Shorten(s))
		}
		if bad := forms.BadMachine(a); bad != "" && !a.IsUnspecified() {
			return fmt.Sprintf("%s cannot be the node's address: it %s", a, bad)
		}
	}
	return ""
}

// CheckHub validates settings of yurthub that are flags of `firstboot convert`. Its messages name
// the flags. It ignores empty settings.
func CheckHub(nodePool, namespace, lbMode string, localClients []int, extraArgs []string) error {
	var probs Problems
	if bad := badNodePool(nodePool); nodePool != "" && bad != "" {
		probs.Add("--nodepool-name", "%s", bad)
	}
	if bad := badNamespace(namespace); namespace != "" && bad != "" {
		probs.Add("--namespace", "%s", bad)
	}
	if modes := openyurt.LBModes(); lbMode != "" && !slices.Contains(modes, lbMode) {
		probs.Add("--lb-mode", "%q is not one of %s", strict.Shorten(lbMode), strings.Join(modes, ", "))
	}
	validateLocalClients("--local-client", localClients, &probs)
	validateYurthubArgs("--yurthub-arg", extraArgs, "", &probs)
	return probs.Err()
}

// CheckSiteYurthubArgs returns the problems of a Site's yurthub.extraArgs with this version of
// yurthub.
func CheckSiteYurthubArgs(args []string, version string) Problems {
	var probs Problems
	validateYurthubArgs("yurthub.extraArgs", args, version, &probs)
	return probs
}

// validateYurthubArgs validates additional arguments ("--name=value") for a version of yurthub, or
// for any version if version is empty.
func validateYurthubArgs(path string, args []string, version string, probs *Problems) {
	for i, a := range args {
		sub := fmt.Sprintf("%s[%d]", path, i)
		name, isFlag := strings.CutPrefix(a, "--")
		name, _, _ = strings.Cut(name, "=")
		switch {
		case !isFlag || !flagName.MatchString(name):
			probs.Add(sub, "%q is not of the form --name=value", strict.Shorten(a))
		case strings.ContainsFunc(a, unicode.IsSpace) || strict.BadText(a) != "":
			probs.Add(sub, "contains a space or control character; write --name=value as one word")
		case openyurt.BadFlag(name, version) != "":
			probs.Add(sub, "--%s %s", name, openyurt.BadFlag(name, version))
		}
	}
}

// validateNames reports names that the node cannot resolve without a DNS server.
func (s *Site) validateNames(probs *Problems) {
	n := &s.Network
	if len(n.DNS) > 0 || n.UsesDHCP() {
		return
	}
	for i, m := range s.Masters {
		host, _, _ := net.SplitHostPort(m)
		if _, err := netip.ParseAddr(host); err != nil && forms.BadHostPort(m) == "" {
			probs.Add(fmt.Sprintf("masters[%d]", i), "%s is a name, which the node cannot resolve: no interface uses DHCP, and network.dns is empty", host)
		}
	}
	for i, h := range n.NTP {
		if _, err := netip.ParseAddr(h); err != nil && forms.BadHost(h) == "" {
			probs.Add(fmt.Sprintf("network.ntp[%d]", i), "%s is a name, which the node cannot resolve: no interface uses DHCP, and network.dns is empty", h)
		}
	}
}
