package overlays

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// The firmware of a Raspberry Pi reads config.txt from the disk's first FAT
// partition, in a GPT the ESP, and with it kernel, initrd, command line, device
// tree and overlays, all of them from the directory that os_prefix names. So that
// directory is a system, and an update is another directory and one line.

// piFirmware is what a 4 loads before all else, whatever os_prefix says; a 5 has
// it on board.
var piFirmware = []string{"start4.elf", "fixup4.dat"}

// piFirmwareDir is where the package raspi-firmware has it.
const piFirmwareDir = "usr/lib/raspi-firmware"

// piBoards are the boards whose firmware reads a GPT, each with how the names of
// its device trees begin, and the kernel's modules without which it has no disk
// or no network. A board of either kind that is new needs a new device tree only.
var piBoards = []struct {
	name, trees string
	modules     []string
}{
	{RaspberryPi4, "bcm2711-rpi-", []string{"sdhci-iproc", "genet", "pcie-brcmstb"}},
	// Network and USB are in a second chip, RP1, behind PCIe.
	{"Raspberry Pi 5", pi5Trees, []string{"sdhci-brcmstb", "pcie-brcmstb", "rp1_pci", "clk-rp1", "pinctrl-rp1", "macb"}},
}

// RaspberryPi4 is the name of a board, and stands for a 400 and Compute Modules.
const RaspberryPi4 = "Raspberry Pi 4"

const pi5Trees = "bcm2712-"

// PiBoards says which boards a kernel serves, and of the others what they lack.
// builtin is the content of the kernel's modules.builtin.
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

// Modules returns whether the kernel has a module, as a file or built in. builtin is the
// content of its modules.builtin.
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

// moduleName is the name of the module in a file, as lsmod shows it.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// isDeviceTree reports whether n is a device tree of the kernel's for a board with
// a processor of Broadcom's. Debian has moved them once.
func isDeviceTree(n tree.Node, kernel string) bool {
	dir := path.Dir(n.Path)
	return n.IsRegular() && path.Ext(n.Path) == ".dtb" &&
		(dir == "usr/lib/linux-image-"+kernel+"/broadcom" || dir == "usr/lib/modules/"+kernel+"/dtb/broadcom")
}

// FirmwareConfig is all that this package writes for the board's own firmware, or
// decides by: config.txt for all boards, with PREFIX for the directory of the
// system, and the tables above. It is part of the plan, and empty for UEFI.
func FirmwareConfig(img *configs.Image) string {
	if img.Hardware != configs.RaspberryPi {
		return ""
	}
	return piConfig("PREFIX", []string{pi5Trees}) + overlaysReadme + fmt.Sprint(piBoards, piFirmware)
}

// piConfig is config.txt. The firmware reads no line beyond 98 characters, older
// firmware none beyond 78.
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
		// Where the kernel has no drivers for a 5, its firmware finds no device
		// tree, says so and tries the next disk.
		text += "# The build has found the drivers of a 5 in this kernel.\nos_check=0\n"
	}
	return text
}

// maxPiCommandLine is what the firmware takes, 1024 characters, without what it
// adds itself, about 250.
const maxPiCommandLine = 768

// CheckCommandLine rejects a command line that the firmware would cut.
func CheckCommandLine(img *configs.Image, cmdline string) error {
	if over := len(cmdline) - maxPiCommandLine; img.Hardware == configs.RaspberryPi && over > 0 {
		return fmt.Errorf("the kernel's command line has %d characters, and the firmware of a Raspberry Pi takes %d: shorten kernel.args or kernel.consoles by %d", len(cmdline), maxPiCommandLine, over)
	}
	return nil
}

// raspberryPi adds what the board's own firmware reads.
func (e *esp) raspberryPi(dir, kver, cmdline string, boards []string) {
	for _, name := range piFirmware {
		e.take("add the package raspi-firmware", name, piFirmwareDir+"/"+name)
	}
	trees := e.deviceTrees(dir, kver, boards)
	e.overlays(dir + "/overlays")
	e.file(ondisk.ESPPiConfig, 0o644, []byte(piConfig(dir, trees)))
	e.file(dir+"/"+ondisk.ESPPiCommandLine, 0o644, []byte(cmdline+"\n"))
}

// deviceTrees adds the device trees of the boards that the kernel serves.
func (e *esp) deviceTrees(dir, kver string, boards []string) (names []string) {
	for _, p := range sortedKeys(e.from) {
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

// overlays adds those of the firmware's package. The firmware takes them from here
// only if there is a README; otherwise it looks for the disk's own.
func (e *esp) overlays(dir string) {
	for _, p := range sortedKeys(e.from) {
		if path.Dir(p) == piFirmwareDir+"/overlays" && path.Ext(p) == ".dtbo" && e.from[p].IsRegular() {
			e.take("", dir+"/"+path.Base(p), p)
		}
	}
	e.file(dir+"/README", 0o644, []byte(overlaysReadme))
}
