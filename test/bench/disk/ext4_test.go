// Package disk compares the disk writers with other programs on the same trees, alternately in one
// run. On a shared machine only the ratios of times are meaningful. Results go to
// test/bench/results.
//
//	EDGEBAKE_BENCH_RUNS   number of runs of each writer, 5 by default
//	EDGEBAKE_BENCH_DIR    directory for the images; by default in memory (/dev/shm) if there is space
//	EDGEBAKE_BENCH_TAR    an additional uncompressed tar to measure
package disk

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/test/bench"
)

const results = "../results/ext4.md"

// childEnv is set in child processes of the test binary. Each writer runs in its own process, so
// that its memory can be measured.
const childEnv = "EDGEBAKE_BENCH_CHILD"

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(childEnv) {
	case "":
		os.Exit(m.Run())
	case "write":
		err = childWrite(os.Args[1], os.Args[2])
	case "image":
		err = childImage(os.Args[1], os.Args[2])
	case "scale":
		err = childScale(os.Args[1], os.Args[2])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

var options = ext4.Options{
	Label: "BENCH", UUID: [16]byte{1}, HashSeed: [16]byte{2}, Time: time.Unix(1767225600, 0),
	// mke2fs needs more space for the same tree; both file systems get the same size.
	FreeBytes: 64 << 20, FreeInodes: 1000,
}

// report is the output of a child.
type report struct {
	Entries       int
	Size, Written int64
	Index, Write  float64 // seconds
	CPU           float64 // processor seconds of Write
	Before, Peak  int64   // resident bytes
}

func (r report) print() error {
	r.Peak = resident("self", "VmHWM")
	return json.NewEncoder(os.Stdout).Encode(r)
}

// tarBlob is the only blob.
type tarBlob string

func (b tarBlob) OpenBlob(string) (tree.BlobFile, error) { return os.Open(string(b)) }

// readTar indexes a tar and merges it into a tree, as a build does.
func readTar(path string) (nodes []tree.Node, size int64, r report, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, r, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, 0, r, err
	}
	start := time.Now()
	if nodes, err = tree.FromTar(f, st.Size(), "tar", "tar"); err != nil {
		return nil, 0, r, err
	}
	if nodes, err = tree.Merge([]tree.Layer{{Name: "tar", Nodes: nodes}}, mtime); err != nil {
		return nil, 0, r, err
	}
	return nodes, st.Size(), report{Index: time.Since(start).Seconds(), Entries: len(nodes)}, nil
}

// childWrite writes an image with the tree of a tar.
func childWrite(tarPath, image string) error {
	nodes, _, r, err := readTar(tarPath)
	if err != nil {
		return err
	}
	return write(r, nodes, tarBlob(tarPath), image)
}

// childScale writes an image with n small files.
func childScale(count, image string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	content := bytes.Repeat([]byte("edgebake"), 12)
	nodes := make([]tree.Node, 0, n)
	mtime := time.Unix(1767225600, 0)
	for i := 0; len(nodes) < n; i++ {
		dir := fmt.Sprintf("d%06d", i/100)
		if i%100 == 0 {
			nodes = append(nodes, tree.Node{Path: dir, Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: mtime}})
		}
		nodes = append(nodes, tree.Node{Path: dir + fmt.Sprintf("/file-%06d", i), Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: mtime, Data: tree.Bytes(content)}})
	}
	runtime.GC()
	return write(report{Entries: n, Before: resident("self", "VmRSS")}, nodes, nil, image)
}

func write(r report, nodes []tree.Node, blobs tree.Blobs, image string) error {
	start, cpu := time.Now(), processorTime()
	o := options
	var err error
	if o.Size, err = ext4.Size(nodes, o); err != nil {
		return err
	}
	f, err := os.Create(image)
	if err != nil {
		return err
	}
	if err := f.Truncate(o.Size); err != nil {
		return err
	}
	st, err := ext4.Write(f, nodes, blobs, o)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	r.Write, r.CPU = time.Since(start).Seconds(), processorTime()-cpu
	r.Size, r.Written = o.Size, st.Written
	return r.print()
}

// processorTime returns the processor seconds that this process has used.
func processorTime() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// resident reads a process's memory in bytes from /proc. getrusage would also count the parent's
// memory at the time of the fork.
func resident(pid, field string) int64 {
	b, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			n, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return n << 10
		}
	}
	return 0
}

// process describes a finished child.
type process struct {
	seconds, cpu float64
	peak         int64
	out          []byte
}

// run runs a program and measures its memory.
func run(ctx context.Context, env string, name string, args ...string) (process, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return process{}, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	var p process
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			p.seconds, p.out = time.Since(start).Seconds(), out.Bytes()
			p.cpu = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
			if err != nil {
				err = fmt.Errorf("%s: %w\n%s", cmd, err, errOut.Bytes())
			}
			return p, err
		case <-tick.C:
			p.peak = max(p.peak, resident(strconv.Itoa(cmd.Process.Pid), "VmHWM"))
		}
	}
}

// tarTree writes a tree as a tar.
type tarTree struct {
	name  string
	write func(*tar.Writer) error
}

var mtime = time.Unix(1767225600, 0)

func header(kind byte, name string, size int64) *tar.Header {
	mode := int64(0o644)
	if kind == tar.TypeDir {
		mode = 0o755
	}
	return &tar.Header{Typeflag: kind, Name: name, Mode: mode, Size: size, ModTime: mtime, Format: tar.FormatPAX}
}

// filler returns content that does not repeat and has no zero blocks.
func filler(seed byte) io.Reader { return rand.NewChaCha8([32]byte{seed, 1}) }

func addFile(w *tar.Writer, from io.Reader, name string, size int64) error {
	if err := w.WriteHeader(header(tar.TypeReg, name, size)); err != nil {
		return err
	}
	_, err := io.CopyN(w, from, size)
	return err
}

// smallFiles writes 20,000 files in one directory and 30,000 in 300.
func smallFiles(w *tar.Writer) error {
	from := filler(1)
	if err := w.WriteHeader(header(tar.TypeDir, "one/", 0)); err != nil {
		return err
	}
	for i := range 20000 {
		if err := addFile(w, from, fmt.Sprintf("one/file-with-a-name-%06d.yaml", i), int64(i%3000)); err != nil {
			return err
		}
	}
	for d := range 300 {
		if err := w.WriteHeader(header(tar.TypeDir, fmt.Sprintf("d%03d/", d), 0)); err != nil {
			return err
		}
		for i := range 100 {
			if err := addFile(w, from, fmt.Sprintf("d%03d/f%03d", d, i), int64(i*37%9000)); err != nil {
				return err
			}
		}
	}
	return nil
}

// rootfs writes a tree like a Debian system with a kernel and Kubernetes: about 500 MB in 15,000
// entries, most small, some large.
func rootfs(w *tar.Writer) error {
	from := filler(2)
	rnd := rand.New(rand.NewPCG(1, 2))
	for d := range 1500 {
		dir := fmt.Sprintf("usr-%02d/share-%04d", d%30, d)
		if d < 30 {
			if err := w.WriteHeader(header(tar.TypeDir, fmt.Sprintf("usr-%02d/", d), 0)); err != nil {
				return err
			}
		}
		if err := w.WriteHeader(header(tar.TypeDir, dir+"/", 0)); err != nil {
			return err
		}
		for i := range 8 {
			size := int64(math.Exp(7.8 + 1.7*rnd.NormFloat64()))
			if err := addFile(w, from, fmt.Sprintf("%s/file%d", dir, i), min(size, 8<<20)); err != nil {
				return err
			}
		}
		h := header(tar.TypeSymlink, dir+"/link", 0)
		h.Linkname = "../target"
		if err := w.WriteHeader(h); err != nil {
			return err
		}
	}
	for i, mib := range []int64{105, 60, 55, 50, 40, 30, 12, 8, 8, 6} {
		if err := addFile(w, from, fmt.Sprintf("program%d", i), mib<<20); err != nil {
			return err
		}
	}
	return nil
}

// manyEntries writes 100,000 entries of all kinds, like the trees of many container images.
func manyEntries(w *tar.Writer) error {
	from := filler(3)
	for d := range 5000 {
		dir := fmt.Sprintf("layer%02d/dir%04d", d%50, d)
		if d < 50 {
			if err := w.WriteHeader(header(tar.TypeDir, fmt.Sprintf("layer%02d/", d), 0)); err != nil {
				return err
			}
		}
		if err := w.WriteHeader(header(tar.TypeDir, dir+"/", 0)); err != nil {
			return err
		}
		for i := range 15 {
			if err := addFile(w, from, fmt.Sprintf("%s/file%d", dir, i), int64((d*31+i*977)%6000)); err != nil {
				return err
			}
		}
		for i := range 3 {
			s, l := header(tar.TypeSymlink, fmt.Sprintf("%s/soft%d", dir, i), 0), header(tar.TypeLink, fmt.Sprintf("%s/hard%d", dir, i), 0)
			s.Linkname, l.Linkname = "file1", dir+"/file2"
			if err := errors.Join(w.WriteHeader(s), w.WriteHeader(l)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t tarTree) make(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	w := tar.NewWriter(f)
	return errors.Join(t.write(w), w.Close(), f.Close())
}

// scratch returns the directory for the images. It is in memory if there is space, because a disk's
// speed varies.
func scratch(b *testing.B) (dir, kind string) {
	parent := os.Getenv("EDGEBAKE_BENCH_DIR")
	if parent == "" {
		parent = os.TempDir()
		var st unix.Statfs_t
		if unix.Statfs("/dev/shm", &st) == nil && int64(st.Bavail)*st.Bsize > 6<<30 {
			parent = "/dev/shm"
		}
	}
	dir, err := os.MkdirTemp(parent, "edgebake-bench-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		b.Fatal(err)
	}
	if st.Type == unix.TMPFS_MAGIC {
		return dir, "tmpfs"
	}
	return dir, "a disk"
}

// writer is one of the compared programs.
type writer struct {
	name         string
	seconds, cpu []float64
	peak         int64
}

// BenchmarkExt4 runs only once, whatever b.N is: it takes minutes and repeats its measurements
// itself.
func BenchmarkExt4(b *testing.B) {
	if b.N > 1 {
		return
	}
	mke2fs, err := exec.LookPath("mke2fs")
	if err != nil {
		if mke2fs, err = exec.LookPath("/usr/sbin/mke2fs"); err != nil {
			b.Fatal("mke2fs is missing; install the package e2fsprogs")
		}
	}
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	runs := bench.Runs(b, 5)
	dir, kind := scratch(b)
	version, _ := exec.Command(mke2fs, "-V").CombinedOutput()
	firstLine, _, _ := strings.Cut(string(version), "\n")
	var out strings.Builder
	fmt.Fprintf(&out, "# The ext4 writer and its rivals\n\n"+
		"Made by `make bench` (test/bench/disk). Median of %d runs each, in turns, on %s, %d processors, %s.\n"+
		"`dd` copies as many bytes as our writer wrote; times are those of whole processes but ours, which leaves out the start of the process and the indexing of the tar, given apart.\n"+
		"On a machine that others use as well, processor time is the steadier figure.\n"+
		"Memory is the peak of the process (VmHWM), for ours with the tree itself.\n", runs, kind, runtime.NumCPU(), firstLine)

	trees := []tarTree{{"50,000 small files", smallFiles}, {"a root file system of 500 MB", rootfs}, {"100,000 entries", manyEntries}}
	for _, t := range trees {
		tarPath := filepath.Join(dir, "tree.tar")
		if err := t.make(tarPath); err != nil {
			b.Fatal(err)
		}
		compare(b, &out, t.name, tarPath, dir, self, mke2fs, runs)
		os.Remove(tarPath)
	}
	if p := os.Getenv("EDGEBAKE_BENCH_TAR"); p != "" {
		compare(b, &out, "the tar given", p, dir, self, mke2fs, runs)
	}
	scale(b, &out, dir, self, runs)

	b.Log("\n" + out.String())
	if err := os.MkdirAll(filepath.Dir(results), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(results, []byte(out.String()), 0o644); err != nil {
		b.Fatal(err)
	}
}

// compare runs all writers alternately on one tree.
func compare(b *testing.B, out io.Writer, name, tarPath, dir, self, mke2fs string, runs int) {
	ctx := b.Context()
	image := filepath.Join(dir, "image")
	source := filepath.Join(dir, "source")
	same := filepath.Join(dir, "same")
	defer os.Remove(image)
	defer os.Remove(same)
	defer os.RemoveAll(source)
	b.Logf("preparing %s", name)
	if err := os.MkdirAll(source, 0o755); err != nil {
		b.Fatal(err)
	}
	if o, err := exec.CommandContext(ctx, "tar", "-xf", tarPath, "-C", source).CombinedOutput(); err != nil {
		b.Fatalf("tar: %v\n%s", err, o)
	}
	// The first run determines the sizes, and its result is checked.
	var ours report
	child := func() process {
		os.Remove(image)
		p, err := run(ctx, childEnv+"=write", self, tarPath, image)
		if err != nil {
			b.Fatal(err)
		}
		if err := json.Unmarshal(p.out, &ours); err != nil {
			b.Fatal(err)
		}
		return p
	}
	child()
	if fsck, err := exec.LookPath("e2fsck"); err == nil {
		if o, err := exec.CommandContext(ctx, fsck, "-fn", image).CombinedOutput(); err != nil {
			b.Fatalf("e2fsck: %v\n%s", err, o)
		}
	}
	if err := fillFile(same, tarPath, ours.Written); err != nil {
		b.Fatal(err)
	}

	dd, us, rival := &writer{name: "dd"}, &writer{name: "edgebake"}, &writer{name: "mke2fs -d"}
	var index []float64
	other := func(w *writer, program string, args ...string) {
		os.Remove(image)
		p, err := run(ctx, "LC_ALL=C", program, args...)
		if err != nil {
			b.Fatal(err)
		}
		w.seconds = append(w.seconds, p.seconds)
		w.cpu = append(w.cpu, p.cpu)
		w.peak = max(w.peak, p.peak)
	}
	for i := range runs {
		b.Logf("%s: run %d of %d", name, i+1, runs)
		other(dd, "dd", "if="+same, "of="+image, "bs=1M", "status=none")
		child()
		us.seconds = append(us.seconds, ours.Write)
		us.cpu = append(us.cpu, ours.CPU)
		us.peak = max(us.peak, ours.Peak)
		index = append(index, ours.Index)
		other(rival, mke2fs, "-q", "-t", "ext4", "-b", "4096", "-m", "0", "-N", strconv.Itoa(ours.Entries+1100),
			"-d", source, image, strconv.FormatInt(ours.Size>>10, 10)+"k")
	}
	fmt.Fprintf(out, "\n## %s\n\n%d entries, %d MiB written into a file system of %d MiB; indexing the tar takes %.2f s\n\n"+
		"| writer | seconds | least | × dd | × edgebake | processor s | × dd | peak MiB |\n|---|---|---|---|---|---|---|---|\n",
		strings.ToUpper(name[:1])+name[1:], ours.Entries, ours.Written>>20, ours.Size>>20, bench.Median(index))
	for _, w := range []*writer{dd, us, rival} {
		m, c := bench.Median(w.seconds), bench.Median(w.cpu)
		fmt.Fprintf(out, "| %s | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %s |\n", w.name, m, slices.Min(w.seconds),
			m/bench.Median(dd.seconds), m/bench.Median(us.seconds), c, c/bench.Median(dd.cpu), cmp.Or(mib(w.peak), "–"))
	}
	slug := strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), ",", "")
	b.ReportMetric(bench.Median(us.seconds)/bench.Median(dd.seconds), slug+"/x-dd")
	b.ReportMetric(bench.Median(rival.seconds)/bench.Median(us.seconds), slug+"/mke2fs-x")
}

func mib(n int64) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("%.0f", float64(n)/(1<<20))
}

// fillFile fills a file of size bytes with another file's content.
func fillFile(path, from string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	for size > 0 && err == nil {
		var src *os.File
		if src, err = os.Open(from); err != nil {
			break
		}
		var n int64
		if n, err = io.CopyN(f, src, size); err == io.EOF && n > 0 {
			err = nil
		}
		size -= n
		src.Close()
	}
	return errors.Join(err, f.Close())
}

// scale measures how time and memory grow with the number of entries.
func scale(b *testing.B, out io.Writer, dir, self string, runs int) {
	fmt.Fprintf(out, "\n## Growth with the number of entries\n\nSmall files, a hundred to a folder. The writer's memory is what the process grew by over the tree itself.\n\n"+
		"| entries | seconds | µs an entry | tree MiB | peak MiB | writer's bytes an entry |\n|---|---|---|---|---|---|\n")
	image := filepath.Join(dir, "image")
	defer os.Remove(image)
	for _, n := range []int{50000, 100000, 200000, 400000, 800000} {
		var seconds []float64
		var last report
		for range runs {
			os.Remove(image)
			p, err := run(b.Context(), childEnv+"=scale", self, strconv.Itoa(n), image)
			if err != nil {
				b.Fatal(err)
			}
			if err := json.Unmarshal(p.out, &last); err != nil {
				b.Fatal(err)
			}
			seconds = append(seconds, last.Write)
		}
		m := bench.Median(seconds)
		fmt.Fprintf(out, "| %d | %.2f | %.1f | %s | %s | %d |\n", n, m, m*1e6/float64(n), mib(last.Before), mib(last.Peak), (last.Peak-last.Before)/int64(n))
	}
}
