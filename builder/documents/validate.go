package documents

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/ondisk"
)

// Validate checks a document of any kind, and the files that it names.
func (r *Reader) Validate(name string) error {
	d, err := r.ReadDecrypted(name)
	if err != nil {
		return err
	}
	doc, err := configs.Read(name, d.Data)
	if err != nil {
		return err
	}
	switch doc.Kind {
	case configs.KindSite, configs.KindInventory:
		_, err = r.sites(d, doc)
	case configs.KindImage:
		err = r.validateImage(d, doc)
	case configs.KindCluster:
		_, _, err = r.cluster(doc)
	default:
		err = doc.WrongKind("")
	}
	return err
}

// Images reads an Image document. It returns one Image for each architecture in archs or, if archs
// is empty, for each architecture that the document lists.
func (r *Reader) Images(name string, archs ...string) ([]*configs.Image, Source, error) {
	d, err := r.Read(name)
	if err != nil {
		return nil, d, err
	}
	images, err := configs.ParseImages(name, d.Data, archs...)
	if err == nil {
		r.warnOfDates(d, images[0])
	}
	return images, d, err
}

// validateImage checks an Image for each of its architectures.
func (r *Reader) validateImage(d Source, doc *configs.Document) error {
	images, err := doc.Images()
	if err != nil {
		return err
	}
	r.warnOfDates(d, images[0])
	var errs []error
	var printed []string
	for _, img := range images {
		warnings, err := builder.LookForFiles(img, d.Dir())
		errs = append(errs, d.Explain(err), checkTemplates(d, img))
		for _, w := range warnings {
			if text := w.Error(); !slices.Contains(printed, text) {
				printed = append(printed, text)
				r.Warn(configs.Problems{d.warning(w)})
			}
		}
	}
	return joined.Distinct(errs...)
}

// warning adds the place in the document to a warning.
func (d Source) warning(w configs.Problem) configs.Problem {
	if w.Path != "" {
		return d.Problem(w.Path, w.Msg)
	}
	w.File = d.Name
	return w
}

// warnOfDates warns if the clock of this computer is too early for stamping the image, or for
// signing a Site that the image accepts.
func (r *Reader) warnOfDates(d Source, img *configs.Image) {
	if first, _ := (ondisk.ImageInfo{SourceDate: img.SourceTime().Unix()}).StampDates(); first.After(r.Now) {
		r.Warn(configs.Problems{d.Problem("sourceDate", fmt.Sprintf("%s is in the future by this computer's clock, so until then the image can be stamped only with --undated: set sourceDate to the current date, or correct the clock", img.SourceDate))})
	}
	if img.Sites.NotBeforeTime().After(r.Now) {
		r.Warn(configs.Problems{d.Problem("sites.notBefore", fmt.Sprintf("%s is in the future by this computer's clock, so until then machines accept no signed Site: set notBefore to the current date, or correct the clock", img.Sites.NotBefore))})
	}
}

// checkTemplates renders the templates that are in files. Inline templates are checked with the
// document, and the build reports missing files.
func checkTemplates(d Source, img *configs.Image) error {
	var all configs.Problems
	for i, f := range img.Files {
		if !f.Template || f.Source == "" {
			continue
		}
		text, err := os.ReadFile(d.Path(f.Source))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			_, err = img.RenderFile(string(text))
		}
		if err != nil {
			all = append(all, d.Problem(fmt.Sprintf("files[%d].source", i), fmt.Sprintf("%s: %v", f.Source, err)))
		}
	}
	return all.Err()
}

// Cluster reads a Cluster and its manifests.
func (r *Reader) Cluster(name string) (*clusterdoc.File, []manifest.File, error) {
	d, err := r.Read(name)
	if err != nil {
		return nil, nil, err
	}
	doc, err := configs.Read(name, d.Data)
	if err != nil {
		return nil, nil, err
	}
	return r.cluster(doc)
}

// cluster reads the Cluster and its manifests. Its error contains the problems of all of them.
func (r *Reader) cluster(doc *configs.Document) (*clusterdoc.File, []manifest.File, error) {
	c, err := clusterdoc.Read(doc)
	var all configs.Problems
	if err != nil && !errors.As(err, &all) {
		return nil, nil, err
	}
	d, named := Source{c.File, c.Text}, all
	if w := configs.KubernetesWarning(c.KubernetesVersion); w != "" {
		r.Warn(configs.Problems{d.Problem("kubernetesVersion", w)})
	}
	var manifests []manifest.File
	for i, m := range c.Manifests {
		field := fmt.Sprintf("manifests[%d]", i)
		if slices.ContainsFunc(named, func(p configs.Problem) bool { return p.Path == field }) {
			continue
		}
		p := d.Path(m)
		text, err := os.ReadFile(p)
		if err != nil {
			all = append(all, d.Problem(field, err.Error()))
			continue
		}
		all = append(all, manifest.Check(p, text)...)
		manifests = append(manifests, manifest.File{Name: m, Text: string(text)})
	}
	if all == nil {
		r.Warn(c.Warnings)
		if image := filepath.Join(d.Dir(), "image.yaml"); len(c.Manifests) == 0 && withoutCNI(image) {
			r.Warn(configs.Problems{{File: d.Name, Path: "manifests", Msg: fmt.Sprintf("is empty, and %s has cni.config: none: add the network plugin, without which no node becomes Ready", image)}})
		}
	}
	return c, manifests, all.Err()
}

// withoutCNI reports whether the Image in the file image leaves the pod network to the cluster.
func withoutCNI(image string) bool {
	text, err := os.ReadFile(image)
	if err != nil {
		return false
	}
	images, err := configs.ParseImages(image, text)
	return err == nil && images[0].CNI.Config == "none"
}
