package merge

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
	"golang.org/x/sys/unix"
)

func needRoot(t *testing.T) {
	t.Helper()
	desk.NeedRoot(t, "it makes files of others")
}

// bakeInto writes a store with these images below dir and returns its root.
func bakeInto(t *testing.T, dir string, imgs ...imagetest.Image) string {
	t.Helper()
	layout := filepath.Join(t.TempDir(), "layout")
	if _, err := imagetest.WriteLayout(layout, imgs...); err != nil {
		t.Fatal(err)
	}
	c, err := fetch.Open(filepath.Join(t.TempDir(), "cache"))
	if err != nil {
		t.Fatal(err)
	}
	var cs []configs.ContainerImage
	for _, i := range imgs {
		cs = append(cs, configs.ContainerImage{Ref: i.Ref, Layout: layout})
	}
	o := images.Options{Arch: "amd64", ContainerdVersion: "2.2.9", SourceDate: time.Unix(1767225600, 0).UTC()}
	pinned, err := images.Resolve(t.Context(), c, cs, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := images.Fetch(t.Context(), c, pinned, o); err != nil {
		t.Fatal(err)
	}
	r, err := images.Bake(t.Context(), c, pinned, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := imagetest.Materialize(dir, r.Nodes, c); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, store.Root)
}

func app(ref, own string) imagetest.Image {
	return imagetest.Image{Ref: ref, Layers: []imagetest.Layer{
		imagetest.Script(imagetest.Dir("etc", 0o755, 0, 0), imagetest.File("etc/base", 0o4755, 3, 4, "base")),
		imagetest.Script(imagetest.File("etc/own", 0o644, 0, 0, own), imagetest.Whiteout("etc/base")),
	}}
}

// memoryDir returns a directory in memory, where syncing is fast. If none supports all features of
// the images, it returns one on disk.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "edgebake-merge-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if unix.Setxattr(dir, "user.probe", []byte("x"), 0) != nil { // needs Linux 6.6
		return t.TempDir()
	}
	return dir
}

// stores makes an old store, which is in use, and a new one.
func stores(t *testing.T) (oldRoot, newRoot string) {
	t.Helper()
	dir := memoryDir(t)
	oldRoot = bakeInto(t, dir+"/old", app("edgebake.test/stays:1", "stays"), app("edgebake.test/goes:1", "goes"), app("edgebake.test/app:1", "v1"))
	newRoot = bakeInto(t, dir+"/new", app("edgebake.test/stays:1", "stays"), app("edgebake.test/app:2", "v2"), imagetest.Nasty("edgebake.test/nasty:1", "#!"))
	return oldRoot, newRoot
}

// check verifies a store that is in use and returns its image tags.
func check(t *testing.T, root string) []string {
	t.Helper()
	f := store.DirFiles(root)
	f.InUse = true
	s, err := store.Verify(f, ".")
	if err != nil {
		t.Fatal(err)
	}
	return s.Images
}

func TestMerge(t *testing.T) {
	needRoot(t)
	oldRoot, newRoot := stores(t)
	before := check(t, oldRoot)
	r, err := Merge(t.Context(), Options{From: newRoot, Into: oldRoot})
	if err != nil {
		t.Fatal(err)
	}
	want := append(before, "edgebake.test/app:2", "edgebake.test/nasty:1")
	slices.Sort(want)
	if got := check(t, oldRoot); !slices.Equal(got, want) {
		t.Errorf("images %q", got)
	}
	if r.Snapshots != 1+20 || r.Shared != 2 {
		t.Errorf("%d snapshots added, %d shared; expected app:2's own and 20 nasty ones, and two of stays:1", r.Snapshots, r.Shared)
	}
	// The source is unchanged, and a second merge changes nothing.
	if _, err := store.Verify(store.DirFiles(newRoot), "."); err != nil {
		t.Error(err)
	}
	again, err := Merge(t.Context(), Options{From: newRoot, Into: oldRoot})
	if err != nil || len(again.Added)+again.Snapshots+again.Blobs != 0 {
		t.Errorf("again: %+v, %v", again, err)
	}
}

// TestMergeOfWhatIsMissing merges a source that has only the parts that the store in use lacks. All
// images must be kept.
func TestMergeOfWhatIsMissing(t *testing.T) {
	needRoot(t)
	oldRoot, newRoot := stores(t)
	before := check(t, oldRoot)
	read := func(root string) *store.State {
		s, err := store.ReadInUse(filepath.Join(root, store.MetaDB), filepath.Join(root, store.SnapshotterDB))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	next := read(newRoot)
	lack := read(oldRoot).Lacks(next)
	for _, s := range next.Snapshots {
		if !slices.ContainsFunc(lack.Snapshots, func(x store.Snapshot) bool { return x.Key == s.Key }) {
			os.RemoveAll(filepath.Join(newRoot, store.SnapshotDir(s.ID)))
		}
	}
	for _, b := range next.Blobs {
		if !slices.ContainsFunc(lack.Blobs, func(x store.Blob) bool { return x.Digest == b.Digest }) {
			os.Remove(filepath.Join(newRoot, store.BlobPath(b.Digest)))
		}
	}
	if len(lack.Snapshots) != 21 || len(lack.Snapshots) == len(next.Snapshots) || len(lack.Blobs) == len(next.Blobs) {
		t.Fatalf("%d of %d snapshots, %d of %d blobs are missing", len(lack.Snapshots), len(next.Snapshots), len(lack.Blobs), len(next.Blobs))
	}
	if _, err := Merge(t.Context(), Options{From: newRoot, Into: filepath.Join(t.TempDir(), "empty")}); err == nil {
		t.Error("a store that has neither was made")
	}
	r, err := Merge(t.Context(), Options{From: newRoot, Into: oldRoot})
	if err != nil {
		t.Fatal(err)
	}
	if r.Snapshots != 21 {
		t.Errorf("%+v", r)
	}
	want := append(before, "edgebake.test/app:2", "edgebake.test/nasty:1")
	slices.Sort(want)
	if got := check(t, oldRoot); !slices.Equal(got, want) {
		t.Errorf("images %q", got)
	}
}

func TestMergeIntoNothing(t *testing.T) {
	needRoot(t)
	_, newRoot := stores(t)
	into := filepath.Join(t.TempDir(), "containerd")
	if _, err := Merge(t.Context(), Options{From: newRoot, Into: into}); err != nil {
		t.Fatal(err)
	}
	// The result of a merge into an empty store is equivalent to a baked store.
	s, err := store.Verify(store.DirFiles(into), ".")
	if err != nil || len(s.Images) != 3 {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestMergeCopies checks that on another file system, files are copied with all metadata.
func TestMergeCopies(t *testing.T) {
	needRoot(t)
	_, newRoot := stores(t)
	into, err := os.MkdirTemp("/var/tmp", "edgebake-merge-") // a directory on a disk
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(into) })
	var a, b unix.Statfs_t
	if err := errors.Join(unix.Statfs(newRoot, &a), unix.Statfs(into, &b)); err != nil || a.Fsid == b.Fsid {
		desk.Lacks(t, "%s must be on another file system than /dev/shm, which must have extended attributes (%v)", into, err)
	}
	if _, err := Merge(t.Context(), Options{From: newRoot, Into: into}); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Verify(store.DirFiles(into), "."); err != nil {
		t.Error(err)
	}
	for n := 1; n <= 22; n++ {
		rel := store.SnapshotDir(uint64(n))
		if x, y := listing(t, filepath.Join(newRoot, rel)), listing(t, filepath.Join(into, rel)); x != y {
			t.Errorf("snapshot %d differs:\n%s\n---\n%s", n, x, y)
		}
	}
}

func listing(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	links := map[uint64]string{}
	err := filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		size := st.Size
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			size = 0 // depends on the file system
		} else if links[st.Ino] == "" {
			links[st.Ino] = rel
		}
		buf := make([]byte, 4096)
		n, err := unix.Llistxattr(p, buf)
		if err != nil {
			return err
		}
		names := strings.Split(string(buf[:n]), "\x00")
		slices.Sort(names)
		fmt.Fprintf(&b, "%s %o %d:%d %d %d.%d %d %s %q\n", rel, st.Mode, st.Uid, st.Gid, st.Rdev, st.Mtim.Sec, st.Mtim.Nsec, size, links[st.Ino], names)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestMergeNeedsStoppedContainerd(t *testing.T) {
	needRoot(t)
	oldRoot, newRoot := stores(t)
	live, err := store.OpenLive(filepath.Join(oldRoot, store.MetaDB), filepath.Join(oldRoot, store.SnapshotterDB))
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	_, err = Merge(t.Context(), Options{From: newRoot, Into: oldRoot})
	if err == nil || !strings.Contains(err.Error(), "stop containerd first") {
		t.Errorf("error %v", err)
	}
}

func TestDamagedSourceChangesNothing(t *testing.T) {
	needRoot(t)
	oldRoot, newRoot := stores(t)
	before := listing(t, oldRoot)
	blobs, err := filepath.Glob(newRoot + "/" + store.ContentDir + "/blobs/sha256/*")
	if err != nil || len(blobs) == 0 {
		t.Fatal(err)
	}
	if err := os.WriteFile(blobs[0], []byte("damaged"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Merge(t.Context(), Options{From: newRoot, Into: oldRoot}); err == nil || !strings.Contains(err.Error(), "blob sha256:") {
		t.Errorf("error %v", err)
	}
	if after := listing(t, oldRoot); after != before {
		t.Error("the store in use changed")
	}
}

// TestMergeIsKilled kills a real merge before each of its changes. After each kill, containerd must
// be able to start on the store, and another merge must give the same result as an uninterrupted
// one.
func TestMergeIsKilled(t *testing.T) {
	needRoot(t)
	if at := os.Getenv("EDGEBAKE_MERGE_KILL"); at != "" {
		n, err := strconv.Atoi(at)
		if err != nil {
			t.Fatal(err)
		}
		count := 0
		_, err = Merge(t.Context(), Options{From: os.Getenv("EDGEBAKE_FROM"), Into: os.Getenv("EDGEBAKE_INTO"), Step: func(string) error {
			if count++; count == n {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
			return nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	oldRoot, newRoot := stores(t)
	kills := 0
	for n := 1; ; n++ {
		into := filepath.Join(filepath.Dir(filepath.Dir(newRoot)), fmt.Sprint("killed-", n))
		if out, err := exec.CommandContext(t.Context(), "cp", "-a", oldRoot, into).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestMergeIsKilled$")
		cmd.Env = append(os.Environ(), fmt.Sprint("EDGEBAKE_MERGE_KILL=", n), "EDGEBAKE_FROM="+newRoot, "EDGEBAKE_INTO="+into)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
			kills++
		} else if err != nil {
			t.Fatalf("%v: %s", err, out)
		} else {
			break // the merge completed: it has fewer than n changes
		}
		// Check the store as it is now, because containerd could start before the next run.
		tags := check(t, into)
		if !slices.Contains(tags, "edgebake.test/stays:1") {
			t.Fatalf("killed at change %d: images %q", n, tags)
		}
		if _, err := Merge(t.Context(), Options{From: newRoot, Into: into}); err != nil {
			t.Fatalf("killed at change %d, run again: %v", n, err)
		}
		want := []string{"edgebake.test/app:1", "edgebake.test/app:2", "edgebake.test/goes:1", "edgebake.test/nasty:1", "edgebake.test/stays:1"}
		if got := check(t, into); !slices.Equal(got, want) {
			t.Errorf("killed at change %d, run again: images %q", n, got)
		}
		clean(t, into, n)
		os.RemoveAll(into)
	}
	if kills < 30 {
		t.Errorf("only %d kills", kills)
	}
	t.Logf("killed at %d changes", kills)
}

// clean checks that a repeated merge leaves nothing of the killed one.
func clean(t *testing.T, root string, n int) {
	t.Helper()
	if _, err := os.Lstat(filepath.Join(root, "edgebake-merge")); err == nil {
		t.Errorf("killed at change %d: scratch files are left", n)
	}
	live, err := store.OpenLive(filepath.Join(root, store.MetaDB), filepath.Join(root, store.SnapshotterDB))
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	ids, err := live.Directories()
	if err != nil {
		t.Fatal(err)
	}
	state, err := live.Read()
	if err != nil {
		t.Fatal(err)
	}
	if len(ids) != len(state.Snapshots) {
		t.Errorf("killed at change %d: metadata.db has %d snapshots, meta.db %d", n, len(ids), len(state.Snapshots))
	}
	dirs, err := os.ReadDir(filepath.Join(root, store.SnapshotterDir, "snapshots"))
	if err != nil || len(dirs) != len(ids) {
		t.Errorf("killed at change %d: %d directories for %d snapshots (%v)", n, len(dirs), len(ids), err)
	}
}
