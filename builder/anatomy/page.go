package anatomy

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
)

//go:embed page.html
var pageText string

// number is a number on the page, with its path in the JSON data. A test compares the two.
type number struct {
	Path string
	Raw  string
	Text string
}

func bytesAt(path string, n int64) number {
	return number{path, strconv.FormatInt(n, 10), bytesize.Human(n)}
}

func countAt(path string, n int) number {
	return number{path, strconv.Itoa(n), strconv.Itoa(n)}
}

func secondsAt(path string, s float64) number {
	return number{path, strconv.FormatFloat(s, 'g', -1, 64), fmt.Sprintf("%.1f s", s)}
}

// view is an Anatomy, prepared for the template.
type view struct {
	*Anatomy
	Size, Stored number
	Bar          []barPart
	Maps         []treemap
	Waterfall    []lane
	Timeline     []lane
	Tables       []table
	BootSeconds  number
	Finished     *number // nil if unknown
	PackageCount number
}

type barPart struct {
	Partition
	Percent, UsedPercent float64
	Numbers              []labelled
}

type labelled struct {
	Label string
	number
}

type treemap struct {
	Label       string
	Bytes, Free number
	Files       number
	Width       float64
	Height      float64
	Boxes       []box
}

// box is the rectangle of a group, or of one of its largest files.
type box struct {
	rect
	Kind, Name, Title string
	Inner             bool
	Size              string // shown only if it fits
	Path              string
	Raw               string
}

type lane struct {
	Name, Class, Said string
	Left, Width       float64 // percent
	Start, Seconds    number
	Attempts          *number
}

type table struct {
	Label  string
	Groups []groupRow
}

type groupRow struct {
	media.Group
	Bytes, Files number
	Percent      float64 // percent of the largest group
	Largest      []fileRow
}

type fileRow struct {
	Name string
	Size number
}

// HTML writes the page.
func (a *Anatomy) HTML(w io.Writer) error {
	t, err := template.New("page").Parse(pageText)
	if err != nil {
		return fmt.Errorf("BUG: the report's template: %w", err)
	}
	if err := t.Execute(w, a.view()); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	return nil
}

func (a *Anatomy) view() *view {
	v := &view{Anatomy: a, Size: bytesAt("size", a.Size), Stored: bytesAt("stored", a.Stored),
		PackageCount: number{"packages.length", strconv.Itoa(len(a.Packages)), strconv.Itoa(len(a.Packages))}}
	for i, p := range a.Partitions {
		at := fmt.Sprintf("partitions.%d.", i)
		part := barPart{Partition: p, Percent: share(p.Size, a.Size), UsedPercent: share(p.Used, p.Size)}
		part.Numbers = append(part.Numbers, labelled{"size", bytesAt(at+"size", p.Size)})
		if p.FS != "" {
			part.Numbers = append(part.Numbers, labelled{"used", bytesAt(at+"used", p.Used)}, labelled{"free", bytesAt(at+"free", p.Free)}, labelled{"reserve", bytesAt(at+"reserve", p.Reserve)})
		}
		v.Bar = append(v.Bar, part)
	}
	for i, c := range a.Contents {
		at := fmt.Sprintf("contents.%d.", i)
		v.Maps = append(v.Maps, mapOf(c, at))
		v.Tables = append(v.Tables, tableOf(c, at))
	}
	end := 0.0
	for _, s := range a.Steps {
		end = max(end, s.Start+s.Seconds)
	}
	for i, s := range a.Steps {
		at := fmt.Sprintf("steps.%d.", i)
		v.Waterfall = append(v.Waterfall, laneOf(s.Step, "", s.Start, s.Seconds, end, at))
	}
	if b := a.Boot; b != nil {
		v.BootSeconds = secondsAt("boot.seconds", b.Seconds)
		began := 0.0 // start of firstboot in seconds, on the time scale of Before
		for _, p := range b.Before {
			began = max(began, p.Start+p.Seconds)
		}
		end := began + b.Seconds
		for _, p := range b.Phases {
			end = max(end, began+p.Start+p.Seconds)
		}
		for i, p := range b.Before {
			v.Timeline = append(v.Timeline, laneOf(p.Name, "before", p.Start, p.Seconds, end, fmt.Sprintf("boot.before.%d.", i)))
		}
		if b.Finished > 0 {
			n := secondsAt("boot.finished", b.Finished)
			v.Finished = &n
		}
		for i, p := range b.Phases {
			at := fmt.Sprintf("boot.phases.%d.", i)
			l := laneOf(p.Name, p.Status, p.Start, p.Seconds, end, at)
			l.Left = 100 * (began + p.Start) / max(end, 1e-9)
			l.Width = min(l.Width, 100-l.Left)
			l.Said = p.Said
			if p.Attempts > 1 {
				n := countAt(at+"attempts", p.Attempts)
				l.Attempts = &n
			}
			v.Timeline = append(v.Timeline, l)
		}
	}
	return v
}

func share(part, whole int64) float64 {
	if whole <= 0 {
		return 0
	}
	return 100 * float64(part) / float64(whole)
}

func laneOf(name, class string, start, seconds, end float64, at string) lane {
	l := lane{Name: name, Class: class, Start: secondsAt(at+"start", start), Seconds: secondsAt(at+"seconds", seconds)}
	if end > 0 {
		l.Left, l.Width = 100*start/end, max(0.3, 100*seconds/end)
	}
	l.Width = min(l.Width, 100-l.Left)
	return l
}

// Size of the drawing, in its own units. The page scales it.
const (
	mapWidth  = 1120
	mapHeight = 420
	small     = 140 // height for a small partition
	gap       = 1.5
)

// mapOf draws the groups of a partition. Inside each group, it draws those of the largest files
// that are large enough to be visible.
func mapOf(c media.Contents, at string) treemap {
	m := treemap{Label: c.Label, Bytes: bytesAt(at+"bytes", c.Bytes), Free: bytesAt(at+"free", c.Free), Files: countAt(at+"files", c.Files), Width: mapWidth, Height: mapHeight}
	if c.Bytes < 64<<20 {
		m.Height = small
	}
	groups := slices.Clone(c.Groups)
	var sizes []float64
	for _, g := range groups {
		sizes = append(sizes, float64(g.Bytes))
	}
	for i, r := range squarify(sizes, rect{0, 0, m.Width, m.Height}) {
		g := groups[i]
		if r.W < 2 || r.H < 2 {
			continue // too small; the table lists it
		}
		r = r.inset(gap / 2)
		b := box{rect: r, Kind: g.Kind, Name: fit(g.Name, r.W, 7), Title: title(g), Path: fmt.Sprintf("%sgroups.%d.bytes", at, i), Raw: strconv.FormatInt(g.Bytes, 10)}
		if r.H > 34 && r.W > 60 {
			b.Size = bytesize.Human(g.Bytes)
		}
		if r.H < 15 || r.W < 34 {
			b.Name = ""
		}
		m.Boxes = append(m.Boxes, b)
		if r.H > 90 && r.W > 90 && len(g.Largest) > 1 {
			inner := rect{r.X + 4, r.Y + 38, r.W - 8, r.H - 42}
			m.Boxes = append(m.Boxes, innerBoxes(g, inner, fmt.Sprintf("%sgroups.%d.largest.", at, i))...)
		}
	}
	return m
}

// innerBoxes draws the largest files of a group. The area of all other files stays empty.
func innerBoxes(g media.Group, in rect, at string) []box {
	var sizes []float64
	named := int64(0)
	for _, f := range g.Largest {
		sizes = append(sizes, float64(f.Size))
		named += f.Size
	}
	rest := float64(g.Bytes - named)
	sizes = append(sizes, rest)
	slices.SortFunc(sizes, func(a, b float64) int { return int(max(-1, min(1, b-a))) })
	skip := slices.Index(sizes, rest)
	var out []box
	n := 0
	for i, r := range squarify(sizes, in) {
		if i == skip {
			continue
		}
		f := g.Largest[n]
		path := fmt.Sprintf("%s%d.size", at, n)
		n++
		if r.W < 3 || r.H < 3 {
			continue
		}
		r = r.inset(gap / 2)
		b := box{rect: r, Kind: g.Kind, Inner: true, Title: f.Name + ", " + bytesize.Human(f.Size), Path: path, Raw: strconv.FormatInt(f.Size, 10)}
		if r.H > 14 && r.W > 40 {
			b.Name = fit(f.Name[strings.LastIndexByte(f.Name, '/')+1:], r.W, 6.2)
		}
		out = append(out, b)
	}
	return out
}

func title(g media.Group) string {
	t := g.Name
	if g.Version != "" {
		t += " " + g.Version
	}
	return fmt.Sprintf("%s (%s): %s in %s", t, g.Kind, bytesize.Human(g.Bytes), configs.Count(g.Files, "file"))
}

// fit shortens a name so that it fits into width. letter is the width of a letter.
func fit(name string, width, letter float64) string {
	n := int((width - 10) / letter)
	r := []rune(name)
	switch {
	case len(r) <= n:
		return name
	case n < 4:
		return ""
	}
	return string(r[:n-1]) + "…"
}

// shown is the number of groups of a partition in the table.
const shown = 20

func tableOf(c media.Contents, at string) table {
	t := table{Label: c.Label}
	for i, g := range c.Groups[:min(shown, len(c.Groups))] {
		gat := fmt.Sprintf("%sgroups.%d.", at, i)
		row := groupRow{Group: g, Bytes: bytesAt(gat+"bytes", g.Bytes), Files: countAt(gat+"files", g.Files), Percent: share(g.Bytes, c.Groups[0].Bytes)}
		for j, f := range g.Largest {
			row.Largest = append(row.Largest, fileRow{f.Name, bytesAt(fmt.Sprintf("%slargest.%d.size", gat, j), f.Size)})
		}
		t.Groups = append(t.Groups, row)
	}
	return t
}
