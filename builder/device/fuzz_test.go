package device

import (
	"strings"
	"testing"
	"unicode"
)

// FuzzDevices reads outputs of lsblk and wipefs. A disk with a mount or swap must have a reason not
// to be overwritten, and descriptions must not contain control characters.
func FuzzDevices(f *testing.F) {
	for _, seed := range []string{
		`{"blockdevices":[{"name":"sda","path":"/dev/sda","type":"disk","size":1073741824,"model":"A\u001b[2J","log-sec":512,"mountpoints":[null],"children":[
		  {"name":"sda1","path":"/dev/sda1","type":"part","size":1,"fstype":"ext4","label":"x","mountpoints":["/srv"]}]}]}`,
		`{"blockdevices":[{"name":"nvme0n1","path":"/dev/nvme0n1","type":"disk","size":1,"fstype":"ddf_raid_member","ro":true,"rm":true,"tran":"nvme","mountpoints":["[SWAP]","/",""]}]}`,
		`{"blockdevices":[{"name":"mmcblk0boot0","type":"disk","size":1},{"name":"loop0","type":"loop","size":-1,"children":[{"children":[{}]}]}]}`,
		`{"signatures":[{"type":"ext4","label":"\u0000"}]}`, `{"blockdevices":null}`, `[]`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, out []byte) {
		parseSignatures(out)
		devices, err := parse(out)
		if err != nil {
			return
		}
		used := map[string]bool{}
		for i := range devices.top {
			devices.top[i].walk(func(n *node) {
				for _, at := range n.Mountpoints {
					used[devices.top[i].Path] = used[devices.top[i].Path] || at != ""
				}
			})
		}
		for _, d := range devices.Disks() {
			if used[d.Path] && len(d.Refusals) == 0 && unique(devices, d.Path) {
				t.Errorf("%s is in use, and may be overwritten", d.Path)
			}
			for _, text := range append([]string{d.Model, d.Serial}, d.Holds...) {
				if strings.ContainsFunc(text, unicode.IsControl) {
					t.Errorf("%q has a control character", text)
				}
			}
			d.Describe()
			for _, rule := range []string{"only", "usb", "nvme", "smallest"} {
				if r, err := ParseRule(rule); err == nil {
					r.Pick([]Disk{d})
				}
			}
		}
	})
}

// unique reports whether only one device has this path.
func unique(d *Devices, path string) bool {
	n := 0
	for i := range d.top {
		if d.top[i].Path == path {
			n++
		}
	}
	return n == 1
}
