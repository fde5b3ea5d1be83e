package update

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/ondisk/update"
)

const (
	// stagedStore is a containerd store with the images that this machine lacks. UnitMerge merges
	// it into containerd's own.
	stagedStore = ondisk.StagedStore
	// dataSpool is the prefix of the name of the file with the chunks downloaded from the image's
	// DATA partition.
	dataSpool = "data-"
	// reserve is the percentage of DATA that must stay free. With less space, kubelet removes
	// images and pods.
	reserve = 15
)

// newImages contains the container images of an update that this machine lacks.
type newImages struct {
	spool  *spool
	images *update.Images
	lack   *store.State
	chunks []int // chunks that contain the missing files
}

// lookAtImages finds the container images that this machine lacks. It returns an error if they do
// not fit. The chunks that it downloads stay in the spool.
func (u *job) lookAtImages() error {
	refs := update.Lacks(u.sys.image, u.next)
	if len(refs) == 0 {
		return nil
	}
	fail := func(err error) error {
		return fmt.Errorf("adding the container images that this machine lacks (%s): %w", strings.Join(refs, ", "), err)
	}
	part := u.image.Index.Find(ondisk.LabelData)
	if part == nil {
		return fail(fmt.Errorf("the image's index lacks partition %s: build it again", ondisk.LabelData))
	}
	sum := sha256.Sum256(u.image.Body)
	file := fmt.Sprintf("%s%x", dataSpool, sum[:8])
	if err := sweep(u.e, file); err != nil {
		return err
	}
	var err error
	n := &newImages{}
	if n.spool, err = newSpool(u.e, u.fetch, part, path.Join(Dir, file)); err != nil {
		return err
	}
	u.new = n
	if n.images, err = update.ReadImages(n.spool.view(u.ctx)); err != nil {
		return fail(err)
	}
	have, err := liveStore(u.e)
	if err != nil {
		return err
	}
	if n.lack = have.Lacks(n.images.State); none(n.lack) {
		return nil
	}
	var need int64
	if n.chunks, need, err = n.images.Chunks(part, n.lack); err != nil {
		return fail(err)
	}
	for _, k := range n.spool.missing(n.chunks) {
		need += part.Chunks[k].Size
	}
	if err := roomOnDATA(u.e, need); err != nil {
		return fail(err)
	}
	return nil
}

// roomOnDATA returns an error if need bytes do not fit on DATA.
func roomOnDATA(e *machine.Env, need int64) error {
	size, err := e.FSSize("/var")
	if err != nil {
		return fmt.Errorf("reading the free space on DATA: %w", err)
	}
	free, err := e.FSFree("/var")
	if err != nil {
		return fmt.Errorf("reading the free space on DATA: %w", err)
	}
	if keep := size / 100 * reserve; free-need < keep {
		return fmt.Errorf("they need %s on DATA, which is mounted at /var, has %s free and must keep %s free for kubelet: remove unused container images (`crictl rmi --prune`), or build an image with fewer", bytesize.MiB(need), bytesize.MiB(free), bytesize.MiB(keep))
	}
	return nil
}

// none reports whether the machine lacks nothing.
func none(lack *store.State) bool {
	return len(lack.Images)+len(lack.Blobs)+len(lack.Snapshots) == 0
}

// liveStore reads this machine's store while containerd has it open.
func liveStore(e *machine.Env) (*store.State, error) {
	root := e.Path("/" + store.Root)
	return store.ReadInUse(path.Join(root, store.MetaDB), path.Join(root, store.SnapshotterDB))
}

// sweep removes the staged store, and the downloaded chunks of DATA except those in the file keep.
func sweep(e *machine.Env, keep string) error {
	if err := e.RemoveAll(stagedStore); err != nil {
		return err
	}
	list, err := os.ReadDir(e.Path(Dir))
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	for _, f := range list {
		if strings.HasPrefix(f.Name(), dataSpool) && f.Name() != keep {
			if err := e.Remove(path.Join(Dir, f.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// stageImages downloads the missing container images and writes them to stagedStore.
func (u *job) stageImages(ctx context.Context, e *machine.Env) error {
	if none(u.new.lack) {
		return nil
	}
	// Layers may have chunks in common with files on DATA. Scan only the part of DATA that was
	// flashed; the rest was added when DATA grew.
	d, err := u.device(ondisk.LabelData, false)
	if err != nil {
		return err
	}
	u.say("reading %s", ondisk.LabelData)
	if err := u.fetch.onDisk.scan(ctx, d, min(u.sys.disk.Part(ondisk.LabelData).Size, u.new.spool.part.Size)); err != nil {
		return fmt.Errorf("reading %s: %w", ondisk.LabelData, err)
	}
	if err := u.new.spool.fill(ctx, u.new.chunks); err != nil {
		return err
	}
	u.say("unpacking container images")
	if err := e.RemoveAll(stagedStore); err != nil {
		return err
	}
	err = e.WriteTree(ctx, stagedStore, u.new.images, func(f func(tree.Node) error) error {
		return u.new.images.Walk(u.new.lack, f)
	})
	if err != nil {
		return fmt.Errorf("unpacking container images: %w", err)
	}
	return e.Sync(stagedStore)
}

// mergeImages adds stagedStore to containerd's store. UnitMerge stops containerd for a short time.
func (u *job) mergeImages(ctx context.Context, e *machine.Env) error {
	if none(u.new.lack) {
		return nil
	}
	if err := e.Unit(ctx, "start", ondisk.UnitMerge); err != nil {
		return fmt.Errorf("starting %s: %w", ondisk.UnitMerge, err)
	}
	have, err := liveStore(e)
	if err != nil {
		return err
	}
	if !none(have.Lacks(u.new.images.State)) {
		return fmt.Errorf("containerd's store still lacks images; see `journalctl -u %s`", ondisk.UnitMerge)
	}
	return e.RemoveAll(stagedStore)
}

// pinRunningImages pins the container images of the running system. It unpins the container images
// that only other systems use, so that kubelet's garbage collection can remove them.
func pinRunningImages(ctx context.Context, e *machine.Env, image ondisk.ImageInfo) error {
	have, err := liveStore(e)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	ours, err := recordsOf(have, image)
	if err != nil {
		return err
	}
	for _, i := range have.Images {
		pinned := ""
		if ours[i.Digest] {
			pinned = "pinned"
		}
		if i.Labels[store.LabelBaked] == "" || i.Labels[store.LabelPinned] == pinned {
			continue
		}
		cmd := machine.Cmd{Args: []string{"ctr", "--namespace", store.Namespace, "images", "label", i.Name, store.LabelPinned + "=" + pinned}}
		if err := e.Run(ctx, cmd); err != nil {
			return fmt.Errorf("pinning or unpinning the container image %s: %w", i.Name, err)
		}
	}
	return nil
}

// recordsOf returns the digests under which the store has the container images of an image.
func recordsOf(have *store.State, image ondisk.ImageInfo) (map[string]bool, error) {
	names := map[string]bool{}
	for _, i := range image.Images {
		ref, err := imageref.Parse(i.Ref)
		if err != nil {
			return nil, err
		}
		for _, name := range store.RecordNames(ref.Repo(), ref.Tag, i.Digest, "") {
			names[name] = true
		}
	}
	digests := map[string]bool{}
	for _, i := range have.Images {
		if names[i.Name] {
			digests[i.Digest] = true
		}
	}
	return digests, nil
}
