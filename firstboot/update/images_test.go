package update

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/builder/fetch"
	prebake "github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/store/merge"
	"github.com/edgebake/edgebake/ondisk/tree"
	format "github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/edgebake/edgebake/test/mediatest"
)

// baked has the container stores of both images, as a build makes them.
var baked = struct {
	sync.Once
	old, new *prebake.Result
	cache    *fetch.Cache
}{}

const (
	oldApp, newApp = "edgebake.test/app:1", "edgebake.test/app:2"
	nasty, moved   = "edgebake.test/nasty:1", "edgebake.test/moved:stable"
)

// makeBaked builds withold.raw and withnew.raw.zst, and variants of
// withnew.raw.zst with invalid stores.
func makeBaked(t *testing.T) {
	t.Helper()
	makeImages(t)
	baked.Do(func() {
		noise := mediatest.Noise(2 << 20)
		base := imagetest.Script(imagetest.Dir("etc", 0o755, 0, 0), imagetest.File("etc/base", 0o4755, 3, 4, string(noise)))
		img := func(ref string, layers ...imagetest.Layer) imagetest.Image {
			return imagetest.Image{Ref: ref, Layers: layers}
		}
		app := func(ref string, n byte) imagetest.Image {
			more := slices.Clone(noise)
			rand.NewChaCha8([32]byte{n}).Read(more[:1<<20]) // the other version has the rest too
			return img(ref, base, imagetest.Script(imagetest.File("etc/own", 0o644, 0, 0, string(more)), imagetest.Whiteout("etc/base")))
		}
		pause := img("edgebake.test/pause:1", base)
		tag := func(own string) imagetest.Image {
			return img(moved, base, imagetest.Script(imagetest.File("own", 0o644, 0, 0, own)))
		}
		var err error
		if baked.cache, err = fetch.Open(filepath.Join(images.dir, "cache")); err != nil {
			t.Fatal(err)
		}
		baked.old = bake(t, pause, app(oldApp, 1), tag("old"))
		baked.new = bake(t, pause, app(newApp, 2), tag("new"), imagetest.Nasty(nasty, "#!"))
		made := func(name, plan string, r *prebake.Result) {
			mediatest.Make(t, imagePath(name), mediatest.Image{ID: plan, Seed: "same", Data: 1 << 20, FreeRoot: 6 << 20, FreeData: 1 << 20, Initrd: initrd(plan), ESP: 40 << 20,
				Store: r.Nodes, Blobs: baked.cache, SignIndex: images.sign,
				Info: func(i *ondisk.ImageInfo) {
					i.UpdateKeys, i.Images, i.Snapshotter = []string{images.public}, r.Images, store.Snapshotter
				}})
		}
		made("withold.raw", oldPlan, baked.old)
		made("withnew.raw.zst", newPlan, baked.new)
		made("archives.raw.zst", newPlan, &prebake.Result{Images: baked.new.Images})
		changed := func(name string, change func(n *tree.Node) (keep bool)) {
			r := *baked.new
			r.Nodes = nil
			for _, n := range baked.new.Nodes {
				i := *n.Inode
				n.Inode = &i
				if change(&n) {
					r.Nodes = append(r.Nodes, n)
				}
			}
			made(name, newPlan, &r)
		}
		changed("otherblob.raw.zst", func(n *tree.Node) bool {
			if strings.Contains(n.Path, "/blobs/sha256/") {
				n.Data = tree.Bytes([]byte("{}"))
			}
			return true
		})
		snapshots := store.Root + "/" + store.SnapshotterDir + "/snapshots"
		changed("link.raw.zst", func(n *tree.Node) bool {
			if n.Path == snapshots {
				n.Mode, n.Target = tree.ModeSymlink|0o777, "/etc"
			}
			return !strings.HasPrefix(n.Path, snapshots+"/")
		})
		changed("lost.raw.zst", func(n *tree.Node) bool {
			return !strings.HasPrefix(n.Path, snapshots+"/4/") && n.Path != snapshots+"/4"
		})
	})
}

func bake(t *testing.T, imgs ...imagetest.Image) *prebake.Result {
	t.Helper()
	layout := filepath.Join(t.TempDir(), "layout")
	if _, err := imagetest.WriteLayout(layout, imgs...); err != nil {
		t.Fatal(err)
	}
	var list []configs.ContainerImage
	for _, i := range imgs {
		list = append(list, configs.ContainerImage{Ref: i.Ref, Layout: layout})
	}
	o := prebake.Options{Arch: "amd64", ContainerdVersion: "2.2.9", SourceDate: mediatest.Date}
	pinned, err := prebake.Resolve(t.Context(), baked.cache, list, o)
	if err == nil {
		err = prebake.Fetch(t.Context(), baked.cache, pinned, o)
	}
	if err != nil {
		t.Fatal(err)
	}
	r, err := prebake.Bake(t.Context(), baked.cache, pinned, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// withImages is a machine that was flashed with withold.raw. Its containerd
// is running, and has the databases open.
type withImages struct {
	*box
	live *store.Live
	// unmerged means that UnitMerge fails.
	unmerged bool
}

func newWithImages(t *testing.T) *withImages {
	t.Helper()
	desk.NeedRoot(t, "it makes files of others")
	makeBaked(t)
	b := &withImages{box: boxOf(t, "withold.raw")}
	if err := imagetest.Materialize(b.root, baked.old.Nodes, baked.cache); err != nil {
		t.Fatal(err)
	}
	b.containerd()
	t.Cleanup(func() { b.live.Close() })
	b.unit = func(verb, unit string) error {
		if unit != ondisk.UnitMerge {
			return nil
		}
		if b.unmerged {
			return errors.New("its job ended with \"failed\"")
		}
		if err := b.live.Close(); err != nil {
			return err
		}
		defer b.containerd()
		_, err := merge.Merge(t.Context(), merge.Options{From: filepath.Join(b.root, stagedStore), Into: b.store(),
			Step: func(string) error { _, err := b.effect(); return err }})
		return err
	}
	return b
}

func (b *withImages) store() string { return filepath.Join(b.root, store.Root) }

func (b *withImages) containerd() {
	b.t.Helper()
	var err error
	b.live, err = store.OpenLive(filepath.Join(b.store(), store.MetaDB), filepath.Join(b.store(), store.SnapshotterDB))
	if err != nil {
		b.t.Fatal(err)
	}
}

// images verifies the machine's store, and returns the digests of its records by name.
func (b *withImages) images() map[string]string {
	b.t.Helper()
	if err := b.live.Close(); err != nil {
		b.t.Fatal(err)
	}
	defer b.containerd()
	f := store.DirFiles(b.store())
	f.InUse = true
	if _, err := store.Verify(f, "."); err != nil {
		b.t.Fatal(err)
	}
	s, err := store.ReadFrom(f, ".")
	if err != nil {
		b.t.Fatal(err)
	}
	out := map[string]string{}
	for _, i := range s.Images {
		out[i.Name] = i.Digest
	}
	return out
}

// complete checks that the machine has the container images of both systems,
// with each layer as a build writes it.
func (b *withImages) complete() {
	b.t.Helper()
	have := b.images()
	for _, i := range slices.Concat(baked.old.Images, baked.new.Images) {
		repo, _, _ := strings.Cut(i.Ref, ":")
		if have[repo+"@"+i.Digest] != i.Digest {
			b.t.Errorf("%s of %s is missing", i.Ref, i.Digest)
		}
	}
	for _, i := range baked.new.Images {
		if have[i.Ref] != i.Digest {
			b.t.Errorf("%s is %s, expected %s", i.Ref, have[i.Ref], i.Digest)
		}
	}
	other := b.t.TempDir()
	if err := imagetest.Materialize(other, baked.new.Nodes, baked.cache); err != nil {
		b.t.Fatal(err)
	}
	read := func(root string) *store.State {
		s, err := liveStore(&machine.Env{Root: root})
		if err != nil {
			b.t.Fatal(err)
		}
		return s
	}
	ids := map[string]uint64{}
	for _, s := range read(b.root).Snapshots {
		ids[s.Key] = s.ID
	}
	for _, s := range read(other).Snapshots {
		want, got := listing(b.t, other, s.ID), listing(b.t, b.root, ids[s.Key])
		if want != got {
			b.t.Errorf("layer %s differs:\n%s\n---\n%s", s.Key, want, got)
		}
	}
	for _, left := range []string{stagedStore, "/" + store.Root + "/edgebake-merge"} {
		if _, err := os.Stat(filepath.Join(b.root, left)); err == nil {
			b.t.Errorf("%s is left", left)
		}
	}
}

// listing describes all files of a snapshot.
func listing(t testing.TB, root string, id uint64) string {
	t.Helper()
	var out strings.Builder
	links := map[uint64]string{}
	dir := filepath.Join(root, store.Root, store.SnapshotDir(id))
	err := filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		content := ""
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			content = fmt.Sprintf("%x", b[:min(len(b), 40)])
			if sum, err := sumOf(&machine.Env{Root: "/"}, p); err == nil {
				content += fmt.Sprintf(" %x", sum)
			}
		case unix.S_IFLNK:
			content, _ = os.Readlink(p)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR && links[st.Ino] == "" {
			links[st.Ino] = rel
		}
		buf := make([]byte, 4096)
		n, err := unix.Llistxattr(p, buf)
		if err != nil {
			return err
		}
		attrs := map[string]string{}
		for _, name := range strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
			if k, err := unix.Lgetxattr(p, name, buf[n:]); err == nil && name != "" {
				attrs[name] = string(buf[n : n+k])
			}
		}
		fmt.Fprintf(&out, "%s %o %d:%d %d %d.%d %s %s", rel, st.Mode, st.Uid, st.Gid, st.Rdev, st.Mtim.Sec, st.Mtim.Nsec, links[st.Ino], content)
		for _, k := range slices.Sorted(maps.Keys(attrs)) {
			fmt.Fprintf(&out, " %s=%x", k, attrs[k])
		}
		out.WriteString("\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestImages checks that container images are part of an update. Only new layers are downloaded,
// and of these only the chunks that are not on the disk.
func TestImages(t *testing.T) {
	b, s := newWithImages(t), serve(t, "withnew.raw.zst")
	before := b.images()
	if err := b.order(Options{Image: s.URL}); err != nil {
		t.Fatal(err)
	}
	b.complete()
	for name, digest := range before {
		if name != moved && b.images()[name] != digest {
			t.Errorf("the old system has lost %s", name)
		}
	}
	if got := b.done(); got != "cost done, retire done, root done, data done, merge done, esp done, reboot done" {
		t.Error(got)
	}
	// 2 MiB of the initrd, 1 MiB of the new layer; the base exists.
	cost, err := media.CostOfUpdate(imagePath("withold.raw"), media.ImageSource{Name: imagePath("withnew.raw.zst")})
	if err != nil {
		t.Fatal(err)
	}
	body := cost.Bytes - int64(cost.Requests)*format.RequestBytes
	sent, requests := s.sent.Load(), s.requests.Load()
	if sent > body+1<<10 || sent < body-1<<10 || cost.Data > 2<<20 || requests > int64(cost.Requests)+2 {
		t.Errorf("%d bytes were sent in %d requests, expected %+v", sent, requests, *cost)
	}
	// The second time, there is nothing to merge.
	if err := b.order(Options{Image: s.URL}); err != nil {
		t.Fatal(err)
	}
	if got := b.done(); got != "cost done, retire done, root done, data done, merge done, esp done, reboot done" {
		t.Error(got)
	}
}

// TestImagesInterrupted checks that an update that fails or is interrupted before the images are
// complete changes nothing that is in use. Downloaded data is not downloaded again.
func TestImagesInterrupted(t *testing.T) {
	b, s := newWithImages(t), serve(t, "withnew.raw.zst")
	b.unmerged = true
	before := b.images()
	if err := b.order(Options{Image: s.URL}); err == nil || !strings.Contains(err.Error(), "edgebake-merge.service: its job ended") {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(b.root, entryB)); err == nil || b.rebooted || !maps.Equal(before, b.images()) {
		t.Error("the new system boots without its images, or the store has changed")
	}
	b.unmerged = false
	s.sent.Store(0)
	if err := b.order(Options{Image: s.URL}); err != nil {
		t.Fatal(err)
	}
	b.complete()
	// Only the end of the image, with the index, is sent again. The initrd (2 MiB) is sent for the
	// first time.
	if sent := s.sent.Load(); sent > 3<<20 {
		t.Errorf("%d bytes were sent again", sent)
	}
}

func TestImagesPowerCuts(t *testing.T) {
	b := newWithImages(t)
	if err := b.order(Options{Image: b.inside("withnew.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	all := b.effects
	cuts := 12
	if testing.Short() {
		cuts = 2
	}
	for n := range cuts {
		cut := 1 + n*all/cuts
		b := newWithImages(t)
		b.cut, b.arrives = cut, float64(n%3)/2
		if err := b.order(Options{Image: b.inside("withnew.raw.zst")}); !errors.Is(err, errPower) {
			t.Fatalf("cut at %d of %d: %v", cut, all, err)
		}
		have := b.images() // the store is valid
		for _, i := range baked.old.Images {
			if have[i.Ref] == "" {
				t.Fatalf("cut at %d of %d: %s is lost", cut, all, i.Ref)
			}
		}
		if _, err := os.Stat(filepath.Join(b.root, entryB)); err == nil {
			b.complete()
		}
		b.cut = 0
		if err := b.order(Options{Image: b.inside("withnew.raw.zst")}); err != nil {
			t.Fatalf("cut at %d of %d, then: %v", cut, all, err)
		}
		b.complete()
	}
	t.Logf("%d of %d points", cuts, all)
}

// TestImagesRejected checks that problems of an image's container images are reported before
// anything is written.
func TestImagesRejected(t *testing.T) {
	for _, c := range []struct {
		name, image string
		prepare     func(b *withImages, s *web)
		want        []string
	}{
		{"no room", "withnew.raw.zst", func(b *withImages, _ *web) { b.free = 17 << 20 }, []string{
			"adding the container images that this machine lacks (edgebake.test/app:2, edgebake.test/moved:stable, edgebake.test/nasty:1): they need ",
			"MiB on DATA, which is mounted at /var, has 17 MiB free and must keep 15 MiB free for kubelet: remove unused container images (`crictl rmi --prune`), or build an image with fewer"}},
		{"archives", "archives.raw.zst", nil, []string{newApp, "the container images are archives"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newWithImages(t)
			s := serve(t, c.image)
			if c.prepare != nil {
				c.prepare(b, s)
			}
			before, records := b.partition(ondisk.LabelRootB), b.images()
			err := b.order(Options{Image: s.URL})
			for _, w := range c.want {
				if err == nil || !strings.Contains(err.Error(), w) {
					t.Errorf("%q is not in: %v", w, err)
				}
			}
			if string(before) != string(b.partition(ondisk.LabelRootB)) || !maps.Equal(records, b.images()) {
				t.Error("the other root or the store was written")
			}
		})
	}
}

// TestImagesHostile checks that an image whose store does not match its records is rejected, and
// the machine's store is not changed.
func TestImagesHostile(t *testing.T) {
	for name, want := range map[string]string{
		"otherblob": "has 2 bytes, but meta.db says",
		"link":      "snapshots is not a directory",
		"lost":      "file does not exist",
	} {
		t.Run(name, func(t *testing.T) {
			b := newWithImages(t)
			before := b.images()
			err := b.order(Options{Image: b.inside(name + ".raw.zst")})
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q is not in: %v", want, err)
			}
			if _, err := os.Stat(filepath.Join(b.root, entryB)); err == nil || !maps.Equal(before, b.images()) {
				t.Error("the new system has a boot entry, or the store has changed")
			}
		})
	}
}

// TestReleaseImages checks that once the new system is kept, kubelet may remove the former images.
// If the machine returns to the former system, kubelet may remove the new ones.
func TestReleaseImages(t *testing.T) {
	b := newWithImages(t)
	if err := b.order(Options{Image: b.inside("withnew.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{}
	e := b.env()
	e.Run = func(_ context.Context, c machine.Cmd) error {
		if !slices.Equal(c.Args[:5], []string{"ctr", "--namespace", "k8s.io", "images", "label"}) {
			t.Errorf("%q", c.Args)
		}
		labels[c.Args[5]] = c.Args[6]
		return nil
	}
	pinned := func(when string, image ondisk.ImageInfo, want ...string) {
		t.Helper()
		clear(labels)
		if err := pinRunningImages(t.Context(), e, image); err != nil {
			t.Fatal(err)
		}
		var got []string
		for name, label := range labels {
			if label != store.LabelPinned+"=" {
				t.Errorf("%s: %s", name, label)
			}
			if !strings.HasPrefix(name, "sha256:") {
				got = append(got, name)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q lose their pin, expected %q", when, got, want)
		}
	}
	at := func(ref string, r *prebake.Result) string {
		for _, i := range r.Images {
			if i.Ref == ref {
				repo, _, _ := strings.Cut(ref, ":")
				return repo + "@" + i.Digest
			}
		}
		t.Fatal(ref)
		return ""
	}
	old := b.info()
	b.put(ondisk.ImageInfoFile, b.infoOf("withnew.raw.zst"))
	pinned("kept", b.info(), oldApp, at(oldApp, baked.old), at(moved, baked.old))
	pinned("gone back", old, newApp, at(newApp, baked.new), nasty, at(nasty, baked.new))
}

// info returns image.json of the running system.
func (b *box) info() ondisk.ImageInfo {
	b.t.Helper()
	i, err := site.ImageInfo(&machine.Env{Root: b.root})
	if err != nil {
		b.t.Fatal(err)
	}
	return i
}
