package update

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
	format "github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/test/mediatest"
)

// slowLine is a web server on a slow connection. Its transfers advance the box's clock.
type slowLine struct {
	b     *box
	image []byte
	// rate is the number of bytes per second; piece is the size of the pieces in which they arrive.
	// lasts is the time after which the connection breaks; 0: never.
	rate, piece float64
	lasts       time.Duration
	requests    int
	came        int64
	sent        int64 // bytes of complete answers and of requests
	err         error // of each request
	status      int   // of each answer; 0: the range
}

func newLine(b *box, image string) *slowLine {
	b.t.Helper()
	file, err := os.ReadFile(imagePath(image))
	if err != nil {
		b.t.Fatal(err)
	}
	return &slowLine{b: b, image: file, rate: 1e6, piece: 64 << 10}
}

func (l *slowLine) get(_ context.Context, _ string, header http.Header, _ []string) (*http.Response, error) {
	l.requests++
	if l.err != nil {
		return nil, l.err
	}
	if l.status > 0 {
		return &http.Response{StatusCode: l.status, Status: fmt.Sprintf("%d %s", l.status, http.StatusText(l.status)), Body: io.NopCloser(strings.NewReader(""))}, nil
	}
	size := int64(len(l.image))
	from, to := size-1, size-1
	if r := header.Get("Range"); r != "bytes=-1" {
		if _, err := fmt.Sscanf(r, "bytes=%d-%d", &from, &to); err != nil {
			l.b.t.Fatal(err)
		}
	}
	l.sent += to - from + 1 + format.RequestBytes
	return &http.Response{
		StatusCode: http.StatusPartialContent,
		Header:     http.Header{"Content-Range": {fmt.Sprintf("bytes %d-%d/%d", from, to, size)}},
		Body:       &slowBody{l: l, r: bytes.NewReader(l.image[from : to+1]), began: l.b.now},
	}, nil
}

type slowBody struct {
	l     *slowLine
	r     *bytes.Reader
	began time.Time
}

func (s *slowBody) Read(p []byte) (int, error) {
	l := s.l
	if l.lasts > 0 && l.b.now.Sub(s.began) >= l.lasts {
		return 0, errors.New("connection reset by peer")
	}
	n, err := s.r.Read(p[:min(len(p), int(l.piece))])
	l.b.now = l.b.now.Add(time.Duration(float64(n) / l.rate * float64(time.Second)))
	l.came += int64(n)
	return n, err
}

func (s *slowBody) Close() error { return nil }

// over carries out an update over a simulated connection.
func (b *box) over(l *slowLine, o Options) error {
	e := b.env()
	e.Get = l.get
	o.Image = "https://images.example.com/new.raw.zst"
	return Update(b.t.Context(), e, o, func(s run.Step) { b.steps = append(b.steps, s.Name+" "+s.Status+" "+s.Detail) })
}

// TestLineThatDropsEachMinute checks that a connection that breaks each minute still transfers the
// image. Only bytes in transit are sent twice.
func TestLineThatDropsEachMinute(t *testing.T) {
	b := newBox(t)
	l := newLine(b, "new.raw.zst")
	if err := b.over(l, Options{}); err != nil {
		t.Fatal(err)
	}
	whole := l.came
	b = newBox(t)
	l = newLine(b, "new.raw.zst")
	l.rate, l.piece, l.lasts = 1500, 1000, time.Minute
	if err := b.over(l, Options{}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	if l.requests < 20 || l.came > whole+whole/50 {
		t.Errorf("%d requests, %d bytes came, %d on a good line", l.requests, l.came, whole)
	}
}

// TestStalledServer checks that a server that sends almost nothing does not delay an update
// forever.
func TestStalledServer(t *testing.T) {
	b := newBox(t)
	l := newLine(b, "new.raw.zst")
	l.rate, l.piece = 50, 1000
	began := b.now
	err := b.over(l, Options{})
	if err == nil || !strings.Contains(err.Error(), "bytes arrived in a minute") || !strings.Contains(run.Advice(err), "it continues") {
		t.Errorf("%v (%s)", err, run.Advice(err))
	}
	if took := b.now.Sub(began); took > 2*time.Hour {
		t.Errorf("it took too long: %s", took)
	}
}

func TestLimitRate(t *testing.T) {
	b := newBox(t)
	l := newLine(b, "new.raw.zst")
	began := b.now
	if err := b.over(l, Options{Rate: 100e3}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	if rate := float64(l.came) / b.now.Sub(began).Seconds(); rate > 101e3 || rate < 80e3 {
		t.Errorf("%.0f bytes a second", rate)
	}
}

// TestFinal checks that an error that a retry cannot fix ends the update at once.
func TestFinal(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(l *slowLine)
		want string
	}{
		{"redirect", func(l *slowLine) { l.err = fmt.Errorf("Get: %w: only https is allowed", machine.ErrRedirect) }, "only https"},
		{"truncated", func(l *slowLine) { l.image = l.image[:len(l.image)-100] }, "truncated"},
		{"damaged index", func(l *slowLine) {
			i := bytes.LastIndex(l.image, []byte{0x5d, 0x2a, 0x4d, 0x18})
			l.image = bytes.Clone(l.image)
			l.image[i+8] = 0 // its version
		}, "is damaged"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBox(t)
			l := newLine(b, "new.raw.zst")
			l.rate = 1e12
			c.do(l)
			began := b.now
			err := b.over(l, Options{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Error(err)
			}
			if l.requests > 4 || b.now.Sub(began) >= time.Second {
				t.Errorf("%d requests in %s", l.requests, b.now.Sub(began))
			}
		})
	}
	b := newBox(t)
	began := b.now
	if err := b.order(Options{Image: "/mnt/none.raw.zst"}); !errors.Is(err, os.ErrNotExist) || b.now != began {
		t.Errorf("a file that is not there: %v after %s", err, b.now.Sub(began))
	}
}

// TestUnreachable checks that an unreachable server is retried for a while.
func TestUnreachable(t *testing.T) {
	b := newBox(t)
	l := newLine(b, "new.raw.zst")
	l.err = errors.New("connection refused")
	began := b.now
	if err := b.over(l, Options{}); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Error(err)
	}
	if took := b.now.Sub(began); l.requests < 4 || took > 5*time.Minute {
		t.Errorf("%d requests in %s", l.requests, took)
	}
}

// site gives the box a Site with an unreachable API server.
func (b *box) site(e *machine.Env, lines ...string) {
	e.Dial = func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("network is unreachable")
	}
	doc := strings.Join(append([]string{
		"apiVersion: edgebake.io/v1alpha1", "kind: Site", "masters: ['192.0.2.11:6443', '192.0.2.12:6443']",
		"caCertHashes: ['sha256:" + strings.Repeat("ab", 32) + "']", "nodeName: edge1", "nodeType: native",
	}, lines...), "\n") + "\n"
	read := e.ReadSlot
	e.ReadSlot = func(dev string) (*slot.Contents, error) {
		c, err := read(dev)
		if errors.Is(err, slot.ErrNoSite) && c == nil {
			c = &slot.Contents{Info: ondisk.SlotInfo{Version: ondisk.SlotInfoVersion}}
		}
		if c != nil {
			c.Files, err = map[string][]byte{ondisk.SlotSite: []byte(doc)}, nil
		}
		return c, err
	}
}

// TestMetered checks that with a metered Site the user must set a limit, which is never exceeded.
func TestMetered(t *testing.T) {
	b := newBox(t)
	before := b.partition(ondisk.LabelRootB)
	l := newLine(b, "new.raw.zst")
	order := func(o Options) error {
		e := b.env()
		e.Get = l.get
		b.site(e, "ipvs: {profile: metered}")
		return Update(t.Context(), e, o, func(run.Step) {})
	}
	const url = "https://images.example.com/new.raw.zst"
	if err := order(Options{Image: url}); err == nil || !strings.Contains(err.Error(), "metered") || !strings.Contains(run.Advice(err), "--max-bytes") || l.requests > 0 {
		t.Errorf("%v, %d requests", err, l.requests)
	}
	if err := order(Options{Image: url, MaxBytes: 1e6}); err == nil || !strings.Contains(err.Error(), "--max-bytes allows 1.0 MB") || l.came > 1e6 {
		t.Errorf("%v, %d bytes came", err, l.came)
	}
	if !bytes.Equal(before, b.partition(ondisk.LabelRootB)) {
		t.Error("the other root was written")
	}
	l.came = 0
	if err := order(Options{Image: url, MaxBytes: 8e6}); err != nil {
		t.Fatal(err)
	}
	if l.came > 8e6 {
		t.Errorf("%d bytes came", l.came)
	}
	b.updated()
	if err := order(Options{Image: b.inside("new.raw.zst")}); err != nil {
		t.Errorf("from a file: %v", err)
	}
}

// TestCostOfOverwrittenChunks checks that chunks that are only on the other root, where they are overwritten
// before they are needed, count as missing. Otherwise --max-bytes would end the update halfway.
func TestCostOfOverwrittenChunks(t *testing.T) {
	update := func(most int64) (*box, *slowLine, error) {
		b := newBox(t)
		f, err := os.OpenFile(b.disk, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt(imageRoot()[1<<20:], b.parts[ondisk.LabelRootB].Start); err != nil {
			t.Fatal(err)
		}
		l := newLine(b, "new.raw.zst")
		return b, l, b.over(l, Options{MaxBytes: most})
	}
	b, l, err := update(64e6)
	if err != nil {
		t.Fatal(err)
	}
	b.updated()
	before := newBox(t).partition(ondisk.LabelRootB)
	copy(before, imageRoot()[1<<20:])
	b, l, err = update(l.sent - 512<<10)
	if err == nil || !strings.Contains(err.Error(), "the update needs") || !bytes.Equal(before, b.partition(ondisk.LabelRootB)) {
		t.Errorf("%v after %d bytes; or the other root was written", err, l.sent)
	}
}

// plug puts a stick with FAT32 into the box, with a copy of each image.
func (b *box) plug(name string, images ...string) {
	b.t.Helper()
	dev := "sys/devices/usb/" + name
	b.put(dev+"/size", "1000000")
	b.put(dev+"/"+name+"1/partition", "1")
	if _, err := os.Lstat(filepath.Join(b.root, "sys/block", name)); err != nil {
		b.link("../devices/usb/"+name, "sys/block/"+name)
	}
	b.put("dev/"+name+"1", "")
	f, err := os.OpenFile(filepath.Join(b.root, "dev", name+"1"), os.O_RDWR, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	nodes := []tree.Node{{Path: "notes.txt", Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes([]byte("x"))}}}
	for _, i := range images {
		image, err := os.ReadFile(imagePath(i))
		if err != nil {
			b.t.Fatal(err)
		}
		nodes = append(nodes, tree.Node{Path: i, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes(image)}})
	}
	const size = 64 << 20
	if err = f.Truncate(size); err == nil {
		err = fat.Write(f, nodes, nil, fat.Options{Type: 32, Size: size})
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// TestStick checks that the only suitable image on the sticks is used.
func TestStick(t *testing.T) {
	b := newBox(t)
	order := func() error { return b.order(Options{Image: Stick, NoReboot: true}) }
	if err := order(); err == nil || !strings.Contains(err.Error(), "no stick in this machine has an image") {
		t.Error(err)
	}
	b.plug("sda", "foreign.raw.zst", "unsigned.raw.zst")
	err := order()
	for _, want := range []string{"/dev/sda1/foreign.raw.zst: the image is for arm64", "unsigned.raw.zst: the image's chunk index has no signature"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	b.plug("sdb", "new.raw.zst", "old.raw.zst")
	if err := order(); err != nil {
		t.Fatal(err)
	}
	b.updated()
	b.plug("sdc", "new.raw.zst")
	if err := order(); err == nil || !strings.Contains(err.Error(), "accepts two of the images") {
		t.Error(err)
	}
}

// TestStickByItself checks that a stick with a signed image and a higher serial updates the machine
// automatically. A stick that stays plugged in does nothing more.
func TestStickByItself(t *testing.T) {
	for _, c := range []struct {
		name, image, change, want string
		taken                     bool
	}{
		{name: "higher serial", image: "later.raw.zst", taken: true, want: "the system of " + newPlan + " (serial 6, Kubernetes v1.36.3) is installed: remove the stick. The machine restarts into the new system in 1m0s"},
		{name: "the same serial", image: "new.raw.zst"},
		{name: "the image that runs", image: "old.raw.zst"},
		{name: "unsigned", image: "unsigned.raw.zst", want: "the image's chunk index has no signature"},
		{name: "of another key", image: "later.raw.zst", change: "key", want: "is signed by key"},
		{name: "no keys", image: "later.raw.zst", change: "no keys"},
		{name: "sticks are not looked at", image: "later.raw.zst", change: "never"},
		{name: "on trial", image: "later.raw.zst", change: "on trial"},
		{name: "no image", image: ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBox(t)
			info := b.get(ondisk.ImageInfoFile)
			switch c.change {
			case "key", "no keys":
				other := ""
				if c.change == "key" {
					public, _, err := minisign.GenerateKey(rand.NewChaCha8([32]byte{9}))
					if err != nil {
						t.Fatal(err)
					}
					other = `"` + public.String() + `"`
				}
				info = strings.Replace(info, `"`+images.public+`"`, other, 1)
			case "never":
				info = strings.Replace(info, `"arch"`, `"removable":"never","arch"`, 1)
			case "on trial":
				b.put(machine.BootCountFile, "\x06\x00\x00\x00\\\x00x\x00")
				b.put("efi/x", "")
			}
			b.put(ondisk.ImageInfoFile, info)
			b.put(ondisk.HealthyFile, "")
			if c.image == "" {
				b.plug("sda")
			} else {
				b.plug("sda", c.image)
			}
			err := FromStick(t.Context(), b.env())
			console := strings.Join(b.console, "\n")
			if b.rebooted != c.taken || c.taken && err != nil {
				t.Fatalf("restarted: %v, %v\n%s", b.rebooted, err, console)
			}
			if !strings.Contains(console, c.want) || c.want == "" && console != "" {
				t.Errorf("console:\n%s", console)
			}
			if !c.taken {
				return
			}
			// The stick stays plugged in, and the new system runs.
			b.runs(ondisk.LabelRootB, c.image)
			b.rebooted, b.console = false, nil
			if err := FromStick(t.Context(), b.env()); err != nil || b.rebooted || b.console != nil {
				t.Errorf("again: %v, restarted: %v, %q", err, b.rebooted, b.console)
			}
		})
	}
}

// TestStickAfterFailure checks that a stick whose system has failed does not install it again at
// each boot.
func TestStickAfterFailure(t *testing.T) {
	b := newBox(t)
	b.put(ondisk.HealthyFile, "")
	b.plug("sda", "later.raw.zst")
	if err := FromStick(t.Context(), b.env()); err != nil || !b.rebooted {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(b.root, entryB), filepath.Join(b.root, "efi/loader/entries/edgebake-b+0-3.conf")); err != nil {
		t.Fatal(err)
	}
	if err := Finish(t.Context(), b.env()); err != nil {
		t.Fatal(err)
	}
	b.rebooted, b.console = false, nil
	if err := FromStick(t.Context(), b.env()); err == nil || b.rebooted || !strings.Contains(strings.Join(b.console, "\n"), "this machine has tried this image and returned to the previous system") {
		t.Errorf("%v, restarted: %v, %q", err, b.rebooted, b.console)
	}
	if err := b.order(Options{Image: Stick}); err != nil || !b.rebooted {
		t.Errorf("by hand: %v", err)
	}
}

// failsB makes the new system in ROOT-B fail, and boots the former one.
func (b *box) failsB() {
	b.t.Helper()
	if err := os.Rename(filepath.Join(b.root, entryB), filepath.Join(b.root, "efi/loader/entries/edgebake-b+0-3.conf")); err != nil {
		b.t.Fatal(err)
	}
	if err := Finish(b.t.Context(), b.env()); err != nil {
		b.t.Fatal(err)
	}
	b.rebooted, b.console = false, nil
}

const latestPlan = "abababababababababababababababab"

// makeLatest makes latest.raw.zst, whose serial is higher than that of later.raw.zst.
func makeLatest(t *testing.T) {
	if _, err := os.Stat(imagePath("latest.raw.zst")); err == nil {
		return
	}
	mediatest.Make(t, imagePath("latest.raw.zst"), mediatest.Image{ID: latestPlan, Seed: "same", Data: 4 << 20, FreeRoot: 6 << 20, FreeData: 1 << 20, Initrd: initrd(latestPlan), ESP: 40 << 20,
		SignIndex: images.sign,
		Info: func(i *ondisk.ImageInfo) {
			i.UpdateSerial, i.UpdateKeys = 7, []string{images.public}
			i.Images = []ondisk.ImageRef{{Ref: "edgebake.test/pause:1", Digest: "sha256:aa"}}
		}})
}

// TestCutOffIsNoFailure checks that an image whose update was interrupted before its first boot
// does not count as failed.
func TestCutOffIsNoFailure(t *testing.T) {
	makeImages(t)
	makeLatest(t)
	for n := 1; n < 12; n++ {
		b := newBox(t)
		if err := b.order(Options{Image: b.inside("later.raw.zst")}); err != nil {
			t.Fatal(err)
		}
		b.failsB()
		b.cut, b.effects = n, 0
		if err := b.order(Options{Image: b.inside("latest.raw.zst")}); !errors.Is(err, errPower) {
			t.Fatal(err)
		}
		b.cut = 0
		if got, err := failedPlans(b.env()); err != nil || !slices.Equal(got, []string{newPlan}) {
			t.Errorf("cut at %d: failed: %q, %v, %s", n, got, err, b.status())
		}
	}
}

// TestUnreadablePlan checks that an order is not recorded as failed, and that Finish fails, while
// the plan of the last update cannot be read.
func TestUnreadablePlan(t *testing.T) {
	b := newBox(t)
	record, err := json.Marshal(orderRecord{Version: orderRecordVersion, State: order.StateRestarting, Plan: newPlan})
	if err != nil {
		t.Fatal(err)
	}
	b.put(OrderFile, string(record))
	plan := filepath.Join(b.root, planFile)
	if err := os.MkdirAll(plan, 0o700); err != nil { // a directory cannot be read
		t.Fatal(err)
	}
	o := &orders{e: b.env()}
	for what, err := range map[string]error{"the order": o.load(), "Finish": Finish(t.Context(), b.env())} {
		if err == nil || !strings.Contains(err.Error(), plan) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if o.record.State != order.StateRestarting {
		t.Errorf("the order is recorded as %q: %s", o.record.State, o.record.Reason)
	}
}

// TestUnreadableFailures checks that no order and no stick installs an image while the list of the
// failed ones cannot be read, and that the list is not replaced.
func TestUnreadableFailures(t *testing.T) {
	b := newBox(t)
	list := filepath.Join(b.root, failedFile)
	if err := os.MkdirAll(list, 0o700); err != nil { // a directory cannot be read
		t.Fatal(err)
	}
	u := &job{e: b.env(), sys: &system{}, o: Options{byItself: true}}
	u.next.UpdateSerial = 1
	for name, err := range map[string]error{
		"an order":    (&orders{e: b.env()}).mayTry(order.Order{}, newPlan),
		"a stick":     u.takesByItself(),
		"a recording": noteFailed(b.env()),
	} {
		if err == nil || !strings.Contains(err.Error(), list) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestStickTriesEachImageOnce checks two images on a stick that both fail. Each is tried once, even
// if another update runs in between.
func TestStickTriesEachImageOnce(t *testing.T) {
	b := newBox(t)
	makeLatest(t)
	b.put(ondisk.HealthyFile, "")
	b.plug("sda", "later.raw.zst")
	var taken []string
	for boot := range 5 {
		switch boot {
		case 1:
			b.plug("sda", "later.raw.zst", "latest.raw.zst")
		case 3: // an update by hand begins, and is interrupted
			b.cut, b.effects = 20, 0
			if err := b.order(Options{Image: b.inside("new.raw.zst")}); !errors.Is(err, errPower) || b.status() != "interrupted ROOT-B" {
				t.Fatalf("%v, %s", err, b.status())
			}
			b.cut = 0
		}
		if err := FromStick(t.Context(), b.env()); b.rebooted != (err == nil) {
			t.Errorf("boot %d: restarted: %v, %v", boot, b.rebooted, err)
		}
		if b.rebooted {
			taken = append(taken, b.get(planFile))
			b.failsB()
		}
	}
	if !slices.Equal(taken, []string{newPlan + "\n", latestPlan + "\n"}) {
		t.Errorf("taken: %q", taken)
	}
	b.plug("sda", "later.raw.zst")
	if err := b.order(Options{Image: Stick}); err != nil || !b.rebooted {
		t.Errorf("by hand: %v", err)
	}
}

// TestStickWaitsForAnotherUpdate checks that a stick that is plugged in during another update waits
// for the end of that update.
func TestStickWaitsForAnotherUpdate(t *testing.T) {
	b := newBox(t)
	b.put(ondisk.HealthyFile, "")
	b.plug("sda", "later.raw.zst")
	e := b.env()
	lock, locked := e.Lock, 0
	e.Lock = func(ctx context.Context, p string) (func(), error) {
		if locked++; locked < 4 {
			return nil, machine.ErrLocked
		}
		return lock(ctx, p)
	}
	if err := FromStick(t.Context(), e); err != nil || !b.rebooted {
		t.Fatalf("%v, restarted: %v", err, b.rebooted)
	}
	if console := strings.Join(b.console, "\n"); strings.Contains(console, "at work") {
		t.Errorf("console:\n%s", console)
	}
	e.Lock = func(context.Context, string) (func(), error) { return nil, machine.ErrLocked }
	began := b.now
	if err := FromStick(t.Context(), e); err == nil || !strings.Contains(err.Error(), "another update, convert, revert or reset is running") || b.now.Sub(began) < stickPatience {
		t.Errorf("after %s: %v", b.now.Sub(began), err)
	}
}

// scatter moves the file of this size on the FAT32 in f to a chain of clusters at the end, no
// two of which are adjacent. Their number is odd.
func scatter(t *testing.T, f *os.File, size int64, clusters int) {
	t.Helper()
	boot, dir := make([]byte, 512), make([]byte, 512)
	if _, err := f.ReadAt(boot, 0); err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	sector := int64(le.Uint16(boot[11:]))
	cluster := sector * int64(boot[13])
	table := int64(le.Uint16(boot[14:])) * sector
	top := table + int64(boot[16])*int64(le.Uint32(boot[36:]))*sector
	first := int((int64(le.Uint32(boot[32:]))*sector-top)/cluster) + 2 - clusters
	chain := make([]byte, clusters*4)
	for i := range clusters {
		le.PutUint32(chain[i*4:], uint32(first+(i+2)%clusters))
	}
	if _, err := f.WriteAt(chain, table+int64(first)*4); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(dir, top); err != nil {
		t.Fatal(err)
	}
	for at := 0; ; at += 32 {
		if at == len(dir) {
			t.Fatalf("no file of %d bytes", size)
		}
		if x := dir[at:]; x[11] != 0x0f && int64(le.Uint32(x[28:])) == size {
			le.PutUint16(x[20:], uint16(first>>16))
			le.PutUint16(x[26:], uint16(first))
			le.PutUint32(x[28:], uint32(int64(clusters)*cluster))
			break
		}
	}
	if _, err := f.WriteAt(dir, top); err != nil {
		t.Fatal(err)
	}
}

// TestStickInPieces checks that a file with very many extents is rejected, and does not hide
// another image.
func TestStickInPieces(t *testing.T) {
	b := newBox(t)
	b.put(ondisk.HealthyFile, "")
	const size = 1000
	if err := os.WriteFile(imagePath("a.raw.zst"), make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	b.plug("sda", "a.raw.zst", "later.raw.zst")
	f, err := os.OpenFile(filepath.Join(b.root, "dev/sda1"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	scatter(t, f, size, maxExtents+1)
	err = b.order(Options{Image: Stick, NoReboot: true, Golden: "other"})
	for _, want := range []string{"a.raw.zst: it is in more than 65536 pieces on the stick", "later.raw.zst: its golden digest is"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, i := range imagesOnSticks(b.env()) {
		if _, err := i.open(ctx, b.env()); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", i.name, err)
		}
	}
	if err := FromStick(t.Context(), b.env()); err != nil || !b.rebooted {
		t.Errorf("%v, restarted: %v", err, b.rebooted)
	}
}

// TestStickAnnouncesLast checks that the restart is announced only once nothing can prevent it.
func TestStickAnnouncesLast(t *testing.T) {
	b := newBox(t)
	c, e := b.member("v1.37.2")
	b.put(ondisk.ImageInfoFile, strings.Replace(b.get(ondisk.ImageInfoFile), `"updateSerial":5`, `"updateSerial":4`, 1))
	b.put(ondisk.HealthyFile, "")
	b.plug("sda", "minor.raw.zst")
	c.Pods = []kubeapi.Pod{pod("guarded", "StatefulSet")}
	leaves := false
	c.Disrupt = func(string) bool { return leaves }
	announced := func() bool {
		return strings.Contains(strings.Join(b.console, "\n"), "The machine restarts into the new system in")
	}
	if err := FromStick(t.Context(), e); err == nil || !strings.Contains(err.Error(), "these pods are still on the Node") || b.rebooted || announced() {
		t.Errorf("%v, restarted: %v\n%s", err, b.rebooted, strings.Join(b.console, "\n"))
	}
	leaves = true
	if err := FromStick(t.Context(), e); err != nil || !b.rebooted || !announced() {
		t.Errorf("%v, restarted: %v\n%s", err, b.rebooted, strings.Join(b.console, "\n"))
	}
}

// TestStickPulledOut checks that a stick that is unplugged too early only has to be plugged in
// again.
func TestStickPulledOut(t *testing.T) {
	b := newBox(t)
	b.put(ondisk.HealthyFile, "")
	b.plug("sda", "later.raw.zst")
	e := b.env()
	openDevice := e.OpenDevice
	e.OpenDevice = func(p string, write bool) (machine.Device, error) {
		d, err := openDevice(p, write)
		if p == "/dev/sda1" {
			d = pulled{d, b}
		}
		return d, err
	}
	if err := FromStick(t.Context(), e); err == nil || b.rebooted || !strings.Contains(strings.Join(b.console, "\n"), "update from the stick: ") {
		t.Errorf("%v, restarted: %v, %q", err, b.rebooted, b.console)
	}
	b.bootable()
	if err := FromStick(t.Context(), b.env()); err != nil || !b.rebooted {
		t.Error(err)
	}
}

// pulled is a stick that is unplugged once the other root is written.
type pulled struct {
	machine.Device
	b *box
}

func (p pulled) ReadAt(b []byte, off int64) (int, error) {
	if slices.Contains(p.b.console, "update from the stick: retire done") {
		return 0, errors.New("input/output error")
	}
	return p.Device.ReadAt(b, off)
}

// TestReadAfterTheCount checks chunks on the disk that have changed between the computation of the
// cost and their use. They are downloaded.
func TestReadAfterTheCount(t *testing.T) {
	b, s := newBox(t), serve(t, "new.raw.zst")
	e := b.env()
	sys, err := readSystem(e)
	if err != nil {
		t.Fatal(err)
	}
	u, err := openNamed(t.Context(), e, sys, Options{Image: s.URL}, func(run.Step) {})
	if err != nil {
		t.Fatal(err)
	}
	defer u.close()
	u.note = func(string) {}
	ctx, cancel := context.WithCancel(t.Context())
	if err := u.cost(ctx, e); err != nil {
		t.Fatal(err)
	}
	cancel()
	clear(u.fetch.onDisk)
	for _, f := range u.boot.Files {
		if err := u.boot.Copy(io.Discard, f); err != nil {
			t.Errorf("%s: %v", f.Path, err)
		}
	}
}

// TestDamagedChunks checks that a server that sends good and damaged chunks in turn does not make a
// machine fetch without end.
func TestDamagedChunks(t *testing.T) {
	b := newBox(t)
	l := newLine(b, "new.raw.zst")
	e := b.env()
	e.Get = spoil(t, l)
	if err := Update(t.Context(), e, Options{Image: imageURL}, func(run.Step) {}); !errors.Is(err, errDamaged) || l.requests > 4*maxDamaged {
		t.Errorf("%v after %d requests", err, l.requests)
	}
}

// flipping is a device that stores one bit of each chunk wrongly.
type flipping struct{ machine.Device }

func (f flipping) ReadAt(b []byte, off int64) (int, error) {
	n, err := f.Device.ReadAt(b, off)
	if n == len(b) {
		b[n/2] ^= 1
	}
	return n, err
}

// TestBadSpool checks that a chunk that DATA returns otherwise than it was written is not installed.
func TestBadSpool(t *testing.T) {
	b := newBox(t)
	e := b.env()
	open := e.OpenDevice
	e.OpenDevice = func(p string, write bool) (machine.Device, error) {
		d, err := open(p, write)
		if p == spoolFile {
			return flipping{d}, err
		}
		return d, err
	}
	err := Update(t.Context(), e, Options{Image: b.inside("new.raw.zst")}, func(run.Step) {})
	if _, entry := os.Stat(filepath.Join(b.root, entryB)); !errors.Is(err, errReadBack) || entry == nil {
		t.Errorf("%v; the boot entry: %v", err, entry)
	}
}
