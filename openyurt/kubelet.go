package openyurt

import (
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"
)

// RedirectFlags redirect kubelet to yurthub. OpenYurt's own tools write and search for exactly
// these bytes.
const RedirectFlags = " --kubeconfig=" + KubeletConf + " --bootstrap-kubeconfig= "

// ListPlainly makes kubelet list objects with plain requests. kubelet 1.35 and later lists through
// watches, to which yurthub 1.7 sends nothing while no API server is reachable. kubelet would then
// not find its Node, and run no pods.
const ListPlainly = " --feature-gates=WatchListClient=false"

// Redirect adds the arguments that redirect kubelet to yurthub. plain is the result of PlainLists.
func Redirect(args, plain string) string {
	if strings.HasSuffix(args, ListPlainly) {
		plain = ListPlainly // add a second gate, so that Unredirect keeps the one that a person set
	}
	return args + plain + RedirectFlags
}

// Unredirect removes the arguments that Redirect or OpenYurt's own tools added, and returns them as
// turned. Any other ListPlainly stays: a person set it, or it begins a longer list of feature gates.
func Unredirect(args string) (rest, turned string) {
	for _, t := range []string{ListPlainly + RedirectFlags, RedirectFlags} {
		before, after, found := strings.Cut(args, t)
		if !found {
			continue
		}
		if before != "" && after != "" && after[0] != ' ' {
			before += " " // this space was the end of the removed arguments
		}
		return before + after, t
	}
	return args, ""
}

// IsRedirected reports whether kubelet's arguments redirect it to yurthub.
func IsRedirected(args string) bool { return strings.Contains(args, "--kubeconfig="+KubeletConf) }

// JoinedArgs adds to given the arguments of a kubelet that joins through yurthub as a static pod.
// Such a kubelet has no certificate of its own. plain is the result of PlainLists.
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

// Kubeconfig is the contents of KubeletConf.
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

// PlainLists returns ListPlainly if kubelet needs it, otherwise "". version is the output of
// kubelet --version, or a version such as v1.36.3. Older kubelets do not need the feature gate, and
// before 1.30 they do not start with it.
func PlainLists(version string) (string, error) {
	m := kubeletVersion.FindStringSubmatch(version)
	if m == nil {
		return "", fmt.Errorf("%q contains no version of kubelet", strings.TrimSpace(version))
	}
	if minor, err := strconv.Atoi(m[1]); err != nil || minor < 35 {
		return "", err
	}
	return ListPlainly, nil
}
