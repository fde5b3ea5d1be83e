package device

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
)

// Rule selects the disk that an installer overwrites on a machine that nobody has seen before. It
// never guesses: if two disks match, it selects none.
type Rule struct {
	// path is the path of the disk. If it is set, nothing else is compared.
	path          string
	bus           string
	model, serial string // patterns of path.Match; case is ignored
	least, most   int64  // bytes; 0 means no limit
	pick          string // smallest, largest or ""
}

// OnlyDisk is the rule for a machine with exactly one internal disk.
const OnlyDisk = "only"

const (
	smallest = "smallest"
	largest  = "largest"
	pickTerm = "smallest or largest"
)

// buses lists the values of Disk.Bus: lsblk's names of buses, sd for SD cards and mmc for eMMCs.
var buses = append([]string{"nvme", "sata", "sas", "mmc", "virtio", "ata", "scsi"}, external...)

// external lists the buses of disks that are not part of the machine: removable disks and disks of
// a storage network.
var external = []string{busUSB, busSD, "fc", "fcoe", "iscsi", "sbp"}

const (
	busSD  = "sd"
	busUSB = "usb"
)

// ParseRule parses a rule: "only", a path that begins with /, or terms separated by commas, which
// must all match. The error contains all problems of the rule.
func ParseRule(text string) (Rule, error) {
	p := ruleParser{text: text, seen: map[string]bool{}}
	for term := range strings.SplitSeq(text, ",") {
		p.term(strings.TrimSpace(term))
	}
	if r := p.rule; r.most > 0 && r.least > r.most {
		p.bad("no disk has both %s and %s", "size>="+size(r.least), "size<="+size(r.most))
	}
	return p.rule, errors.Join(p.errs...)
}

// ruleParser collects the terms and the errors of a rule.
type ruleParser struct {
	text string
	rule Rule
	seen map[string]bool
	errs []error
}

func (p *ruleParser) bad(format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("rule %q: "+format, append([]any{p.text}, args...)...))
}

// once adds an error if a term of this kind was given before.
func (p *ruleParser) once(kind string) {
	if p.seen[kind] {
		p.bad("%s is given twice", strings.TrimRight(kind, "<>="))
	}
	p.seen[kind] = true
}

func (p *ruleParser) term(term string) {
	key, value, hasValue := strings.Cut(term, "=")
	if strings.HasSuffix(key, ">") || strings.HasSuffix(key, "<") {
		key += "="
	}
	pick, bus, ofBus := strings.Cut(term, "-")
	switch {
	case term == "":
		p.bad("a term is empty: write \"only\", a path below /dev, or terms such as smallest-nvme, model=Samsung*, size>=100G")
	case strings.HasPrefix(term, "/"):
		p.path(term)
	case term == OnlyDisk:
		p.only()
	case !hasValue && (pick == smallest || pick == largest):
		if p.rule.pick = pick; ofBus {
			p.bus(bus)
		}
		p.once(pickTerm)
	case key == "bus":
		p.bus(value)
	case key == "model":
		p.rule.model = p.pattern(term, key, value)
	case key == "serial":
		p.rule.serial = p.pattern(term, key, value)
	case key == "size>=":
		p.rule.least = p.size(term, key, value)
	case key == "size<=":
		p.rule.most = p.size(term, key, value)
	default:
		p.bad("unknown term %q: the terms are only, smallest, largest (or smallest-nvme), bus=, model=, serial=, size>=, size<=, and a path below /dev", term)
	}
}

func (p *ruleParser) path(term string) {
	if p.rule.path = filepath.Clean(term); strings.Contains(p.text, ",") {
		p.bad("%s names one disk, so it cannot be combined with other terms", term)
	} else if !strings.HasPrefix(p.rule.path, "/dev/") {
		p.bad("%s is not below /dev", term)
	}
	p.once("path")
}

func (p *ruleParser) only() {
	if p.text != OnlyDisk {
		p.bad("the term \"only\" cannot be combined with other terms")
	}
	p.once(pickTerm)
}

func (p *ruleParser) bus(bus string) {
	if p.rule.bus = bus; !slices.Contains(buses, bus) {
		p.bad("unknown bus %q: want one of %s", bus, strings.Join(buses, ", "))
	}
	p.once("bus")
}

func (p *ruleParser) pattern(term, key, value string) string {
	if _, err := path.Match(value, ""); err != nil || value == "" {
		p.bad("%s is not a pattern, e.g. %s=Samsung*", term, key)
	}
	p.once(key)
	return value
}

func (p *ruleParser) size(term, key, value string) int64 {
	n, err := forms.ParseSize(value)
	if err != nil {
		p.bad("%s: %w", term, err)
	}
	p.once(key)
	return n
}

// size formats a number of bytes in decimal units, as vendors print it on disks.
func size(n int64) string {
	if n >= 1e12 {
		return strconv.FormatFloat(float64(n)/1e12, 'f', 1, 64) + " TB"
	}
	return strconv.FormatFloat(float64(n)/1e9, 'f', 1, 64) + " GB"
}

// Describe returns the path, size, bus, model and serial number, for a person who must find the
// disk.
func (d *Disk) Describe() string {
	words := []string{d.Path, size(d.Size)}
	for _, w := range []string{d.Bus, d.Model} {
		if w != "" {
			words = append(words, w)
		}
	}
	if d.Serial != "" {
		words = append(words, "serial "+d.Serial)
	}
	return strings.Join(words, ", ")
}

// Same reports whether two listings of a path probably describe the same disk. It does not compare
// sizes: the caller uses the size of the opened disk.
func (d *Disk) Same(now *Disk) bool {
	return now.Path == d.Path && now.Bus == d.Bus && now.Model == d.Model && now.Serial == d.Serial
}

// IsInternal reports whether a disk is part of the machine. Any other disk matches only if the rule
// names its bus or path.
func (d *Disk) IsInternal() bool { return !slices.Contains(external, d.Bus) && !d.Removable }

// Pick returns the disks that match the rule. If several match, the caller must not choose one.
func (r Rule) Pick(disks []Disk) []Disk {
	var left []Disk
	for _, d := range disks {
		if r.matches(&d) {
			left = append(left, d)
		}
	}
	if r.pick == "" || len(left) == 0 {
		return left
	}
	bySize := func(a, b Disk) int { return cmp.Compare(a.Size, b.Size) }
	best := slices.MinFunc(left, bySize)
	if r.pick == largest {
		best = slices.MaxFunc(left, bySize)
	}
	return slices.DeleteFunc(left, func(d Disk) bool { return d.Size != best.Size })
}

func (r Rule) matches(d *Disk) bool {
	if r.path != "" {
		real, err := filepath.EvalSymlinks(r.path)
		return err == nil && real == d.Path
	}
	is := func(pattern, have string) bool {
		// path.Match would not match a slash with *, so replace slashes.
		plain := func(s string) string { return strings.ReplaceAll(strings.ToLower(s), "/", "\x01") }
		ok, err := path.Match(plain(pattern), plain(have))
		return pattern == "" || err == nil && ok
	}
	return (d.IsInternal() || slices.Contains(external, r.bus)) && (r.bus == "" || r.bus == d.Bus) &&
		is(r.model, d.Model) && is(r.serial, d.Serial) &&
		d.Size >= r.least && (r.most == 0 || d.Size <= r.most)
}
