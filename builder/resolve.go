package builder

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/overlays"
)

// Names of inputs and layers, and sizes in bytes.
const (
	inputBase      = "base"
	inputCNI       = "cni"
	inputYurthub   = "yurthub"
	imagePrefix    = "image "
	overlayPrefix  = "overlay "
	fileSrcPrefix  = "file "
	minRootHead    = 256 << 20 // minimum free bytes on ROOT-A
	minDataHead    = 512 << 20 // minimum free bytes on DATA, before the first boot grows it
	espSize        = 512 << 20
	luksGap        = 32 << 20 // twice a LUKS2 header, as in-place encryption requires
	maxSidecar     = 4 << 10
	maxDpkgStatus  = 64 << 20
	maxArchive     = 8 << 30 // bytes of an uncompressed base or release
	dpkgStatusPath = "var/lib/dpkg/status"
)

// Resolve pins an Image's inputs without making them. It finds the digests of local files, releases
// and container images. For inputs that the build makes later, it uses the lock and the cache.
func Resolve(ctx context.Context, img *configs.Image, o Options) (*plan.Plan, error) {
	b, err := newResolver(ctx, img, o)
	if err != nil {
		return nil, err
	}
	return b.resolve(ctx)
}

// resolver makes the plan of one Image.
type resolver struct {
	*buildEnv
	img     *configs.Image
	date    time.Time
	plan    *plan.Plan
	cni     []byte // the user's network configuration, or nil
	origins origins
}

func newResolver(ctx context.Context, img *configs.Image, o Options) (*resolver, error) {
	if err := img.Validate().Err(); err != nil {
		return nil, err
	}
	date := img.SourceTime()
	return &resolver{
		buildEnv: newBuildEnv(ctx, img.Arch, o), img: img, date: date, origins: origins{},
		plan: &plan.Plan{
			Version:    plan.Version,
			Name:       img.Name,
			Builder:    o.Version,
			Arch:       img.Arch,
			SourceDate: date.Unix(),
			Inputs:     map[string]plan.Input{},
			Registries: img.Registries,
		},
	}, nil
}

func (b *resolver) resolve(ctx context.Context) (*plan.Plan, error) {
	s := b.startStep("resolve", "pinning inputs")
	// The order of the layers is: base, programs, edgebake's own files (see compose), the user's
	// layers.
	var errs []error
	for _, part := range []func(context.Context) error{
		b.resolveBase, b.resolvePrograms, b.resolveAgents, b.resolveCNI, b.resolveImages, b.resolveOverlays, b.resolveFiles,
	} {
		err := part(ctx)
		if fetch.NoSpace(err) {
			return nil, err // the remaining parts would fail for the same reason
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	var err error
	if b.plan.Partitions, err = partitions(b.img); err != nil {
		return nil, err
	}
	if b.plan.Rendered, err = rendered(b.img, b.plan, b.cni); err != nil {
		return nil, err
	}
	if b.Locked {
		if b.Lock == nil {
			return nil, errNoLock
		}
		if err := checkLock(b.Lock, b.plan); err != nil {
			return nil, err
		}
	}
	s.done()
	return b.plan, nil
}

var errNoLock = errors.New("--locked: there is no lock next to the Image; build once without --locked to make one")

func checkLock(l *plan.Lock, p *plan.Plan) error {
	if err := l.Check(p); err != nil {
		return fmt.Errorf("--locked: the lock and the Image differ:\n%w", err)
	}
	return nil
}

// add adds an input with its origin and, unless layer is nil, its layer. If the input has no
// digest, add uses the lock's digest.
func (b *resolver) add(from origin, name string, in plan.Input, layer *plan.Layer) {
	b.origins[name] = from
	in.Field, in.Place = from.field, from.place
	if sha, ok := b.Lock.Pinned(name, in); ok && in.SHA256 == "" {
		in.SHA256, in.Go = sha, b.Lock.Go(name)
	}
	in.Uncompressed = b.Lock.Uncompressed(name, in)
	b.plan.Inputs[name] = in
	if layer != nil {
		layer.Name, layer.Input = name, name
		b.plan.Layers = append(b.plan.Layers, *layer)
	}
}

func (b *resolver) resolveBase(ctx context.Context) error {
	base := b.img.Base
	switch {
	case base.Debian != nil:
		keyrings, err := b.keyrings(ctx)
		if err != nil {
			return err
		}
		raw, err := canonical(newDebianRecipe(b.img, b.date, keyrings))
		if err != nil {
			return err
		}
		in := plan.Input{Make: makeDebian, Recipe: raw}
		key := debianKey(in)
		if b.Update {
			if err := b.Cache.Forget(key); err != nil {
				return err
			}
		}
		if sha, ok := b.Cache.Lookup(key); ok && b.Base == "" {
			if _, locked := b.Lock.Pinned(inputBase, in); !locked {
				in.SHA256 = sha
			}
		}
		b.add(origin{field: "base.debian"}, inputBase, in, &plan.Layer{})
		return nil
	case base.Tar != nil && base.Tar.File != "" && b.Base != "":
		return &configs.FieldError{Path: "base.tar.file", Err: fmt.Errorf("the Image already names a local base: build without --base %s, or set base.tar.file to that file", b.Base)}
	case base.Tar != nil:
		return b.fileSource(ctx, inputBase, "base.tar", *base.Tar, &plan.Layer{})
	case base.OCI != nil:
		return b.resolveOCI(ctx, *base.OCI)
	}
	return errors.New("base: choose one of debian, tar and oci")
}

// fileSource adds an input that is a local file or a URL.
func (b *resolver) fileSource(ctx context.Context, name, field string, src configs.FileSource, layer *plan.Layer) error {
	if src.File != "" {
		sha, err := b.importNamed(ctx, src.File, src.SHA256)
		if err != nil {
			return fieldError(field, err)
		}
		b.add(origin{field: field}, name, plan.Input{File: src.File, SHA256: sha}, layer)
		return fieldError(field, b.checkFile(sha, layer.Path, src.File))
	}
	in := plan.Input{Fetch: []string{src.URL}, SHA256: src.SHA256}
	if _, locked := b.Lock.Pinned(name, in); src.SHA256 == "" && !locked {
		return fieldError(field, fmt.Errorf("%s has no sha256: set it, so that a changed file is detected", fetch.Redact(src.URL)))
	}
	b.add(origin{field: field}, name, in, layer)
	return nil
}

// resolveOverlays packs the user's overlay directories into the cache.
func (b *resolver) resolveOverlays(ctx context.Context) error {
	var errs []error
	for i, o := range b.img.Overlays {
		field := fmt.Sprintf("overlays[%d].dir", i)
		if err := checkOverlay(b.path(o.Dir), b.Dir); err != nil {
			errs = append(errs, fieldError(field, err))
			continue
		}
		sha, err := b.packDir(ctx, o.Dir, b.date)
		if err != nil {
			errs = append(errs, fieldError(field, err))
			continue
		}
		b.add(origin{field: field}, fmt.Sprintf("%s%d", overlayPrefix, i), plan.Input{Make: makeFolder, File: o.Dir, SHA256: sha}, &plan.Layer{Replace: o.Replace})
	}
	return errors.Join(errs...)
}

// resolveFiles pins the sources of files in the Image, and renders the templates among them.
func (b *resolver) resolveFiles(ctx context.Context) error {
	var errs []error
	for i, f := range b.img.Files {
		if f.Source == "" {
			continue
		}
		field := fmt.Sprintf("files[%d].source", i)
		sha, err := b.importNamed(ctx, f.Source, "")
		if err != nil {
			errs = append(errs, fieldError(field, err))
			continue
		}
		b.add(origin{field: field}, fileInput(i), plan.Input{File: f.Source, SHA256: sha}, nil)
	}
	if len(errs) == 0 {
		files, err := userFiles(b.img, b.date, b.Cache, b.plan.Inputs)
		if err == nil {
			b.plan.Config, err = renderedConfig(b.img, files)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// fileInput returns the input name of files[i]. The name does not contain the path, so that the
// plan does not depend on the directory of the file.
func fileInput(i int) string { return fmt.Sprintf("%s%d", fileSrcPrefix, i) }

// resolveCNI pins the network configuration file, if the Image names one.
func (b *resolver) resolveCNI(ctx context.Context) error {
	c := b.img.CNI.Config
	if !strings.HasSuffix(c, ".conflist") {
		return nil
	}
	sha, err := b.importNamed(ctx, c, "")
	if err != nil {
		return fieldError("cni.config", err)
	}
	if b.cni, err = b.Cache.ReadBlob(sha); err != nil {
		return fieldError("cni.config", err)
	}
	if _, err = overlays.CNIPlugins(b.cni); err != nil {
		return fieldError("cni.config", fmt.Errorf("reading %s: %w", c, err))
	}
	b.add(origin{field: "cni.config"}, inputCNI, plan.Input{File: c, SHA256: sha}, nil)
	return nil
}

func partitions(img *configs.Image) ([]plan.Partition, error) {
	root, err := diskSize("disk.root", img.Disk.Root)
	data, err2 := diskSize("disk.data", img.Disk.Data)
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	if root != 0 && root <= minRootHead { // the contents are not known yet
		return nil, fieldError("disk.root", fmt.Errorf("%s is too small, since %s must stay free: increase it, or remove it to have it computed", img.Disk.Root, bytesize.MiB(minRootHead)))
	}
	// Both roots have the same size, since updates alternate between them. A size in the Image is
	// not enlarged for updates.
	grow := &plan.Grow{Percent: 50, AtLeast: 256 << 20}
	if root != 0 || img.Disk.Reserve == "none" {
		grow = nil
	}
	slotFS := "fat16"
	if img.Disk.Sector == 4096 {
		slotFS = "fat12" // see ondisk/slot
	}
	p := []plan.Partition{
		{Label: ondisk.LabelESP, FS: "fat32", Size: espSize},
		{Label: ondisk.LabelSlot, FS: slotFS, Size: ondisk.SlotSize},
		{Label: ondisk.LabelRootA, FS: "ext4", Size: root, Grow: grow, HashTree: true},
		{Label: ondisk.LabelRootB, Grow: grow, HashTree: true},
		{Label: ondisk.LabelData, FS: "ext4", Size: data, Gap: luksGap},
	}
	if img.Disk.Reserve == "none" {
		p = slices.DeleteFunc(p, func(p plan.Partition) bool { return p.Label == ondisk.LabelRootB })
	}
	return p, nil
}

// diskSize parses a size, and rounds it up to whole MiB. An empty size gives 0: the build computes
// it.
func diskSize(field, s string) (int64, error) {
	if s == "" {
		return 0, nil
	}
	n, err := forms.ParseSize(s)
	if err != nil {
		return 0, fieldError(field, err)
	}
	const mib = 1 << 20
	return (n + mib - 1) / mib * mib, nil
}

// renderedConfig returns the part of the Image that affects rendering. Sources of inputs are left
// out, since the plan has their digests, and container images are sorted. files contains the
// rendered templates, which may use any field of the Image.
func renderedConfig(img *configs.Image, files []tree.Layer) (json.RawMessage, error) {
	c := *img
	c.Base, c.Kubernetes.Source, c.Containerd.Source = configs.Base{}, configs.Source{}, configs.Source{}
	c.Registries, c.Overlays, c.Agents, c.ImagesFrom, c.ImagesIgnore = nil, nil, configs.Agents{}, nil, nil
	if c.Containerd.Crictl != nil {
		c.Containerd.Crictl = &configs.Crictl{Version: c.Containerd.Crictl.Version}
	}
	if img.Yurthub != nil {
		y := *img.Yurthub
		y.Binary = nil
		if y.Image != nil {
			y.Image = &configs.ContainerImage{Ref: y.Image.Ref}
		}
		c.Yurthub = &y
	}
	if strings.HasSuffix(c.CNI.Config, ".conflist") {
		c.CNI.Config = inputCNI
	}
	c.Images = nil
	for _, i := range img.Images {
		c.Images = append(c.Images, configs.ContainerImage{Ref: i.Ref})
	}
	slices.SortFunc(c.Images, func(a, b configs.ContainerImage) int { return strings.Compare(a.Ref, b.Ref) })
	c.Files = slices.Clone(img.Files)
	for i := range c.Files {
		f := &c.Files[i]
		f.Source = ""
		if !f.Template {
			continue
		}
		text, err := renderedFile(files, f.Path)
		if err != nil {
			return nil, err
		}
		f.Contents = &text
	}
	return canonical(c)
}

// rendered returns the digest of the files that edgebake renders for an Image. Placeholders replace
// facts that become known only when the inputs are made, such as Debian's containerd version.
func rendered(img *configs.Image, p *plan.Plan, cni []byte) (string, error) {
	f := overlays.Facts{SourceDate: time.Unix(p.SourceDate, 0).UTC(), CNI: cni, Containerd: strings.TrimPrefix(img.Containerd.Version, "v")}
	if img.Containerd.Debian {
		f.Containerd = "1" // placeholder for the version in the base, which is not known yet
	}
	f.Info = imageInfo(img, p, "", "", f.Containerd, &images.Result{})
	root, err := overlays.Root(img, f)
	if err != nil {
		return "", err
	}
	cmdline, err := overlays.CommandLine(img, f, ondisk.LabelRootA)
	if err != nil {
		return "", err
	}
	if err := overlays.CheckCommandLine(img, cmdline); err != nil {
		return "", fieldError("kernel.args", err)
	}
	all, err := canonical(struct {
		Nodes       []tree.Node
		CommandLine string
		Firmware    string `json:",omitempty"`
	}{root.Nodes, cmdline, overlays.FirmwareConfig(img)})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(all)
	return hex.EncodeToString(sum[:]), nil
}

// renderedFile returns the text of a rendered template.
func renderedFile(files []tree.Layer, path string) (string, error) {
	for _, l := range files {
		for _, n := range l.Nodes {
			if "/"+n.Path == path {
				text, err := tree.ReadContent(n.Data, nil, n.Data.Size)
				return string(text), err
			}
		}
	}
	return "", fmt.Errorf("BUG: template %s was not rendered", path)
}
