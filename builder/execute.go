package builder

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/dpkg"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays"
)

// siteVersions lists the versions of Site documents that the image's firstboot can read.
var siteVersions = []string{configs.Version}

// Result is the result of a build.
type Result struct {
	Plan   *plan.Plan
	Report *Report
	SBOM   []byte // SPDX, JSON
}

// Job is one image to build: an Image, or the Plan of an Image.
type Job struct {
	Image   *configs.Image
	Plan    *plan.Plan
	Options Options
}

// BuildEach builds images one after another and calls done for each. First it resolves and checks
// all of them. A problem that several images share is reported once.
func BuildEach(ctx context.Context, jobs []Job, done func(job int, r *Result) error) error {
	builds := make([]*executor, len(jobs))
	err := forEachJob(ctx, jobs, func(i int, j Job) (err error) {
		builds[i], err = j.start(ctx)
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
		b.begun = b.begun.Add(now().Sub(ready)) // leave out the time spent on other images
		r, err := b.execute(ctx)
		if err != nil {
			return err
		}
		if err := done(i, r); err != nil {
			return err
		}
	}
	return nil
}

// start resolves the job's Image, unless the job has a plan.
func (j Job) start(ctx context.Context) (*executor, error) {
	if j.Plan != nil {
		return openPlan(ctx, j.Plan, j.Options)
	}
	b, err := newResolver(ctx, j.Image, j.Options)
	if err != nil {
		return nil, err
	}
	p, err := b.resolve(ctx)
	if err != nil {
		return nil, err
	}
	e, err := newExecutor(b.buildEnv, p)
	if err != nil {
		return nil, err
	}
	e.doc = j.Image
	return e, nil
}

// forEachJob calls f for each job and joins the distinct errors. It stops if the disk is full.
func forEachJob(ctx context.Context, jobs []Job, f func(i int, j Job) error) error {
	var errs []error
	for i, j := range jobs {
		err := f(i, j)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		errs = append(errs, err)
		if fetch.NoSpace(err) {
			break
		}
	}
	return joined.Distinct(errs...)
}

// executor builds the image of one plan.
type executor struct {
	*buildEnv
	plan    *plan.Plan     // never modified
	img     *configs.Image // from the plan, for rendering
	date    time.Time
	origins origins
	// bound means that the build fails if an input that it makes differs from the digest in the
	// plan. Otherwise, the build renews the lock.
	bound bool
	// doc is the Image document, for messages only. It is nil if the plan was read from a file.
	doc    *configs.Image
	inputs map[string]plan.Input // from the plan, with digests found during the build; guarded by mu
	// base is the file tree of the base if checkBase has read it.
	base struct {
		sha   string
		nodes []tree.Node
	}
	// given is the SHA-256 of the uncompressed tar from Options.Base, or "" if no --base was given.
	given string
}

// openPlan prepares the build of a plan from a file. It rejects the plan if this edgebake would
// render other files than the edgebake that made the plan.
func openPlan(ctx context.Context, p *plan.Plan, o Options) (*executor, error) {
	o.Locked = true
	b, err := newExecutor(newBuildEnv(ctx, p.Arch, o), p)
	if err != nil {
		return nil, err
	}
	cni, err := b.cni()
	if err != nil {
		return nil, err
	}
	r, err := rendered(b.img, p, cni)
	if err != nil {
		return nil, err
	}
	if r != p.Rendered {
		return nil, fmt.Errorf("the plan was made by edgebake %s, and this edgebake (%s) would render other files: use the edgebake that made the plan, or make the plan again", p.Builder, o.Version)
	}
	return b, nil
}

func newExecutor(r *buildEnv, p *plan.Plan) (*executor, error) {
	img, err := imageOf(p)
	if err != nil {
		return nil, err
	}
	return &executor{
		buildEnv: r, plan: p, img: img, date: time.Unix(p.SourceDate, 0).UTC(), bound: r.Locked,
		origins: originsOf(p, len(img.Files), r.Base), inputs: maps.Clone(p.Inputs),
	}, nil
}

// imageOf returns the Image from a plan, with rendered templates. Of the sources of inputs, it
// contains only those that rendering needs.
func imageOf(p *plan.Plan) (*configs.Image, error) {
	img := &configs.Image{}
	d := json.NewDecoder(bytes.NewReader(p.Config))
	d.DisallowUnknownFields()
	if err := d.Decode(img); err != nil {
		return nil, fmt.Errorf("reading the plan: config: %w", err)
	}
	for i := range img.Files {
		f := &img.Files[i]
		if in, ok := p.Inputs[fileInput(i)]; ok && !f.Template {
			f.Source = in.File
		}
		f.Template = false
	}
	if p.Inputs[inputBase].Make == makeDebian {
		img.Base.Debian = &configs.DebianBase{}
	}
	if in, ok := p.Inputs[inputYurthub]; ok && img.Yurthub != nil {
		img.Yurthub.Binary = &configs.FileSource{File: in.File}
	}
	return img, nil
}

// cni returns the user's network configuration, or nil if there is none.
func (b *executor) cni() ([]byte, error) {
	in, ok := b.plan.Inputs[inputCNI]
	if !ok {
		return nil, nil
	}
	if _, err := b.importNamed(context.Background(), in.File, in.SHA256); err != nil {
		return nil, b.origins[inputCNI].withOrigin(err)
	}
	return b.Cache.ReadBlob(in.SHA256)
}

// execute makes the inputs and the image.
func (b *executor) execute(ctx context.Context) (*Result, error) {
	b.watchCache()
	if err := b.makeInputs(ctx); err != nil {
		return nil, err
	}
	full := b.plan.With(b.inputs)
	id, err := full.ID()
	if err != nil {
		return nil, err
	}
	c, err := b.compose(ctx, id)
	if err != nil {
		return nil, err
	}
	r, err := b.write(ctx, id, c)
	if err != nil {
		return nil, err
	}
	return &Result{Plan: full, Report: r, SBOM: c.sbom}, nil
}

// ExportBase copies the base of a plan to path as an uncompressed tar. If the base is not in the
// cache, ExportBase first makes it.
func ExportBase(ctx context.Context, p *plan.Plan, o Options, path string) error {
	only := p.With(map[string]plan.Input{inputBase: p.Inputs[inputBase]})
	only.Layers, only.Images = nil, nil
	b, err := newExecutor(newBuildEnv(ctx, p.Arch, o), only)
	if err != nil {
		return err
	}
	if err := b.checkInputs(ctx); err != nil {
		return err
	}
	if err := b.makeInputs(ctx); err != nil {
		return err
	}
	return b.exportBase(path)
}

// CheckOutput returns an error if the image cannot be written to out. Callers check this before the
// build.
func CheckOutput(out string, force bool) error {
	switch {
	case out == "":
		return errors.New("no output is named")
	case !strings.HasSuffix(out, ".raw") && !strings.HasSuffix(out, ".raw.zst"):
		return fmt.Errorf("output %s: its name must end in .raw or .raw.zst (compressed)", out)
	}
	if err := file.Check(out, force); err != nil {
		return fmt.Errorf("output %w", err)
	}
	return nil
}

// composition contains everything that is written to the disk.
type composition struct {
	esp       []tree.Node
	root      []tree.Node
	data      []tree.Node
	packages  []dpkg.Package
	imgReport images.Report
	sbom      []byte
	merged    []tree.Node
	facts     overlays.Facts
}

// compose merges the plan's layers in order and checks the result. The layers that edgebake renders
// come before the user's layers, which may replace their files.
func (b *executor) compose(ctx context.Context, id string) (*composition, error) {
	s := b.startStep("merge", "merging layers")
	base, programs, user, err := b.planLayers(ctx)
	if err != nil {
		return nil, err
	}
	c := &composition{}
	store, err := b.gather(ctx, id, base.Nodes, c)
	if err != nil {
		return nil, err
	}
	own, err := overlays.Root(b.img, c.facts)
	if err != nil {
		return nil, err
	}
	files, err := userFiles(b.img, b.date, b.Cache, b.inputs)
	if err != nil {
		return nil, err
	}
	brought := slices.Concat(user, files)
	layers := slices.Concat([]tree.Layer{base}, programs, []tree.Layer{{Name: "images", Nodes: store}, overlays.Fresh(own, brought)}, brought)
	if c.merged, err = tree.Merge(layers, b.date); err != nil {
		return nil, b.origins.locate(err)
	}
	if err := b.checkTree(c.merged); err != nil {
		return nil, b.origins.locate(err)
	}
	b.checkNetworkManagers(c.merged)
	if err := b.checkModules(c.merged); err != nil {
		return nil, b.origins.locate(err)
	}
	if err := b.checkCNI(c); err != nil {
		return nil, err
	}
	c.root, c.data = overlays.Split(c.merged)
	if c.sbom, err = b.makeSBOM(id, c); err != nil {
		return nil, err
	}
	s.done()
	return c, nil
}

// planLayers returns the layers of the plan: the base, the programs on top of it, and the user's
// layers.
func (b *executor) planLayers(ctx context.Context) (base tree.Layer, programs, user []tree.Layer, err error) {
	for _, l := range b.plan.Layers {
		layer, err := b.nodes(ctx, l)
		if err != nil {
			return base, nil, nil, b.origins.locate(err)
		}
		switch {
		case l.Name == inputBase:
			base = layer
		case isOverlay(l.Name):
			user = append(user, layer)
		default:
			programs = append(programs, layer)
		}
	}
	return base, programs, user, nil
}

// gather completes c.facts for rendering and returns the files of the baked container images.
func (b *executor) gather(ctx context.Context, id string, base []tree.Node, c *composition) (_ []tree.Node, err error) {
	if c.packages, err = b.packages(base); err != nil {
		return nil, err
	}
	containerd, err := b.containerdVersion(c.packages)
	if err != nil {
		return nil, err
	}
	kernel, err := overlays.KernelVersion(base)
	if err != nil {
		// Rendering needs a kernel: stop here, and report everything that the base lacks.
		return nil, b.origins.locate(b.checkTree(base))
	}
	boards, err := b.boards(base, kernel)
	if err != nil {
		return nil, b.origins.locate(err)
	}
	store, err := b.bakeImages(ctx, containerd)
	if err != nil {
		return nil, b.origins.locate(err)
	}
	c.imgReport = store.Report
	info := imageInfo(b.img, b.plan, id, kernel, containerd, store)
	info.Boards = boards
	c.facts = overlays.Facts{SourceDate: b.date, Info: info, Containerd: containerd}
	c.facts.CNI, err = b.cni()
	return store.Nodes, err
}

// bakeImages makes containerd's store with the plan's container images.
func (b *executor) bakeImages(ctx context.Context, containerd string) (*images.Result, error) {
	if len(b.plan.Images) == 0 {
		return &images.Result{}, nil
	}
	o := imageOptions(b.buildEnv, b.img, b.plan)
	o.ContainerdVersion = containerd
	if b.img.ImageStore.Mode == "import" {
		return images.Archives(ctx, b.Cache, b.plan.Images, o)
	}
	return images.Bake(ctx, b.Cache, b.plan.Images, o)
}

func imageOptions(r *buildEnv, img *configs.Image, p *plan.Plan) images.Options {
	return images.Options{
		Arch:       p.Arch,
		KeepLayers: img.ImageStore.KeepLayers || img.ImageStore.Mode == "import",
		MaxLayer:   img.ImageStore.MaxLayer(),
		MaxFiles:   img.ImageStore.MaxFiles,
		Sandbox:    img.Containerd.Sandbox,
		Registries: p.Registries,
		Dir:        r.Dir,
		SourceDate: time.Unix(p.SourceDate, 0).UTC(),
		Warn:       func(text string) { r.event(Event{Step: "images", State: StateWarning, Text: text}) },
	}
}

// containerdVersion returns the version of containerd in the image.
func (b *executor) containerdVersion(packages []dpkg.Package) (string, error) {
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

func imageInfo(img *configs.Image, pl *plan.Plan, id, kernel, containerd string, baked *images.Result) ondisk.ImageInfo {
	info := ondisk.ImageInfo{
		Version: ondisk.ImageInfoVersion, Name: img.Name, Plan: id, Arch: img.Arch,
		SourceDate: pl.SourceDate, NodeTypes: img.NodeTypes, SiteVersions: siteVersions, SiteFields: configs.SiteFields(), InventoryVersions: siteVersions,
		Removable: img.Sites.Removable, SiteKeys: img.Sites.Keys,
		UpdateSerial: img.Updates.Serial, UpdateKeys: img.Updates.Keys, ControlPlaneUpdates: slices.Contains(img.NodeTypes, configs.NodeControlPlane),
		Kubernetes: img.Kubernetes.Version, Containerd: containerd, Kernel: kernel,
		Snapshotter: store.Snapshotter, Images: baked.Images,
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
	for _, p := range pl.Partitions {
		info.Partitions = append(info.Partitions, ondisk.PartitionInfo{
			Label: p.Label, FS: p.FS, GUID: disk.PartitionGUID(id, p.Label),
		})
	}
	return info
}

// spec returns the specification from which package disk writes the disk.
func (b *executor) spec(id string, c *composition) disk.Spec {
	spec := disk.Spec{ID: id, Arch: b.img.Arch, SourceDate: b.date, SectorSize: int64(b.img.Disk.Sector)}
	for _, p := range b.plan.Partitions {
		d := disk.Partition{Label: p.Label, FS: p.FS, Size: p.Size, Gap: p.Gap}
		switch p.Label {
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

// dataHeadroom returns the free space on DATA, in bytes. The device may be no larger than the
// image, and kubelet evicts pods and removes images if less than 15 % is free. Images that the node
// imports need more: up to four times the size of their archives, since they are unpacked.
func (b *executor) dataHeadroom(c *composition) int64 {
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

// checkSpace warns if the root file system is too large for the partitions of machines in the
// field.
func (b *executor) checkSpace(l *disk.Layout) {
	root := l.Find(ondisk.LabelRootA)
	if b.RootRoom == 0 || root == nil || root.FSSize <= b.RootRoom {
		return
	}
	b.event(Event{Step: "write", State: StateWarning, Text: fmt.Sprintf(
		"the root file system has %s, but machines flashed with earlier images have space for %s and will reject this image as an update: make the root file system smaller or, if all these machines will be flashed again, remove rootRoom from the lock",
		bytesize.MiB(root.FSSize), bytesize.MiB(b.RootRoom))})
}

// write computes the layout and writes the disk. The layout depends only on ROOT-A and DATA, so
// image.json on the ESP can contain it.
func (b *executor) write(ctx context.Context, id string, c *composition) (*Report, error) {
	spec := b.spec(id, c)
	layout, err := disk.Compute(spec)
	if err != nil {
		return nil, b.origins.locate(byLayer(err))
	}
	b.checkSpace(layout)
	c.facts.Info.Partitions = slices.Clone(layout.Parts)
	if c.esp, err = overlays.ESP(b.img, c.facts, c.merged); err != nil {
		return nil, b.origins.locate(err)
	}
	c.esp = append(c.esp, tree.Node{Path: ondisk.ESPSBOM, Layer: overlays.LayerName, Inode: &tree.Inode{
		Mode: tree.ModeRegular | 0o644, MTime: b.date, Data: tree.Bytes(c.sbom)}})
	if err := spec.Fill(layout, ondisk.LabelESP, c.esp); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(c.esp, func(n tree.Node) bool { return n.Path == ondisk.ESPImageInfo })
	if i < 0 {
		return nil, fmt.Errorf("BUG: the ESP has no %s", ondisk.ESPImageInfo)
	}
	imageInfo := c.esp[i].Data.Inline
	s := b.startStep("write", b.Output)
	res, err := disk.Write(ctx, b.Output, spec, layout, b.Cache, disk.WriteOptions{
		Unchanged: b.Cache.Unchanged,
		Zstd:      strings.HasSuffix(b.Output, ".zst"), Force: b.Force, Progress: s.progress,
		ImageInfo: imageInfo, SignIndex: b.SignIndex,
		Slot: func(d disk.Digest) ([]byte, error) {
			info := ondisk.SlotInfo{
				Version: ondisk.SlotInfoVersion, Plan: id, Golden: d.Golden, Parts: d.Parts, SiteVersions: siteVersions, SectorSize: spec.SectorSize,
			}
			if b.Sign != nil {
				if info.Signature, err = b.Sign(d.Golden, imageInfo); err != nil {
					return nil, err
				}
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
