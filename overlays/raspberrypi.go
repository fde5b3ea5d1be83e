package overlays

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// The firmware of a Raspberry Pi reads config.txt from the first FAT partition, the ESP. os_prefix
// in it names one directory with kernel, initrd, command line, device trees and overlays. An update
// therefore adds such a directory and changes that one line.

// piFirmware lists the files that a Raspberry Pi 4 loads before it reads os_prefix. A Raspberry Pi
// 5 has them in its EEPROM.
var piFirmware = []string{"start4.elf", "fixup4.dat"}

// piFirmwareDir is the directory with the files of the package raspi-firmware.
const piFirmwareDir = "usr/lib/raspi-firmware"

// piBoards lists the board families whose firmware supports GPT, with the prefix of their device
// trees and the kernel modules for disk and network. A new board of a family needs no change here.
var piBoards = []struct {
	name, trees string
	modules     []string
}{
	{RaspberryPi4, "bcm2711-rpi-", []string{"sdhci-iproc", "genet", "pcie-brcmstb"}},
	// The chip RP1, connected by PCIe, provides network and USB.
	{"Raspberry Pi 5", pi5Trees, []string{"sdhci-brcmstb", "pcie-brcmstb", "rp1_pci", "clk-rp1", "pinctrl-rp1", "macb"}},
}

// RaspberryPi4 is the board family that also includes the Raspberry Pi 400 and Compute Module 4.
const RaspberryPi4 = "Raspberry Pi 4"

const pi5Trees = "bcm2712-"

// PiBoards returns the boards that a kernel supports, and for each unsupported board the missing
// modules and device trees. builtin is the content of the kernel's modules.builtin.
func PiBoards(nodes []tree.Node, kernel, builtin string) (serves, lacks []string) {
	have := Modules(nodes, kernel, builtin)
	var trees []string
	for _, n := range nodes {
		if isDeviceTree(n, kernel) {
			trees = append(trees, path.Base(n.Path))
		}
	}
	for _, b := range piBoards {
		var missing []string
		for _, m := range b.modules {
			if !have(m) {
				missing = append(missing, m)
			}
		}
		if !slices.ContainsFunc(trees, func(t string) bool { return strings.HasPrefix(t, b.trees) }) {
			missing = append(missing, b.trees+"*.dtb")
		}
		if len(missing) == 0 {
			serves = append(serves, b.name)
		} else {
			lacks = append(lacks, fmt.Sprintf("%s lacks %s", b.name, strings.Join(missing, ", ")))
		}
	}
	return serves, lacks
}

// Modules returns a function that reports whether the kernel has a module, as a file or built in.
// builtin is the content of the kernel's modules.builtin.
func Modules(nodes []tree.Node, kernel, builtin string) func(name string) bool {
	have := map[string]bool{}
	for line := range strings.Lines(builtin) {
		have[moduleName(strings.TrimSpace(line))] = true
	}
	for _, n := range nodes {
		if n.IsRegular() && strings.HasPrefix(n.Path, "usr/lib/modules/"+kernel+"/") {
			have[moduleName(n.Path)] = true
		}
	}
	return func(name string) bool { return have[moduleName(name)] }
}

// moduleName returns the module's name, as printed by lsmod, from its file name.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// isDeviceTree reports whether n is one of the kernel's device trees for Broadcom processors. Their
// directory depends on the Debian release.
func isDeviceTree(n tree.Node, kernel string) bool {
	dir := path.Dir(n.Path)
	return n.IsRegular() && path.Ext(n.Path) == ".dtb" &&
		(dir == "usr/lib/linux-image-"+kernel+"/broadcom" || dir == "usr/lib/modules/"+kernel+"/dtb/broadcom")
}

// FirmwareConfig returns all inputs of the files for the board's firmware, as a part of the plan.
// It is empty for UEFI.
func FirmwareConfig(img *configs.Image) string {
	if img.Hardware != configs.RaspberryPi {
		return ""
	}
	return piConfig("PREFIX", []string{pi5Trees}) + overlaysReadme + fmt.Sprint(piBoards, piFirmware)
}

// piConfig returns config.txt. The firmware reads only the first 98 characters of each line; older
// firmware reads 78.
func piConfig(dir string, trees []string) string {
	text := `# Made by edgebake. os_prefix is the directory of the system that starts.
arm_64bit=1
os_prefix=` + dir + `/
kernel=linux
initramfs initrd followkernel
# The device trees are those of the mainline kernel.
upstream_kernel=1
enable_uart=1
# The rate of the serial line of a 4 follows this clock.
[pi4]
core_freq=360
[all]
`
	if slices.ContainsFunc(trees, func(t string) bool { return strings.HasPrefix(t, pi5Trees) }) {
		// Skip the firmware's check only if the kernel has the drivers of a Raspberry Pi 5. With
		// the check, the firmware reports the missing device tree and tries the next disk.
		text += "# The build has found the drivers of a 5 in this kernel.\nos_check=0\n"
	}
	return text
}

// maxPiCommandLine is the firmware's limit of 1024 characters, less about 250 that it adds itself.
const maxPiCommandLine = 768

// CheckCommandLine rejects a command line that the board's firmware would truncate.
func CheckCommandLine(img *configs.Image, cmdline string) error {
	if over := len(cmdline) - maxPiCommandLine; img.Hardware == configs.RaspberryPi && over > 0 {
		return fmt.Errorf("the kernel's command line has %d characters, but the firmware of a Raspberry Pi accepts %d: shorten kernel.args or kernel.consoles by %d", len(cmdline), maxPiCommandLine, over)
	}
	return nil
}

// raspberryPi adds the files for the board's firmware.
func (e *esp) raspberryPi(dir, kver, cmdline string, boards []string) {
	for _, name := range piFirmware {
		e.take("add the package raspi-firmware", name, piFirmwareDir+"/"+name)
	}
	trees := e.deviceTrees(dir, kver, boards)
	e.overlays(dir + "/overlays")
	e.file(ondisk.ESPPiConfig, 0o644, []byte(piConfig(dir, trees)))
	e.file(dir+"/"+ondisk.ESPPiCommandLine, 0o644, []byte(cmdline+"\n"))
}

// deviceTrees adds the device trees of the boards that the kernel supports.
func (e *esp) deviceTrees(dir, kver string, boards []string) (names []string) {
	for _, p := range slices.Sorted(maps.Keys(e.from)) {
		if !isDeviceTree(e.from[p], kver) {
			continue
		}
		name := path.Base(p)
		for _, b := range piBoards {
			if slices.Contains(boards, b.name) && strings.HasPrefix(name, b.trees) {
				e.take("", dir+"/"+name, p)
				names = append(names, name)
			}
		}
	}
	return names
}

const overlaysReadme = "The firmware takes overlays from this directory because this file is here.\n"

// overlays adds the overlays of the firmware package, and a README: without a README in this
// directory, the firmware would use the directory overlays at the root of the partition.
func (e *esp) overlays(dir string) {
	for _, p := range slices.Sorted(maps.Keys(e.from)) {
		if path.Dir(p) == piFirmwareDir+"/overlays" && path.Ext(p) == ".dtbo" && e.from[p].IsRegular() {
			e.take("", dir+"/"+path.Base(p), p)
		}
	}
	e.file(dir+"/README", 0o644, []byte(overlaysReadme))
}
