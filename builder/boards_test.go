package builder

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/disktest"
)

func newPiProject(t *testing.T, base []buildtest.Entry, edit func(string) string) *project {
	t.Helper()
	return projectBy(t, buildtest.WritePi, base, edit)
}

// TestRaspberryPi checks that the image lists the boards that its kernel supports, that the build
// warns about unsupported boards, and that a second build gives the same bytes.
func TestRaspberryPi(t *testing.T) {
	for _, tc := range []struct {
		pi5         bool
		builds      int
		boards, say string
		state       string
	}{
		{false, 1, "[Raspberry Pi 4]", "kernel 6.12.1-test supports Raspberry Pi 4; Raspberry Pi 5 lacks sdhci-brcmstb, rp1_pci, clk-rp1, pinctrl-rp1: to boot such boards, use a newer kernel (docs/guide.md, Raspberry Pi)", StateWarning},
		{true, 2, "[Raspberry Pi 4 Raspberry Pi 5]", "kernel 6.12.1-test supports Raspberry Pi 4 and Raspberry Pi 5", StateLog},
	} {
		p := newPiProject(t, buildtest.PiBase(tc.pi5), nil)
		var first []byte
		for range tc.builds {
			var said []Event
			out := filepath.Join(t.TempDir(), "pi.raw")
			o := p.options(out)
			o.Events = func(e Event) { said = append(said, e) }
			res, err := Build(t.Context(), p.image(t), o)
			if err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(res.Report.Info.Boards); got != tc.boards {
				t.Errorf("boards in the report: %s, want %s", got, tc.boards)
			}
			old := slices.ContainsFunc(said, func(e Event) bool {
				return e.State == StateWarning && e.Text == "start4.elf of 2024-04-17 does not boot from a GPT on a Raspberry Pi 4 with a bootloader of 2025-02-11 or later in its EEPROM: use raspi-firmware of 2025 or later (docs/guide.md, Raspberry Pi)"
			})
			if old == tc.pi5 {
				t.Errorf("warned of old firmware: %v", old)
			}
			if !slices.ContainsFunc(said, func(e Event) bool { return e.State == tc.state && e.Text == tc.say }) {
				t.Errorf("no event %s %q in %+v", tc.state, tc.say, said)
			}
			info, err := media.Inspect(out)
			if err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(info.Image.Boards); got != tc.boards {
				t.Errorf("boards in image.json: %s, want %s", got, tc.boards)
			}
			sum := []byte(disktest.Sum(t, out))
			if first != nil && !bytes.Equal(first, sum) {
				t.Error("a second build gives other bytes")
			}
			first = sum
			os.Remove(out)
		}
	}
}

// TestRaspberryPiRejects checks that an image that no board could boot is rejected before anything
// is written.
func TestRaspberryPiRejects(t *testing.T) {
	without := func(parts ...string) []buildtest.Entry {
		return slices.DeleteFunc(buildtest.PiBase(true), func(e buildtest.Entry) bool {
			return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(e.Name, p) })
		})
	}
	kernel := func(body string) []buildtest.Entry {
		base := buildtest.PiBase(true)
		for i := range base {
			if strings.Contains(base[i].Name, "boot/vmlinuz-") {
				base[i].Body = body
			}
		}
		return base
	}
	const notPlain = "boot/vmlinuz-6.12.1-test is not an arm64 kernel image that the firmware of a Raspberry Pi can start: use Debian's linux-image-arm64"
	for name, tc := range map[string]struct {
		base []buildtest.Entry
		edit func(string) string
		want string
	}{
		"no drivers": {without("/drivers/"), nil,
			"the kernel 6.12.1-test supports no board of hardware: raspberry-pi (Raspberry Pi 4 lacks sdhci-iproc, genet; Raspberry Pi 5 lacks sdhci-brcmstb, rp1_pci, clk-rp1, pinctrl-rp1, macb): use the package linux-image-arm64"},
		"no device trees":        {without(".dtb"), nil, "Raspberry Pi 4 lacks bcm2711-rpi-*.dtb; Raspberry Pi 5 lacks bcm2712-*.dtb"},
		"nothing about built-in": {without("modules.builtin"), nil, "Raspberry Pi 4 lacks pcie-brcmstb; "},
		"a short kernel":         {kernel("kernel"), nil, notPlain},
		"an EFI program":         {kernel("MZ\x00\x00zimg" + strings.Repeat("\x00", 200)), nil, notPlain},
		"no firmware":            {without("raspi-firmware"), nil, "the base lacks usr/lib/raspi-firmware/start4.elf, needed to boot; add the package raspi-firmware"},
		"a long command line": {buildtest.PiBase(true), func(doc string) string {
			return doc + "kernel: {args: [a=" + strings.Repeat("x", 400) + "]}\n"
		}, "kernel.args: the kernel's command line has "},
	} {
		p := newPiProject(t, tc.base, tc.edit)
		out := filepath.Join(t.TempDir(), "pi.raw")
		_, err := p.build(t, out)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v lacks %q", name, err, tc.want)
		}
		if _, err := os.Stat(out); err == nil {
			t.Errorf("%s: an image was written", name)
		}
	}
}

// TestFirmwareDate finds the build dates in the firmware of Debian 13 and its successor, and none
// in files without a date.
func TestFirmwareDate(t *testing.T) {
	for text, want := range map[string]string{
		"VC_BUILD_ID_TIME: 17:27:09\x00VC_BUILD_ID_VARIANT: start\x00VC_BUILD_ID_TIME: Apr 17 2024\x00": "2024-04-17",
		"VC_BUILD_ID_TIME: 18:28:41\x00VC_BUILD_ID_TIME: Feb 11 2026\x00":                               "2026-02-11",
		"VC_BUILD_ID_TIME: Jan  6 2025\x00":                                                             "2025-01-06",
		"VC_BUILD_ID_TIME: Foo 17 2024\x00":                                                             "0001-01-01",
		"start":                                                                                         "0001-01-01",
	} {
		if got := firmwareDate([]byte(text)).Format(time.DateOnly); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// TestRaspberryPiConfigIsPlanned checks that the firmware's settings are part of the plan for a
// Raspberry Pi, but not for other hardware.
func TestRaspberryPiConfigIsPlanned(t *testing.T) {
	p := newPiProject(t, buildtest.PiBase(true), nil)
	pi, err := Resolve(t.Context(), p.image(t), p.options(""))
	if err != nil {
		t.Fatal(err)
	}
	uefi := func(doc string) string {
		return strings.Replace(doc, "hardware: raspberry-pi", "hardware: generic\nkernel: {consoles: [tty0, 'ttyAMA10,115200', 'ttyS1,115200']}", 1)
	}
	p = newPiProject(t, buildtest.BaseFor("arm64"), uefi)
	generic, err := Resolve(t.Context(), p.image(t), p.options(""))
	if err != nil {
		t.Fatal(err)
	}
	if pi.Rendered == generic.Rendered {
		t.Error("the two plans have the same digest of rendered files")
	}
}
