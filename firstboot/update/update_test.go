package update

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/edgebake/edgebake/test/mediatest"
)

// images has the test images, which are built once: the one that
// the machine runs, and the new one.
var images = struct {
	sync.Once
	dir, public string
	sign        func(body []byte) (string, error)
}{}

const (
	oldPlan = "0123456789abcdef0123456789abcdef"
	newPlan = "fedcba9876543210fedcba9876543210"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if images.dir != "" {
		os.RemoveAll(images.dir)
	}
	os.Exit(code)
}

// initrd returns the initrd of an image. Half of the new image's initrd is new.
func initrd(plan string) []byte {
	b := make([]byte, 4<<20)
	rand.NewChaCha8([32]byte{1}).Read(b)
	if plan == newPlan {
		rand.NewChaCha8([32]byte{2}).Read(b[2<<20:])
	}
	return b
}

func makeImages(t *testing.T) {
	t.Helper()
	images.Do(func() {
		var err error
		if images.dir, err = os.MkdirTemp("", "edgebake-update-"); err != nil {
			t.Fatal(err)
		}
		public, key, err := minisign.GenerateKey(rand.NewChaCha8([32]byte{3}))
		if err != nil {
			t.Fatal(err)
		}
		images.public = public.String()
		images.sign = func(body []byte) (string, error) { return slot.SignIndex(body, key, mediatest.Date) }
		made := func(name, plan string, change func(*mediatest.Image)) {
			i := mediatest.Image{ID: plan, Seed: "same", Data: 4 << 20, FreeRoot: 6 << 20, FreeData: 1 << 20, Initrd: initrd(plan), ESP: 40 << 20,
				SignIndex: images.sign,
				Info: func(i *ondisk.ImageInfo) {
					i.UpdateSerial, i.UpdateKeys = 5, []string{images.public}
					i.Images = []ondisk.ImageRef{{Ref: "edgebake.test/pause:1", Digest: "sha256:aa"}}
				}}
			if change != nil {
				change(&i)
			}
			mediatest.Make(t, filepath.Join(images.dir, name), i)
		}
		nano := make([]byte, 1<<20)
		rand.NewChaCha8([32]byte{4}).Read(nano)
		with := func(i *mediatest.Image) { i.Files = map[string][]byte{"nano": nano} }
		made("old.raw", oldPlan, nil)
		made("old.raw.zst", oldPlan, nil)
		made("new.raw.zst", newPlan, with)
		made("new.raw", newPlan, with)
		made("later.raw.zst", newPlan, func(i *mediatest.Image) {
			with(i)
			info := i.Info
			i.Info = func(x *ondisk.ImageInfo) { info(x); x.UpdateSerial = 6 }
		})
		made("minor.raw.zst", newPlan, func(i *mediatest.Image) {
			with(i)
			info := i.Info
			i.Info = func(x *ondisk.ImageInfo) { info(x); x.Kubernetes = "v1.37.2" }
		})
		made("unsigned.raw.zst", newPlan, func(i *mediatest.Image) { with(i); i.SignIndex = nil })
		made("foreign.raw.zst", newPlan, func(i *mediatest.Image) {
			with(i)
			info := i.Info
			i.Info = func(x *ondisk.ImageInfo) {
				info(x)
				x.Arch, x.UpdateSerial, x.Kubernetes = "arm64", 4, "v1.37.0"
			}
		})
	})
}

func imagePath(name string) string { return filepath.Join(images.dir, name) }

// box is a machine whose disk is a file.
type box struct {
	t     testing.TB
	root  string
	disk  string
	parts map[string]gpt.Partition
	now   time.Time
	log   bytes.Buffer
	// effects counts the writes to the disk and the file system. At write number cut the power
	// fails; arrives is the share of it that is stored (of a file, all or nothing).
	effects, cut int
	arrives      float64
	rebooted     bool
	console      []string
	steps        []string
	free         int64 // on DATA
	unit         func(verb, unit string) error
}

// newBox returns a running machine that was flashed with the old image.
func newBox(t *testing.T) *box {
	t.Helper()
	makeImages(t)
	return boxOf(t, "old.raw")
}

// boxOf returns a running machine that was flashed with this image.
func boxOf(t testing.TB, image string) *box {
	t.Helper()
	b := &box{t: t, root: disktest.Scratch(t), now: mediatest.Date, parts: map[string]gpt.Partition{}, free: 90 << 20,
		unit: func(string, string) error { return nil }}
	b.disk = filepath.Join(b.root, "disk")
	disktest.Copy(t, imagePath(image), b.disk)
	f, err := os.Open(b.disk)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	table, err := gpt.Read(f, st.Size())
	if err != nil {
		t.Fatal(err)
	}
	const dev = "sys/devices/virtio/block/vda"
	b.put(dev+"/size", fmt.Sprint(st.Size()/512))
	for i, p := range table.Partitions {
		b.parts[p.Name] = p
		part := fmt.Sprintf("%s/vda%d", dev, i+1)
		b.put(part+"/partition", fmt.Sprint(i+1))
		b.put(part+"/start", fmt.Sprint(p.Start/512))
		b.put(part+"/size", fmt.Sprint(p.Size/512))
		b.put(part+"/uevent", "PARTNAME="+p.Name+"\nPARTUUID="+p.GUID+"\n")
	}
	b.link("../../devices/virtio/block/vda/vda3", "sys/dev/block/254:3")
	b.link("../../devices/virtio/block/vda/vda4", "sys/dev/block/254:4")
	b.put("proc/self/mountinfo", "20 1 254:3 / / rw - ext4 /dev/root rw\n")
	esp, err := fat.Open(io.NewSectionReader(f, b.parts[ondisk.LabelESP].Start, b.parts[ondisk.LabelESP].Size))
	if err != nil {
		t.Fatal(err)
	}
	err = esp.Walk(func(e fat.Entry) error {
		if e.Dir {
			return nil
		}
		text, err := esp.Read(e)
		b.put("efi/"+e.Path, string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	b.put(ondisk.ImageInfoFile, b.get("efi/"+ondisk.ESPImageInfo))
	b.put("run/x", "")
	return b
}

func (b *box) put(p, text string) {
	b.t.Helper()
	full := filepath.Join(b.root, p)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) link(to, p string) {
	b.t.Helper()
	full := filepath.Join(b.root, p)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.Symlink(to, full); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) get(p string) string {
	text, err := os.ReadFile(filepath.Join(b.root, p))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

var errPower = errors.New("the power is gone")

// effect counts one change of the machine. share is the share of the change that is stored.
func (b *box) effect() (share float64, err error) {
	b.effects++
	switch {
	case b.cut == 0 || b.effects < b.cut:
		return 1, nil
	case b.effects == b.cut:
		return b.arrives, errPower
	}
	return 0, errPower
}

// env returns the Env of the machine.
func (b *box) env() *machine.Env {
	files := host.Files{Root: b.root}
	do := func(path string, f func() error) error {
		if strings.HasPrefix(path, "/run/") { // lost at a power cut
			return f()
		}
		share, power := b.effect()
		if share < 1 {
			return power
		}
		return errors.Join(f(), power)
	}
	return &machine.Env{
		Root: b.root,
		Log:  slog.New(slog.NewTextHandler(&b.log, nil)),
		Clock: machine.Clock{Now: func() time.Time { return b.now }, Sleep: func(ctx context.Context, d time.Duration) error {
			b.now = b.now.Add(d)
			return ctx.Err()
		}},
		Files: machine.Files{
			WriteFile: func(p string, data []byte, o machine.Owner) error {
				return do(p, func() error { return files.WriteFile(p, data, o) })
			},
			Stream: func(p string, o machine.Owner, write func(io.Writer) error) error {
				return do(p, func() error { return files.Stream(p, o, write) })
			},
			Mkdir:     func(p string, o machine.Owner) error { return do(p, func() error { return files.Mkdir(p, o) }) },
			Remove:    func(p string) error { return do(p, func() error { return files.Remove(p) }) },
			RemoveAll: func(p string) error { return do(p, func() error { return files.RemoveAll(p) }) },
			WriteTree: func(ctx context.Context, dir string, blobs tree.Blobs, walk func(func(tree.Node) error) error) error {
				return files.WriteTree(ctx, dir, blobs, func(f func(tree.Node) error) error {
					return walk(func(n tree.Node) error { return do(dir, func() error { return f(n) }) })
				})
			},
			Sync: func(...string) error { return nil },
			Lock: files.Lock,
		},
		Programs: machine.Programs{
			Run: func(_ context.Context, c machine.Cmd) error {
				b.rebooted = b.rebooted || slices.Equal(c.Args, []string{"systemctl", "reboot"})
				return nil
			},
			Unit:      func(_ context.Context, verb, unit string) error { return b.unit(verb, unit) },
			UnitState: func(context.Context, string) (string, error) { return "inactive", nil },
		},
		Network: machine.Network{ProbeTimeout: time.Minute, Get: func(ctx context.Context, url string, header http.Header, _ []string) (*http.Response, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return nil, err
			}
			req.Header = header
			return http.DefaultTransport.RoundTrip(req)
		}},
		Output: machine.Output{Console: func(line string) { b.console = append(b.console, line) }},
		Slots:  machine.Slots{ReadSlot: func(string) (*slot.Contents, error) { return b.slot() }},
		FileSystems: machine.FileSystems{
			FSSize: func(string) (int64, error) { return 100 << 20, nil },
			FSFree: func(p string) (int64, error) {
				if p == espDir {
					return 40 << 20, nil
				}
				return b.free, nil
			},
			OpenDevice: func(p string, write bool) (machine.Device, error) {
				var n int
				if _, err := fmt.Sscanf(p, "/dev/vda%d", &n); err != nil {
					f, err := os.OpenFile(filepath.Join(b.root, p), os.O_RDWR|os.O_CREATE, 0o600)
					return &part{b: b, f: f, name: p}, err
				}
				f, err := os.OpenFile(b.disk, os.O_RDWR, 0)
				for _, x := range b.parts {
					if fmt.Sprintf("vda%d", slices.Index([]string{"", ondisk.LabelESP, ondisk.LabelSlot, ondisk.LabelRootA, ondisk.LabelRootB, ondisk.LabelData}, x.Name)) == filepath.Base(p) {
						return &part{b: b, f: f, name: p, start: x.Start, size: x.Size, write: write}, err
					}
				}
				return nil, errors.New("no " + p)
			},
		},
	}
}

// slot reads the slot of the box's disk.
func (b *box) slot() (*slot.Contents, error) {
	f, err := os.Open(b.disk)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p := b.parts[ondisk.LabelSlot]
	return slot.Read(io.NewSectionReader(f, p.Start, p.Size))
}

// part is a partition of the box's disk.
type part struct {
	b           *box
	f           *os.File
	name        string
	start, size int64
	write       bool
}

func (p *part) Name() string                            { return p.name }
func (p *part) Size() (int64, error)                    { return p.size, nil }
func (p *part) Sync() error                             { return nil }
func (p *part) Close() error                            { return p.f.Close() }
func (p *part) ReadAt(b []byte, off int64) (int, error) { return p.f.ReadAt(b, p.start+off) }
func (p *part) WriteAt(b []byte, off int64) (n int, err error) {
	if p.size > 0 && (!p.write || off+int64(len(b)) > p.size) {
		p.b.t.Errorf("%d bytes are written at %d of %s", len(b), off, p.name)
	}
	share, power := p.b.effect()
	n, err = p.f.WriteAt(b[:int(share*float64(len(b)))], p.start+off)
	return n, errors.Join(err, power)
}

func (b *box) order(o Options) error {
	b.steps = nil
	return Update(b.t.Context(), b.env(), o, func(s run.Step) { b.steps = append(b.steps, s.Name+" "+s.Status) })
}

// done returns the results of the steps.
func (b *box) done() string {
	return strings.Join(slices.DeleteFunc(slices.Clone(b.steps), func(s string) bool { return strings.HasSuffix(s, " waiting") || strings.HasSuffix(s, " note") }), ", ")
}

// partition returns the contents of a partition.
func (b *box) partition(label string) []byte {
	b.t.Helper()
	f, err := os.Open(b.disk)
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	out := make([]byte, b.parts[label].Size)
	if _, err := f.ReadAt(out, b.parts[label].Start); err != nil {
		b.t.Fatal(err)
	}
	return out
}

// imageRoot returns the root file system of the new image.
var imageRoot = sync.OnceValue(func() []byte {
	f, err := os.Open(imagePath("new.raw"))
	if err != nil {
		panic(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		panic(err)
	}
	table, err := gpt.Read(f, st.Size())
	if err != nil {
		panic(err)
	}
	for _, p := range table.Partitions {
		if p.Name == ondisk.LabelRootA {
			out := make([]byte, p.Size)
			if _, err := f.ReadAt(out, p.Start); err != nil {
				panic(err)
			}
			return out
		}
	}
	panic("no root")
})

const (
	entryA = "efi/loader/entries/edgebake-a.conf"
	entryB = "efi/loader/entries/edgebake-b+3.conf"
)

// bootable checks the state after a power cut: the old system is unchanged, and the
// new one is complete if it has a boot entry.
func (b *box) bootable() {
	b.t.Helper()
	if !strings.Contains(b.get(entryA), "/edgebake/"+oldPlan[:16]+"/linux") || b.get("efi/edgebake/"+oldPlan[:16]+"/initrd") != string(initrd(oldPlan)) {
		b.t.Fatal("the old system cannot boot")
	}
	if _, err := os.Stat(filepath.Join(b.root, entryB)); err == nil {
		b.updated()
	}
}

// updated checks that the new system is complete.
func (b *box) updated() {
	b.t.Helper()
	entry := b.get(entryB)
	for label, built := range map[string]string{ondisk.LabelRootB: ondisk.LabelRootA, ondisk.LabelData: ondisk.LabelData, ondisk.LabelESP: ondisk.LabelESP} {
		if !strings.Contains(entry, b.parts[label].GUID) {
			b.t.Errorf("the entry does not name %s (%s)", label, built)
		}
	}
	if strings.Contains(entry, b.parts[ondisk.LabelRootA].GUID) || !strings.Contains(entry, "\nversion 2\n") {
		b.t.Errorf("the entry:\n%s", entry)
	}
	if b.get("efi/edgebake/"+newPlan[:16]+"/initrd") != string(initrd(newPlan)) || b.get("efi/edgebake/"+newPlan[:16]+"/linux") != "kernel" {
		b.t.Error("kernel or initrd are not those of the image")
	}
	want := imageRoot()
	if got := b.partition(ondisk.LabelRootB); !bytes.Equal(got[:len(want)], want) {
		b.t.Error("the root is not that of the image")
	}
}

func TestUpdate(t *testing.T) {
	b := newBox(t)
	before := b.partition(ondisk.LabelRootA)
	if err := b.order(Options{Image: b.inside("new.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	if !b.rebooted || !bytes.Equal(before, b.partition(ondisk.LabelRootA)) {
		t.Errorf("restarted: %v; or the running root was changed", b.rebooted)
	}
	if got := b.done(); got != "cost done, retire done, root done, esp done, reboot done" {
		t.Error(got)
	}
	// The new system is marked as good. An update to the same image does nothing; an update
	// to the former image writes the first root.
	b.runs(ondisk.LabelRootB, "new.raw.zst")
	if err := b.order(Options{Image: b.inside("new.raw.zst")}); !errors.Is(err, run.ErrAlready) {
		t.Errorf("the image that runs: %v", err)
	}
	b.rebooted = false
	if err := b.order(Options{Image: b.inside("old.raw.zst"), NoReboot: true}); err != nil || b.rebooted {
		t.Fatalf("restarted: %v; %v", b.rebooted, err)
	}
	if !bytes.Equal(before, b.partition(ondisk.LabelRootA)) {
		t.Error("the root is not the one of the image")
	}
	if entry := b.get("efi/loader/entries/edgebake-a+3.conf"); !strings.Contains(entry, "\nversion 3\n") || !strings.Contains(entry, "root=PARTUUID="+b.parts[ondisk.LabelRootA].GUID) {
		t.Errorf("the entry:\n%s", entry)
	}
	if _, err := os.Stat(filepath.Join(b.root, entryA)); err == nil {
		t.Error("the root has two entries")
	}
}

// runs makes the machine run an image from a root, after its trial.
func (b *box) runs(root, image string) {
	b.t.Helper()
	n := 3 + strings.Index("AB", strings.TrimPrefix(root, "ROOT-"))
	b.put("proc/self/mountinfo", fmt.Sprintf("20 1 254:%d / / rw - ext4 /dev/root rw\n", n))
	entries := filepath.Join(b.root, "efi/loader/entries/edgebake-"+strings.ToLower(root[5:]))
	if err := os.Rename(entries+"+3.conf", entries+".conf"); err != nil {
		b.t.Fatal(err)
	}
	b.put(ondisk.ImageInfoFile, b.infoOf(image))
}

// infoOf returns an image's image.json.
func (b *box) infoOf(image string) string {
	b.t.Helper()
	file, err := os.ReadFile(imagePath(image))
	if err != nil {
		b.t.Fatal(err)
	}
	i, err := update.Open(bytes.NewReader(file), int64(len(file)))
	if err == nil {
		err = i.Decode()
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return string(i.Index.ImageInfo)
}

// inside copies an image into the machine, and returns its path there.
func (b *box) inside(name string) string {
	b.t.Helper()
	to := filepath.Join(b.root, "mnt", name)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if _, err := os.Stat(to); err != nil {
		disktest.Copy(b.t, imagePath(name), to)
	}
	return "/mnt/" + name
}

// TestPowerCuts makes the power fail at each change, of which nothing, a part or all is stored. The
// old system can boot, and the same command completes the update and downloads little again.
func TestPowerCuts(t *testing.T) {
	b := newBox(t)
	l := newLine(b, "new.raw.zst")
	if err := b.over(l, Options{}); err != nil {
		t.Fatal(err)
	}
	all, whole := b.effects, l.came
	want, shares := 200, []float64{0, 0.25, 0.5, 0.75, 1}
	if testing.Short() {
		want, shares = 10, []float64{0, 1}
	}
	var points []point
	for cut := 1; cut <= all; cut++ {
		for k, arrives := range shares {
			// The boot entry is written at the end, so all of these points are tested.
			if n, most := len(shares)*cut+k, len(shares)*all; cut > all-8 || n*want/most != (n-1)*want/most {
				points = append(points, point{cut, arrives})
			}
		}
	}
	t.Logf("%d points, of %d changes", len(points), all)
	if !testing.Short() && len(points) < 200 {
		t.Errorf("only %d points", len(points))
	}
	const workers = 4
	for i := range workers {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			for k := i; k < len(points) && !t.Failed(); k += workers {
				powerCut(t, points[k], all, whole)
			}
		})
	}
}

// point is a change at which the power fails, and the share of it that is stored.
type point struct {
	cut     int
	arrives float64
}

// powerCut cuts the power at point p of an update. Without the cut, the update
// makes all changes and downloads whole bytes.
func powerCut(t *testing.T, p point, all int, whole int64) {
	t.Helper()
	b := newBox(t)
	defer os.RemoveAll(b.root)
	l := newLine(b, "new.raw.zst")
	b.cut, b.arrives = p.cut, p.arrives
	if err := b.over(l, Options{}); !errors.Is(err, errPower) && p.cut < all-1 {
		t.Fatalf("cut at %d of %d: %v", p.cut, all, err)
	}
	b.bootable()
	b.cut = 0
	if err := b.over(l, Options{}); err != nil {
		t.Fatalf("cut at %d of %d, then: %v", p.cut, all, err)
	}
	b.updated()
	if again := l.came - whole; again > update.Tail+1+600<<10 {
		t.Errorf("cut at %d of %d: %d bytes were fetched again", p.cut, all, again)
	}
}

// web is a web server with an image. It counts the bytes that it sends.
type web struct {
	*httptest.Server
	mu       sync.Mutex
	image    []byte
	requests atomic.Int64
	sent     atomic.Int64
	// answer, if not nil, answers requests instead of the server.
	answer func(w http.ResponseWriter, r *http.Request, n int) bool
}

func serve(t *testing.T, name string) *web {
	t.Helper()
	makeImages(t)
	s := &web{}
	var err error
	if s.image, err = os.ReadFile(imagePath(name)); err != nil {
		t.Fatal(err)
	}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := int(s.requests.Add(1))
		s.mu.Lock()
		image := s.image
		s.mu.Unlock()
		if strings.Contains(r.Header.Get("Range"), ",") {
			t.Errorf("several ranges in one request: %s", r.Header.Get("Range"))
		}
		if s.answer != nil && s.answer(w, r, n) {
			return
		}
		http.ServeContent(&counting{w, &s.sent}, r, "", time.Time{}, bytes.NewReader(image))
	}))
	t.Cleanup(s.Close)
	return s
}

type counting struct {
	http.ResponseWriter
	n *atomic.Int64
}

// Write counts before it writes, so that a client that has the bytes sees them counted.
func (c *counting) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	n, err := c.ResponseWriter.Write(b)
	c.n.Add(int64(n - len(b)))
	return n, err
}

// TestFetch checks that only missing data is downloaded: the new file, and half of the initrd.
func TestFetch(t *testing.T) {
	b, s := newBox(t), serve(t, "new.raw.zst")
	if err := b.order(Options{Image: s.URL}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	if sent := s.sent.Load(); sent > 6<<20 || sent < 3<<20 {
		t.Errorf("%d of %d bytes were sent in %d requests", sent, len(s.image), s.requests.Load())
	}
	if n := s.requests.Load(); n > 40 {
		t.Errorf("%d requests", n)
	}
	// Again, as after a power cut before the restart: only the index is downloaded.
	s.sent.Store(0)
	if err := b.order(Options{Image: s.URL}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	if sent := s.sent.Load(); sent > 256<<10+1 {
		t.Errorf("%d bytes were sent again", sent)
	}
}

// TestManyServers checks that the servers behind one name may have different ETags for the same image.
func TestManyServers(t *testing.T) {
	b, s := newBox(t), serve(t, "new.raw.zst")
	s.answer = func(w http.ResponseWriter, _ *http.Request, n int) bool {
		w.Header().Set("ETag", fmt.Sprintf(`"%d"`, n%2))
		return false
	}
	if err := b.order(Options{Image: s.URL}); err != nil {
		t.Fatal(err)
	}
	b.updated()
}

// TestBrokenLine checks that a connection that breaks during every answer costs only the data in
// transit.
func TestBrokenLine(t *testing.T) {
	b, s := newBox(t), serve(t, "new.raw.zst")
	s.answer = func(w http.ResponseWriter, r *http.Request, n int) bool {
		if n%3 != 0 {
			return n%7 == 0 && func() bool { w.WriteHeader(http.StatusServiceUnavailable); return true }()
		}
		rec := httptest.NewRecorder()
		http.ServeContent(rec, r, "", time.Time{}, bytes.NewReader(s.image))
		for k, v := range rec.Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(rec.Code)
		w.Write(rec.Body.Bytes()[:rec.Body.Len()*2/3])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	if err := b.order(Options{Image: s.URL}); err != nil {
		t.Fatal(err)
	}
	b.updated()
}

// TestRejected checks that each fault of an image or its source is reported with its reason and
// changes nothing.
func TestRejected(t *testing.T) {
	whole := func(w http.ResponseWriter, _ *http.Request, _ int) bool { w.Write([]byte("whole")); return true }
	for _, c := range []struct {
		name    string
		image   string
		prepare func(b *box, s *web)
		o       Options
		want    []string
		late    bool // the other root may have been written
	}{
		{name: "unsigned", image: "unsigned.raw.zst", want: []string{"has no signature"}},
		{name: "another key", image: "new.raw.zst", prepare: func(b *box, _ *web) {
			other, _, err := minisign.GenerateKey(rand.NewChaCha8([32]byte{9}))
			if err != nil {
				b.t.Fatal(err)
			}
			b.put(ondisk.ImageInfoFile, strings.Replace(b.get(ondisk.ImageInfoFile), images.public, other.String(), 1))
		}, want: []string{"is signed by key"}},
		{name: "all reasons at once", image: "foreign.raw.zst", want: []string{"for arm64", "serial 4", "rejects serials below 5", "Kubernetes v1.37.0"}},
		{name: "raw", image: "new.raw", want: []string{"not a seekable zstd file"}},
		{name: "truncated", image: "new.raw.zst", prepare: func(_ *box, s *web) { s.image = s.image[:len(s.image)-100] }, want: []string{"truncated"}},
		{name: "changed index", image: "new.raw.zst", prepare: func(_ *box, s *web) {
			i := bytes.LastIndex(s.image, []byte(`"golden":"`))
			s.image = slices.Clone(s.image)
			s.image[i+12] ^= 1
		}, want: []string{"does not match"}},
		{name: "no ranges", image: "new.raw.zst", prepare: func(_ *box, s *web) { s.answer = whole }, want: []string{"does not support ranges"}},
		{name: "not found", image: "new.raw.zst", prepare: func(_ *box, s *web) {
			s.answer = func(w http.ResponseWriter, r *http.Request, _ int) bool { http.NotFound(w, r); return true }
		}, want: []string{"404"}},
		{name: "a 200 in the middle", image: "new.raw.zst", prepare: func(_ *box, s *web) {
			s.answer = func(w http.ResponseWriter, r *http.Request, n int) bool { return n > 3 && whole(w, r, n) }
		}, want: []string{"does not support ranges"}, late: true},
		{name: "replaced", image: "new.raw.zst", prepare: func(b *box, s *web) {
			other, err := os.ReadFile(imagePath("unsigned.raw.zst"))
			if err != nil {
				b.t.Fatal(err)
			}
			// The other image gets the same size, so only the contents differ.
			long := append(bytes.Repeat([]byte("x"), max(0, len(s.image)-len(other))), other...)
			s.answer = func(_ http.ResponseWriter, _ *http.Request, n int) bool {
				if n > 2 {
					s.mu.Lock()
					s.image = long[len(long)-len(s.image):]
					s.mu.Unlock()
				}
				return false
			}
		}, want: []string{"the image was replaced"}, late: true},
		{name: "damaged on the server", image: "new.raw.zst", prepare: func(b *box, s *web) {
			z, err := seekable.Open(bytes.NewReader(s.image), int64(len(s.image)))
			if err != nil {
				b.t.Fatal(err)
			}
			defer z.Close()
			s.image = slices.Clone(s.image)
			for i := range z.Frames() {
				if e := z.Entry(i); e.Compressed > 20<<10 {
					s.image[e.Offset+e.Compressed/2] ^= 0x55
				}
			}
		}, want: []string{"it does not match the index"}, late: true},
		{name: "a control plane", image: "new.raw.zst", prepare: func(b *box, _ *web) {
			b.put(ondisk.ManifestsDir+"/kube-apiserver.yaml", "")
		}, want: []string{"runs a control plane"}},
		{name: "still on trial", image: "new.raw.zst", prepare: func(b *box, _ *web) {
			if err := os.Rename(filepath.Join(b.root, entryA), filepath.Join(b.root, "efi/loader/entries/edgebake-a+2-1.conf")); err != nil {
				b.t.Fatal(err)
			}
		}, want: []string{"is still on trial"}},
		{name: "no way back", image: "new.raw.zst", prepare: func(b *box, _ *web) {
			if err := os.Remove(filepath.Join(b.root, entryA)); err != nil {
				b.t.Fatal(err)
			}
		}, want: []string{"the machine could not return to it"}},
		{name: "no keys", image: "new.raw.zst", prepare: func(b *box, _ *web) {
			b.put(ondisk.ImageInfoFile, strings.Replace(b.get(ondisk.ImageInfoFile), images.public, "", 1))
			b.put(ondisk.ImageInfoFile, strings.Replace(b.get(ondisk.ImageInfoFile), `"updateKeys":[""]`, `"updateKeys":[]`, 1))
		}, want: []string{"names no keys"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, s := newBox(t), serve(t, c.image)
			if c.prepare != nil {
				c.prepare(b, s)
			}
			before := b.partition(ondisk.LabelRootB)
			c.o.Image = s.URL
			err := b.order(c.o)
			for _, w := range c.want {
				if err == nil || !strings.Contains(err.Error(), w) {
					t.Errorf("%q is not in: %v", w, err)
				}
			}
			if !c.late && !bytes.Equal(before, b.partition(ondisk.LabelRootB)) {
				t.Error("the other root was written")
			}
			if _, err := os.Stat(filepath.Join(b.root, entryB)); err == nil || b.rebooted {
				t.Error("the new system has a boot entry, or the machine was restarted")
			}
		})
	}
}

// TestCancel checks that an update to the image that runs cancels one that waits for a restart: the
// machine keeps the running system, as it says.
func TestCancel(t *testing.T) {
	b := newBox(t)
	if err := b.order(Options{Image: b.inside("new.raw.zst"), NoReboot: true}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	err := b.order(Options{Image: b.inside("old.raw.zst")})
	if !errors.Is(err, run.ErrAlready) || !strings.Contains(err.Error(), "the update that waited for a restart is cancelled") {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(b.root, entryB)); err == nil || b.rebooted || b.status() != "interrupted ROOT-B" {
		t.Errorf("the new system has a boot entry, or the machine was restarted; %s", b.status())
	}
	b.bootable()
	if err := b.order(Options{Image: b.inside("new.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	b.updated()
}

// TestESPInUse checks that a program that reads the EFI system partition for a moment, such as firstboot status,
// does not make an update fail.
func TestESPInUse(t *testing.T) {
	b := newBox(t)
	busy := 3
	b.unit = func(verb, unit string) error {
		if busy--; unit == espUnit && busy >= 0 {
			return errors.New(`its job ended with "failed"`)
		}
		return nil
	}
	if err := b.order(Options{Image: b.inside("new.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	b.updated()
}

// TestBadDisk checks that if a disk returns bytes other than those written, no boot entry is
// written.
func TestBadDisk(t *testing.T) {
	b := newBox(t)
	e := b.env()
	open := e.OpenDevice
	e.OpenDevice = func(p string, write bool) (machine.Device, error) {
		d, err := open(p, write)
		if write && p == "/dev/vda4" {
			d = forgetful{d}
		}
		return d, err
	}
	err := Update(t.Context(), e, Options{Image: b.inside("new.raw.zst")}, func(run.Step) {})
	if !errors.Is(err, errReadBack) {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(filepath.Join(b.root, entryB)); err == nil {
		t.Error("the new system has a boot entry")
	}
}

// forgetful is a disk that loses a bit of all data written to it.
type forgetful struct{ machine.Device }

func (f forgetful) WriteAt(b []byte, off int64) (int, error) {
	b = bytes.Clone(b)
	b[len(b)/2] ^= 1
	return f.Device.WriteAt(b, off)
}

// TestProgress checks that progress is shown on a connection that delivers nothing for a while, and
// on one that takes hours.
func TestProgress(t *testing.T) {
	now, told := mediatest.Date, ""
	f := &fetcher{
		src: &file{name: "image"}, total: 2e9, now: func() time.Time { return now },
		tell: func(format string, args ...any) { told = fmt.Sprintf(format, args...) },
	}
	f.count(0)
	now = now.Add(10 * time.Second)
	f.count(0)
	if told != "image: 0.0 of 2000.0 MB" {
		t.Error(told)
	}
	now = now.Add(time.Hour - 10*time.Second)
	f.count(1e9)
	if told != "image: 1000.0 of 2000.0 MB, 1h0m0s left" {
		t.Error(told)
	}
}

// TestAbandoned checks that the system of an abandoned update is removed from the EFI system
// partition, even if the power failed just after its boot entry was removed. The running system
// stays.
func TestAbandoned(t *testing.T) {
	const dir = "efi/edgebake/aaaaaaaaaaaaaaaa"
	b := newBox(t)
	name := b.inside("new.raw.zst")
	b.put(dir+"/linux", "kernel")
	b.put("efi/loader/entries/edgebake-b.conf", "linux /edgebake/aaaaaaaaaaaaaaaa/linux\n")
	// The power fails just before the directory is removed.
	e := b.env()
	removeAll := e.RemoveAll
	e.RemoveAll = func(p string) error {
		if p == "/"+dir {
			return errPower
		}
		return removeAll(p)
	}
	if err := Update(t.Context(), e, Options{Image: name}, func(run.Step) {}); !errors.Is(err, errPower) {
		t.Fatal(err)
	}
	if err := b.order(Options{Image: name}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	b.bootable()
	if _, err := os.Stat(filepath.Join(b.root, dir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old system's files are left: %v", err)
	}
}
