package overlays

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs"
)

// containerd renders /etc/containerd/config.toml. It names the pause image and the snapshotter of
// the baked store; with others, containerd would pull images.
func (b *layer) containerd(img *configs.Image, f Facts) error {
	major, _, _ := strings.Cut(strings.TrimPrefix(f.Containerd, "v"), ".")
	if _, err := strconv.Atoi(major); err != nil {
		return fmt.Errorf("rendering containerd's configuration: version %q does not begin with a number", f.Containerd)
	}
	sandbox := img.Containerd.Sandbox
	var s strings.Builder
	if major == "1" {
		s.WriteString("version = 2\n")
		s.WriteString("[plugins.'io.containerd.grpc.v1.cri']\n")
		if sandbox != "" {
			fmt.Fprintf(&s, "  sandbox_image = '%s'\n", sandbox)
		}
		s.WriteString(`  [plugins.'io.containerd.grpc.v1.cri'.cni]
    bin_dir = '/opt/cni/bin'
    conf_dir = '/etc/cni/net.d'
  [plugins.'io.containerd.grpc.v1.cri'.registry]
    config_path = '/etc/containerd/certs.d'
  [plugins.'io.containerd.grpc.v1.cri'.containerd]
    snapshotter = 'overlayfs'
  [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]
      SystemdCgroup = true
`)
	} else {
		s.WriteString("version = 3\n")
		s.WriteString("[plugins.'io.containerd.cri.v1.images']\n  snapshotter = 'overlayfs'\n")
		if sandbox != "" {
			fmt.Fprintf(&s, "  [plugins.'io.containerd.cri.v1.images'.pinned_images]\n    sandbox = '%s'\n", sandbox)
		}
		s.WriteString(`  [plugins.'io.containerd.cri.v1.images'.registry]
    config_path = '/etc/containerd/certs.d'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
    SystemdCgroup = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ['/opt/cni/bin']
  conf_dir = '/etc/cni/net.d'
`)
	}
	b.file("etc/containerd/config.toml", 0o644, []byte(s.String()))
	return nil
}
