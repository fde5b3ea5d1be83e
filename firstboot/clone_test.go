package firstboot

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/disktest"
)

// clone is another machine in the same state, with a cluster of its own, as
// the disk of a machine whose power was cut is looked at twice.
func (w *world) clone(t *testing.T) *world {
	t.Helper()
	return w.cloneWith(t, w.files())
}

// cloneWith is clone of a machine whose files were read already.
func (w *world) cloneWith(t *testing.T, files []entry) *world {
	t.Helper()
	c := &world{
		t: t, root: disktest.Scratch(t), slots: map[string]*memDevice{}, units: maps.Clone(w.units), started: maps.Clone(w.started),
		loaded: maps.Clone(w.loaded), zone: w.zone, deadDNS: w.deadDNS,
		console: slices.Clone(w.console), posted: slices.Clone(w.posted), now: w.now, wrong: w.wrong, deadlines: map[time.Time]time.Time{},
		randoms: w.randoms, cluster: w.cluster.clone(t), joins: w.joins, joinError: w.joinError, source: w.source,
		offline: w.offline, heard: w.heard, kubelet: w.kubelet, podConf: w.podConf, joinConf: w.joinConf, unregistered: w.unregistered, kubeletBroken: w.kubeletBroken, noNFT: w.noNFT,
		deafKubelet: w.deafKubelet, synced: w.synced, unsynced: maps.Clone(w.unsynced),
		sole: w.sole, boots: w.boots, effects: w.effects, names: slices.Clone(w.names), patience: w.patience,
	}
	c.log.Write(w.log.Bytes())
	c.cluster.of(c)
	for dev, d := range w.slots {
		c.slots[dev] = d.clone()
	}
	if err := makeFiles(c.root, files); err != nil {
		t.Fatal(err)
	}
	return c
}

// snapshot tells a machine and its cluster from others: two of the same go on in
// the same way. What was said so far is not part of it, and neither is the state,
// which TestStateDecidesNothing holds.
func (w *world) snapshot(t *testing.T, files []entry) [32]byte {
	t.Helper()
	h := sha256.New()
	for _, f := range files {
		if f.path == ondisk.StateFile {
			continue
		}
		fmt.Fprintf(h, "%s %v %d\n%s\n", f.path, f.mode, len(f.data), f.data)
	}
	for _, dev := range slices.Sorted(maps.Keys(w.slots)) {
		fmt.Fprintln(h, dev)
		for i, page := range w.slots[dev].pages {
			fmt.Fprintln(h, i, len(page))
			h.Write(page)
		}
	}
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	c := w.cluster
	rest, err := json.Marshal([]any{w.units, w.started, w.loaded, w.now, w.wrong, w.rules, w.randoms, w.joins, w.heard, w.podConf, w.unregistered, w.unsynced, c.nodes, c.down, c.csr, c.clientCSR, c.unpublished, c.objects, c.rules, c.marker, c.markerMode, c.configs, c.annotations, c.created, c.marked})
	if err != nil {
		t.Fatal(err)
	}
	h.Write(rest)
	return [32]byte(h.Sum(nil))
}

// cuttable is a machine whose power is cut: a world, or one around a world.
type cuttable[M any] interface {
	cloneWith(t *testing.T, files []entry) M
	snapshot(t *testing.T, files []entry) [32]byte
	machine() *world
}

func (w *world) machine() *world { return w }

// afterCut is what a test does with a machine whose power was cut.
type afterCut[M any] struct {
	// next turns the power on again. left are the files of the cut, goesOn boots
	// what has these files now.
	next func(t *testing.T, cut M, left []entry, goesOn func(kind string, m M, now []entry))
	// check looks at a machine that has booted again, said at what was said on one
	// that need not boot.
	check func(t *testing.T, m M, when string)
	said  func(t *testing.T, m M)
}

// everyCut is how many effects lie between two cuts of the power: with -short, one in
// four is tried.
func everyCut() int {
	if testing.Short() {
		return 4
	}
	return 1
}

// cutBefore cuts the power of machines like this one before each of so many effects
// of their first boot. A firstboot that was only killed starts again too. Cuts that
// leave the very same machine are followed once.
func cutBefore[M cuttable[M]](t *testing.T, m M, files []entry, count int, after afterCut[M]) {
	var followed sync.Map
	for n := 1; n <= count; n += everyCut() {
		t.Run(fmt.Sprintf("at %d", n), func(t *testing.T) {
			t.Parallel()
			cut := m.cloneWith(t, files)
			cut.machine().cutAt = n
			// Of the last words (state, report) a failure stops nobody.
			if err := cut.machine().boot(); err == nil && n < count-3 {
				t.Fatalf("cut at %d of %d: it went on without power", n, count)
			}
			at := cut.machine().names[len(cut.machine().names)-1]
			left := cut.machine().files()
			goesOn := func(kind string, m M, now []entry) {
				when := fmt.Sprintf("%s at %d (%s)", kind, n, at)
				if other, same := followed.LoadOrStore(m.snapshot(t, now), when); same {
					t.Logf("%s is as %s", when, other)
					after.said(t, m)
					return
				}
				if kind == "kill" { // whose power is still to go
					m = cut.cloneWith(t, left)
					m.machine().effects, m.machine().names = 0, nil
				}
				if err := m.machine().boot(); err != nil {
					t.Errorf("%s: %v\n%s", when, err, strings.Join(m.machine().console, "\n"))
					return
				}
				after.check(t, m, when)
			}
			goesOn("kill", cut, left)
			after.next(t, cut, left, goesOn)
		})
	}
}

// entry is a file of a machine, a directory or a link.
type entry struct {
	path string // below its root
	mode fs.FileMode
	data []byte // or where a link leads
}

// files are all of a machine, each behind the directory that it is in. A test
// that looks at thousands of machines reads each once.
func (w *world) files() []entry {
	w.t.Helper()
	var all []entry
	var below func(dir string) error
	below = func(dir string) error {
		entries, err := os.ReadDir(w.root + dir)
		for _, d := range entries {
			e := entry{path: dir + "/" + d.Name()}
			switch p := w.root + e.path; d.Type() {
			case 0:
				e.mode, e.data, err = readFile(p)
			case fs.ModeSymlink:
				var target string
				target, err = os.Readlink(p)
				e.mode, e.data = fs.ModeSymlink|0o777, []byte(target)
			default:
				var st fs.FileInfo
				if st, err = d.Info(); err == nil {
					e.mode = st.Mode()
				}
			}
			if err != nil {
				return err
			}
			all = append(all, e)
			if d.IsDir() {
				if err := below(e.path); err != nil {
					return err
				}
			}
		}
		return err
	}
	if err := below(""); err != nil {
		w.t.Fatal(err)
	}
	return all
}

// readFile is os.ReadFile, with the file's mode, by as few system calls as there
// can be.
func readFile(path string) (fs.FileMode, []byte, error) {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return 0, nil, err
	}
	var st syscall.Stat_t
	err = syscall.Fstat(fd, &st)
	b := make([]byte, st.Size)
	if err == nil && len(b) > 0 {
		var n int
		if n, err = syscall.Read(fd, b); err == nil && n < len(b) {
			err = io.ErrUnexpectedEOF
		}
	}
	mode := fs.FileMode(st.Mode & 0o777)
	if st.Mode&syscall.S_ISUID != 0 {
		mode |= fs.ModeSetuid
	}
	if st.Mode&syscall.S_ISGID != 0 {
		mode |= fs.ModeSetgid
	}
	if st.Mode&syscall.S_ISVTX != 0 {
		mode |= fs.ModeSticky
	}
	return mode, b, errors.Join(err, syscall.Close(fd))
}

func makeFiles(root string, files []entry) error {
	for _, f := range files {
		to, perm := root+f.path, f.mode.Perm()
		var err error
		switch {
		case f.mode.IsDir():
			if err = os.Mkdir(to, 0o755); err == nil && perm != 0o755 {
				err = os.Chmod(to, perm)
			}
		case f.mode&fs.ModeSymlink != 0:
			err = os.Symlink(string(f.data), to)
		default:
			err = makeFile(to, f.data, uint32(perm))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func makeFile(path string, b []byte, perm uint32) error {
	fd, err := syscall.Open(path, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_CLOEXEC, perm)
	if err != nil {
		return err
	}
	if len(b) > 0 {
		var n int
		if n, err = syscall.Write(fd, b); err == nil && n < len(b) {
			err = io.ErrShortWrite
		}
	}
	if perm&umask != 0 {
		err = errors.Join(err, syscall.Fchmod(fd, perm))
	}
	return errors.Join(err, syscall.Close(fd))
}

func (c *fakeCluster) clone(t *testing.T) *fakeCluster {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &fakeCluster{
		t: t, ca: c.ca, key: c.key, pem: c.pem, pin: c.pin, names: c.names, tls: c.tls, now: c.now, issued: c.issued,
		down: maps.Clone(c.down), births: c.births, noService: c.noService, made: maps.Clone(c.made), applied: slices.Clone(c.applied), marked: c.marked, marker: maps.Clone(c.marker), markerMode: c.markerMode, configs: maps.Clone(c.configs), annotations: maps.Clone(c.annotations), created: slices.Clone(c.created), noNotes: c.noNotes, webhookDown: c.webhookDown, unsigned: c.unsigned, revoked: c.revoked, nodes: map[string]*api.Node{}, notReady: c.notReady,
		csr: c.csr, clientCSR: c.clientCSR, revive: c.revive, noRBAC: c.noRBAC, noPool: c.noPool, poolType: c.poolType,
		refusesNode: c.refusesNode, labelsKept: c.labelsKept, pools: c.pools, noWebhook: c.noWebhook,
		requests: slices.Clone(c.requests), unpublished: c.unpublished, changed: c.changed, summary: c.summary, objects: slices.Clone(c.objects), rules: slices.Clone(c.rules),
	}
	for name, node := range c.nodes {
		m := *node
		m.Metadata.Labels, m.Metadata.Annotations = maps.Clone(node.Metadata.Labels), maps.Clone(node.Metadata.Annotations)
		m.Status.Conditions = slices.Clone(node.Status.Conditions)
		n.nodes[name] = &m
	}
	n.serve(t)
	return n
}

// memDevice is a block device in memory, as a list of pages of which nil is
// all zero. A page is never written to, so clones share them.
type memDevice struct{ pages [][]byte }

const pageSize = 16 << 10

func blankDevice(size int) *memDevice {
	return &memDevice{pages: make([][]byte, (size+pageSize-1)/pageSize)}
}

func newMemDevice(img []byte) *memDevice {
	m := blankDevice(len(img))
	m.WriteAt(img, 0)
	return m
}

func (m *memDevice) clone() *memDevice { return &memDevice{slices.Clone(m.pages)} }

func (m *memDevice) size() int64 { return int64(len(m.pages)) * pageSize }

func (m *memDevice) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > m.size() {
		return 0, errors.New("beyond the device")
	}
	for done := 0; done < len(p); {
		at := off + int64(done)
		page, from := m.pages[at/pageSize], int(at%pageSize)
		n := min(len(p)-done, pageSize-from)
		if page == nil {
			clear(p[done : done+n])
		} else {
			copy(p[done:done+n], page[from:])
		}
		done += n
	}
	return len(p), nil
}

func (m *memDevice) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > m.size() {
		return 0, fmt.Errorf("%d bytes at %d are beyond the device", len(p), off)
	}
	for done := 0; done < len(p); {
		at := off + int64(done)
		i, from := at/pageSize, int(at%pageSize)
		n := min(len(p)-done, pageSize-from)
		m.pages[i] = changed(m.pages[i], p[done:done+n], from)
		done += n
	}
	return len(p), nil
}

var zeros [pageSize]byte

// padding is a page of a report's room: most of what a slot holds.
var padding = bytes.Repeat([]byte("\n"), pageSize)

// changed is page with b written at an offset: the same one where that changes
// nothing.
func changed(page, b []byte, at int) []byte {
	old := page
	if old == nil {
		old = zeros[:]
	}
	if bytes.Equal(old[at:at+len(b)], b) {
		return page
	}
	switch {
	case len(b) < pageSize:
	case bytes.Equal(b, zeros[:]):
		return nil
	case bytes.Equal(b, padding):
		return padding
	}
	page = make([]byte, pageSize)
	copy(page, old)
	copy(page[at:], b)
	return page
}

func (m *memDevice) Sync() error { return nil }

// written is all of the device but long runs of zeros.
func (m *memDevice) written() []byte {
	pages := slices.Clone(m.pages)
	for i, p := range pages {
		if p == nil {
			pages[i] = zeros[:1]
		}
	}
	return bytes.Join(pages, nil)
}
