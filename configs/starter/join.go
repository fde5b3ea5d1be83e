package starter

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

// ParseJoin parses a join command: one that kubeadm prints, alone or in the output of kubeadm init,
// or one of yurtadm or edgeadm. Its errors never quote the token.
func ParseJoin(text string) (*Input, error) {
	words, err := joinLine(strings.Fields(strings.NewReplacer("\\\n", " ", "\\\r\n", " ").Replace(text)))
	if err != nil {
		return nil, err
	}
	args, err := joinArgs(words)
	if err != nil {
		return nil, err
	}
	in := new(Input)
	var errs []error
	var bare []string
	for _, a := range args {
		if a.flag == "" {
			bare = append(bare, a.value)
		} else {
			errs = append(errs, in.set(a))
		}
	}
	bareErr := in.setMasters(bare)
	errs = append(append(errs, in.checkJoin()...), bareErr)
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return in, nil
}

// joinArg is a flag of a join command with its value. A word that belongs to no flag, usually the
// API server, has an empty flag.
type joinArg struct{ flag, value string }

// unusableFlags lists flags that are given instead of the token or the CA hash. ParseJoin rejects
// them.
var unusableFlags = []string{"--config", "--discovery-file", "--discovery-token", "--tls-bootstrap-token"}

// joinArgs splits the words after "kubeadm join" into arguments.
func joinArgs(words []string) (args []joinArg, err error) {
	for ; len(words) > 0; words = words[1:] {
		if dash := strings.TrimLeft(words[0], "–—−"); dash != words[0] {
			return nil, fmt.Errorf("the line has %q, whose dashes a text program has changed: write --%s, or copy the line from the terminal", words[0], dash)
		}
		flag, value, hasValue := strings.Cut(words[0], "=")
		if !strings.HasPrefix(flag, "-") {
			args = append(args, joinArg{"", words[0]})
			continue
		}
		if slices.Contains(unusableFlags, flag) {
			return nil, fmt.Errorf("the line has %s: give a line with --token and --discovery-token-ca-cert-hash, as `kubeadm token create --print-join-command` prints it", flag)
		}
		if !hasValue && len(words) > 1 && !slices.Contains(joinSwitches, flag) && !strings.HasPrefix(words[1], "-") {
			words, value = words[1:], words[1]
		}
		// A terminal may have wrapped the line inside the token or the hash.
		for len(words) > 1 && continues(flag, value, words[1]) {
			words, value = words[1:], value+words[1]
		}
		args = append(args, joinArg{flag, value})
	}
	return args, nil
}

// continues reports whether word may be the rest of a flag's value.
func continues(flag, value, word string) bool {
	switch flag {
	case flagToken:
		return len(value) < len(forms.PlaceholderToken) && strings.Trim(strings.ToLower(word), "abcdefghijklmnopqrstuvwxyz0123456789.") == ""
	case flagCAHash:
		return len(value) < caHashLen && isHex(word)
	}
	return false
}

const flagToken = "--token"

const flagCAHash = "--discovery-token-ca-cert-hash"

// setMasters sets the API servers from the words that belong to no flag. Its error does not quote
// other words, because one may be a part of the token.
func (in *Input) setMasters(bare []string) error {
	if len(bare) == 0 {
		return nil
	}
	isServer := func(word string) bool {
		first, _, _ := strings.Cut(word, ",")
		return forms.BadHostPort(first) == ""
	}
	at := max(0, slices.IndexFunc(bare, isServer))
	in.Masters = strings.Split(bare[at], ",") // yurtadm accepts several API servers
	others := slices.Delete(bare, at, at+1)
	switch {
	case len(others) == 0:
		return nil
	case slices.ContainsFunc(others, isServer):
		return errors.New("the line names two API servers: give one, and add the others to masters in site.yaml")
	case len(others) == 1:
		return errors.New("the line has a word that is neither a flag, a flag's value nor an API server (host:port): remove it")
	}
	return fmt.Errorf("the line has %d words that are neither flags, flags' values nor API servers (host:port): remove them", len(others))
}

// set sets the fields for one argument of a join command.
func (in *Input) set(a joinArg) error {
	switch a.flag {
	case flagToken:
		in.Token = a.value
	case flagCAHash:
		in.CAHashes = append(in.CAHashes, strings.ToLower(a.value))
	case "--node-name":
		in.NodeName = strings.ToLower(a.value) // like kubeadm, convert it to lower case
		if err := forms.CheckNodeName(in.NodeName); err != nil {
			return fmt.Errorf("--node-name: %w", err)
		}
	case "--node-type":
		in.NodeType = a.value
		if !in.isYurt() {
			return fmt.Errorf("--node-type %s: want %s or %s", strict.Shorten(a.value), configs.NodeEdge, configs.NodeCloud)
		}
	case "--nodepool-name":
		in.NodePool = a.value
	case "-v", "--v": // ignore kubeadm's log level
	default:
		switch field := joinFields[a.flag]; {
		case slices.Contains(joinOnBoard, a.flag):
			in.LeftOut = append(in.LeftOut, a.flag)
		case field != "":
			return fmt.Errorf("the line has %s, which init cannot use: remove it, and set %s in site.yaml", a.flag, field)
		default:
			return fmt.Errorf("the line has %s, which init cannot use: remove it, and look for the field of the Site with `edgebake explain site`", a.flag)
		}
	}
	return nil
}

func (in *Input) isYurt() bool {
	return in.NodeType == configs.NodeEdge || in.NodeType == configs.NodeCloud
}

// checkJoin returns an error for each value that is missing or invalid in a join command.
func (in *Input) checkJoin() (errs []error) {
	switch {
	case in.Token == "":
		errs = append(errs, errors.New("the line has no --token TOKEN: "+forms.TokenWords))
	case !forms.Token.MatchString(in.Token):
		errs = append(errs, errors.New("--token is not a bootstrap token: "+forms.TokenWords))
	}
	if len(in.Masters) == 0 {
		in.Masters = []string{""}
	}
	for _, m := range in.Masters {
		if bad := forms.BadHostPort(m); bad != "" {
			errs = append(errs, fmt.Errorf("the API server %s", bad))
		}
	}
	if in.isYurt() && in.NodePool == "" {
		errs = append(errs, fmt.Errorf("the line has --node-type %s but no --nodepool-name, which %[1]s nodes need: add it", in.NodeType))
	}
	if len(in.CAHashes) == 0 {
		errs = append(errs, errors.New("the line has no "+flagCAHash+" sha256:HEX, with which the machine verifies your cluster"))
	}
	for _, h := range in.CAHashes {
		if !forms.CAHash.MatchString(h) {
			errs = append(errs, fmt.Errorf("%s %q is not sha256: followed by 64 hexadecimal digits", flagCAHash, strict.Shorten(h)))
		}
	}
	return errs
}

// BeginsJoin reports whether a line of text contains the beginning of a join command.
func BeginsJoin(line string) bool { return len(joinStarts(strings.Fields(line))) > 0 }

// joinStarts returns the index of the word after each "kubeadm join", "yurtadm join" or "edgeadm
// join".
func joinStarts(words []string) (starts []int) {
	for i := 1; i < len(words); i++ {
		if words[i] == "join" && slices.Contains([]string{"kubeadm", "yurtadm", "edgeadm"}, path.Base(words[i-1])) {
			starts = append(starts, i+1)
		}
	}
	return starts
}

// joinLine returns the words after "kubeadm join" in the command for workers. It skips the command
// for control-plane nodes, which the output of kubeadm init also contains.
func joinLine(words []string) (worker []string, err error) {
	starts := joinStarts(words)
	if len(starts) == 0 {
		return nil, errors.New("want a line that begins with kubeadm join, as `kubeadm token create --print-join-command` prints it")
	}
	found := 0
	for n, start := range starts {
		line := words[start:]
		if n+1 < len(starts) {
			line = words[start : starts[n+1]-2]
		}
		if i := slices.IndexFunc(line, isControlPlaneFlag); i >= 0 {
			flag, _, _ := strings.Cut(line[i], "=")
			err = fmt.Errorf("the line has %s, so it is for control-plane nodes: use the line for workers", flag)
			continue
		}
		worker = line
		found++
	}
	switch {
	case found > 1:
		return nil, fmt.Errorf("there are %d join lines for workers: keep one", found)
	case found == 0:
		return nil, err
	}
	return worker, nil
}

func isControlPlaneFlag(word string) bool {
	flag, _, _ := strings.Cut(word, "=")
	return flag == "--control-plane" || flag == "--certificate-key"
}

// joinSwitches lists the flags of kubeadm, yurtadm and edgeadm join that have no value.
var joinSwitches = []string{
	"--control-plane", "--discovery-token-unsafe-skip-ca-verification", "--dry-run", "--reuse-cni-bin", "--enable-edge",
}

// joinOnBoard lists the flags of yurtadm and edgeadm join that a node with an image does not need.
// They are about programs that the image contains, or about SuperEdge's lite-apiserver, which
// edgebake does not use.
var joinOnBoard = []string{
	"--install-pkg-path", "--worker-path", "--runtime", "--enable-edge",
	"--kubernetes-resource-server", "--reuse-cni-bin", "--pause-image",
	"--yurthub-image", "--yurthub-binary-url", "--yurthub-server-addr",
}

// joinFields maps flags of kubeadm, yurtadm and edgeadm join to fields of a Site.
var joinFields = map[string]string{
	"--cri-socket":              "criSocket",
	"--ignore-preflight-errors": "ignorePreflightErrors",
	"--skip-phases":             "skipPhases",
	"--node-labels":             "labels",
	"--namespace":               "yurthub.namespace",
	"--organizations":           "organizations",
	"--discovery-token-unsafe-skip-ca-verification": "caCertHashes (or unsafeSkipCAVerification, which trusts any API server)",
}

const caHashLen = len("sha256:") + 2*sha256.Size

func isHex(s string) bool {
	return strings.Trim(strings.ToLower(s), "0123456789abcdef") == ""
}
