package cluster

import (
	"strings"
	"testing"
)

func TestLifecycleFix(t *testing.T) {
	for _, tt := range []struct {
		image string
		both  bool
		want  string
	}{
		{"openyurt/yurt-manager:v1.7.0", true, "give yurt-manager --controllers=-nodelifecycle,*"},
		{"registry.example.com:5000/openyurt/yurt-manager:v1.5.0@sha256:00", true, `"-nodelifecycle,*,bootstrapsigner,tokencleaner"`},
		{"openyurt/yurt-manager:1.5.1", false, "remove -nodelifecycle from --controllers of yurt-manager"},
		{"openyurt/yurt-manager:v1.6.0", false, `"*,bootstrapsigner,tokencleaner"`},
		{"registry.example.com:5000/yurt-manager", false, `"*,bootstrapsigner,tokencleaner"`},
		{"yurt-manager:latest", true, "give yurt-manager"},
	} {
		got := lifecycleFix(tagOf(tt.image), tt.both)
		if !strings.Contains(got, tt.want) {
			t.Errorf("%s, both %v: %s", tt.image, tt.both, got)
		}
		if changes := strings.Contains(got, "kubeadm init phase"); changes != (strings.Contains(got, "kubeadm-config") && strings.Contains(got, "/root/before-edgebake")) {
			t.Errorf("%s: the step must both edit kubeadm-config and back up the old files: %s", tt.image, got)
		}
	}
}
