// Package anatomy describes the contents of an image: its partitions; their packages, programs,
// container images and largest files; the pinned inputs; and the duration of each build step. The
// result is data (Anatomy), an HTML page that shows it, and the difference between two images.
//
// It reads the image and, if they exist, its build report and the report of a node that has booted
// it. The page needs no network and no scripts, and every number on it is also in the data.
package anatomy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
)

// Version is the version of Anatomy's JSON form.
const Version = 1

// reportEnding is the suffix in the file name of a build report.
const reportEnding = ".report.json"

// Anatomy describes the contents of an image.
type Anatomy struct {
	Version    int    `json:"version"`
	Name       string `json:"name"`
	Arch       string `json:"arch"`
	Kubernetes string `json:"kubernetes"`
	Containerd string `json:"containerd"`
	Kernel     string `json:"kernel"`
	SourceDate string `json:"sourceDate"`
	Plan       string `json:"plan"`
	Golden     string `json:"golden"`
	Slot       string `json:"slot"` // state of the slot
	// Size is the size of the disk, and Stored the size of the file, in bytes.
	Size       int64            `json:"size"`
	Stored     int64            `json:"stored"`
	Partitions []Partition      `json:"partitions"`
	Contents   []media.Contents `json:"contents"`
	// Images lists the container images, and Packages the packages in the SBOM.
	Images   []ondisk.ImageRef `json:"images"`
	Packages []media.Package   `json:"packages"`
	// Builder, Steps and Inputs come from the build report.
	Builder string             `json:"builder,omitempty"`
	Steps   []builder.StepTime `json:"steps,omitempty"`
	Inputs  []Input            `json:"inputs,omitempty"`
	Boot    *Boot              `json:"boot,omitempty"`
	// Notes lists the data that is missing, with the reasons.
	Notes []string `json:"notes,omitempty"`
}

// Partition describes one partition of the disk.
type Partition struct {
	Label string `json:"label"`
	FS    string `json:"fs,omitempty"`
	Start int64  `json:"start"`
	Size  int64  `json:"size"`
	// Used and Free are bytes of the file system. Reserve is the space after it, in bytes.
	Used    int64 `json:"used"`
	Free    int64 `json:"free"`
	Reserve int64 `json:"reserve"`
}

// Input is a pinned input of the build.
type Input struct {
	Name string `json:"name"`
	// From describes the source of the input, or how it was made.
	From   string `json:"from"`
	Digest string `json:"digest"`
}

// Boot describes the first boot of a node.
type Boot struct {
	Node    string    `json:"node"`
	Result  string    `json:"result"`
	Started time.Time `json:"started"`
	// Seconds is the time from Started to the last update of the report.
	Seconds float64 `json:"seconds"`
	// Before lists the stages before firstboot, in order. Finished is the time at which systemd had
	// started everything. It is in seconds since power-on, or since the start of the kernel if the
	// firmware does not report times.
	Before   []Part   `json:"before,omitempty"`
	Finished float64  `json:"finished,omitempty"`
	Phases   []Phase  `json:"phases"`
	Notes    []string `json:"notes,omitempty"`
}

// Part is a stage before firstboot: firmware, boot loader, kernel, initrd or system.
type Part struct {
	Name    string  `json:"name"`
	Start   float64 `json:"start"`
	Seconds float64 `json:"seconds"`
}

// Phase is one phase of firstboot.
type Phase struct {
	Name     string  `json:"name"`
	Doc      string  `json:"doc,omitempty"`
	Status   string  `json:"status"`
	Attempts int     `json:"attempts"`
	Start    float64 `json:"start"` // seconds since Boot.Started
	Seconds  float64 `json:"seconds"`
	Said     string  `json:"said,omitempty"`
}

// Read describes an image. build is the path of its build report, or "" to look in the image's
// directory. boot is the path of a node's report.json, or "".
func Read(image, build, boot string) (*Anatomy, error) {
	info, err := media.Inspect(image)
	if err != nil {
		return nil, err
	}
	m := info.Image
	a := &Anatomy{
		Version: Version, Name: m.Name, Arch: m.Arch, Kubernetes: m.Kubernetes, Containerd: m.Containerd, Kernel: m.Kernel,
		SourceDate: time.Unix(m.SourceDate, 0).UTC().Format(time.RFC3339), Plan: m.Plan, Golden: info.Slot.Golden, Slot: info.Slot.State,
		Size: info.Size, Stored: info.Stored, Images: m.Images, Packages: info.Packages,
	}
	for _, p := range info.Partitions {
		a.Partitions = append(a.Partitions, Partition{Label: p.Label, FS: p.FS, Start: p.Start, Size: p.Size, Used: p.Used, Free: p.Free, Reserve: p.Reserve})
	}
	if a.Contents, err = media.ReadContents(image); err != nil {
		return nil, err
	}
	if err := a.readReport(image, build); err != nil {
		return nil, err
	}
	if boot != "" {
		if a.Boot, err = readBoot(boot); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// readReport adds the data of the build report. If this build has no report, it adds a note.
func (a *Anatomy) readReport(image, build string) error {
	names := []string{build}
	if build == "" {
		// A stamped copy may be in the same directory as the golden image and its report.
		names = []string{strings.TrimSuffix(strings.TrimSuffix(image, ".zst"), ".raw") + reportEnding}
		for _, golden := range []string{a.Name, a.Name + "-" + a.Arch} {
			// The name comes from the image, which is not trusted.
			if golden == filepath.Base(golden) && len(golden) < 200 && !strings.Contains(golden, "\x00") {
				names = append(names, filepath.Join(filepath.Dir(image), golden+reportEnding))
			}
		}
	}
	r, other, err := a.findReport(names, image, build)
	if err != nil {
		return err
	}
	switch {
	case r == nil && other != "":
		a.Notes = append(a.Notes, fmt.Sprintf("%s is the report of another build, so the steps and inputs of this one are unknown.", filepath.Base(other)))
		return nil
	case r == nil:
		a.Notes = append(a.Notes, fmt.Sprintf("There is no %s next to the image, so the steps and inputs of its build are unknown.", filepath.Base(names[0])))
		return nil
	}
	a.Builder, a.Steps = r.Builder, r.Timings
	slices.SortStableFunc(a.Steps, func(x, y builder.StepTime) int { return cmp.Compare(x.Start, y.Start) })
	for name, in := range r.Inputs {
		a.Inputs = append(a.Inputs, Input{name, in.From(), cmp.Or(in.SHA256, in.Digest)})
	}
	slices.SortFunc(a.Inputs, func(x, y Input) int { return strings.Compare(x.Name, y.Name) })
	return nil
}

// findReport returns the first of the named reports that belongs to this image's build. other is
// the name of a report of another build, or "". If build is set, every failure is an error.
func (a *Anatomy) findReport(names []string, image, build string) (r *builder.Report, other string, err error) {
	for _, name := range names {
		raw, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) && build == "" {
			continue
		}
		if err != nil {
			return nil, "", fmt.Errorf("reading the build's report: %w", err)
		}
		r := new(builder.Report)
		switch err := json.Unmarshal(raw, r); {
		case err != nil && build == "":
			return nil, "", fmt.Errorf("reading the build's report %s: it is damaged: build the image again, or remove the file", name)
		case err == nil && r.Plan == a.Plan:
			return r, "", nil
		case build != "" && (err != nil || r.Plan == ""):
			return nil, "", fmt.Errorf("reading the build's report %s: it is not the report of a build: name the NAME.report.json that `edgebake build` wrote", build)
		case build != "":
			return nil, "", fmt.Errorf("%s is the report of another build (it has plan %.12s, the image has plan %.12s): name the report of the build that made %s", build, r.Plan, a.Plan, image)
		}
		other = cmp.Or(other, name)
	}
	return nil, other, nil
}

// readBoot reads a report.json that firstboot has written into a slot.
func readBoot(name string) (*Boot, error) {
	raw, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("reading the node's report: %w", err)
	}
	var s ondisk.State
	if err := json.Unmarshal(raw, &s); err != nil || s.Version == 0 || s.Phases == nil && s.Result == "" {
		return nil, fmt.Errorf("reading the node's report %s: it is not the report.json of a first boot: get it from the slot, or from firstboot status --output json", name)
	}
	if s.Version != ondisk.StateVersion {
		return nil, fmt.Errorf("reading the node's report %s: its version is %d, but this edgebake supports only version %d", name, s.Version, ondisk.StateVersion)
	}
	b := &Boot{Node: s.Node, Result: s.Result, Started: s.Started, Seconds: max(0, s.Updated.Sub(s.Started).Seconds()), Notes: s.Notes}
	for _, p := range s.Phases {
		ph := Phase{Name: p.Name, Doc: p.Doc, Status: p.Status, Attempts: p.Attempts, Seconds: p.Seconds, Said: cmp.Or(p.Error, p.Waiting)}
		if !p.Since.IsZero() {
			end := p.Since.Sub(s.Started).Seconds()
			if p.Status == ondisk.PhaseRunning || p.Status == ondisk.PhaseWaiting {
				end += p.Seconds
			}
			ph.Start = max(0, end-p.Seconds)
		}
		b.Phases = append(b.Phases, ph)
	}
	if s.Boot != nil {
		b.Before, b.Finished = before(*s.Boot)
	}
	return b, nil
}

// before splits the time before firstboot into stages. If systemd does not report a stage, its time
// is part of the preceding stage.
func before(c ondisk.BootClock) (parts []Part, finished float64) {
	const us = 1e6
	power := float64(max(c.Firmware, c.Loader)) // from power-on to the start of the kernel
	begun := func(at uint64) float64 { return (power + float64(at)) / us }
	add := func(name string, start float64) {
		if n := len(parts); n > 0 {
			parts[n-1].Seconds = max(0, start-parts[n-1].Start)
		}
		parts = append(parts, Part{Name: name, Start: start})
	}
	if c.Firmware > 0 {
		add("firmware", 0)
	}
	if c.Loader > 0 {
		add("loader", (power-float64(c.Loader))/us)
	}
	add("kernel", power/us)
	if c.InitRD > 0 {
		add("initrd", begun(c.InitRD))
	}
	if c.Userspace > 0 {
		add("system", begun(c.Userspace))
	}
	last := &parts[len(parts)-1]
	last.Seconds = max(0, begun(c.FirstBoot)-last.Start)
	if c.Finish > 0 {
		finished = begun(c.Finish)
	}
	return parts, finished
}

// JSON returns the Anatomy as indented JSON.
func (a *Anatomy) JSON() ([]byte, error) {
	b, err := json.MarshalIndent(a, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encoding the report: %w", err)
	}
	return append(b, '\n'), nil
}
