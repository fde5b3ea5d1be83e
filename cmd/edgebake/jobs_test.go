package main

import (
	"io"
	"os"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestJobsOfTheFleet checks that the Jobs in docs/fleet.md use existing commands and flags, on
// files below their containers' mounts.
func TestJobsOfTheFleet(t *testing.T) {
	text, err := os.ReadFile("../../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	type container struct {
		Name         string
		Args         []string
		VolumeMounts []struct {
			MountPath string `yaml:"mountPath"`
			ReadOnly  bool   `yaml:"readOnly"`
		} `yaml:"volumeMounts"`
	}
	var ran []string
	for i, block := range strings.Split(string(text), "```yaml\n") {
		block, _, ok := strings.Cut(block, "```")
		if i == 0 || !ok {
			continue
		}
		for doc := range strings.SplitSeq(block, "\n---\n") {
			var job struct {
				Kind string
				Spec struct {
					Template struct {
						Spec struct {
							InitContainers []container `yaml:"initContainers"`
							Containers     []container
						}
					}
				}
			}
			if err := yaml.Unmarshal([]byte(doc), &job); err != nil {
				t.Fatal(err)
			}
			pod := job.Spec.Template.Spec
			for _, c := range append(pod.InitContainers, pod.Containers...) {
				ran = append(ran, c.Args[0])
				cmd, rest, err := newRoot(streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard}).Find(c.Args)
				if err == nil {
					err = cmd.ParseFlags(rest)
				}
				if err == nil {
					err = cmd.ValidateArgs(cmd.Flags().Args())
				}
				if err != nil {
					t.Errorf("container %s: %v", c.Name, err)
					continue
				}
				for _, a := range c.Args[1:] {
					mounted := !strings.HasPrefix(a, "/")
					for _, v := range c.VolumeMounts {
						mounted = mounted || strings.HasPrefix(a+"/", v.MountPath+"/")
					}
					if !mounted {
						t.Errorf("container %s: nothing is mounted at %s", c.Name, a)
					}
				}
				if out := cmd.Flag("output"); out != nil && out.Value.String() != "" {
					for _, v := range c.VolumeMounts {
						if v.ReadOnly && strings.HasPrefix(out.Value.String(), v.MountPath+"/") {
							t.Errorf("container %s: --output %s is read-only", c.Name, out.Value)
						}
					}
				}
			}
		}
	}
	if got := strings.Join(ran, " "); got != "build push pull stamp" {
		t.Errorf("the Jobs run %s", got)
	}
}
