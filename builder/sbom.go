package builder

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"io"
	"net/url"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/dpkg"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/ondisk/tree"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
	"github.com/spdx/tools-golang/spdxlib"
)

// sbom is an SPDX document of the parts of an image. It is stored on the disk, so its bytes must
// depend only on the plan's ID: it describes programs by digest, not by source.
type sbom struct {
	doc  *spdx.Document
	seen map[common.ElementID]bool
}

const noAssertion = "NOASSERTION"

// makeSBOM lists the Debian packages, the programs with their Go modules, and the container images.
func (b *executor) makeSBOM(id string, c *composition) ([]byte, error) {
	d := &sbom{seen: map[common.ElementID]bool{}, doc: &spdx.Document{
		SPDXVersion:    spdx.Version,
		DataLicense:    spdx.DataLicense,
		SPDXIdentifier: "DOCUMENT",
		DocumentName:   b.img.Name,
		// This is a name, not an address. SPDX requires a unique one for each document.
		DocumentNamespace: "https://edgebake.io/spdx/" + url.PathEscape(b.img.Name) + "/" + id,
		CreationInfo: &spdx.CreationInfo{
			// Leave out edgebake's version, which must not change the bytes of the disk. The report
			// contains it.
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "edgebake"}},
			Created:  b.date.UTC().Format(time.RFC3339),
		},
	}}
	image := d.add("Image", &spdx.Package{
		PackageName: b.img.Name, PackageVersion: id[:12],
		PackageDownloadLocation: "NONE", PrimaryPackagePurpose: "OPERATING-SYSTEM",
	})
	d.relate("DOCUMENT", "DESCRIBES", image)
	for _, p := range c.packages {
		d.relate(image, "CONTAINS", d.add("deb-"+p.Name+":"+p.Arch, &spdx.Package{
			PackageName: p.Name, PackageVersion: p.Version,
			PackageHomePage: p.Homepage, PackageSourceInfo: sourceInfo(p),
			PackageExternalReferences: purl("pkg:deb/debian/" + url.PathEscape(p.Name) + "@" + url.QueryEscape(p.Version) + "?arch=" + p.Arch),
		}))
	}
	if err := b.programsSBOM(d, image, c.merged); err != nil {
		return nil, err
	}
	for _, i := range c.facts.Info.Images {
		repo, _, _ := strings.Cut(i.Ref, "@")
		d.relate(image, "CONTAINS", d.add("oci-"+i.Ref, &spdx.Package{
			PackageName: i.Ref, PackageVersion: i.Digest,
			PackageChecksums:          []common.Checksum{{Algorithm: common.SHA256, Value: strings.TrimPrefix(i.Digest, "sha256:")}},
			PrimaryPackagePurpose:     "CONTAINER",
			PackageExternalReferences: purl("pkg:oci/" + url.PathEscape(repo[strings.LastIndexByte(repo, '/')+1:]) + "@" + url.QueryEscape(i.Digest)),
		}))
	}
	if err := spdxlib.ValidateDocument(d.doc); err != nil {
		return nil, fmt.Errorf("making the SBOM: %w", err)
	}
	var out bytes.Buffer
	if err := spdxjson.Write(d.doc, &out, spdxjson.Indent(" ")); err != nil {
		return nil, fmt.Errorf("making the SBOM: %w", err)
	}
	return out.Bytes(), nil
}

// programsSBOM lists the programs that are not part of Debian packages.
func (b *executor) programsSBOM(d *sbom, image common.ElementID, merged []tree.Node) error {
	layers := map[string]plan.Layer{}
	for _, l := range b.plan.Layers {
		if l.Path != "" || l.Members != nil {
			layers[l.Name] = l
		}
	}
	for _, n := range merged {
		l, ok := layers[n.Layer]
		if !ok || !n.IsRegular() {
			continue
		}
		in := b.input(l.Input)
		pkg := &spdx.Package{
			PackageName: n.Path[strings.LastIndexByte(n.Path, '/')+1:],
			// The mirror's address is in the report: the bytes of the disk must not depend on it.
			PackageDownloadLocation: noAssertion, PackageFileName: n.Path, PrimaryPackagePurpose: "APPLICATION",
		}
		if l.Path != "" {
			pkg.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: in.SHA256}}
		}
		info, err := b.buildInfo(n)
		if err != nil {
			return err
		}
		if info != nil {
			pkg.PackageVersion = programVersion(info)
		}
		prog := d.add("file-"+n.Path, pkg)
		d.relate(image, "CONTAINS", prog)
		if info == nil {
			continue
		}
		for _, m := range append([]*debug.Module{{Path: "stdlib", Version: strings.TrimPrefix(info.GoVersion, "go")}, &info.Main}, info.Deps...) {
			if m.Replace != nil {
				m = m.Replace
			}
			if m.Path == "" || m.Path == "scratch" {
				continue // the temporary module in which edgebake compiles
			}
			d.relate(prog, "CONTAINS", d.add("go-"+m.Path+"@"+m.Version, &spdx.Package{
				PackageName: m.Path, PackageVersion: m.Version,
				PackageExternalReferences: purl("pkg:golang/" + m.Path + "@" + url.QueryEscape(m.Version)),
			}))
		}
	}
	return nil
}

// programVersion returns the version of the module that contains a Go program's main package. If
// edgebake compiled the program, that module is a dependency of the main module.
func programVersion(info *debug.BuildInfo) string {
	of := &info.Main
	found := 0
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if inside := info.Path == m.Path || strings.HasPrefix(info.Path, m.Path+"/"); inside && len(m.Path) > found {
			of, found = m, len(m.Path)
		}
	}
	if of.Replace != nil {
		of = of.Replace
	}
	return of.Version
}

// buildInfo reads a Go program's build information. It returns nil for any other file.
func (b *executor) buildInfo(n tree.Node) (*debug.BuildInfo, error) {
	f, err := b.Cache.OpenBlob(n.Data.Blob)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := buildinfo.Read(io.NewSectionReader(f, n.Data.Off, n.Data.Size))
	if err != nil {
		return nil, nil //nolint:nilerr // not a Go program
	}
	return info, nil
}

func sourceInfo(p dpkg.Package) string {
	if p.Source == "" {
		return "built from: " + p.Name
	}
	return "built from: " + p.Source
}

func purl(s string) []*spdx.PackageExternalReference {
	return []*spdx.PackageExternalReference{{Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL, Locator: s}}
}

var notInID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

// elementID returns an SPDX ID for a name. Invalid characters become hyphens, and a hash
// distinguishes names that would get the same ID.
func elementID(name string) common.ElementID {
	sum := sha256.Sum256([]byte(name))
	return common.ElementID(fmt.Sprintf("%s-%x", notInID.ReplaceAllString(name, "-"), sum[:6]))
}

// add adds a package unless the document has it, and returns its ID.
func (d *sbom) add(name string, p *spdx.Package) common.ElementID {
	id := elementID(name)
	if d.seen[id] {
		return id
	}
	d.seen[id] = true
	p.PackageSPDXIdentifier = id
	if p.PackageDownloadLocation == "" {
		p.PackageDownloadLocation = noAssertion
	}
	// The packages contain their own licences, and edgebake does not analyze files.
	p.PackageLicenseConcluded, p.PackageLicenseDeclared, p.PackageCopyrightText = noAssertion, noAssertion, noAssertion
	d.doc.Packages = append(d.doc.Packages, p)
	return id
}

func (d *sbom) relate(from common.ElementID, how string, to common.ElementID) {
	d.doc.Relationships = append(d.doc.Relationships, &spdx.Relationship{
		RefA: common.MakeDocElementID("", string(from)), RefB: common.MakeDocElementID("", string(to)), Relationship: how,
	})
}
