package worldtest

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
	"reflect"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/disktest"
)

// Clone returns a copy of the machine and its cluster.
func (w *World) Clone(t *testing.T) *World {
	t.Helper()
	return w.CloneWith(t, w.Files())
}

// CloneWith is Clone with these files, which Files has returned.
func (w *World) CloneWith(t *testing.T, files []Entry) *World {
	t.Helper()
	c := &World{
		T: t, Root: disktest.Scratch(t), Slots: map[string]*memDevice{}, Cluster: w.Cluster.clone(t), deadlines: map[time.Time]time.Time{},
		machineState: cloned(w.machineState), machineSettings: cloned(w.machineSettings),
	}
	c.Log.Write(w.Log.Bytes())
	c.Cluster.Attach(c)
	for dev, d := range w.Slots {
		c.Slots[dev] = d.Clone()
	}
	if err := makeFiles(c.Root, files); err != nil {
		t.Fatal(err)
	}
	return c
}

// Fingerprint returns a digest of the state of the machine and its cluster. It omits output and
// state.json, on which nothing depends (TestStateDecidesNothing).
func (w *World) Fingerprint(t *testing.T, files []Entry) [32]byte {
	t.Helper()
	h := sha256.New()
	for _, f := range files {
		if f.Path == ondisk.StateFile {
			continue
		}
		fmt.Fprintf(h, "%s %v %d\n%s\n", f.Path, f.Mode, len(f.Data), f.Data)
	}
	for _, dev := range slices.Sorted(maps.Keys(w.Slots)) {
		fmt.Fprintln(h, dev)
		for i, page := range w.Slots[dev].Pages {
			fmt.Fprintln(h, i, len(page))
			h.Write(page)
		}
	}
	w.Cluster.Mu.Lock()
	defer w.Cluster.Mu.Unlock()
	rest, err := json.Marshal([]any{w.machineState, w.Cluster.clusterState})
	if err != nil {
		t.Fatal(err)
	}
	h.Write(rest)
	return [32]byte(h.Sum(nil))
}

// cloned returns a copy of a struct that shares none of its maps and slices.
func cloned[S any](s S) S {
	v := reflect.ValueOf(&s).Elem()
	for i := range v.NumField() {
		switch f := v.Field(i); {
		case f.Kind() == reflect.Map && !f.IsNil():
			c := reflect.MakeMapWithSize(f.Type(), f.Len())
			for k, e := range f.Seq2() {
				c.SetMapIndex(k, e)
			}
			f.Set(c)
		case f.Kind() == reflect.Slice && !f.IsNil():
			c := reflect.MakeSlice(f.Type(), f.Len(), f.Len())
			reflect.Copy(c, f)
			f.Set(c)
		}
	}
	return s
}

// Entry is a file, directory or link of a machine.
type Entry struct {
	Path string // below its root
	Mode fs.FileMode
	Data []byte // content, or the target of a link
}

// Files returns all files of a machine, each after its directory.
func (w *World) Files() []Entry {
	w.T.Helper()
	var all []Entry
	var below func(dir string) error
	below = func(dir string) error {
		entries, err := os.ReadDir(w.Root + dir)
		for _, d := range entries {
			e := Entry{Path: dir + "/" + d.Name()}
			switch p := w.Root + e.Path; d.Type() {
			case 0:
				e.Mode, e.Data, err = readFile(p)
			case fs.ModeSymlink:
				var target string
				target, err = os.Readlink(p)
				e.Mode, e.Data = fs.ModeSymlink|0o777, []byte(target)
			default:
				var st fs.FileInfo
				if st, err = d.Info(); err == nil {
					e.Mode = st.Mode()
				}
			}
			if err != nil {
				return err
			}
			all = append(all, e)
			if d.IsDir() {
				if err := below(e.Path); err != nil {
					return err
				}
			}
		}
		return err
	}
	if err := below(""); err != nil {
		w.T.Fatal(err)
	}
	return all
}

// readFile is os.ReadFile with the file's mode, in few system calls.
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

func makeFiles(root string, files []Entry) error {
	for _, f := range files {
		to, perm := root+f.Path, f.Mode.Perm()
		var err error
		switch {
		case f.Mode.IsDir():
			if err = os.Mkdir(to, 0o755); err == nil && perm != 0o755 {
				err = os.Chmod(to, perm)
			}
		case f.Mode&fs.ModeSymlink != 0:
			err = os.Symlink(string(f.Data), to)
		default:
			err = makeFile(to, f.Data, uint32(perm))
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
	if perm&Umask != 0 {
		err = errors.Join(err, syscall.Fchmod(fd, perm))
	}
	return errors.Join(err, syscall.Close(fd))
}

// memDevice is a block device in memory: a list of pages, where nil is a page of zeros. Pages
// are replaced and never changed, so clones can share them.
type memDevice struct{ Pages [][]byte }

const pageSize = 16 << 10

func blankDevice(size int) *memDevice {
	return &memDevice{Pages: make([][]byte, (size+pageSize-1)/pageSize)}
}

func NewMemDevice(img []byte) *memDevice {
	m := blankDevice(len(img))
	m.WriteAt(img, 0)
	return m
}

func (m *memDevice) Clone() *memDevice { return &memDevice{slices.Clone(m.Pages)} }

func (m *memDevice) size() int64 { return int64(len(m.Pages)) * pageSize }

func (m *memDevice) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off+int64(len(p)) > m.size() {
		return 0, errors.New("beyond the device")
	}
	for done := 0; done < len(p); {
		at := off + int64(done)
		page, from := m.Pages[at/pageSize], int(at%pageSize)
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
		m.Pages[i] = changed(m.Pages[i], p[done:done+n], from)
		done += n
	}
	return len(p), nil
}

var zeros [pageSize]byte

// padding is one page of the padding of a report, which is most of a slot's contents.
var padding = bytes.Repeat([]byte("\n"), pageSize)

// changed returns page with b at an offset, or the same page if it is unchanged.
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

// Written returns the contents without pages of zeros.
func (m *memDevice) Written() []byte {
	pages := slices.Clone(m.Pages)
	for i, p := range pages {
		if p == nil {
			pages[i] = zeros[:1]
		}
	}
	return bytes.Join(pages, nil)
}

// Umask is the umask of the tests, so that most files need no chmod.
const Umask = 0o022
