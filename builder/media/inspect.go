package media

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// Info describes an image. It contains no secrets: only the names and sizes of the slot's files.
type Info struct {
	Path   string `json:"path"`
	Format string `json:"format"` // FormatRaw or FormatZstd
	// Size is the size of the disk, and Stored the space that the file occupies, in bytes.
	Size   int64 `json:"size"`
	Stored int64 `json:"stored"`
	// SectorSize is the sector size of the disk, in bytes.
	SectorSize int64            `json:"sectorSize"`
	DiskGUID   string           `json:"diskGUID"`
	Image      ondisk.ImageInfo `json:"image"`
	// Partitions lists the partitions in the order of the table.
	Partitions []Partition `json:"partitions"`
	Slot       SlotState   `json:"slot"`
	// Boot lists the files of the EFI system partition.
	Boot []File `json:"boot"`
	// Packages are the packages in the image's SBOM, sorted by name.
	Packages []Package `json:"packages,omitempty"`
}

// Partition describes a partition of the disk.
type Partition struct {
	Label string `json:"label"`
	Type  string `json:"type"`
	GUID  string `json:"guid"`
	FS    string `json:"fs,omitempty"`
	Start int64  `json:"start"`
	Size  int64  `json:"size"`
	// All sizes are in bytes. Used and Free are of the file system. Reserve is the space after it,
	// for an update's larger file system and its hash tree.
	Used    int64 `json:"used,omitempty"`
	Free    int64 `json:"free,omitempty"`
	Reserve int64 `json:"reserve,omitempty"`
	// Error is the reason why the file system could not be read.
	Error string `json:"error,omitempty"`
}

// File is a file's name and size.
type File struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
}

// States of a slot.
const (
	SlotGolden    = "golden"    // without a Site
	SlotSite      = "site"      // stamped for one machine
	SlotInventory = "inventory" // stamped for several machines
	SlotDamaged   = "damaged"   // must be stamped again
)

// SlotState describes a slot.
type SlotState struct {
	State string `json:"state"`
	// Error describes the damage of a slot, and Fix the remedy.
	Error  string `json:"error,omitempty"`
	Fix    string `json:"fix,omitempty"`
	Golden string `json:"golden,omitempty"`
	// Signed means that the image has a signature. Inspect does not verify it.
	Signed  bool      `json:"signed,omitempty"`
	Stamped time.Time `json:"stamped,omitzero"`
	Files   []File    `json:"files,omitempty"`
	// Site is the public part of the Site. It is nil if there is none, or if it cannot be decoded.
	Site *SiteSummary `json:"site,omitempty"`
	// Sites is the number of Sites in the Inventory. It is 0 if there is none, or if it cannot be
	// decoded.
	Sites int `json:"sites,omitempty"`
	// Report is the last report that a machine wrote into the slot.
	Report string `json:"report,omitempty"`
}

// SiteSummary identifies the Site in a slot. It contains no secrets.
type SiteSummary struct {
	// NodeName may be a template.
	NodeName string   `json:"nodeName"`
	NodeType string   `json:"nodeType"`
	NodePool string   `json:"nodePool,omitempty"`
	Masters  []string `json:"masters"`
	// Match selects the machine that the Site is for.
	Match configs.Match `json:"match,omitzero"`
	// Token reports whether the Site contains a bootstrap token.
	Token bool `json:"token"`
}

// Package is one entry of the image's SBOM.
type Package struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
}

// Inspect describes an image.
func Inspect(path string) (*Info, error) {
	m, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	i := &Info{Path: path, Format: m.format, Size: m.size, Stored: stored(m.f, m.stored), DiskGUID: m.table.GUID, SectorSize: m.table.SectorSize, Image: m.info}
	m.partitions(i)
	if err := m.readSlot(i); err != nil {
		return nil, fmt.Errorf("inspecting image %s: %w", path, err)
	}
	if err := m.boot(i); err != nil {
		return nil, fmt.Errorf("inspecting image %s: %w", path, err)
	}
	return i, nil
}

// partitions reads the partition table and the sizes of the file systems. If a file system cannot
// be read, the result contains the error, because people inspect images to find damage.
func (m *Image) partitions(i *Info) {
	for _, p := range m.table.Partitions {
		out := Partition{Label: p.Name, Type: p.Type, GUID: p.GUID, Start: p.Start, Size: p.Size}
		if k := slices.IndexFunc(m.info.Partitions, func(x ondisk.PartitionInfo) bool { return x.Label == p.Name }); k >= 0 {
			out.FS = m.info.Partitions[k].FS
		}
		section := m.section(p)
		f, fatErr := fat.Open(section)
		if err := fatErr; err == nil {
			out.FS = fmt.Sprintf("fat%d", f.Type())
			if out.Free, err = f.Free(); err != nil {
				out.Error = err.Error()
			} else {
				out.Used = p.Size - out.Free
			}
		} else if e, err := ext4.Open(section); err == nil {
			out.FS, out.Free = disk.Ext4, e.Info().FreeBytes
			out.Used, out.Reserve = e.Info().Size-out.Free, p.Size-e.Info().Size
		} else if strings.HasPrefix(out.FS, "fat") {
			out.Error = fatErr.Error()
		} else if out.FS != "" {
			out.Error = err.Error()
		}
		i.Partitions = append(i.Partitions, out)
	}
}

func (m *Image) readSlot(i *Info) error {
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return err
	}
	var c *slot.Contents
	if i.Slot, c = slotState(m.section(p)); i.Slot.State == SlotInventory {
		if inv, err := configs.ParsePublicInventory(ondisk.SlotInventory, c.Files[ondisk.SlotInventory]); err == nil {
			i.Slot.Sites = len(inv.Sites)
		}
	}
	return nil
}

// slotState describes a slot. It returns nil contents if the slot is damaged.
func slotState(r io.ReaderAt) (s SlotState, c *slot.Contents) {
	c, err := slot.Read(r)
	switch {
	case errors.Is(err, slot.ErrNoSite):
		s.State = SlotGolden
	case err != nil:
		s.State = SlotDamaged
		s.Error, s.Fix = slot.Explain(err)
		return s, nil
	case c.Files[ondisk.SlotInventory] != nil:
		s.State = SlotInventory
	default:
		s.State = SlotSite
		s.Site = summary(c.Files[ondisk.SlotSite])
	}
	s.Golden, s.Report = c.Info.Golden, string(c.Report.Text)
	s.Signed = c.Info.Signature != ""
	if c.Info.Stamped > 0 {
		s.Stamped = time.Unix(c.Info.Stamped, 0).UTC()
	}
	for name, b := range c.Files {
		s.Files = append(s.Files, File{name, int64(len(b))})
	}
	slices.SortFunc(s.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return s, c
}

// summary returns the public part of a Site. It returns nil if this edgebake cannot decode the
// Site, for example because a newer edgebake wrote it.
func summary(doc []byte) *SiteSummary {
	site, err := configs.ParsePublicSite(ondisk.SlotSite, doc)
	if err != nil {
		return nil
	}
	return &SiteSummary{NodeName: site.NodeName, NodeType: site.NodeType, NodePool: site.NodePool, Match: site.Match,
		Masters: site.Masters, Token: !site.Credentials.Token.IsZero()}
}

func (m *Image) boot(i *Info) error {
	fsys, err := m.esp()
	if err != nil {
		return err
	}
	err = fsys.Walk(func(e fat.Entry) error {
		if !e.Dir {
			i.Boot = append(i.Boot, File{e.Path, e.Size})
		}
		return nil
	})
	if err != nil {
		return err
	}
	b, err := m.espFile(ondisk.ESPSBOM)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if i.Packages, err = readSBOM(b); err != nil {
		return fmt.Errorf("reading %s: %w", ondisk.ESPSBOM, err)
	}
	return nil
}

type sbomPackage struct {
	Name    string `json:"name"`
	Version string `json:"versionInfo"`
	File    string `json:"packageFileName"` // path, if this is a program
	Purpose string `json:"primaryPackagePurpose"`
}

// decodeSBOM returns the packages, programs and modules of an SPDX document, but not the entries
// for the image itself and for container images. A program's version is empty if Go does not record
// it.
func decodeSBOM(doc []byte) ([]sbomPackage, error) {
	var sbom struct {
		Packages []sbomPackage `json:"packages"`
	}
	if err := json.Unmarshal(doc, &sbom); err != nil {
		return nil, err
	}
	var out []sbomPackage
	for _, p := range sbom.Packages {
		if p.Purpose == "OPERATING-SYSTEM" || p.Purpose == "CONTAINER" {
			continue
		}
		if p.Version == "(devel)" {
			p.Version = ""
		}
		out = append(out, p)
	}
	return out, nil
}

// readSBOM returns the packages of an SPDX document, sorted by name.
func readSBOM(doc []byte) ([]Package, error) {
	packages, err := decodeSBOM(doc)
	if err != nil {
		return nil, err
	}
	var out []Package
	for _, p := range packages {
		if p.Name != "" {
			out = append(out, Package{p.Name, p.Version})
		}
	}
	slices.SortFunc(out, func(a, b Package) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		return strings.Compare(a.Version, b.Version)
	})
	return out, nil
}
