package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/test/desk"
)

// flashable is a directory with an image, a Site and a disk.
func flashable(t *testing.T) *cli {
	t.Helper()
	c := newCLI(t)
	c.project(nil)
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "tiny.raw.zst")
	c.disk("disk", 8<<30)
	return c
}

// disk makes a file that plays one.
func (c *cli) disk(name string, size int64) {
	c.t.Helper()
	c.file(name, "old data")
	if err := os.Truncate(name, size); err != nil {
		c.t.Fatal(err)
	}
}

// TestFlashCommand asks, writes, verifies, and keeps a record.
func TestFlashCommand(t *testing.T) {
	c := flashable(t)
	old := func() bool {
		b, err := os.ReadFile("head")
		return err == nil && string(b) == "old data"
	}
	head := func() {
		out, err := exec.Command("dd", "if=disk", "of=head", "bs=8", "count=1").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for _, answer := range []string{"", "\n", "no\n", "nyes\n"} {
		c.runIn(t.Context(), answer, 1, "flash", "tiny.raw.zst", "disk", "--site", "site.yaml", "--log", "log")
		c.want(c.err, "disk, 8.0 GiB", "Everything on it will be lost. It gets tiny.raw.zst (tiny, Kubernetes v1.36.3) and site.yaml", "nothing was written", "--yes")
		if answer == "" && !strings.Contains(c.err, "[y/N] \nedgebake: flashing disk") {
			t.Errorf("the end of the input leaves the error on the question's line:\n%s", c.err)
		}
		if head(); !old() {
			t.Fatalf("%q wrote", answer)
		}
	}
	c.runIn(t.Context(), "y\n", 0, "flash", "tiny.raw.zst", "disk", "--site", "site.yaml", "--log", "log")
	c.want(c.out, "flashed disk with tiny.raw.zst and site.yaml", "read back and verified", "golden ")
	c.want(c.err, "write: ", "verify: ", "done in")
	c.run(0, "inspect", "disk", "--verify")
	c.want(c.out, "slot        site, stamped", "berlin-7", "(verified)")
	if fi, err := os.Stat("disk"); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file with the token: %v %v", fi.Mode(), err)
	}
	c.disk("disk", 8<<30)
	c.run(0, "flash", "tiny.raw.zst", "disk", "--yes", "--no-verify", "--log", "log")
	c.want(c.out, "(no Site)", "not verified")
	c.want(c.err, "It has no Site")
	b, err := os.ReadFile("log")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(b), "abcdef") {
		t.Error("the log has the token")
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if len(lines) != 2 {
		t.Fatalf("%d lines: %s", len(lines), b)
	}
	var r record
	if err := json.Unmarshal([]byte(lines[0]), &r); err != nil || r.Device != "disk" || r.NodeName != "berlin-7" || r.Site != "site.yaml" ||
		len(r.Golden) != 64 || !r.Verified || len(r.DiskGUID) != 36 || r.Time.IsZero() {
		t.Errorf("%s: %+v %v", lines[0], r, err)
	}
	c.run(0, "inspect", "disk", "--verify")
	c.want(c.out, "slot        golden")
}

// TestFlashCommandRefuses names every problem, and writes nothing.
func TestFlashCommandRefuses(t *testing.T) {
	c := flashable(t)
	c.disk("small", 1<<20)
	c.file("bad.yaml", "apiVersion: edgebake.io/v1alpha1\nkind: Site\n")
	c.file("cloud.yaml", site+"arch: arm64\nnodeType: cloud\nnodePool: shops\n")
	for _, tc := range []struct {
		code int
		args []string
		want []string
	}{
		{2, []string{"flash", "tiny.raw.zst"}, []string{"requires an image and a disk"}},
		{2, []string{"flash", "tiny.raw.zst", "disk", "--site", "-"}, []string{"add --yes"}},
		{1, []string{"flash", "tiny.raw.zst", "none"}, []string{"flashing none: ", "edgebake devices lists the disks", "truncate -s"}},
		{1, []string{"flash", "tiny.raw.zst", "."}, []string{"it is a directory"}},
		{1, []string{"flash", "tiny.raw.zst", "/dev/null"}, []string{"neither a block device nor a file"}},
		{1, []string{"flash", "tiny.raw.zst", "tiny.raw.zst", "--yes"}, []string{"it is the image itself"}},
		{1, []string{"flash", "tiny.raw.zst", "small", "--site", "bad.yaml", "--yes"}, []string{"take a larger disk", "masters", "credentials"}},
		{1, []string{"flash", "site.yaml", "disk", "--yes"}, []string{"not an edgebake image"}},
		{1, []string{"flash", "tiny.raw.zst", "small", "--site", "cloud.yaml", "--yes"}, []string{"edgebake: flashing image tiny.raw.zst: the disk has",
			"\ncloud.yaml:8:7: arch: the Site is for arm64", "\ncloud.yaml:9:11: nodeType: the image cannot make a node of type \"cloud\""}},
		{1, []string{"flash", "tiny.raw.zst", "disk", "--yes", "--log", "./tiny.raw.zst"}, []string{"--log ./tiny.raw.zst: it is the image: name another file"}},
		{1, []string{"flash", "tiny.raw.zst", "disk", "--yes", "--log", "disk"}, []string{"--log disk: it is the disk: name another file"}},
		{1, []string{"flash", "tiny.raw.zst", "disk", "--yes", "--site", "site.yaml", "--log", "site.yaml"}, []string{"--log site.yaml: it is the document: name another file"}},
		{1, []string{"flash", "tiny.raw.zst", "disk", "--yes", "--log", "none/log"}, []string{"opening the log", "nothing was written"}},
	} {
		c.run(tc.code, tc.args...)
		c.want(c.err, tc.want...)
	}
	if b, err := exec.Command("head", "-c", "8", "disk").Output(); err != nil || string(b) != "old data" {
		t.Errorf("the disk has %q, %v", b, err)
	}
	// An interrupt says what it leaves.
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

// TestFlashWithoutALog: where the record cannot be written, what is said of the
// disk is still true.
func TestFlashWithoutALog(t *testing.T) {
	c := flashable(t)
	for _, tc := range []struct{ flag, want, not string }{
		{"--no-verify", "is flashed, not verified, but writing the log /dev/full", "and verified"},
		{"--undated", "is flashed, read back and verified, but writing the log /dev/full", "not verified"},
	} {
		c.run(1, "flash", "tiny.raw.zst", "disk", "--yes", "--log", "/dev/full", tc.flag)
		c.want(c.err, tc.want)
		if strings.Contains(c.err, tc.not) {
			t.Errorf("%s: %s", tc.flag, c.err)
		}
	}
}

// TestDevicesCommand asks the real lsblk.
func TestDevicesCommand(t *testing.T) {
	desk.NeedProgram(t, "lsblk", "util-linux")
	c := newCLI(t)
	c.run(0, "devices", "--output", "json")
	var disks []struct {
		Path string
		Size int64
	}
	if err := json.Unmarshal([]byte(c.out), &disks); err != nil || disks == nil {
		t.Errorf("%v in %s", err, c.out)
	}
	var list bytes.Buffer
	printDisks(streams{Out: &list}, []device.Disk{{Path: "/dev/loop0", Size: 1 << 30}, {Path: "/dev/loop1", Size: 1 << 30, Sector: 4096}})
	if got, want := list.String(), "/dev/loop0    1.0 GiB\n/dev/loop1    1.0 GiB  (4Kn)\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	c.run(0, "devices")
	for _, d := range disks {
		c.want(c.out, d.Path)
	}
	c.run(2, "devices", "x")
	c.run(0, "__complete", "flash", "")
	c.want(c.out, "zst", ":8") // the image's endings
	c.run(0, "__complete", "flash", "tiny.raw", "/dev/none")
	c.want(c.out, ":0")
}
