package overlays

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/tree"
)

func piImage() *configs.Image {
	img := testImage()
	img.Arch, img.Hardware = "arm64", configs.RaspberryPi
	img.Kernel.Consoles = []string{"tty0", "ttyAMA10,115200", "ttyS1,115200"}
	return img
}

// files returns regular files. The content of each file is its path.
func files(paths ...string) (nodes []tree.Node) {
	for _, p := range paths {
		nodes = append(nodes, tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes([]byte(p))}})
	}
	return nodes
}

// trixie returns the relevant files and the version of Debian 13's kernel package in November 2026.
// backports does the same for the kernel in Debian's backports.
func trixie() ([]tree.Node, string) {
	const k = "6.12.107+deb13-arm64"
	m := "usr/lib/modules/" + k + "/kernel/drivers/"
	dtb := "usr/lib/linux-image-" + k + "/"
	return files("boot/vmlinuz-"+k, "boot/initrd.img-"+k,
		m+"mmc/host/sdhci-iproc.ko.xz", m+"net/ethernet/broadcom/genet/genet.ko.xz", m+"net/ethernet/cadence/macb.ko.xz", m+"reset/reset-raspberrypi.ko.xz",
		dtb+"broadcom/bcm2711-rpi-4-b.dtb", dtb+"broadcom/bcm2711-rpi-400.dtb", dtb+"broadcom/bcm2711-rpi-cm4-io.dtb", dtb+"broadcom/bcm2712-rpi-5-b.dtb",
		dtb+"broadcom/bcm2837-rpi-3-b.dtb", dtb+"allwinner/bcm2711-rpi-4-b.dtb"), k
}

func backports() ([]tree.Node, string) {
	const k = "7.3.4+deb13-arm64"
	m := "usr/lib/modules/" + k + "/kernel/drivers/"
	dtb := "usr/lib/modules/" + k + "/dtb/broadcom/"
	return files("boot/vmlinuz-"+k, "boot/initrd.img-"+k,
		m+"mmc/host/sdhci-iproc.ko.xz", m+"mmc/host/sdhci-brcmstb.ko.xz", m+"net/ethernet/broadcom/genet/genet.ko.xz", m+"net/ethernet/cadence/macb.ko.xz",
		m+"misc/rp1/rp1_pci.ko.xz", m+"clk/clk-rp1.ko.xz", m+"pinctrl/pinctrl-rp1.ko.xz",
		dtb+"bcm2711-rpi-4-b.dtb", dtb+"bcm2712-rpi-5-b.dtb", dtb+"bcm2712-d-rpi-5-b.dtb"), k
}

const builtinPCIe = "kernel/drivers/pci/controller/pcie-brcmstb.ko\nkernel/drivers/clk/bcm/clk-raspberrypi.ko\n"

func TestPiBoards(t *testing.T) {
	old, k6 := trixie()
	new, k7 := backports()
	noTrees := slices.DeleteFunc(slices.Clone(new), func(n tree.Node) bool { return strings.HasPrefix(path.Base(n.Path), "bcm2712-") })
	for name, tc := range map[string]struct {
		nodes           []tree.Node
		kernel, builtin string
		serves, lacks   string
	}{
		"Debian 13": {old, k6, builtinPCIe, "[Raspberry Pi 4]", "[Raspberry Pi 5 lacks sdhci-brcmstb, rp1_pci, clk-rp1, pinctrl-rp1]"},
		"backports": {new, k7, builtinPCIe, "[Raspberry Pi 4 Raspberry Pi 5]", "[]"},
		"all built into the kernel": {files("usr/lib/linux-image-1/broadcom/bcm2711-rpi-4-b.dtb"), "1",
			builtinPCIe + "kernel/drivers/mmc/host/sdhci-iproc.ko\nkernel/drivers/net/ethernet/broadcom/genet/genet.ko", "[Raspberry Pi 4]",
			"[Raspberry Pi 5 lacks sdhci-brcmstb, rp1_pci, clk-rp1, pinctrl-rp1, macb, bcm2712-*.dtb]"},
		"no device trees":   {noTrees, k7, builtinPCIe, "[Raspberry Pi 4]", "[Raspberry Pi 5 lacks bcm2712-*.dtb]"},
		"another's modules": {old, k7, builtinPCIe, "[]", "[Raspberry Pi 4 lacks sdhci-iproc, genet, bcm2711-rpi-*.dtb Raspberry Pi 5 lacks sdhci-brcmstb, rp1_pci, clk-rp1, pinctrl-rp1, macb, bcm2712-*.dtb]"},
	} {
		serves, lacks := PiBoards(tc.nodes, tc.kernel, tc.builtin)
		if got := fmt.Sprint(serves); got != tc.serves {
			t.Errorf("%s serves %s, want %s", name, got, tc.serves)
		}
		if got := fmt.Sprint(lacks); got != tc.lacks {
			t.Errorf("%s: %s, want %s", name, got, tc.lacks)
		}
	}
}

// piESP returns the files of the ESP for the boards that the kernel supports, also as text.
func piESP(t *testing.T, nodes []tree.Node, kernel string) (map[string]tree.Node, string) {
	t.Helper()
	facts := testFacts()
	facts.Info.Arch = "arm64"
	facts.Info.Boards, _ = PiBoards(nodes, kernel, builtinPCIe)
	nodes = append(slices.Clone(nodes), files(piFirmwareDir+"/start4.elf", piFirmwareDir+"/fixup4.dat", piFirmwareDir+"/start.elf",
		piFirmwareDir+"/overlays/pi4-spidev.dtbo", piFirmwareDir+"/overlays/README.md", "boot/firmware/start4.elf")...)
	esp, err := ESP(piImage(), facts, nodes)
	if err != nil {
		t.Fatal(err)
	}
	var s strings.Builder
	for _, n := range esp {
		switch {
		case n.IsDir():
			s.WriteString(n.Path + "/\n")
		case path.Ext(n.Path) == ".json":
			s.WriteString(n.Path + "\n")
		default:
			s.WriteString(n.Path + "\n" + indent(string(n.Data.Inline)))
		}
	}
	return nodeMap(t, esp), s.String()
}

// TestPiESP checks that the files of a system are in the directory that os_prefix names. If the
// kernel or a device tree is missing there, the firmware ignores os_prefix.
func TestPiESP(t *testing.T) {
	for name, base := range map[string]func() ([]tree.Node, string){"pi4": trixie, "pi5": backports} {
		nodes, kernel := base()
		m, text := piESP(t, nodes, kernel)
		golden(t, name+".golden", text)
		config := string(m["config.txt"].Data.Inline)
		_, rest, _ := strings.Cut(config, "os_prefix=")
		prefix, _, _ := strings.Cut(rest, "\n")
		if !strings.HasSuffix(prefix, "/") {
			t.Errorf("%s: os_prefix=%s names no directory", name, prefix)
		}
		for _, f := range []string{"linux", "initrd", "cmdline.txt", "bcm2711-rpi-4-b.dtb", "overlays/README"} {
			if _, ok := m[prefix+f]; !ok {
				t.Errorf("%s: the ESP has no %s%s", name, prefix, f)
			}
		}
		for line := range strings.Lines(config) {
			if len(line) > 78 {
				t.Errorf("%s: the firmware cuts %q", name, line)
			}
		}
		if strings.Count(string(m[prefix+"cmdline.txt"].Data.Inline), "\n") != 1 {
			t.Errorf("%s: the command line is not one line", name)
		}
	}
}

// TestPiESPLacks checks that the error lists every file that is missing from the base.
func TestPiESPLacks(t *testing.T) {
	nodes, _ := trixie()
	_, err := ESP(piImage(), testFacts(), slices.DeleteFunc(nodes, func(n tree.Node) bool { return strings.HasPrefix(n.Path, "boot/initrd") }))
	for _, want := range []string{"boot/initrd.img-6.12.107+deb13-arm64, needed to boot", "usr/lib/raspi-firmware/start4.elf, needed to boot; add the package raspi-firmware", "fixup4.dat"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}

// TestPiCommandLine checks that a command line is rejected only if a Raspberry Pi's firmware would
// truncate it. With UEFI, every length is accepted.
func TestPiCommandLine(t *testing.T) {
	img := piImage()
	line, err := CommandLine(img, testFacts(), "ROOT-A")
	if err != nil {
		t.Fatal(err)
	}
	room := maxPiCommandLine - len(line)
	if room < 64 {
		t.Errorf("without arguments of the Image's own the command line has %d characters: little room for any", len(line))
	}
	if err := CheckCommandLine(img, line+strings.Repeat("x", room)); err != nil {
		t.Errorf("what just fits: %v", err)
	}
	long := line + strings.Repeat("x", room+5)
	if err := CheckCommandLine(img, long); err == nil || !strings.Contains(err.Error(), "has 773 characters, but the firmware of a Raspberry Pi accepts 768: shorten kernel.args or kernel.consoles by 5") {
		t.Errorf("%v", err)
	}
	if err := CheckCommandLine(testImage(), long); err != nil {
		t.Errorf("with UEFI: %v", err)
	}
}

// TestPiPackages checks that the packages include no boot loader for UEFI, and no kernel for
// virtual machines.
func TestPiPackages(t *testing.T) {
	all := strings.Join(Packages(piImage()), " ")
	if strings.Contains(all, "systemd-boot") || strings.Contains(all, "shim") || strings.Contains(all, "cloud") || !strings.Contains(all, "linux-image-arm64 ") || !strings.Contains(all, "raspi-firmware") {
		t.Error(all)
	}
	if got := fmt.Sprint(Components(piImage())); got != "[main non-free-firmware]" {
		t.Error(got)
	}
}
