// Package facts reads the identity of a machine from the kernel. First boot and the installer both
// use it, so both match the same Site of an Inventory.
package facts

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Read returns the identity of the machine below root: host name, MAC addresses of physical
// network cards, and serial number, UUID and asset tag from SMBIOS or the device tree.
func Read(root string) siteconf.Machine {
	m := siteconf.Machine{
		Hostname: text(root, "/proc/sys/kernel/hostname"),
		MACs:     macs(root),
	}
	for _, f := range []string{
		"/sys/class/dmi/id/product_serial",
		"/sys/class/dmi/id/board_serial",
		"/sys/class/dmi/id/chassis_serial",
		"/sys/firmware/devicetree/base/serial-number",
	} {
		if m.Serial = forms.Identity(contents(root, f)); m.Serial != "" {
			break
		}
	}
	m.UUID = strings.ToLower(forms.Identity(contents(root, "/sys/class/dmi/id/product_uuid")))
	for _, f := range []string{"/sys/class/dmi/id/chassis_asset_tag", "/sys/class/dmi/id/board_asset_tag"} {
		if m.AssetTag = forms.Identity(contents(root, f)); m.AssetTag != "" {
			break
		}
	}
	return m
}

// macs lists the addresses of the physical network cards: wired cards first, both kinds by
// interface name.
func macs(root string) []string {
	dir := "/sys/class/net"
	entries, err := os.ReadDir(filepath.Join(root, dir))
	if err != nil {
		return nil
	}
	var wired, wireless []string
	for _, en := range entries {
		p := filepath.Join(dir, en.Name())
		if !exists(root, filepath.Join(p, "device")) { // bridges, veths and lo have no device
			continue
		}
		mac := strings.ToLower(text(root, filepath.Join(p, "address")))
		if len(mac) != 17 || strings.Trim(mac, "0:") == "" || strings.Trim(mac, "f:") == "" {
			continue
		}
		if exists(root, filepath.Join(p, "wireless")) || exists(root, filepath.Join(p, "phy80211")) {
			wireless = append(wireless, mac)
		} else {
			wired = append(wired, mac)
		}
	}
	return append(wired, wireless...)
}

// contents returns the contents of a file, or "" if it cannot be read.
func contents(root, path string) string {
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		return ""
	}
	return string(b)
}

func text(root, path string) string { return strings.TrimSpace(contents(root, path)) }

func exists(root, path string) bool {
	_, err := os.Lstat(filepath.Join(root, path))
	return err == nil
}
