package anatomy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/update"
)

// Difference lists the differences between two images.
type Difference struct {
	A     Side `json:"a"`
	B     Side `json:"b"`
	Equal bool `json:"equal"` // same golden digest, and no difference found
	// Facts lists the fields of image.json that differ.
	Facts      []Change     `json:"facts"`
	Packages   []Change     `json:"packages"`
	Images     []Change     `json:"images"`
	Partitions []SizeChange `json:"partitions"`
	Groups     []SizeChange `json:"groups"`
	Files      []SizeChange `json:"files"`
	// Config lists the small files whose text differs.
	Config []TextChange `json:"config"`
	// Update is the cost of updating a machine from a to b. It is nil if the cost cannot be
	// computed, for example because b has no chunk index.
	Update *media.UpdateCost `json:"update,omitempty"`
}

// Side is one of the two images.
type Side struct {
	Path   string `json:"path"`
	Name   string `json:"name"`
	Plan   string `json:"plan"`
	Golden string `json:"golden"`
}

// Change is a changed value. "" means that the value is absent.
type Change struct {
	Name string `json:"name"`
	A    string `json:"a"`
	B    string `json:"b"`
}

// SizeChange is a changed size of a file, group or partition, in bytes. -1 means that it is absent.
// If A equals B, only the contents of a file differ.
type SizeChange struct {
	Name string `json:"name"`
	A    int64  `json:"a"`
	B    int64  `json:"b"`
}

// TextChange lists the changed lines of a small file.
type TextChange struct {
	Path    string   `json:"path"`
	Removed []string `json:"removed"` // lines only in a
	Added   []string `json:"added"`
}

// Diff compares two images.
func Diff(a, b string) (*Difference, error) {
	ia, errA := media.Inspect(a)
	ib, errB := media.Inspect(b)
	if err := joined.Distinct(errA, errB); err != nil {
		return nil, err
	}
	fa, errA := media.ReadFiles(a)
	fb, errB := media.ReadFiles(b)
	err := joined.Distinct(errA, errB)
	if err != nil {
		return nil, err
	}
	d := &Difference{A: sideOf(a, ia), B: sideOf(b, ib)}
	if d.Facts, err = facts(ia.Image, ib.Image); err != nil {
		return nil, err
	}
	d.Packages = changes(versions(ia.Packages), versions(ib.Packages))
	d.Images = changes(digests(ia.Image.Images), digests(ib.Image.Images))
	d.Partitions = sizes(partSizes(ia), partSizes(ib))
	d.Groups = sizes(groupSizes(fa), groupSizes(fb))
	d.Files, d.Config = files(fa.Files, fb.Files)
	// Equal digests are not enough: the slot of a booted disk still contains the digest of the
	// build.
	same := len(d.Facts)+len(d.Packages)+len(d.Images)+len(d.Partitions)+len(d.Groups)+len(d.Files) == 0
	d.Equal = same && d.A.Golden != "" && d.A.Golden == d.B.Golden
	if d.Update, err = media.CostOfUpdate(a, media.ImageSource{Name: b}); err != nil && !errors.Is(err, update.ErrNoIndex) && !errors.Is(err, update.ErrBoard) && !errors.Is(err, update.ErrArchives) {
		return nil, err
	}
	return d, nil
}

func sideOf(path string, i *media.Info) Side {
	return Side{path, i.Image.Name, i.Image.Plan, i.Slot.Golden}
}

// facts compares the fields of image.json, except for the lists that Difference has separately.
func facts(a, b ondisk.ImageInfo) ([]Change, error) {
	flat := func(i ondisk.ImageInfo) (map[string]string, error) {
		i.Images, i.Partitions, i.Plan = nil, nil, ""
		raw, err := json.Marshal(i)
		if err != nil {
			return nil, fmt.Errorf("comparing image.json: %w", err)
		}
		var all map[string]any
		if err := json.Unmarshal(raw, &all); err != nil {
			return nil, fmt.Errorf("comparing image.json: %w", err)
		}
		out := map[string]string{}
		for k, v := range all {
			text, err := json.Marshal(v)
			if err != nil {
				return nil, fmt.Errorf("comparing image.json: %w", err)
			}
			out[k] = strings.Trim(string(text), `"`)
		}
		return out, nil
	}
	fa, err := flat(a)
	if err != nil {
		return nil, err
	}
	fb, err := flat(b)
	if err != nil {
		return nil, err
	}
	return changes(fa, fb), nil
}

func versions(all []media.Package) map[string]string {
	out := map[string]string{}
	for _, p := range all {
		if old, ok := out[p.Name]; ok && old != p.Version { // a module in two programs
			p.Version = old + ", " + p.Version
		}
		out[p.Name] = p.Version
	}
	return out
}

func digests(all []ondisk.ImageRef) map[string]string {
	out := map[string]string{}
	for _, i := range all {
		out[i.Ref] = i.Digest
	}
	return out
}

func changes(a, b map[string]string) []Change {
	out := []Change{}
	for name, v := range a {
		if w, ok := b[name]; !ok || w != v {
			out = append(out, Change{name, v, w})
		}
	}
	for name, w := range b {
		if _, ok := a[name]; !ok {
			out = append(out, Change{name, "", w})
		}
	}
	slices.SortFunc(out, func(x, y Change) int { return strings.Compare(x.Name, y.Name) })
	return out
}

func partSizes(i *media.Info) map[string]int64 {
	out := map[string]int64{}
	for _, p := range i.Partitions {
		out[p.Label] = p.Size
		if p.FS != "" && p.Error == "" && p.Label != ondisk.LabelSlot { // the space used in the slot is not compared
			out[p.Label+", used"] = p.Used
		}
	}
	return out
}

func groupSizes(l *media.Listing) map[string]int64 {
	out := map[string]int64{}
	for _, c := range l.Contents {
		for _, g := range c.Groups {
			out[g.Kind+" "+g.Name] += g.Bytes
		}
	}
	return out
}

// sizes returns the changes, sorted by the amount of change, the largest first.
func sizes(a, b map[string]int64) []SizeChange {
	out := []SizeChange{}
	for name, n := range a {
		m, ok := b[name]
		if !ok {
			m = -1
		}
		if n != m {
			out = append(out, SizeChange{name, n, m})
		}
	}
	for name, m := range b {
		if _, ok := a[name]; !ok {
			out = append(out, SizeChange{name, -1, m})
		}
	}
	sortBySize(out)
	return out
}

func sortBySize(all []SizeChange) {
	weight := func(c SizeChange) int64 { return max(c.A, 0) - max(c.B, 0) }
	abs := func(n int64) int64 { return max(n, -n) }
	slices.SortFunc(all, func(x, y SizeChange) int {
		return cmp.Or(cmp.Compare(abs(weight(y)), abs(weight(x))), strings.Compare(x.Name, y.Name))
	})
}

// files compares files by digest. It compares small text files line by line.
func files(a, b map[string]media.Listed) ([]SizeChange, []TextChange) {
	changed, texts := []SizeChange{}, []TextChange{}
	for name, f := range a {
		g, ok := b[name]
		switch {
		case !ok:
			changed = append(changed, SizeChange{name, f.Size, -1})
		case f.SHA256 != g.SHA256:
			changed = append(changed, SizeChange{name, f.Size, g.Size})
			if f.Text != "" && g.Text != "" {
				texts = append(texts, linesOf(name, f.Text, g.Text))
			}
		}
	}
	for name, g := range b {
		if _, ok := a[name]; !ok {
			changed = append(changed, SizeChange{name, -1, g.Size})
		}
	}
	sortBySize(changed)
	slices.SortFunc(texts, func(x, y TextChange) int { return strings.Compare(x.Path, y.Path) })
	return changed, texts
}

// linesOf returns the lines that are in only one of the two texts.
func linesOf(path, a, b string) TextChange {
	less := func(a, b string) []string {
		count := map[string]int{}
		for line := range strings.Lines(b) {
			count[strings.TrimRight(line, "\n")]++
		}
		out := []string{}
		for line := range strings.Lines(a) {
			line = strings.TrimRight(line, "\n")
			if count[line]--; count[line] < 0 {
				out = append(out, line)
			}
		}
		return out
	}
	return TextChange{path, less(a, b), less(b, a)}
}

// few is the largest number of entries of each list that Text prints.
const few = 40

// Text writes the difference as text.
func (d *Difference) Text(w io.Writer) {
	fmt.Fprintf(w, "a  %s (%s, plan %.12s)\nb  %s (%s, plan %.12s)\n", d.A.Path, d.A.Name, d.A.Plan, d.B.Path, d.B.Name, d.B.Plan)
	if d.Equal {
		fmt.Fprintln(w, "The images are the same (diff does not compare slots): no file differs, and both have the same golden digest (edgebake verify compares every byte with it).")
		return
	}
	changeList(w, "Versions and settings", d.Facts)
	changeList(w, "Packages", d.Packages)
	changeList(w, "Container images", d.Images)
	sizeList(w, "Partitions", d.Partitions)
	sizeList(w, "Packages, programs and images by size", d.Groups)
	sizeList(w, "Files", d.Files)
	if u := d.Update; u != nil {
		fmt.Fprintf(w, "\nA machine with image a fetches %d bytes to update to image b, %.1f %% of the size of b (edgebake update cost).\n", u.Bytes, 100*float64(u.Bytes)/float64(u.Image))
	}
	section(w, "Configuration", d.Config, func(c TextChange) string {
		lines := []string{c.Path}
		for _, l := range c.Removed[:min(len(c.Removed), few)] {
			lines = append(lines, "    - "+l)
		}
		for _, l := range c.Added[:min(len(c.Added), few)] {
			lines = append(lines, "    + "+l)
		}
		return strings.Join(lines, "\n")
	})
}

func changeList(w io.Writer, title string, all []Change) {
	section(w, title, all, func(c Change) string {
		switch {
		case c.A == "":
			return strings.TrimSpace(fmt.Sprintf("+ %s %s", c.Name, c.B))
		case c.B == "":
			return strings.TrimSpace(fmt.Sprintf("- %s %s", c.Name, c.A))
		}
		return fmt.Sprintf("~ %s %s -> %s", c.Name, c.A, c.B)
	})
}

func sizeList(w io.Writer, title string, all []SizeChange) {
	section(w, title, all, func(c SizeChange) string {
		switch {
		case c.A < 0:
			return fmt.Sprintf("+ %s, %s", c.Name, bytesize.Human(c.B))
		case c.B < 0:
			return fmt.Sprintf("- %s, %s", c.Name, bytesize.Human(c.A))
		case c.A == c.B:
			return fmt.Sprintf("~ %s, different contents", c.Name)
		}
		return fmt.Sprintf("~ %s, %s -> %s (%+d bytes)", c.Name, bytesize.Human(c.A), bytesize.Human(c.B), c.B-c.A)
	})
}

// section prints a title and the first entries of a list.
func section[T any](w io.Writer, title string, all []T, line func(T) string) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%s (%d)\n", title, len(all))
	for i, c := range all {
		if i == few {
			fmt.Fprintf(w, "  and %d more (--output json has all)\n", len(all)-few)
			return
		}
		fmt.Fprintf(w, "  %s\n", line(c))
	}
}
