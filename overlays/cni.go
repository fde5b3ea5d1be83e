package overlays

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"github.com/edgebake/edgebake/configs"
)

// conflistFile is the image's network configuration for containerd. containerd uses the first file
// of the directory, so a network plugin's file with a lower number takes precedence.
const conflistFile = "etc/cni/net.d/90-edgebake.conflist"

// cni adds the network configuration: the user's, or by default a bridge for clusters without a
// network plugin.
func (b *layer) cni(img *configs.Image, f Facts) error {
	b.dir("etc/cni/net.d", 0o755)
	if f.CNI != nil {
		b.file(conflistFile, 0o644, f.CNI)
		return nil
	}
	if img.CNI.Config != "bridge" {
		return nil
	}
	pods, err := netip.ParsePrefix(img.CNI.PodCIDR)
	if err != nil {
		return fmt.Errorf("rendering the network configuration: cni.podCIDR: %w", err)
	}
	everywhere := "0.0.0.0/0"
	if pods.Addr().Is6() {
		everywhere = "::/0"
	}
	b.file(conflistFile, 0o644, fmt.Appendf(nil, `{
  "cniVersion": "1.0.0",
  "name": "edgebake",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "cni0",
      "isGateway": true,
      "ipMasq": true,
      "hairpinMode": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": %q}]],
        "routes": [{"dst": %q}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`, pods, everywhere))
	return nil
}

// cniVersion matches the CNI versions that support lists of plugins: 0.3.0 and later.
var cniVersion = regexp.MustCompile(`^(0\.[3-9]|[1-9][0-9]*\.[0-9]+)\.[0-9]+$`)

// cniName matches the network names that libcni accepts. Paths contain these names.
var cniName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// CNIPlugins parses a network configuration list (CNI specification 1.0.0) and returns the names of
// its plugins, including IPAM plugins. The error lists everything that containerd would reject.
func CNIPlugins(conflist []byte) ([]string, error) {
	var list struct {
		CNIVersion string `json:"cniVersion"`
		Name       string `json:"name"`
		Plugins    []struct {
			Type string `json:"type"`
			IPAM struct {
				Type string `json:"type"`
			} `json:"ipam"`
		} `json:"plugins"`
	}
	if err := json.Unmarshal(conflist, &list); err != nil {
		return nil, fmt.Errorf("not a CNI configuration list: %w", err)
	}
	var errs []error
	switch {
	case list.CNIVersion == "":
		errs = append(errs, errors.New(`cniVersion is required, for example "1.0.0"`))
	case !cniVersion.MatchString(list.CNIVersion):
		errs = append(errs, fmt.Errorf(`cniVersion %q: write a version of the CNI specification that has lists, e.g. "1.0.0"`, list.CNIVersion))
	}
	switch {
	case list.Name == "":
		errs = append(errs, errors.New("name is required"))
	case !cniName.MatchString(list.Name):
		errs = append(errs, fmt.Errorf("name %q: use letters, digits, _, . and -, beginning with a letter or digit", list.Name))
	}
	if len(list.Plugins) == 0 {
		errs = append(errs, errors.New("plugins is empty: name at least one, for example {\"type\": \"bridge\"}"))
	}
	var out []string
	program := func(field, name string) {
		if strings.ContainsAny(name, "/\x00") || name == "." || name == ".." {
			errs = append(errs, fmt.Errorf("%s %q: write the name of a plugin's program, without a directory", field, name))
			return
		}
		out = append(out, name)
	}
	for i, p := range list.Plugins {
		if p.Type == "" {
			errs = append(errs, fmt.Errorf("plugins[%d].type is required: the name of a plugin's program", i))
			continue
		}
		program(fmt.Sprintf("plugins[%d].type", i), p.Type)
		if p.IPAM.Type != "" {
			program(fmt.Sprintf("plugins[%d].ipam.type", i), p.IPAM.Type)
		}
	}
	return out, errors.Join(errs...)
}
