package builder

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays"
)

const (
	maxModulesBuiltin = 4 << 20
	maxFirmware       = 32 << 20
)

// boards returns the boards without UEFI that the base's kernel supports, or nil for hardware with
// UEFI. It warns about boards and bootloaders that the base does not support, and fails if the
// kernel supports no board.
func (b *executor) boards(base []tree.Node, kernel string) ([]string, error) {
	if b.img.Hardware != configs.RaspberryPi {
		return nil, nil
	}
	bad := func(format string, args ...any) ([]string, error) {
		return nil, &tree.LayerError{Layer: inputBase, Err: fmt.Errorf(format, args...)}
	}
	if err := b.plainKernel(base, "boot/vmlinuz-"+kernel); err != nil {
		return bad("%w", err)
	}
	builtin, err := b.readBase(base, "usr/lib/modules/"+kernel+"/modules.builtin", maxModulesBuiltin)
	if err != nil {
		return bad("%w", err)
	}
	serves, lacks := overlays.PiBoards(base, kernel, string(builtin))
	if len(serves) == 0 {
		return bad("the kernel %s supports no board of hardware: raspberry-pi (%s): use the package linux-image-arm64", kernel, strings.Join(lacks, "; "))
	}
	text := fmt.Sprintf("kernel %s supports %s", kernel, strings.Join(serves, " and "))
	state := StateLog
	if len(lacks) > 0 {
		state = StateWarning
		text += fmt.Sprintf("; %s: to boot such boards, use a newer kernel (docs/guide.md, Raspberry Pi)", strings.Join(lacks, "; "))
	}
	b.event(Event{Step: "merge", State: state, Text: text})
	firmware, err := b.readBase(base, "usr/lib/raspi-firmware/start4.elf", maxFirmware)
	if err != nil {
		return bad("%w", err)
	}
	if made := firmwareDate(firmware); !made.IsZero() && made.Before(firmwareOfGPT()) && slices.Contains(serves, overlays.RaspberryPi4) {
		b.event(Event{Step: "merge", State: StateWarning, Text: fmt.Sprintf(
			"start4.elf of %s does not boot from a GPT on a %s with a bootloader of 2025-02-11 or later in its EEPROM: use raspi-firmware of 2025 or later (docs/guide.md, Raspberry Pi)",
			made.Format(time.DateOnly), overlays.RaspberryPi4)})
	}
	return serves, nil
}

// firmwareOfGPT returns the date of the first start4.elf that boots from a GPT with every
// bootloader. An older one boots only with a bootloader from before 2025-02-11 (rpi-eeprom, issue
// 668).
func firmwareOfGPT() time.Time { return time.Date(2025, 1, 16, 0, 0, 0, 0, time.UTC) }

var firmwareBuilt = regexp.MustCompile(`VC_BUILD_ID_TIME: ([A-Z][a-z]{2} [ 0-9][0-9] [0-9]{4})`)

// firmwareDate returns the build date in the firmware, or the zero Time.
func firmwareDate(firmware []byte) time.Time {
	m := firmwareBuilt.FindSubmatch(firmware)
	if m == nil {
		return time.Time{}
	}
	made, err := time.Parse("Jan _2 2006", string(m[1]))
	if err != nil {
		return time.Time{}
	}
	return made
}

// plainKernel returns an error for a kernel that the boards' firmware cannot start. The firmware
// supports Linux's arm64 image format (Documentation/arch/arm64/booting.rst), but not compressed
// EFI programs.
func (b *executor) plainKernel(base []tree.Node, file string) error {
	const magic, at = "ARM\x64", 56
	i := slices.IndexFunc(base, func(n tree.Node) bool { return n.Path == file })
	data := base[i].Data
	if data.Size > at+int64(len(magic)) {
		head := data
		head.Size = at + int64(len(magic))
		start, err := tree.ReadContent(head, b.Cache, head.Size)
		if err != nil {
			return fmt.Errorf("reading %s: %w", file, err)
		}
		if string(start[at:]) == magic {
			return nil
		}
	}
	return fmt.Errorf("%s is not an arm64 kernel image that the firmware of a Raspberry Pi can start: use Debian's linux-image-arm64", file)
}

// readBase returns the content of a file of the base, or nil if the base does not have the file.
func (b *executor) readBase(base []tree.Node, file string, limit int64) ([]byte, error) {
	i := slices.IndexFunc(base, func(n tree.Node) bool { return n.Path == file && n.IsRegular() })
	if i < 0 {
		return nil, nil
	}
	text, err := tree.ReadContent(base[i].Data, b.Cache, limit)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", file, err)
	}
	return text, nil
}
