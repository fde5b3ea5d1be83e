package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/test/desk"
)

// flashable returns a directory with an image, a Site and a disk.
func flashable(t *testing.T) *program {
	t.Helper()
	c := newCLI(t)
	c.project(nil)
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "tiny.raw.zst")
	c.disk("disk", 8<<30)
	return c
}

// disk makes a file that is used like a disk.
func (c *program) disk(name string, size int64) {
	c.t.Helper()
	c.file(name, "old data")
	if err := os.Truncate(name, size); err != nil {
		c.t.Fatal(err)
	}
}

// TestFlashInterrupted checks that the message after an interrupt describes the state of the disk.
func TestFlashInterrupted(t *testing.T) {
	c := flashable(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.runIn(ctx, "", exitInterrupted, "flash", "tiny.raw.zst", "disk", "--yes")
	c.want(c.err, "interrupted, nothing was written to disk")
	if b, err := exec.Command("head", "-c", "8", "disk").Output(); err != nil || string(b) != "old data" {
		t.Errorf("the disk has %q, %v", b, err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	var said bytes.Buffer
	begun := writerFunc(func(b []byte) (int, error) {
		if strings.Contains(string(b), "write") {
			cancel()
		}
		return said.Write(b)
	})
	if code := run(ctx, []string{"flash", "tiny.raw.zst", "disk", "--yes"}, streams{In: strings.NewReader(""), Out: io.Discard, Err: begun}); code != exitInterrupted {
		t.Errorf("exit code %d: %s", code, &said)
	}
	c.want(said.String(), "interrupted; disk has no partition table now: flash it again")
	c.run(1, "inspect", "disk")
	c.want(c.err, "writing an image to this disk did not finish: flash it again")
	c.run(0, "flash", "tiny.raw.zst", "disk", "--yes")
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// TestDevicesCommand runs the command with the real lsblk.
func TestDevicesCommand(t *testing.T) {
	desk.NeedProgram(t, "lsblk", "util-linux")
	c := newCLI(t)
	paths := func() (out []string) {
		c.run(0, "devices", "--output", "json")
		var disks []struct {
			Path string
			Size int64
		}
		if err := json.Unmarshal([]byte(c.out), &disks); err != nil || disks == nil {
			t.Errorf("%v in %s", err, c.out)
		}
		for _, d := range disks {
			out = append(out, d.Path)
		}
		return out
	}
	before := paths()
	var list bytes.Buffer
	printDisks(streams{Out: &list}, []device.Disk{{Path: "/dev/loop0", Size: 1 << 30}, {Path: "/dev/loop1", Size: 1 << 30, Sector: 4096}})
	if got, want := list.String(), "/dev/loop0      1.0Gi\n/dev/loop1      1.0Gi  (4Kn)\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	c.run(0, "devices")
	list.Reset()
	list.WriteString(c.out)
	for _, path := range paths() {
		if slices.Contains(before, path) { // other programs may attach and detach loop devices meanwhile
			c.want(list.String(), path)
		}
	}
	c.run(2, "devices", "x")
	c.run(0, "__complete", "flash", "")
	c.want(c.out, "zst", ":8") // the extensions of images
	c.run(0, "__complete", "flash", "tiny.raw", "/dev/none")
	c.want(c.out, ":0")
}
