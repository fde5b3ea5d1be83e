package openyurt

import (
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"
)

// TurnedFlags turn kubelet to yurthub. OpenYurt's own tools write these very
// bytes, and look for them.
const TurnedFlags = " --kubeconfig=" + KubeletConf + " --bootstrap-kubeconfig= "

// ListPlainly has kubelet list in a way that yurthub can serve offline.
// Kubelet 1.35 and later asks for lists as watches; of these yurthub 1.7
// without a server sends nothing at all, so that kubelet would not even find
// its Node and run no pod.
const ListPlainly = " --feature-gates=WatchListClient=false"

// Turn adds to kubelet's arguments what turns it to yurthub. plain is what
// PlainLists says.
func Turn(args, plain string) string {
	if strings.HasSuffix(args, ListPlainly) {
		plain = ListPlainly // twice, so that Unturn leaves a person's own
	}
	return args + plain + TurnedFlags
}

// Unturn removes what Turn added, or OpenYurt's own tools did, and returns that
// as well; "": the arguments were not turned. A ListPlainly elsewhere is a
// person's, or begins a longer list of feature gates.
func Unturn(args string) (rest, turned string) {
	for _, t := range []string{ListPlainly + TurnedFlags, TurnedFlags} {
		before, after, found := strings.Cut(args, t)
		if !found {
			continue
		}
		if before != "" && after != "" && after[0] != ' ' {
			before += " " // which was the end of t
		}
		return before + after, t
	}
	return args, ""
}

// IsTurned reports whether kubelet's arguments lead it to yurthub.
func IsTurned(args string) bool { return strings.Contains(args, "--kubeconfig="+KubeletConf) }

// JoinedArgs adds to given the arguments of a kubelet that joins through a yurthub
// of form staticPod: it has no certificate of its own. plain is PlainLists' result.
func JoinedArgs(given map[string]string, plain string) map[string]string {
	args := maps.Clone(given)
	if args == nil {
		args = map[string]string{}
	}
	args["kubeconfig"], args["bootstrap-kubeconfig"], args["rotate-certificates"] = KubeletConf, "", "false"
	if _, gate, ok := strings.Cut(plain, "="); ok {
		if more := args["feature-gates"]; more != "" {
			gate = more + "," + gate
		}
		args["feature-gates"] = gate
	}
	return args
}

var kubeletVersion = regexp.MustCompile(`(?m)(?:^|\s)v1\.(\d{1,3})\.\d`)

// Kubeconfig is in KubeletConf.
const Kubeconfig = `apiVersion: v1
kind: Config
clusters:
- cluster:
    server: ` + Proxy + `
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
preferences: {}
`

// PlainLists returns ListPlainly for a kubelet that needs it, else "". version is
// what kubelet --version prints, or v1.36.3. Kubelet before 1.30 does not know the
// gate and would not start with it; before 1.35 it lists plainly by itself.
func PlainLists(version string) (string, error) {
	m := kubeletVersion.FindStringSubmatch(version)
	if m == nil {
		return "", fmt.Errorf("it says %q", strings.TrimSpace(version))
	}
	if minor, err := strconv.Atoi(m[1]); err != nil || minor < 35 {
		return "", err
	}
	return ListPlainly, nil
}
