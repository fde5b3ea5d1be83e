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
	"github.com/edgebake/edgebake/openyurt"
)

// Node types.
const (
	NodeNative       = "native" // plain kubeadm worker
	NodeEdge         = "edge"   // behind yurthub, autonomous
	NodeCloud        = "cloud"  // behind yurthub, always online
	NodeControlPlane = "control-plane"
)

// Validate returns every problem of s, nil if there is none. It changes
// nothing; the values must have their defaults.
func (s *Site) Validate() Problems { return s.validate(true) }

func (s *Site) validate(credentials bool) Problems {
	var probs Problems
	strict.Check(s, checks, &probs)
	if !s.Match.IsZero() {
		s.Match.validate("match", &probs)
	}
	s.validateCluster(credentials, &probs)
	s.validateControlPlane(credentials, &probs)
	s.validateNode(&probs)
	s.validateIPVS(&probs)
	s.Network.validate(&probs)
	s.validateNames(&probs)
	s.validateVIPUse(&probs)
	s.validateMasterUse(&probs)
	s.validateServerUse(&probs)
	s.validateUsers(&probs)
	s.Report.validate(&probs)
	if !s.Ignition.IsZero() {
		if s.IgnitionFile != "" {
			probs.Add("ignition", "give either ignition or ignitionFile, not both")
		}
		if credentials && ignition.Holds([]byte(s.Ignition.Reveal()), s.Credentials.Token) {
			probs.Add("ignition", "contains the bootstrap token, which is wiped after the join: remove it here, and have programs on the node use a credential of their own")
		}
		if _, _, bad := ignition.Parse("", []byte(s.Ignition.Reveal())); bad != nil {
			for _, p := range bad {
				probs.Add("ignition", "%s", inner(p))
			}
		}
	}
	strict.CheckText(s, &probs)
	return probs
}

// inner words a problem inside an inline document: its line is the inline
// document's own.
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
	s.validateEndpoint(probs)
	s.validateToken(credentials, probs)
	s.validateCAPins(probs)
	s.validateCA(credentials, probs)
	s.validateCAHashes(probs)
}

// PlainMaster is the spelling of an API server, "host:port", that all spellings of it
// have in common; ipvscare knows them as one, too. What is not an API server is
// returned as it is.
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

// validateMasters also counts the API servers that are named by address.
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
				probs.Add(path, "%s is the VIP; the VIP is a free address that stands for all API servers, so give it another one (vip)", addr)
			}
		} else if strings.EqualFold(host, s.Endpoint) {
			probs.Add(path, "%s is the endpoint, whose name the node itself maps to the VIP; name the API servers by address or by names of their own", host)
		}
		if first, twice := seen[key]; twice {
			probs.Add(path, "%s is masters[%d] again", m, first)
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
		probs.Add("vip", "%q: leave the port out; it is that of the first API server", s.VIP)
	case err != nil:
		probs.Add("vip", "%q is not an IP address", strict.Shorten(s.VIP))
	case forms.BadMachine(vip.WithZone("")) != "":
		probs.Add("vip", "%s cannot stand for the API servers: it %s; choose a private address that nothing in the site's networks uses, e.g. 10.103.97.2", vip, forms.BadMachine(vip.WithZone("")))
	case forms.BadServer(vip) != "":
		probs.Add("vip", "%s is a link-local address, which is valid on one link only; choose a private address that nothing in the site's networks uses, e.g. 10.103.97.2", vip)
	case s.IPVS.Disabled:
	case forms.ServiceAddrs[vip] != "":
		probs.Add("vip", "%s is the address of %s (kubeadm's default), which kube-proxy takes on every node; choose a private address that nothing in the site's networks uses, e.g. 10.103.97.2", vip, forms.ServiceAddrs[vip])
	case vip.Is4() && v6 > 0 && v4 == 0:
		probs.Add("vip", "%s is IPv4 and the API servers are IPv6; choose an IPv6 address, e.g. fd00:ed6e::2", vip)
	case vip.Is6() && v4 > 0 && v6 == 0:
		probs.Add("vip", "%s is IPv6 and the API servers are IPv4; choose an IPv4 address, e.g. 10.103.97.2", vip)
	}
}

func (s *Site) validateEndpoint(probs *Problems) {
	switch _, err := netip.ParseAddr(s.Endpoint); {
	case err == nil || !forms.IsDNSName(s.Endpoint) || forms.BadHost(s.Endpoint) != "":
		probs.Add("endpoint", "%q is not a DNS name in lower case", strict.Shorten(s.Endpoint))
	case forms.IsLoopbackName(s.Endpoint):
		probs.Add("endpoint", "%q is every machine's name for itself; use the cluster's own name, e.g. apiserver.cluster.local", s.Endpoint)
	}
}

func (s *Site) validateToken(credentials bool, probs *Problems) {
	if tok := s.Credentials.Token; tok.Reveal() == placeholderToken {
		probs.Add("credentials.token", "replace the example: `kubeadm token create --print-join-command` prints a token (`edgebake init --join` takes its whole line)")
	} else if !tok.IsZero() && !tokenForm.MatchString(tok.Reveal()) {
		probs.Add("credentials.token", "is not a bootstrap token: %s (`kubeadm token create` makes one)", tokenWords)
	} else if tok.IsZero() && credentials && s.NodeType != NodeControlPlane {
		probs.AddMissing("credentials.token", "is required")
	}
}

// validateCAPins checks that the Site says, in one way, which CA is the cluster's.
func (s *Site) validateCAPins(probs *Problems) {
	hasCA := s.CACert != "" || s.CAFile != ""
	switch {
	case len(s.CACertHashes) > 0 && s.UnsafeSkipCAVerification:
		probs.Add("unsafeSkipCAVerification", "contradicts caCertHashes; keep the hashes and remove this")
	case hasCA && s.UnsafeSkipCAVerification:
		probs.Add("unsafeSkipCAVerification", "contradicts caCert and caFile; keep the certificate and remove this")
	case len(s.CACertHashes) == 0 && !hasCA && !s.UnsafeSkipCAVerification:
		probs.AddMissing("caCertHashes", "is required, so that the node joins your cluster and no other: sha256:<hex> as `kubeadm token create --print-join-command` shows it; to join whatever answers, say unsafeSkipCAVerification: true")
	}
}

func (s *Site) validateCAHashes(probs *Problems) {
	seen := repeats{}
	for i, h := range s.CACertHashes {
		path := fmt.Sprintf("caCertHashes[%d]", i)
		switch {
		case h == placeholderHash:
			probs.Add(path, "replace the example: `kubeadm token create --print-join-command` prints the hash (`edgebake init --join` takes its whole line)")
		case sha256Hex.MatchString(strings.ToLower(h)):
			probs.Add(path, "write the kind of hash too: \"sha256:%s\"", h)
		case !caHashForm.MatchString(h):
			probs.Add(path, "%q is not sha256: followed by 64 hexadecimal digits", strict.Shorten(h))
		}
		if seen.again(strings.ToLower(h)) {
			probs.Add(path, "is listed twice")
		}
	}
}

// kubeletMaySet reports whether kubelet accepts the label in --node-labels.
// Of kubernetes.io and k8s.io it takes the few named here and those under kubelet.kubernetes.io/ and
// node.kubernetes.io/. It exits at the sight of any other, and the admission
// plugin NodeRestriction would reject it.
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

// managedKubeletArg says who sets a flag of kubelet that other fields,
// kubeadm or first boot own; "" for any other flag.
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

// validateNode finds what is wrong with what the node is called, is and runs,
// a group of fields at a time.
func (s *Site) validateNode(probs *Problems) {
	s.validateName(probs)
	s.validatePool(probs)
	s.validateYurthub(probs)
	s.validateOrganizations(probs)
	s.validateLabels(probs)
	s.validateTaints(probs)
	s.validateKubeadm(probs)
	s.validateKubelet(probs)
}

func (s *Site) validateName(probs *Problems) {
	if bad := badNodeNameTemplate(s.NodeName); bad != "" {
		probs.Add("nodeName", "%s", bad)
	} else if s.NodeName == s.Endpoint {
		probs.Add("nodeName", "is also the endpoint, which stands for the API servers")
	}
}

func (s *Site) validatePool(probs *Problems) {
	switch {
	case s.OpenYurt() && s.NodePool == "":
		probs.AddMissing("nodePool", "is required for nodeType %s: %s", s.NodeType, openyurt.Unpooled)
	case s.NodeType == NodeNative && s.NodePool != "":
		probs.Add("nodePool", "needs nodeType edge or cloud: OpenYurt would convert a native node that carries the label of a pool")
	case badNodePool(s.NodePool) != "":
		probs.Add("nodePool", "%s", badNodePool(s.NodePool))
	}
}

func (s *Site) validateYurthub(probs *Problems) {
	if !isNamespace(s.Yurthub.Namespace) {
		probs.Add("yurthub.namespace", "%q is not the name of a namespace", strict.Shorten(s.Yurthub.Namespace))
	}
	validateYurthubArgs("yurthub.extraArgs", s.Yurthub.ExtraArgs, "", probs)
	validateLocalClients("yurthub.localClients", s.Yurthub.LocalClients, probs)
	if !s.OpenYurt() && len(s.Yurthub.LocalClients) > 0 {
		probs.Add("yurthub.localClients", "needs nodeType edge or cloud; a native node runs no yurthub")
	}
	if !s.OpenYurt() && len(s.Yurthub.ExtraArgs) > 0 {
		probs.Add("yurthub.extraArgs", "needs nodeType edge or cloud; a native node runs no yurthub")
	}
}

// maxUser is the largest user ID; the one above it means no user.
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
			probs.Add(at, "%d is in the list twice", uid)
		}
	}
}

func (s *Site) validateOrganizations(probs *Problems) {
	seen := repeats{}
	for i, org := range s.Organizations {
		path := fmt.Sprintf("organizations[%d]", i)
		switch {
		case !s.OpenYurt():
			probs.Add(path, "needs nodeType edge or cloud: organizations are those of yurthub's certificate")
		case org == "" || strings.ContainsFunc(org, func(r rune) bool { return r == ',' || unicode.IsSpace(r) || unicode.IsControl(r) }):
			probs.Add(path, "%q: one organization an item, without spaces or commas", strict.Shorten(org))
		case strings.HasPrefix(org, "system:"):
			probs.Add(path, "%q: groups of system: are for the cluster to give", strict.Shorten(org))
		case seen.again(org):
			probs.Add(path, "is listed twice")
		}
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
			probs.Add(path, "a kubelet may not set labels of kubernetes.io and k8s.io, but for node.kubernetes.io/…, kubelet.kubernetes.io/… and topology.kubernetes.io/zone and /region; set it from the cluster: kubectl label node NODE %s=%s", k, s.Labels[k])
		}
		if bad := forms.BadLabelValue(s.Labels[k]); bad != "" {
			probs.Add(path, "%s", bad)
		}
	}
}

func (s *Site) validateTaints(probs *Problems) {
	seen := repeats{}
	for i, t := range s.Taints {
		path := fmt.Sprintf("taints[%d]", i)
		if bad := forms.BadLabelKey(t.Key); t.Key != "" && bad != "" {
			probs.Add(path+".key", "%s", bad)
		}
		if bad := forms.BadLabelValue(t.Value); bad != "" {
			probs.Add(path+".value", "%s", bad)
		}
		if seen.again(t.Key + "\x00" + t.Effect) {
			probs.Add(path, "a taint %s:%s is listed already", strict.Shorten(t.Key), strict.Shorten(t.Effect))
		}
	}
}

func (s *Site) validateKubeadm(probs *Problems) {
	if p, ok := strings.CutPrefix(s.CRISocket, "unix://"); !ok || forms.BadFilePath(p) != "" || badArgument(p) != "" {
		probs.Add("criSocket", "%q is not of the form unix:///run/containerd/containerd.sock", strict.Shorten(s.CRISocket))
	}
	phases, checks := repeats{}, repeats{}
	for i, p := range s.SkipPhases {
		path := fmt.Sprintf("skipPhases[%d]", i)
		switch {
		case !skipPhase.MatchString(p):
			probs.Add(path, "%q is not the name of a phase of kubeadm join, e.g. preflight or kubelet-wait-bootstrap", strict.Shorten(p))
		case p == "kubelet-start":
			probs.Add(path, "kubelet-start is the joining itself; without it the node would never join")
		case phases.again(p):
			probs.Add(path, "is listed twice")
		}
	}
	for i, e := range s.IgnorePreflightErrors {
		path := fmt.Sprintf("ignorePreflightErrors[%d]", i)
		switch {
		case e == "" || strings.ContainsFunc(e, func(r rune) bool { return r == ',' || unicode.IsSpace(r) || unicode.IsControl(r) }):
			probs.Add(path, "%q: one check an item, e.g. Swap or NumCPU, or all", strict.Shorten(e))
		case strings.EqualFold(e, "all") && len(s.IgnorePreflightErrors) > 1:
			probs.Add(path, "all includes the others, and kubeadm accepts it only alone")
		case checks.again(strings.ToLower(e)):
			probs.Add(path, "is listed twice")
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

// badArgument says what is wrong with the value of one of kubelet's flags.
// kubeadm joins them by blanks, and systemd splits the line again, and takes
// quotes and backslashes for its own.
func badArgument(v string) string {
	switch {
	case strict.BadText(v) != "":
		return strict.BadText(v)
	case strings.ContainsFunc(v, unicode.IsSpace) || strings.ContainsAny(v, "\"'\\"):
		return fmt.Sprintf("%q contains a blank, quote or backslash, at which kubelet's command line would be divided", strict.Shorten(v))
	}
	return ""
}

// badNodeIP says what is wrong with kubelet's --node-ip: with an address that
// is not of a machine's kubelet does not start.
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

// badNodePool says what is wrong with the name of a node pool, if one is given.
func badNodePool(name string) string {
	if name == "" || forms.IsDNSName(name) && len(name) <= 63 {
		return ""
	}
	return fmt.Sprintf("%q is not the name of a node pool: lower-case letters, digits, - and ., at most 63", strict.Shorten(name))
}

func isNamespace(name string) bool { return forms.IsDNSName(name) && !strings.Contains(name, ".") }

// CheckHub finds what is wrong with settings of yurthub that came by the flags
// of `firstboot convert`, which it names. Empty ones are left out.
func CheckHub(nodePool, namespace, lbMode string, localClients []int, extraArgs []string) error {
	var probs Problems
	if bad := badNodePool(nodePool); bad != "" {
		probs.Add("--nodepool-name", "%s", bad)
	}
	if namespace != "" && !isNamespace(namespace) {
		probs.Add("--namespace", "%q is not the name of a namespace", strict.Shorten(namespace))
	}
	if modes := openyurt.LBModes(); lbMode != "" && !slices.Contains(modes, lbMode) {
		probs.Add("--lb-mode", "%q is not one of %s", strict.Shorten(lbMode), strings.Join(modes, ", "))
	}
	validateLocalClients("--local-client", localClients, &probs)
	validateYurthubArgs("--yurthub-arg", extraArgs, "", &probs)
	return probs.Err()
}

// CheckSiteYurthubArgs finds what is wrong with yurthub.extraArgs of a Site
// for an image with that version of yurthub, which the Site does not say.
func CheckSiteYurthubArgs(args []string, version string) Problems {
	var probs Problems
	validateYurthubArgs("yurthub.extraArgs", args, version, &probs)
	return probs
}

// validateYurthubArgs checks extra arguments of yurthub, "--name=value", for
// that version of it, "" for any.
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

func (s *Site) validateIPVS(probs *Problems) {
	v := s.IPVS
	if !strings.HasPrefix(v.ProbePath, "/") || strings.ContainsFunc(v.ProbePath, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }) {
		probs.Add("ipvs.probePath", "%q must begin with / and hold no space", strict.Shorten(v.ProbePath))
	}
}

// validateNames reports names that nothing on the node could resolve.
func (s *Site) validateNames(probs *Problems) {
	n := &s.Network
	if len(n.DNS) > 0 || n.usesDHCP() {
		return
	}
	for i, m := range s.Masters {
		host, _, _ := net.SplitHostPort(m)
		if _, err := netip.ParseAddr(host); err != nil && forms.BadHostPort(m) == "" {
			probs.Add(fmt.Sprintf("masters[%d]", i), "%s is a name, but no interface uses DHCP and network.dns is empty, so nothing could resolve it", host)
		}
	}
	for i, h := range n.NTP {
		if _, err := netip.ParseAddr(h); err != nil && forms.BadHost(h) == "" {
			probs.Add(fmt.Sprintf("network.ntp[%d]", i), "%s is a name, but no interface uses DHCP and network.dns is empty, so nothing could resolve it", h)
		}
	}
}

func (s *Site) validateUsers(probs *Problems) {
	names := repeats{}
	for i, u := range s.Users {
		path := fmt.Sprintf("users[%d]", i)
		if u.Name != "" && !userName.MatchString(u.Name) {
			probs.Add(path+".name", "%q is not a user's name: lower-case letters, digits, - and _, at most 32, beginning with a letter", strict.Shorten(u.Name))
		}
		if names.again(u.Name) {
			probs.Add(path+".name", "%q is listed twice", strict.Shorten(u.Name))
		}
		for j, k := range u.SSHAuthorizedKeys {
			if bad := forms.BadSSHKey(k); bad != "" {
				probs.Add(fmt.Sprintf("%s.sshAuthorizedKeys[%d]", path, j), "%s", bad)
			}
		}
		switch hash := u.PasswordHash.Reveal(); {
		case hash == "":
		case !hashedPasswd.MatchString(hash):
			probs.Add(path+".passwordHash", "is not a crypt(3) hash ($y$… or $6$…; `mkpasswd` prints one); clear-text passwords are rejected")
		case !wholeHash.MatchString(hash):
			probs.Add(path+".passwordHash", "is cut short or damaged: no password would fit it; copy the whole line that `mkpasswd` prints")
		}
		groups := repeats{}
		for j, g := range u.Groups {
			if !userName.MatchString(g) {
				probs.Add(fmt.Sprintf("%s.groups[%d]", path, j), "%q is not a group's name", strict.Shorten(g))
			} else if groups.again(g) {
				probs.Add(fmt.Sprintf("%s.groups[%d]", path, j), "is listed twice")
			}
		}
		if bad := forms.BadFilePath(u.Shell); u.Shell != "" && bad != "" {
			probs.Add(path+".shell", "%s", bad)
		}
	}
}

func (r *Report) validate(probs *Problems) {
	if r.URL != "" {
		if bad := forms.BadURL(r.URL, "https"); bad != "" {
			probs.Add("report.url", "%s", bad)
		}
	}
	if r.CACert == "" {
		return
	}
	if r.URL == "" {
		probs.Add("report.caCert", "has no receiver to vouch for; name one with report.url")
	}
	if _, err := forms.ParseCertificates(r.CACert); err != nil {
		probs.Add("report.caCert", "%s", err)
	}
}
