package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/edgebake/edgebake/ipvs"
)

func staticPodCommand(stdout io.Writer) *command {
	c := &careFlags{}
	var image, name string
	f := newFlags("static-pod")
	c.register(f)
	f.StringVar(&image, "image", "", "container image that holds /usr/bin/ipvscare")
	f.StringVar(&name, "name", "kube-sealos-lvscare", "name of the pod")
	return &command{
		name:  "static-pod",
		short: "Print a static pod that runs ipvscare care, for sealos-style clusters",
		long: `Print a static pod that runs ipvscare care. Write it to
/etc/kubernetes/manifests/kube-sealos-lvscare.yaml to take lvscare's place. The
pod has CAP_NET_ADMIN and no other privilege; the node must load ip_vs.`,
		flags: f,
		run: func(context.Context) error {
			s, err := c.server(f.Changed)
			if err != nil {
				return usageError{err}
			}
			if image == "" {
				return usageError{errors.New("--image is missing: name the container image that holds ipvscare")}
			}
			_, err = io.WriteString(stdout, staticPod(name, image, c, podArgs(f, c, s)))
			return err
		},
	}
}

// hostDir is the directory in the pod below which those directories of the node are mounted that
// cannot be mounted at their own path.
const hostDir = "/host"

// podArgs returns the arguments for ipvscare in the pod. Their paths are those in the pod.
func podArgs(f *pflag.FlagSet, c *careFlags, s ipvs.Server) []string {
	args := []string{"care", "--vs", s.VIP.String()}
	for _, m := range s.Masters {
		args = append(args, "--rs", m.String())
	}
	own := []string{"vs", "rs", "image", "name", "run-once", "clean", "hosts", "sysctls"}
	f.VisitAll(func(flag *pflag.Flag) {
		if !flag.Changed || slices.Contains(own, flag.Name) {
			return
		}
		value := flag.Value.String()
		if t := flag.Value.Type(); t == "intSlice" || t == "stringToString" {
			value = strings.TrimSuffix(strings.TrimPrefix(value, "["), "]")
		}
		args = append(args, "--"+flag.Name+"="+value)
	})
	args = append(args, "--sysctls="+hostDir+c.sysctls)
	if c.host != "" {
		args = append(args, "--hosts="+hostDir+c.hosts)
	}
	return args
}

// mount is a directory of the node that is mounted in the pod.
type mount struct {
	name, node, pod, kind string
	readOnly              bool
}

func podMounts(c *careFlags) []mount {
	mounts := []mount{
		{"ca", filepath.Dir(c.caFile), filepath.Dir(c.caFile), "DirectoryOrCreate", true},
		// Without kubelet's certificate, kube-apiserver would close the connection after every
		// answer.
		{"kubelet", ipvs.KubeletPKI, ipvs.KubeletPKI, "DirectoryOrCreate", true},
		{"run", c.run, c.run, "DirectoryOrCreate", false},
		// The container's own /proc/sys is read-only. This mount has only the node's network
		// settings.
		{"sysctls", c.sysctls, hostDir + c.sysctls, "Directory", false},
	}
	if c.host != "" {
		// Mount the directory, because a mounted file would still be the old one after the node's
		// file is replaced.
		dir := filepath.Dir(c.hosts)
		mounts = append(mounts, mount{"hosts", dir, hostDir + dir, "Directory", false})
	}
	return mounts
}

// staticPod returns the manifest, with strings quoted as in JSON. NET_ADMIN is for IPVS, routes and
// closing sockets; root is for the files that ipvscare reads and writes.
func staticPod(name, image string, c *careFlags, args []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: v1
kind: Pod
metadata:
  name: %q
  namespace: kube-system
spec:
  hostNetwork: true
  automountServiceAccountToken: false
  priorityClassName: system-node-critical
  containers:
  - name: ipvscare
    image: %q
    imagePullPolicy: IfNotPresent
    command: ["/usr/bin/ipvscare"]
    args:
`, name, image)
	for _, a := range args {
		fmt.Fprintf(&b, "    - %q\n", a)
	}
	b.WriteString(`    securityContext:
      runAsUser: 0
      privileged: false
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: ["ALL"]
        add: ["NET_ADMIN"]
      seccompProfile:
        type: RuntimeDefault
    volumeMounts:
`)
	mounts := podMounts(c)
	for _, m := range mounts {
		fmt.Fprintf(&b, "    - name: %s\n      mountPath: %q\n", m.name, m.pod)
		if m.readOnly {
			b.WriteString("      readOnly: true\n")
		}
	}
	b.WriteString("  volumes:\n")
	for _, m := range mounts {
		fmt.Fprintf(&b, "  - name: %s\n    hostPath:\n      path: %q\n      type: %s\n", m.name, m.node, m.kind)
	}
	return b.String()
}
