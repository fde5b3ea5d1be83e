package builder

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays"
)

// siteVersions are the Site documents that the firstboot on board reads.
var siteVersions = []string{configs.Version}

// Result of a build.
type Result struct {
	Plan   *plan.Plan
	Report *Report
	SBOM   []byte // SPDX, JSON
}

// Job is one of the images that are built together.
type Job struct {
	Image   *configs.Image
	Options Options
}

// BuildEach builds images one after the other and hands each to done when it is
// complete. All of them are resolved and checked before the first input is made. A
// problem that several have in common is reported once. Nothing is written to an
// output's directory before the image is known to fit, and an image appears under
// its name only when it is complete.
func BuildEach(ctx context.Context, jobs []Job, done func(job int, r *Result) error) error {
	builds := make([]*build, len(jobs))
	err := forEachJob(ctx, jobs, func(_ int, j Job) error { return CheckOutput(j.Options.Output, j.Options.Force) })
	if err != nil {
		return err
	}
	err = forEachJob(ctx, jobs, func(i int, j Job) error {
		b, err := resolve(ctx, j.Image, j.Options)
		builds[i] = b
		return err
	})
	if err != nil {
		return err
	}
	if err := forEachJob(ctx, jobs, func(i int, _ Job) error { return builds[i].checkInputs(ctx) }); err != nil {
		return err
	}
	ready := now()
	for i, b := range builds {
		b.begun = b.begun.Add(now().Sub(ready)) // no time of its own, while others were built
		r, err := b.carryOut(ctx)
		if err != nil {
			return err
		}
		if err := done(i, r); err != nil {
			return err
		}
	}
	return nil
}

// forEachJob calls f for each job and joins the errors, each text once.
func forEachJob(ctx context.Context, jobs []Job, f func(i int, j Job) error) error {
	var errs []error
	for i, j := range jobs {
		err := f(i, j)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		errs = append(errs, err)
		if fetch.NoRoom(err) {
			break
		}
	}
	return JoinDistinct(errs...)
}

// carryOut makes the inputs of a resolved build, and the image of them.
func (b *build) carryOut(ctx context.Context) (*Result, error) {
	b.watchCache()
	if err := b.makeInputs(ctx); err != nil {
		return nil, err
	}
	id, err := b.plan.ID()
	if err != nil {
		return nil, err
	}
	t, err := b.compose(ctx, id)
	if err != nil {
		return nil, err
	}
	r, err := b.write(ctx, id, t)
	if err != nil {
		return nil, err
	}
	return &Result{Plan: b.plan, Report: r, SBOM: t.sbom}, nil
}

// ExportBase makes the base, if that was not done before, and copies it to
// path as an uncompressed tar.
func ExportBase(ctx context.Context, img *configs.Image, o Options, path string) error {
	b, err := newBuild(ctx, img, o)
	if err != nil {
		return err
	}
	b.plan = &plan.Plan{Arch: img.Arch, Inputs: map[string]plan.Input{}}
	if err := b.resolveBase(ctx); err != nil {
		return err
	}
	if err := b.checkInputs(ctx); err != nil {
		return err
	}
	if err := b.makeInputs(ctx); err != nil {
		return err
	}
	return b.exportBase(ctx, path)
}

// CheckOutput tells, before a build begins, why its image could not be written.
func CheckOutput(out string, force bool) error {
	switch {
	case out == "":
		return errors.New("no output is named")
	case !strings.HasSuffix(out, ".raw") && !strings.HasSuffix(out, ".raw.zst"):
		return fmt.Errorf("output %s: its name must end in .raw or .raw.zst (compressed)", out)
	}
	if err := CheckFile(out, force); err != nil {
		return fmt.Errorf("output %w", err)
	}
	return nil
}

// composed is everything that will be on the disk.
type composed struct {
	esp       []tree.Node
	root      []tree.Node
	data      []tree.Node
	packages  []dpkgPackage
	imgReport images.Report
	sbom      []byte
	merged    []tree.Node
	facts     overlays.Facts
}

// compose merges the layers, in the order that the plan has them with what
// edgebake renders before the user's own, and checks the result.
func (b *build) compose(ctx context.Context, id string) (*composed, error) {
	s := b.step("merge", "merging layers")
	var programs, user []tree.Layer
	var base tree.Layer
	for _, l := range b.plan.Layers {
		layer, err := b.layer(ctx, l)
		if err != nil {
			return nil, err
		}
		switch b.origins[l.Name].kind {
		case kindBase:
			base = layer
		case kindOverlay:
			user = append(user, layer)
		default:
			programs = append(programs, layer)
		}
	}
	c := &composed{}
	var err error
	if c.packages, err = b.packages(base.Nodes); err != nil {
		return nil, err
	}
	containerd, err := b.containerdVersion(c.packages)
	if err != nil {
		return nil, err
	}
	kernel, err := overlays.KernelVersion(base.Nodes)
	if err != nil {
		// Without a kernel nothing can be rendered; what else the base lacks
		// is said now all the same.
		return nil, b.place(b.checkTree(base.Nodes))
	}
	boards, err := b.boards(base.Nodes, kernel)
	if err != nil {
		return nil, b.place(err)
	}
	store, err := b.bakeImages(ctx, containerd)
	if err != nil {
		return nil, err
	}
	c.imgReport = store.Report
	info := b.imageInfo(id, kernel, containerd, store)
	info.Boards = boards
	c.facts = overlays.Facts{SourceDate: b.date, Info: info, Containerd: containerd, CNI: b.cni}
	own, err := overlays.Root(b.img, c.facts)
	if err != nil {
		return nil, err
	}
	files, err := b.userFiles(c.facts)
	if err != nil {
		return nil, err
	}
	brought := slices.Concat(user, files)
	layers := slices.Concat([]tree.Layer{base}, programs, []tree.Layer{{Name: "images", Nodes: store.Nodes}, overlays.Fresh(own, brought)}, brought)
	if c.merged, err = tree.Merge(layers, b.date); err != nil {
		return nil, b.place(err)
	}
	if err := b.checkTree(c.merged); err != nil {
		return nil, b.place(err)
	}
	if err := checkPlugins(c.merged, b.plugins, b.img.CNI.Config); err != nil {
		return nil, err
	}
	c.root, c.data = overlays.Split(c.merged)
	if c.sbom, err = b.makeSBOM(id, c); err != nil {
		return nil, err
	}
	s.done()
	return c, nil
}

// bakeImages lays the container images down.
func (b *build) bakeImages(ctx context.Context, containerd string) (*images.Result, error) {
	if len(b.pinned) == 0 {
		return &images.Result{}, nil
	}
	s := b.step("images", configs.Count(len(b.pinned), "container image"))
	o := b.imageOptions()
	o.ContainerdVersion = containerd
	o.Progress = func(p images.Progress) { s.log(fmt.Sprintf("layer %d of %d: %s", p.Done, p.Total, p.Ref)) }
	lay := images.Bake
	if b.img.ImageStore.Mode == "import" {
		lay = images.Archives
	}
	store, err := lay(ctx, b.Cache, b.pinned, o)
	if err != nil {
		return nil, b.place(err)
	}
	s.done()
	return store, nil
}

func (b *build) imageOptions() images.Options {
	return images.Options{
		Arch:       b.img.Arch,
		KeepLayers: b.img.ImageStore.KeepLayers,
		MaxLayer:   b.img.ImageStore.MaxLayer(),
		MaxFiles:   b.img.ImageStore.MaxFiles,
		Sandbox:    b.img.Containerd.Sandbox,
		Registries: b.img.Registries,
		Dir:        b.Dir,
		SourceDate: b.date,
		Warn:       func(text string) { b.event(Event{Step: "images", State: StateWarning, Text: text}) },
	}
}

// containerdVersion is the one on board.
func (b *build) containerdVersion(packages []dpkgPackage) (string, error) {
	if !b.img.Containerd.Debian {
		return strings.TrimPrefix(b.img.Containerd.Version, "v"), nil
	}
	for _, p := range packages {
		if p.Name == "containerd" {
			v, _, _ := strings.Cut(p.Version, "~")
			v, _, _ = strings.Cut(v, "-")
			v, _, _ = strings.Cut(v, "+")
			return v, nil
		}
	}
	return "", errors.New("containerd.debian: the base has no package containerd")
}

func (b *build) imageInfo(id, kernel, containerd string, store *images.Result) ondisk.ImageInfo {
	img := b.img
	info := ondisk.ImageInfo{
		Version: ondisk.ImageInfoVersion, Name: img.Name, Plan: id, Arch: img.Arch,
		SourceDate: b.date.Unix(), NodeTypes: img.NodeTypes, SiteVersions: siteVersions, SiteFields: configs.SiteFields(), InventoryVersions: siteVersions,
		Removable: img.Sites.Removable, SiteKeys: img.Sites.Keys,
		Kubernetes: img.Kubernetes.Version, Containerd: containerd, Kernel: kernel,
		Snapshotter: "overlayfs", Images: store.Images,
	}
	if t := img.Sites.NotBeforeTime(); !t.IsZero() {
		info.SitesNotBefore = t.Unix()
	}
	if img.CNI.Config == "bridge" {
		info.PodCIDR = img.CNI.PodCIDR
	}
	if y := img.Yurthub; y != nil {
		info.Yurthub = &ondisk.YurthubInfo{Version: y.Version, Form: y.Form, LBMode: y.LBMode, ExtraArgs: y.ExtraArgs}
		if y.Image != nil {
			info.Yurthub.Image = y.Image.Ref
		}
	}
	for _, p := range b.plan.Partitions {
		info.Partitions = append(info.Partitions, ondisk.PartitionInfo{
			Label: p.Label, FS: p.FS, GUID: disk.PartitionGUID(id, p.Label),
		})
	}
	return info
}

// spec says what the disk will be.
func (b *build) spec(id string, c *composed) disk.Spec {
	spec := disk.Spec{ID: id, Arch: b.img.Arch, SourceDate: b.date, SectorSize: int64(b.img.Disk.Sector)}
	for _, p := range b.plan.Partitions {
		d := disk.Partition{Label: p.Label, FS: p.FS, Size: p.Size, Gap: p.Gap}
		switch p.Label {
		case ondisk.LabelESP:
			d.Nodes = c.esp
		case ondisk.LabelRootA:
			d.Nodes = c.root
			d.FreeBytes = max(minRootHead, contentSize(c.root)/8)
			d.Grow, d.HashTree = p.Grow.Of(contentSize(c.root)), p.HashTree
		case ondisk.LabelData:
			d.Nodes = c.data
			d.FreeBytes = b.dataHeadroom(c)
		}
		spec.Partitions = append(spec.Partitions, d)
	}
	return spec
}

// dataHeadroom keeps a node alive on a device no larger than the image:
// kubelet evicts pods and removes images when less than 15 % is free. Images
// to be imported need their place twice more, packed and unpacked.
func (b *build) dataHeadroom(c *composed) int64 {
	used := contentSize(c.data)
	if b.img.ImageStore.Mode == "import" {
		return minDataHead + used/2 + 4*c.imgReport.Size
	}
	return max(minDataHead, used/2)
}

func contentSize(nodes []tree.Node) (n int64) {
	for _, node := range nodes {
		n += node.Data.Size
	}
	return n
}

// checkRoom warns of a root that machines in the field have no room for.
func (b *build) checkRoom(l *disk.Layout) {
	root := l.Find(ondisk.LabelRootA)
	if b.RootRoom == 0 || root == nil || root.FSSize <= b.RootRoom {
		return
	}
	b.event(Event{Step: "write", State: StateWarning, Text: fmt.Sprintf(
		"the root file system has %d MiB, machines flashed with earlier images have room for %d MiB: they cannot take this image as an update. Make it smaller; or, if all of them are flashed again, remove rootRoom from the lock",
		root.FSSize>>20, b.RootRoom>>20)})
}

// write lays the disk out and writes it. The layout depends on ROOT-A and
// DATA only, so it is known before the ESP, whose image.json tells it.
func (b *build) write(ctx context.Context, id string, c *composed) (*Report, error) {
	layout, err := disk.Compute(b.spec(id, c))
	if err != nil {
		return nil, b.place(byLayer(err))
	}
	b.checkRoom(layout)
	c.facts.Info.Partitions = layout.Parts
	if c.esp, err = overlays.ESP(b.img, c.facts, c.merged); err != nil {
		return nil, b.place(err)
	}
	c.esp = append(c.esp, tree.Node{Path: ondisk.ESPSBOM, Layer: layerEdgebake, Inode: &tree.Inode{
		Mode: tree.ModeRegular | 0o644, MTime: b.date, Data: tree.Bytes(c.sbom)}})
	spec := b.spec(id, c)
	if layout, err = disk.Compute(spec); err != nil {
		return nil, err
	}
	s := b.step("write", b.Output)
	res, err := disk.Write(ctx, b.Output, spec, layout, b.Cache, disk.WriteOptions{
		Unchanged: b.Cache.Unchanged,
		Zstd:      strings.HasSuffix(b.Output, ".zst"), Force: b.Force, Progress: s.progress,
		Slot: func(d disk.Digest) ([]byte, error) {
			info := ondisk.SlotInfo{
				Version: ondisk.SlotInfoVersion, Plan: id, Golden: d.Golden, Parts: d.Parts, SiteVersions: siteVersions, SectorSize: spec.SectorSize,
			}
			if err := b.sign(&info, c.esp); err != nil {
				return nil, err
			}
			return slot.Make(slot.Contents{Info: info})
		},
	})
	if err != nil {
		return nil, err
	}
	s.done()
	return b.report(id, c, layout, res)
}

// sign signs the image, if that is asked for.
func (b *build) sign(info *ondisk.SlotInfo, esp []tree.Node) (err error) {
	if b.Sign == nil {
		return nil
	}
	i := slices.IndexFunc(esp, func(n tree.Node) bool { return n.Path == ondisk.ESPImageInfo })
	if i < 0 {
		return fmt.Errorf("BUG: the ESP has no %s", ondisk.ESPImageInfo)
	}
	info.Signature, err = b.Sign(info.Golden, esp[i].Data.Inline)
	return err
}
