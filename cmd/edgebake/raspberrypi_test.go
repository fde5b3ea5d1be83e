package main

import (
	"io"
	"os"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/fat"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/disktest"
)

// TestRaspberryPi: an image for boards without UEFI is built, told, stamped,
// flashed and verified as any other, with the disk's own GUIDs in the command
// line; what needs UEFI rejects it and says why.
func TestRaspberryPi(t *testing.T) {
	c := newCLI(t)
	if err := buildtest.WritePi(c.dir, buildtest.PiBase(false), nil); err != nil {
		t.Fatal(err)
	}
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "tiny.raw")
	c.want(c.out, "tiny.raw: arm64, Kubernetes", "boots on Raspberry Pi 4\n")
	c.want(c.err, "WARNING: kernel 6.12.1-test serves Raspberry Pi 4; Raspberry Pi 5 lacks sdhci-brcmstb")
	c.run(0, "inspect", "tiny.raw", "--verify")
	c.want(c.out, "arch        arm64\nboards      Raspberry Pi 4\n")

	c.run(1, "boot", "tiny.raw")
	c.want(c.err, "booting tiny.raw: it is for Raspberry Pi 4, whose firmware no virtual machine has: build the Image with hardware: generic or cloud to try it here, or flash it to a card")
	c.run(0, "build", "image.yaml", "--output", "tiny.raw.zst", "--force")
	for _, image := range []string{"tiny.raw", "tiny.raw.zst"} {
		c.run(1, "installer", image, "--iso", "install.iso")
		c.want(c.err, "making an installer of image "+image+": it is for Raspberry Pi 4, whose firmware starts no installer: write it to the board's card or drive with edgebake flash")
	}
	c.notThere("install.iso")
	c.disk("stick", 1<<30)
	c.runIn(t.Context(), "no\n", 1, "flash", "tiny.raw.zst", "--installer", "stick")
	c.want(c.err, "whose firmware starts no installer")
	os.Remove("stick")

	golden := commandLine(t, "tiny.raw")
	c.disk("card", 8<<30)
	c.run(0, "flash", "tiny.raw.zst", "card", "--site", "site.yaml", "--yes")
	c.run(0, "inspect", "card", "--verify")
	c.want(c.out, "boards      Raspberry Pi 4", "slot        site, stamped", "(verified)")
	if out := disktest.Oracle(t, "sgdisk", "-v", "card"); !strings.Contains(out, "No problems found") {
		t.Error(out)
	}
	if own := commandLine(t, "card"); own == golden || len(own) != len(golden) {
		t.Errorf("the command line of the card: %s", own)
	}
}

// commandLine has fsck.fat judge the ESP of a disk, and returns the command line
// of its system, which names the disk's own partitions.
func commandLine(t *testing.T, disk string) string {
	t.Helper()
	f, err := os.Open(disk)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	table, err := gpt.Read(f, fi.Size())
	if err != nil {
		t.Fatal(err)
	}
	// The firmware takes the first FAT file system that it finds.
	first := table.Partitions[0]
	if first.Name != ondisk.LabelESP {
		t.Errorf("%s: the first partition is %s", disk, first.Name)
	}
	esp, err := os.Create("esp.fat")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove("esp.fat")
	defer esp.Close()
	if _, err := io.Copy(esp, io.NewSectionReader(f, first.Start, first.Size)); err != nil {
		t.Fatal(err)
	}
	disktest.Oracle(t, "fsck.fat", "-n", "esp.fat")
	fsys, err := fat.Open(esp)
	if err != nil {
		t.Fatal(err)
	}
	info, err := media.Inspect(disk)
	if err != nil {
		t.Fatal(err)
	}
	text, err := fsys.ReadFile(ondisk.ESPSystemDir(info.Image.Plan) + "/" + ondisk.ESPPiCommandLine)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range table.Partitions {
		if named := p.Name == ondisk.LabelESP || p.Name == ondisk.LabelRootA || p.Name == ondisk.LabelData; strings.Contains(string(text), "PARTUUID="+p.GUID) != named {
			t.Errorf("%s: %s has GUID %s, the command line: %s", disk, p.Name, p.GUID, text)
		}
	}
	return string(text)
}
