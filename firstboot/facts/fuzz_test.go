package facts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzFacts reads any text that firmware and network cards may report, and checks that the facts
// are trimmed and that a MAC address has 17 characters, in lower case.
func FuzzFacts(f *testing.F) {
	f.Add([]byte("PC0Q1234\n"), []byte("4C4C4544-0042-3510-8052-B4C04F4A4231\n"), []byte("No Asset Tag\n"), []byte("52:54:00:00:00:02\n"))
	f.Add([]byte("\x00\x00"), []byte("03000200-0400-0500-0006-000700080009"), []byte("\xff\xfe"), []byte("00:00:00:00:00:00"))
	f.Add([]byte("To be filled by O.E.M."), []byte(""), []byte(" - "), []byte("ff:ff:ff:ff:ff:ff\nx"))
	root := f.TempDir()
	write := func(f testing.TB, path string, b []byte) {
		p := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			f.Fatal(err)
		}
		if err := os.WriteFile(p, b, 0o600); err != nil {
			f.Fatal(err)
		}
	}
	write(f, "/sys/class/net/eth0/device", nil)
	f.Fuzz(func(t *testing.T, serial, uuid, tag, mac []byte) {
		write(t, "/sys/class/dmi/id/product_serial", serial)
		write(t, "/sys/class/dmi/id/product_uuid", uuid)
		write(t, "/sys/class/dmi/id/chassis_asset_tag", tag)
		write(t, "/sys/class/net/eth0/address", mac)
		m := Read(root)
		for _, s := range []string{m.Serial, m.UUID, m.AssetTag} {
			if strings.Trim(s, "\x00 \t\r\n") != s {
				t.Errorf("%q is not trimmed", s)
			}
		}
		if len(m.MACs) > 1 || len(m.MACs) == 1 && (len(m.MACs[0]) != 17 || m.MACs[0] != strings.ToLower(m.MACs[0])) {
			t.Errorf("MAC addresses %q", m.MACs)
		}
	})
}
