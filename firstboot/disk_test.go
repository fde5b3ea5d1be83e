package firstboot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// second attaches another disk with the partitions of the same image.
func (w *world) second(disk string, espUUID string) {
	dir := "/sys/devices/virtio/block/" + disk
	w.Put(dir+"/size", "16777216\n")
	w.Put(dir+"/removable", "0\n")
	for n, label := range map[string]string{"1": "ESP", "5": "DATA"} {
		w.Put(dir+"/"+disk+n+"/partition", n+"\n")
		w.Put(dir+"/"+disk+n+"/start", "2048\n")
		w.Put(dir+"/"+disk+n+"/size", "1048576\n")
		uuid := espUUID
		if label == "DATA" {
			uuid = "5"
		}
		w.Put(dir+"/"+disk+n+"/uevent", "PARTNAME="+label+"\nPARTUUID="+uuid+"\n")
	}
	for name, to := range map[string]string{
		"sys/block/" + disk: "../devices/virtio/block/" + disk, "sys/dev/block/253:5": "../../devices/virtio/block/" + disk + "/" + disk + "5",
		"sys/dev/block/254:5": "../../devices/virtio/block/vda/vda5",
	} {
		if err := os.Symlink(to, filepath.Join(w.Root, name)); err != nil {
			w.T.Fatal(err)
		}
	}
}

// utf16 returns an EFI variable that contains s.
func utf16(s string) string {
	var b strings.Builder
	b.WriteString("\x06\x00\x00\x00")
	for _, c := range s {
		b.WriteRune(c)
		b.WriteByte(0)
	}
	return b.String() + "\x00\x00"
}

// TestTwoCopiesOfOneImage checks that a system with / and /var on different disks is detected
// before anything is changed.
func TestTwoCopiesOfOneImage(t *testing.T) {
	const esp = "aaaaaaaa-0000-4000-8000-000000000001"
	for name, tc := range map[string]struct {
		other, loader string
		words         string
	}{
		"the loader does not tell": {esp, "", "two copies of one image are in this machine"},
		"the loader's disk":        {esp, strings.ToUpper(esp), "the boot loader was started from vdb"},
		"of neither":               {"b", strings.ToUpper(esp), "two copies of one image are in this machine"},
	} {
		t.Run(name, func(t *testing.T) {
			w := nativeWorld(t)
			w.second("vdb", tc.other)
			if tc.loader != "" {
				w.Put(machine.LoaderPartFile, utf16(tc.loader))
			}
			w.Put("/proc/self/mountinfo", strings.Replace(w.Get("/proc/self/mountinfo"), "254:5 / /var", "253:5 / /var", 1))
			if err := w.Boot(); err == nil || !w.ConsoleHas("/ is on vda3, but /var is on vdb5, on another disk: "+tc.words) {
				t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if w.Joins != 0 {
				t.Error("the machine joined the cluster")
			}
			for _, effect := range w.EffectNames {
				if strings.HasPrefix(effect, "run systemd-repart") || strings.HasPrefix(effect, "write slot") || strings.HasPrefix(effect, "hostname") {
					t.Errorf("first boot continued: %s", effect)
				}
			}
			// With / and /var on one disk, first boot continues.
			w.Put("/proc/self/mountinfo", strings.Replace(w.Get("/proc/self/mountinfo"), "253:5 / /var", "254:5 / /var", 1))
			w.PowerOn()
			w.MustBoot()
		})
	}
}
