package merge

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
	"golang.org/x/sys/unix"
)

// Merge merges the store in From into the store in Into. It fails if containerd is running, because
// containerd has locked the databases.
func Merge(ctx context.Context, o Options) (*Report, error) {
	r, err := merge(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("merging the image store %s into %s: %w", o.From, o.Into, err)
	}
	return r, nil
}

func merge(ctx context.Context, o Options) (_ *Report, err error) {
	from, err := store.Read(filepath.Join(o.From, store.MetaDB), filepath.Join(o.From, store.SnapshotterDB))
	if err != nil {
		return nil, err
	}
	m := &merger{ctx: ctx, o: o}
	if err := m.makeDirs(); err != nil {
		return nil, err
	}
	live, err := store.OpenLive(m.into(store.MetaDB), m.into(store.SnapshotterDB))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, live.Close()) }()
	into, err := live.Read()
	if err != nil {
		return nil, err
	}
	// Verify the source first, because a damaged one must not damage the store in use.
	if _, err := store.Verify(m.source(from, into), "."); err != nil {
		return nil, fmt.Errorf("the store to be merged is damaged, copy it again: %w", err)
	}
	p, err := makePlan(from, into)
	if err != nil {
		return nil, err
	}
	if err := m.sweep(live); err != nil {
		return nil, err
	}
	r := &Report{Shared: p.shared, Snapshots: len(p.add), Added: []string{}}
	for _, i := range p.change.Images {
		r.Added = append(r.Added, i.Name)
	}
	if r.Blobs, err = m.copyFiles(p); err != nil {
		return nil, err
	}
	if err := m.record(live, into, p); err != nil {
		return nil, err
	}
	// Directories whose records AddSnapshots has removed are now unused.
	return r, m.sweep(live)
}

// copyFiles copies the blobs and snapshots of the plan, and syncs them. It returns the number of
// blobs that it had to copy.
func (m *merger) copyFiles(p *plan) (blobs int, err error) {
	for _, b := range p.change.Blobs {
		added, err := m.blob(b)
		if err != nil {
			return 0, err
		}
		if added {
			blobs++
		}
	}
	for _, s := range p.add {
		if err := m.snapshot(s, p.from[s.Key]); err != nil {
			return 0, fmt.Errorf("snapshot %s: %w", s.Key, err)
		}
	}
	return blobs, m.sync()
}

// record adds the plan to the databases: first the snapshots, then the images that use them.
func (m *merger) record(live *store.Live, into *store.State, p *plan) error {
	if len(p.add) > 0 {
		known := map[string]bool{}
		for _, s := range into.Snapshots {
			known[s.Backend] = true
		}
		if err := m.step("record snapshots"); err != nil {
			return err
		}
		if err := live.AddSnapshots(p.add, p.parents, p.sequence, known); err != nil {
			return err
		}
	}
	if err := m.step("record images"); err != nil {
		return err
	}
	return live.Apply(p.change)
}

type merger struct {
	ctx context.Context
	o   Options
}

func (m *merger) into(p string) string { return filepath.Join(m.o.Into, p) }
func (m *merger) from(p string) string { return filepath.Join(m.o.From, p) }

// scratch is the directory of incomplete files.
func (m *merger) scratch() string { return m.into("edgebake-merge") }

func (m *merger) step(format string, args ...any) error {
	if err := m.ctx.Err(); err != nil {
		return err
	}
	if m.o.Step == nil {
		return nil
	}
	return m.o.Step(fmt.Sprintf(format, args...))
}

// makeDirs creates the directories of a new store, with the modes that containerd uses.
func (m *merger) makeDirs() error {
	for _, d := range []struct {
		path string
		perm os.FileMode
	}{
		{".", 0o711},
		{store.ContentDir, 0o755}, {store.ContentDir + "/blobs", 0o755}, {store.ContentDir + "/blobs/sha256", 0o755}, {store.ContentDir + "/ingest", 0o755},
		{store.MetaDir, 0o711},
		{store.SnapshotterDir, 0o700}, {store.SnapshotterDir + "/snapshots", 0o700},
	} {
		if err := os.Mkdir(m.into(d.path), d.perm); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// source returns Files for the source store. It reads layers and blobs that the source lacks from
// the store in use, by chain ID or digest.
func (m *merger) source(from, into *store.State) store.Files {
	fs := func(s store.Snapshot) string { return store.SnapshotDir(s.ID) + "/fs" }
	have := map[string]string{} // directories by chain ID
	for _, s := range into.Snapshots {
		have[s.Key] = fs(s)
	}
	same := map[string]string{}
	for _, b := range from.Blobs {
		same[store.BlobPath(b.Digest)] = store.BlobPath(b.Digest)
	}
	for _, s := range from.Snapshots {
		same[fs(s)] = have[s.Key]
	}
	f, other := store.DirFiles(m.o.From), store.DirFiles(m.o.Into)
	stat, open := f.Stat, f.Open
	f.Stat = func(name string) (tree.Node, error) {
		n, err := stat(name)
		if to := same[name]; to != "" && errors.Is(err, os.ErrNotExist) {
			return other.Stat(to)
		}
		return n, err
	}
	f.Open = func(name string) (io.ReadCloser, error) {
		r, err := open(name)
		if to := same[name]; to != "" && errors.Is(err, os.ErrNotExist) {
			return other.Open(to)
		}
		return r, err
	}
	return f
}

// sweep removes the files that a killed run left: scratch files, and snapshot directories that are
// not in metadata.db.
func (m *merger) sweep(live *store.Live) error {
	if _, err := os.Lstat(m.scratch()); err == nil {
		if err := m.step("remove scratch"); err != nil {
			return err
		}
		if err := os.RemoveAll(m.scratch()); err != nil {
			return err
		}
	}
	known, err := live.Directories()
	if err != nil {
		return err
	}
	dir := m.into(store.SnapshotterDir + "/snapshots")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		id, err := strconv.ParseUint(e.Name(), 10, 64)
		if err != nil || known[id] {
			continue
		}
		if err := m.step("remove unreferenced snapshot %d", id); err != nil {
			return err
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// blob copies one file of the content store, unless it exists already.
func (m *merger) blob(b store.Blob) (added bool, err error) {
	to := m.into(store.BlobPath(b.Digest))
	if ok, err := hasDigest(to, b.Digest); err != nil || ok {
		return false, err
	}
	if err := m.step("copy blob %s", b.Digest); err != nil {
		return false, err
	}
	if err := os.MkdirAll(m.scratch(), 0o700); err != nil {
		return false, err
	}
	tmp := filepath.Join(m.scratch(), "blob")
	if err := copyFile(m.from(store.BlobPath(b.Digest)), tmp, 0o444); err != nil {
		return false, err
	}
	if ok, err := hasDigest(tmp, b.Digest); err != nil || !ok {
		return false, errors.Join(fmt.Errorf("blob %s was damaged while it was copied; run the merge again", b.Digest), err)
	}
	if err := m.step("place blob %s", b.Digest); err != nil {
		return false, err
	}
	return true, os.Rename(tmp, to)
}

func hasDigest(name, digest string) (bool, error) {
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return false, err
	}
	return "sha256:"+hex.EncodeToString(h.Sum(nil)) == digest, nil
}

func copyFile(from, to string, perm os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, perm)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}

// snapshot creates the directory of one snapshot.
func (m *merger) snapshot(s store.Snapshot, from uint64) error {
	src, dst := m.from(store.SnapshotDir(from)), m.into(store.SnapshotDir(s.ID))
	if err := m.step("copy snapshot %s", s.Key); err != nil {
		return err
	}
	if err := os.MkdirAll(m.scratch(), 0o700); err != nil {
		return err
	}
	tmp := filepath.Join(m.scratch(), strconv.FormatUint(s.ID, 10))
	c := copier{ctx: m.ctx, made: map[uint64]string{}}
	if err := c.tree(src, tmp); err != nil {
		return err
	}
	if err := m.step("place snapshot %s", s.Key); err != nil {
		return err
	}
	return os.Rename(tmp, dst)
}

// sync writes all files to disk before a database refers to them.
func (m *merger) sync() error {
	if err := m.step("sync"); err != nil {
		return err
	}
	d, err := os.Open(m.o.Into)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Syncfs(int(d.Fd()))
}

// copier copies trees, with hard links if possible. Sharing files is safe, because nothing writes
// to a committed snapshot.
type copier struct {
	ctx  context.Context
	copy bool              // copy contents, because the stores are on different file systems
	made map[uint64]string // maps an inode number in the source to its first copy
}

func (c *copier) tree(src, dst string) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(src, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: src, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return c.file(src, dst, &st)
	}
	if err := os.Mkdir(dst, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(src)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := c.tree(filepath.Join(src, e.Name()), filepath.Join(dst, e.Name())); err != nil {
			return err
		}
	}
	return metadata(src, dst, &st)
}

func (c *copier) file(src, dst string, st *unix.Stat_t) error {
	if !c.copy {
		err := os.Link(src, dst)
		if !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EMLINK) {
			return err
		}
		c.copy = errors.Is(err, unix.EXDEV)
	}
	if first, ok := c.made[st.Ino]; ok {
		return os.Link(first, dst)
	}
	c.made[st.Ino] = dst
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		err = copyContent(src, dst)
	case unix.S_IFLNK:
		var to string
		if to, err = os.Readlink(src); err == nil {
			err = os.Symlink(to, dst)
		}
	default:
		err = unix.Mknod(dst, st.Mode, int(st.Rdev))
	}
	if err != nil {
		return fmt.Errorf("copying %s: %w", src, err)
	}
	return metadata(src, dst, st)
}

// copyContent copies a file without syncing it, because all files are synced together later.
func copyContent(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// metadata copies owner, mode, extended attributes and times, in this order: chown(2), for example,
// clears set-user-ID bits and capabilities.
func metadata(src, dst string, st *unix.Stat_t) error {
	fail := func(err error) error { return fmt.Errorf("copying the metadata of %s: %w", src, err) }
	if err := unix.Lchown(dst, int(st.Uid), int(st.Gid)); err != nil {
		return fail(err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Chmod(dst, st.Mode&0o7777); err != nil {
			return fail(err)
		}
	}
	buf := make([]byte, 64<<10) // the kernel's limit for the list of names and for a value
	n, err := unix.Llistxattr(src, buf)
	if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fail(err)
	}
	names := strings.Split(string(buf[:max(n, 0)]), "\x00")
	for _, name := range slices.DeleteFunc(names, func(s string) bool { return s == "" }) {
		n, err := unix.Lgetxattr(src, name, buf)
		if err != nil {
			return fail(err)
		}
		if err := unix.Lsetxattr(dst, name, buf[:n], 0); err != nil {
			return fail(err)
		}
	}
	times := []unix.Timespec{st.Mtim, st.Mtim}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, dst, times, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fail(err)
	}
	return nil
}
