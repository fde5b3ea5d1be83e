package builder

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// ReportVersion is the version of report.json.
const ReportVersion = 1

// Report is report.json next to the image: inputs, outputs, free space, and timings.
type Report struct {
	Version    int                   `json:"version"`
	Name       string                `json:"name"`
	Plan       string                `json:"plan"`
	Builder    string                `json:"builder"`
	Golden     string                `json:"golden"`
	Size       int64                 `json:"size"` // size of the disk
	Info       ondisk.ImageInfo      `json:"image"`
	Partitions []PartitionReport     `json:"partitions"`
	Inputs     map[string]plan.Input `json:"inputs"`
	Packages   int                   `json:"packages"`
	Images     images.Report         `json:"images"`
	// Timings differ between runs, and Builder between versions of edgebake. Everything else
	// follows from the plan.
	Timings []StepTime `json:"timings"`
}

// PartitionReport describes a partition and its free space.
type PartitionReport struct {
	ondisk.PartitionInfo
	Free  int64 `json:"free,omitempty"`
	Files int   `json:"files,omitempty"`
}

// Reserve returns the space in the partition after the end of the file system, in bytes.
func (p PartitionReport) Reserve() int64 {
	if p.FSSize == 0 {
		return 0
	}
	return p.Size - p.FSSize
}

// countFiles counts regular files. Hard links to a file count once.
func countFiles(nodes []tree.Node) int {
	seen := map[*tree.Inode]bool{}
	for _, n := range nodes {
		if n.IsRegular() {
			seen[n.Inode] = true
		}
	}
	return len(seen)
}

func (b *executor) report(id string, c *composition, l *disk.Layout, res *disk.Result) (*Report, error) {
	r := &Report{
		Version: ReportVersion, Name: b.img.Name, Plan: id, Builder: b.plan.Builder, Golden: res.Golden,
		Size: l.Size, Info: c.facts.Info, Inputs: b.plan.With(b.inputs).Lock().Inputs, Packages: len(c.packages),
		Images: c.imgReport, Timings: b.steps,
	}
	written := map[string]disk.PartResult{}
	for _, p := range res.Parts {
		written[p.Label] = p
	}
	for _, p := range l.Parts {
		pr := PartitionReport{PartitionInfo: p, Free: written[p.Label].Free}
		switch p.Label {
		case ondisk.LabelESP:
			pr.Files = countFiles(c.esp)
		case ondisk.LabelRootA:
			pr.Files = countFiles(c.root)
		case ondisk.LabelData:
			pr.Files = countFiles(c.data)
		}
		r.Partitions = append(r.Partitions, pr)
	}
	return r, nil
}

// RootRoom returns the largest root file system, in bytes, that a machine with this image accepts
// as an update. It returns 0 if the disk has no second root.
func (r *Report) RootRoom() int64 {
	for _, p := range r.Partitions {
		if p.Label == ondisk.LabelRootB {
			return p.Room
		}
	}
	return 0
}

// Encode returns the content of report.json.
func (r *Report) Encode() ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(r); err != nil {
		return nil, fmt.Errorf("encoding the report: %w", err)
	}
	return out.Bytes(), nil
}
