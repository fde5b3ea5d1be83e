package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path"
	"strings"

	"go.yaml.in/yaml/v3"
	"golang.org/x/mod/semver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"github.com/edgebake/edgebake/configs"
)

// Facts are properties of a cluster that the Image of its nodes depends on.
type Facts struct {
	// Version of the API server, without the suffix of a distribution.
	Version string
	// Pause is the newest pause image that any node has; empty: none is listed.
	Pause string
	// DaemonSets are the cluster's DaemonSets, reduced to their images, as YAML; nil if there
	// are none.
	DaemonSets []byte
	// Site has the fields of a Site that the cluster determines: API servers, endpoint, CA.
	Site *configs.Site
	// Skipped lists the DaemonSets for operating systems other than Linux.
	Skipped []string
}

// Facts reads the facts. It first checks the permissions for reading them and for creating a token.
func (c *Client) Facts(ctx context.Context) (*Facts, error) {
	const doing = "describing the cluster"
	if err := c.requirePermissions(ctx, doing, append(mintRights(), permission{"list", nodes, "", ""}, permission{"list", daemonSets, "", ""})...); err != nil {
		return nil, err
	}
	version, _, err := c.version(ctx, doing)
	if err != nil {
		return nil, err
	}
	if !semver.IsValid(version) {
		return nil, fmt.Errorf("%s: the API server reports the invalid version %q", doing, version)
	}
	version, _, _ = strings.Cut(version, "+")
	f := &Facts{Version: strings.TrimSuffix(version, semver.Prerelease(version))}
	if f.Site, err = c.siteStub(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	if f.Pause, err = c.pause(ctx); err != nil {
		return nil, err
	}
	all, err := c.list(ctx, daemonSets, "", metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var docs bytes.Buffer
	enc := yaml.NewEncoder(&docs)
	enc.SetIndent(2)
	for _, d := range all {
		if system, _, _ := unstructured.NestedString(d.Object, "spec", "template", "spec", "nodeSelector", "kubernetes.io/os"); system != "" && system != "linux" {
			f.Skipped = append(f.Skipped, d.GetName())
			continue
		}
		if err := enc.Encode(onlyImages(&d)); err != nil {
			return nil, err
		}
	}
	if f.DaemonSets = docs.Bytes(); len(f.DaemonSets) > 0 {
		f.DaemonSets = append([]byte("# Images of the DaemonSets of "+c.Server()+".\n"), f.DaemonSets...)
	}
	return f, nil
}

// onlyImages returns a DaemonSet reduced to its images, because its other fields may contain
// secrets.
func onlyImages(d *unstructured.Unstructured) map[string]any {
	pod := map[string]any{}
	for _, field := range []string{"initContainers", "containers"} {
		list, _, _ := unstructured.NestedSlice(d.Object, "spec", "template", "spec", field)
		var kept []any
		for _, x := range list {
			if m, ok := x.(map[string]any); ok {
				kept = append(kept, map[string]any{"name": m["name"], "image": m["image"]})
			}
		}
		if kept != nil {
			pod[field] = kept
		}
	}
	volumes, _, _ := unstructured.NestedSlice(d.Object, "spec", "template", "spec", "volumes")
	var kept []any
	for _, x := range volumes {
		if m, ok := x.(map[string]any); ok && m["image"] != nil {
			kept = append(kept, m)
		}
	}
	if kept != nil {
		pod["volumes"] = kept
	}
	return map[string]any{
		"apiVersion": "apps/v1", "kind": "DaemonSet",
		"metadata": map[string]any{"name": d.GetName(), "namespace": d.GetNamespace()},
		"spec":     map[string]any{"template": map[string]any{"spec": pod}},
	}
}

// pause returns the newest pause image on the nodes, by its tag.
func (c *Client) pause(ctx context.Context) (found string, err error) {
	all, err := c.list(ctx, nodes, "", metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	newest := ""
	for _, n := range all {
		images, _, _ := unstructured.NestedSlice(n.Object, "status", "images")
		for _, x := range images {
			m, _ := x.(map[string]any)
			names, _, _ := unstructured.NestedStringSlice(m, "names")
			for _, name := range names {
				tag, ok := strings.CutPrefix(path.Base(name), "pause:")
				if v := "v" + tag; ok && (found == "" || semver.Compare(v, newest) > 0) {
					found, newest = name, v
				}
			}
		}
	}
	return found, nil
}

// version returns the API server's version and the state of the TLS connection; the state is nil
// without TLS.
func (c *Client) version(ctx context.Context, doing string) (string, *tls.ConnectionState, error) {
	client, err := rest.HTTPClientFor(c.config)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", doing, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(c.Server(), "/")+"/version", nil)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", doing, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", nil, c.explain(doing, err)
	}
	defer resp.Body.Close()
	var v struct {
		GitVersion string `json:"gitVersion"`
	}
	// An answer in another format has no version; the caller handles that.
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err == nil {
		_ = json.Unmarshal(text, &v)
	}
	return v.GitVersion, resp.TLS, c.explain(doing, err)
}
