package images

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
)

// TestPodImages checks which images are baked and which are only mentioned, for many kinds of
// manifests.
func TestPodImages(t *testing.T) {
	for name, c := range map[string]struct {
		manifest          string
		baked, mentioned  []string
		passedOver, wrong string
	}{
		"image volumes": {
			manifest: `{kind: Pod, metadata: {name: p}, spec: {containers: [{image: r.test/a:1}], volumes: [{name: v, image: {reference: r.test/model:2}}, {name: w, emptyDir: {}}]}}`,
			baked:    []string{"r.test/a:1", "r.test/model:2"},
		},
		"aliases and merge keys": {
			manifest: `
kind: Deployment
x: &t
  containers: [&c {name: m, image: &i r.test/merged:1}]
  volumes: [{image: {reference: *i}}]
spec: {template: {spec: {<<: *t}}}
---
kind: Pod
x: &base {image: r.test/base:1}
y: &other {image: r.test/other:1, name: o}
spec:
  containers:
  - {<<: [*base, *other]}
  - {<<: *base, image: r.test/own:1}
`,
			baked:     []string{"r.test/base:1", "r.test/merged:1", "r.test/own:1"},
			mentioned: []string{"r.test/base:1", "r.test/merged:1", "r.test/other:1"},
		},
		"pod templates of any kind": {
			manifest: `
apiVersion: argoproj.io/v1alpha1
kind: Rollout
spec: {template: {spec: {containers: [{image: r.test/rollout:1}]}}}
---
apiVersion: serving.knative.dev/v1
kind: Service
spec: {template: {spec: {containers: [{image: r.test/knative:1}]}}}
---
apiVersion: apps.openyurt.io/v1beta1
kind: YurtAppSet
spec: {workload: {workloadTemplate: {deploymentTemplate: {spec: {template: {spec: {containers: [{image: r.test/pool:1}]}}}}}}}
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec: {replicatedJobs: [{template: {spec: {template: {spec: {initContainers: [{image: r.test/init:1}], containers: [{image: r.test/job:1}]}}}}}]}
`,
			baked: []string{"r.test/init:1", "r.test/job:1", "r.test/knative:1", "r.test/pool:1", "r.test/rollout:1"},
		},
		"images that an operator starts": {
			manifest: `
apiVersion: monitoring.coreos.com/v1
kind: Prometheus
metadata: {name: main}
spec: {image: r.test/prometheus:v3, thanosImage: r.test/thanos@sha256:` + strings.Repeat("0a", 32) + `, replicas: 2, externalUrl: "http://r.test/x:1"}
---
kind: Deployment
spec:
  template:
    spec:
      containers:
      - image: r.test/operator:1
        args: ["--config-reloader=r.test/reloader:1", "-l=debug", "--listen=:8080", "--volume=/var/run:ro", "localhost:5000/side:2"]
        env: [{name: RELATED_IMAGE_X, value: related:1}, {name: PROXY_IMAGE, value: r.test/proxy:1}, {name: PORT, value: "a:80"}]
---
apiVersion: x.test/v1
kind: Stack
spec: {image: {registry: r.test, repository: split/app, tag: "1.2"}, images: [r.test/listed:1], baseImage: "", port: "x:80"}
`,
			baked: []string{"r.test/operator:1"},
			mentioned: []string{"docker.io/library/related:1", "localhost:5000/side:2", "r.test/listed:1", "r.test/prometheus:v3", "r.test/proxy:1",
				"r.test/reloader:1", "r.test/split/app:1.2", "r.test/thanos@sha256:" + strings.Repeat("0a", 32)},
			passedOver: "Prometheus main (m.yaml:2), Stack (m.yaml:16)",
		},
		"images in flags, variables and names": {
			manifest: `
kind: Deployment
spec:
  template:
    spec:
      containers:
      - image: r.test/operator:1
        args: ["--sidecar-image", "grafana/agent:v1", "--agentImage", "r.test/b:1", "--image=busybox:1.36", "--image-pull-policy", "Always", "--image-gc-high-threshold=80", "--name", "a/b:1"]
        env: [{name: AGENT_IMAGE_NAME, value: agent:2}, {name: IMAGE_PULL_SECRET, value: secret}, {name: IMAGERY, value: x:1}]
---
kind: Stack
spec: {agent: {imageName: agent:3, imageRef: r.test/c:1, imagePullPolicy: Always}}
`,
			baked:     []string{"r.test/operator:1"},
			mentioned: []string{"docker.io/grafana/agent:v1", "docker.io/library/agent:2", "docker.io/library/agent:3", "docker.io/library/busybox:1.36", "r.test/b:1", "r.test/c:1"},
		},
		"documents and commands in strings": {
			manifest: `
kind: ConfigMap
data:
  values: |
    # see https://r.test/docs:1
    proxy: {image: r.test/istio/proxyv2:1.2, port: 15000}
    init: "r.test/istio/init@sha256:` + strings.Repeat("0b", 32) + `"
    listen: 10.0.0.1:8080
---
kind: Job
spec: {template: {spec: {containers: [{image: r.test/job:1, command: [sh, -c, "crictl pull r.test/pulled:1 && echo done: a/b:1"]}]}}}
`,
			baked:     []string{"r.test/job:1"},
			mentioned: []string{"r.test/istio/init@sha256:" + strings.Repeat("0b", 32), "r.test/istio/proxyv2:1.2", "r.test/pulled:1"},
		},
		"a chart's template": {
			manifest: `{kind: Pod, metadata: {name: "{{ .Release.Name }}"}, spec: {containers: [{image: "{{ .Values.repository }}:1"}]}}`,
			wrong:    "it looks like a chart's template: render it first, e.g. with helm template",
		},
		"a template that is not YAML": {manifest: "kind: Pod\n{{- if .Values.x }}\n", wrong: "helm template"},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := scanManifests("m.yaml", []byte(c.manifest))
			if c.wrong != "" {
				wantError(t, err, c.wrong)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			refs := func(found []Reference) (list []string) {
				for _, f := range byRef(found) {
					list = append(list, f.Ref.String())
				}
				return list
			}
			if got := refs(m.run); !slices.Equal(got, c.baked) {
				t.Errorf("baked %q, want %q", got, c.baked)
			}
			if got := refs(m.mentions); !slices.Equal(got, c.mentioned) {
				t.Errorf("mentioned %q, want %q", got, c.mentioned)
			}
			if got := strings.Join(m.passedOver, ", "); got != c.passedOver {
				t.Errorf("passed over %q, want %q", got, c.passedOver)
			}
		})
	}
}

func TestIgnoredImages(t *testing.T) {
	dir := t.TempDir()
	manifest := "kind: Pod\nspec: {containers: [{image: r.test/a:1}, {image: short:1}]}\nx: {image: r.test/mentioned:1, otherImage: r.test/b/c:1}\n"
	if err := os.WriteFile(filepath.Join(dir, "m.yaml"), []byte(manifest), 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := List(&configs.Image{ImagesFrom: []string{"m.yaml"}, ImagesIgnore: []string{"r.test/*:1", "short:1", "none:1"}}, dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(l.Images) != 0 || len(l.Mentions) != 1 || l.Mentions[0].Ref.String() != "r.test/b/c:1" {
		t.Errorf("images %v, mentions %v", l.Images, l.Mentions)
	}
	want := configs.Problems{{Msg: "m.yaml:3: Pod: r.test/b/c:1 was found but not baked: add it to images, or to imagesIgnore"},
		{Path: "imagesIgnore[2]", Msg: `"none:1" matches no image in the manifests of imagesFrom: remove it, or correct it`}}
	if !slices.Equal(l.Notes, want) {
		t.Errorf("notes %q", l.Notes)
	}
}
