// Package flash compares edgebake flash with dd of as many bytes as the image has data, and with
// bmaptool, which also skips holes. They write alternately to the same loop device. Results go to
// test/bench/results.
//
//	EDGEBAKE_BENCH_RUNS   number of runs of each, 5 by default
//	EDGEBAKE_BENCH_DIR    directory of image and device, by default that for temporary files
package flash

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/test/bench"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/mediatest"
	"golang.org/x/sys/unix"
)

const results = "../results/flash.md"

// promised is the minimum speed of flash, without reading back, as a fraction of dd's speed.
const promised = 0.95

const verified = ", read back and verified"

// data is the usual size of a root file system with Kubernetes.
const data = 400 << 20

// golden makes an image with data in its root: half noise, half compressible.
func golden(b *testing.B, path string) (written int64) {
	b.Helper()
	res := mediatest.Make(b, path, mediatest.Image{ID: "bench", Data: data, FreeRoot: 256 << 20, FreeData: 512 << 20})
	for _, p := range res.Parts {
		written += p.Written
	}
	return written
}

// limitedTo is the rate of the limited device in bytes per second.
const limitedTo = 500_000_000

// limit limits the rate at which this process and its children write to dev, until the end of the
// benchmark. It returns an error if it cannot.
func limit(b *testing.B, dev string, rate int64) error {
	b.Helper()
	var st unix.Stat_t
	if err := unix.Stat(dev, &st); err != nil {
		return err
	}
	number := fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	name := fmt.Sprintf("edgebake-bench-%d", os.Getpid())
	for _, c := range []struct{ root, file, line string }{
		{"/sys/fs/cgroup", "io.max", fmt.Sprintf("%s wbps=%d", number, rate)},
		{"/sys/fs/cgroup/blkio", "blkio.throttle.write_bps_device", fmt.Sprintf("%s %d", number, rate)},
	} {
		dir := filepath.Join(c.root, name)
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		b.Cleanup(func() { os.Remove(dir) })
		if tell(filepath.Join(dir, c.file), c.line) != nil {
			os.Remove(dir)
			continue
		}
		self := strconv.Itoa(os.Getpid())
		if err := tell(filepath.Join(dir, "cgroup.procs"), self); err != nil {
			return err
		}
		b.Cleanup(func() { tell(filepath.Join(c.root, "cgroup.procs"), self) })
		return nil
	}
	return errors.New("no cgroup with an io or blkio controller can be made here")
}

// tell writes to a file of the kernel's I/O controller, which exists only in a directory of that
// controller.
func tell(file, text string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// rival is one program that writes the image.
type rival struct {
	name  string
	run   func() error
	times []float64
}

func (r *rival) median() float64 { return bench.Median(r.times) }

func (r *rival) least() float64 { return slices.Min(r.times) }

// BenchmarkFlash writes the image to a device with each program in turn.
func BenchmarkFlash(b *testing.B) {
	if b.N > 1 {
		return
	}
	desk.NeedRoot(b, "it makes a loop device")
	desk.NeedProgram(b, "losetup", "mount")
	desk.NeedProgram(b, "blkdiscard", "util-linux")
	bmaptool := desk.NeedProgram(b, "bmaptool", "bmap-tools")
	runs := bench.Runs(b, 5)
	dir, err := os.MkdirTemp(cmp.Or(os.Getenv("EDGEBAKE_BENCH_DIR"), os.TempDir()), "edgebake-bench-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	at := func(name string) string { return filepath.Join(dir, name) }
	written := golden(b, at("g.raw"))
	golden(b, at("g.raw.zst"))
	i, err := media.Inspect(at("g.raw"))
	if err != nil {
		b.Fatal(err)
	}
	sh := func(argv ...string) error {
		if out, err := exec.CommandContext(b.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
		}
		return nil
	}
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	must(sh(bmaptool, "create", "-o", at("g.bmap"), at("g.raw")))
	must(os.WriteFile(at("disk"), nil, 0o600))
	must(os.Truncate(at("disk"), i.Size+64<<20))
	out, err := exec.Command("losetup", "--find", "--show", at("disk")).Output()
	must(err)
	dev := strings.TrimSpace(string(out))
	b.Cleanup(func() { exec.Command("losetup", "--detach", dev).Run() })

	// stored is the time at which all data was on the device, in the last run that read the data
	// back.
	var stored time.Time
	// last describes the last run's result.
	var last media.Flashed
	flash := func(image string, verify bool) func() error {
		return func() error {
			d, err := device.Open(dev)
			if err != nil {
				return err
			}
			defer d.Close()
			stored = time.Time{}
			f, err := media.PrepareFlash(image, media.FlashOptions{Size: d.Size, Sector: d.Sector, SkipVerify: !verify, Progress: func(step string, _, _ int64) {
				if step == "verify" && stored.IsZero() {
					stored = time.Now()
				}
			}})
			if err != nil {
				return err
			}
			defer f.Close()
			done, err := f.Write(b.Context(), d)
			if err == nil {
				last = *done
			}
			return err
		}
	}
	must(flash(at("g.raw"), false)())
	must(sh("dd", "if=/dev/urandom", "of="+at("same"), "bs=1M", fmt.Sprintf("count=%d", last.Written>>20)))
	dd := func(n int64) error {
		return sh("dd", "if="+at("same"), "of="+dev, "bs=4M", "iflag=count_bytes", fmt.Sprintf("count=%d", n), "oflag=direct", "conv=fsync")
	}
	rivals := []*rival{
		{name: "dd, as many bytes, direct and synced", run: func() error { return dd(written) }},
		{name: "`blkdiscard --zeroout` of as much as flash makes zeros, and dd of as much as it writes", run: func() error {
			if err := sh("blkdiscard", "--force", "--zeroout", "--offset", strconv.FormatInt(last.Written, 10), "--length", strconv.FormatInt(last.Zeroed>>20<<20, 10), dev); err != nil {
				return err
			}
			return dd(last.Written)
		}},
		{name: "bmaptool, .raw", run: func() error { return sh(bmaptool, "copy", "--bmap", at("g.bmap"), at("g.raw"), dev) }},
		{name: "flash, .raw, not read back", run: flash(at("g.raw"), false)},
		{name: "flash, .raw.zst, not read back", run: flash(at("g.raw.zst"), false)},
		{name: "flash, .raw" + verified, run: flash(at("g.raw"), true)},
		{name: "flash, .raw.zst" + verified, run: flash(at("g.raw.zst"), true)},
	}
	for _, r := range rivals {
		if strings.HasSuffix(r.name, verified) {
			rivals = append(rivals, &rival{name: strings.TrimSuffix(r.name, verified) + ", until all is stored"})
		}
	}
	for range runs {
		for i, r := range rivals[:7] {
			start := time.Now()
			must(r.run())
			r.times = append(r.times, time.Since(start).Seconds())
			if i >= 5 {
				rivals[i+2].times = append(rivals[i+2].times, stored.Sub(start).Seconds())
			}
		}
	}
	// Limit the rate to that of a real disk, because a disk file in the page cache takes two
	// gigabytes per second, at the cost of the processor. The kernel's limit also counts ranges that
	// edgebake lets the device fill with zeros, so dd writes those too.
	limited := []*rival{
		{name: "dd, direct and synced", run: func() error {
			return sh("dd", "if=/dev/zero", "of="+dev, "bs=4M", "iflag=count_bytes", fmt.Sprintf("count=%d", (last.Written+last.Zeroed)), "oflag=direct", "conv=fsync")
		}},
		{name: rivals[3].name, run: rivals[3].run},
		{name: rivals[4].name, run: rivals[4].run},
		{name: rivals[5].name, run: rivals[5].run},
	}
	why := limit(b, dev, limitedTo)
	for range runs {
		for _, r := range limited {
			if why != nil {
				break
			}
			start := time.Now()
			must(r.run())
			r.times = append(r.times, time.Since(start).Seconds())
		}
	}
	var text strings.Builder
	fmt.Fprintf(&text, "# Flash, dd and bmaptool\n\nMade by `make bench` (test/bench/flash). %d runs each, in turns, %d processors, one loop device on a disk file.\n"+
		"Load average at the end: %s. Flash and bmaptool need a processor to hash with and dd needs none, so on a machine that others use as well both fall behind dd.\n"+
		"An image of %d MiB with %d MiB of data. `dd` writes as many bytes as the image has data, with O_DIRECT and fsync, as flash does; promised are %.2f of its speed until all is stored. "+
		"Flash writes whole MiB, %d here, and makes %d MiB of holes zeros, which dd leaves as they were: the second row does the same work with two programs. "+
		"What it reads back, it hashes then; where it does not read back, it hashes before it writes. bmaptool checks the digests of its map, leaves in holes what was there, and reads nothing back.\n\n"+
		"| | seconds (median) | least | speed, × dd | least | × the second row | least | × bmaptool | least |\n|---|---|---|---|---|---|---|---|---|\n",
		runs, runtime.NumCPU(), bench.Load(), i.Size>>20, written>>20, promised, last.Written>>20, last.Zeroed>>20)
	alone, both, bmap := rivals[0], rivals[1], rivals[2]
	for _, r := range rivals {
		fmt.Fprintf(&text, "| %s | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f |\n", r.name, r.median(), r.least(),
			alone.median()/r.median(), alone.least()/r.least(), both.median()/r.median(), both.least()/r.least(), bmap.median()/r.median(), bmap.least()/r.least())
	}
	fmt.Fprintf(&text, "\nThe same device, limited to %d MB/s by the kernel's blkio controller, about what a SATA disk writes, and as one that cannot make zeros by itself: here dd writes the whole %d MiB.\n\n", limitedTo/1_000_000, (last.Written+last.Zeroed)>>20)
	if why != nil {
		fmt.Fprintf(&text, "Not measured: %v.\n", why)
	} else {
		fmt.Fprint(&text, "| | seconds (median) | least | speed, × dd | least |\n|---|---|---|---|---|\n")
		for _, r := range limited {
			fmt.Fprintf(&text, "| %s | %.2f | %.2f | %.2f | %.2f |\n", r.name, r.median(), r.least(), limited[0].median()/r.median(), limited[0].least()/r.least())
		}
	}
	b.Log("\n" + text.String())
	if err := os.WriteFile(results, []byte(text.String()), 0o644); err != nil {
		b.Fatal(err)
	}
}
