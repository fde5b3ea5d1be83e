// Package slot makes and reads the slot: the small FAT file system through which
// a golden image receives one Site and a machine returns its report. edgebake
// writes it when it stamps, any laptop may edit it, and firstboot reads it,
// writes its report to it and removes the secrets from it.
//
// Contract (docs and ondisk name the files):
//   - The slot is always written as a whole, never edited, in an order that
//     survives a power cut: the first sector is zeroed, the rest is written, and
//     the first sector comes last. A reader that finds the first sector zero
//     reports ErrBlank, unless Replace saved the new contents in the second
//     half.
//   - The two reports are the exception. They are preallocated, and WriteReport
//     fills them in place without touching any other sector.
//   - Scrub writes the whole slot without the secrets, so no old byte survives,
//     not even in free clusters.
//   - Read accepts what laptops leave: other case, short names, files of the
//     operating system, byte order marks. It ignores everything that the
//     contract does not name.
//   - The limits in budget.go bound the cost of reading, whatever the file
//     system claims: root reads it from any stick that is plugged in.
//
// The package needs only a file, so firstboot can use it.
package slot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Room of the reports. What is not used is filled with line ends, which a
// text and a JSON document may both have at their end.
const (
	ReportTextSize = 64 << 10
	ReportJSONSize = 256 << 10
)

var (
	// ErrBlank says that the slot was being written when the power went, or
	// never was.
	ErrBlank = error(&fixError{errors.New("the slot is blank"), stampAgain})
	// ErrNoSite says that there is no site yet. Read returns the rest of the
	// contents with it: wait, and look again.
	ErrNoSite = errors.New("no Site: stamp the image, or put a " + ondisk.SlotSite + " into the slot")
	// ErrBothSites says that a person has to choose.
	ErrBothSites = error(&fixError{errors.New(ondisk.SlotSite + " and " + ondisk.SlotInventory + " are both there"), "remove one of them"})
	// ErrNoReport says that somebody removed the report, or replaced it with
	// a file that is too small.
	ErrNoReport = errors.New("no preallocated report in the slot")
	// ErrForeign says that a file system is larger than a slot: somebody's
	// stick, with other files on it, which a whole write would destroy.
	ErrForeign = errors.New("not a slot but somebody's larger file system: remove the Site from it by hand")
)

// Contents is what is in a slot.
type Contents struct {
	// Label is the file system's own label, as Read found it.
	Label string
	// Info is edgebake.json. It is zero where a laptop made the file system,
	// as on a USB stick.
	Info ondisk.SlotInfo
	// Files are site.yaml or inventory.yaml, config.ign, and what is below
	// files/ and pki/, by path.
	Files map[string][]byte
	// Signature is site.minisig, nil where there is none. Verify tells what
	// it is worth.
	Signature []byte
	// Report is what WriteReport left.
	Report Report
	// Time stamps the files; zero takes Info.Stamped.
	Time time.Time
	// Unfinished: Replace was cut off, and some of what it wrote is in the
	// second half too. It is to be written again.
	Unfinished bool
}

// Report is what the machine says of itself.
type Report struct {
	Text []byte
	JSON []byte
}

// Make renders a slot of SlotSize bytes.
func Make(c Contents) ([]byte, error) {
	b, err := Encode(c)
	if err != nil {
		return nil, err
	}
	img := make([]byte, ondisk.SlotSize)
	copy(img, b)
	return img, nil
}

// Encode is Make up to the last page that is in use. All behind it, most of a slot,
// is zero: the machines that write one have little memory, and memory that is
// touched is half of what stamping takes.
func Encode(c Contents) ([]byte, error) {
	b, err := c.encode()
	if err != nil {
		return nil, fmt.Errorf("making the slot: %w", err)
	}
	return b, nil
}

func (c *Contents) encode() ([]byte, error) {
	info := c.Info
	if info.Version == 0 {
		info.Version = ondisk.SlotInfoVersion
	}
	meta, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return nil, err
	}
	var errs []error
	_, site := c.Files[ondisk.SlotSite]
	_, inventory := c.Files[ondisk.SlotInventory]
	if site && inventory {
		errs = append(errs, ErrBothSites)
	}
	text, err := pad(c.Report.Text, ReportTextSize)
	errs = append(errs, err)
	report, err := pad(c.Report.JSON, ReportJSONSize)
	errs = append(errs, err)

	nodes := append(c.nodes(), node(ondisk.SlotMeta, append(meta, '\n')), node(ondisk.SlotReportText, text), node(ondisk.SlotReportJSON, report))
	if c.Signature != nil {
		nodes = append(nodes, node(ondisk.SlotSignature, c.Signature))
	}
	var total int
	var largest string
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		b := c.Files[name]
		if !known(name) {
			errs = append(errs, fmt.Errorf("%s has no place in a slot", name))
		}
		if total += len(b); len(b) > len(c.Files[largest]) {
			largest = name
		}
		if limit := SizeLimit(name); int64(len(b)) > limit {
			errs = append(errs, fmt.Errorf("%s has %d bytes, the slot has room for %d: %s", name, len(b), limit, Smaller(name)))
		}
		if tooDeep(name) {
			errs = append(errs, fmt.Errorf("%s is nested too deep; at most %d directories are allowed", name, maxDepth))
		}
	}
	if entries := countEntries(c.Files); entries > maxEntries {
		errs = append(errs, fmt.Errorf("%d files and directories are too many; at most %d are allowed", entries, maxEntries))
	}
	// One that is too large by itself has been named, with what to do.
	if total > maxFiles && int64(len(c.Files[largest])) <= SizeLimit(largest) {
		errs = append(errs, fmt.Errorf("the Site's files have %.1f MiB, a slot has room for %d MiB: take large contents out of %s and put them into the Image (files, overlays)",
			float64(total)/(1<<20), maxFiles>>20, largest))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	when := c.Time
	if when.IsZero() && info.Stamped > 0 {
		when = time.Unix(info.Stamped, 0)
	}
	id := sha256.Sum256([]byte("edgebake slot\x00" + info.Plan))
	img := new(image)
	err = fat.Write(img, nodes, nil, fat.Options{
		Type: fatType(info.SectorSize), Label: ondisk.LabelSlot, VolumeID: binary.LittleEndian.Uint32(id[:]),
		Size: ondisk.SlotSize, Time: when, SectorSize: info.SectorSize,
	})
	if err == nil && inventory && len(trimmed(img.b)) > half-sectorSize {
		err = fmt.Errorf("the inventory and what goes with it take %.1f MiB, and must leave half a slot (%d MiB) free: %s",
			float64(total)/(1<<20), half>>20, smallerInventory)
	}
	if err == nil {
		err = readable(img)
	}
	return img.b, err
}

// fatType returns the type of a slot's FAT on a disk with sectors of that size. With 4 KiB
// sectors a FAT16 of a slot's size would have 4,087 clusters, two more than a FAT12 may have.
func fatType(sectorSize int64) int {
	if sectorSize == 4096 {
		return 12
	}
	return 16
}

// readable returns why Read would reject a slot that is being made.
func readable(img *image) error {
	in, err := open(img)
	if err == nil {
		in.skim = true
		_, err = in.contents()
	}
	switch {
	case errors.Is(err, ErrNoSite):
		return nil
	case errors.Is(err, errCost):
		return errors.New("reading it again would take too long: put the files into fewer directories, or into the Image (files, overlays)")
	case err != nil:
		return fmt.Errorf("reading it again: %w", err)
	}
	return nil
}

// nodes are the Site's files, in the order of their names.
func (c *Contents) nodes() []tree.Node {
	var nodes []tree.Node
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		nodes = append(nodes, node(name, c.Files[name]))
	}
	return nodes
}

func node(name string, b []byte) tree.Node {
	return tree.Node{Path: name, Layer: "slot", Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes(b)}}
}

// Smaller is what to do about a file that is too large for a slot.
func Smaller(name string) string {
	if name == ondisk.SlotInventory {
		return smallerInventory
	}
	return "put large contents into the Image (files, overlays)"
}

// smallerInventory is what to do about an inventory that is too large.
const smallerInventory = "split the inventory, or stamp each Site onto a copy of its own (edgebake stamp --each)"

const page = 4096

// image is a slot in memory, as far as it is written to.
type image struct{ b []byte }

func (m *image) WriteAt(p []byte, off int64) (int, error) {
	end := off + int64(len(p))
	if off < 0 || end > ondisk.SlotSize {
		return 0, io.ErrShortWrite
	}
	if end > int64(len(m.b)) {
		whole := (end + page - 1) / page * page // no device has larger sectors
		m.b = append(m.b, make([]byte, whole-int64(len(m.b)))...)
	}
	return copy(m.b[off:], p), nil
}

func (m *image) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off >= ondisk.SlotSize {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), ondisk.SlotSize-off))
	there := 0
	if off < int64(len(m.b)) {
		there = copy(p, m.b[off:])
	}
	clear(p[there:n])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// known reports whether the contract names the path.
func known(name string) bool {
	switch name {
	case ondisk.SlotSite, ondisk.SlotInventory, ondisk.SlotIgnition:
		return true
	}
	dir, rest, ok := strings.Cut(name, "/")
	return ok && rest != "" && (dir == ondisk.SlotFilesDir || dir == ondisk.SlotPKIDir)
}

// pad fills a report up to its room.
func pad(b []byte, room int) ([]byte, error) {
	if len(b) > room {
		return nil, fmt.Errorf("a report of %d bytes has room for %d", len(b), room)
	}
	padded := bytes.Repeat([]byte("\n"), room)
	copy(padded, b)
	return padded, nil
}

const (
	stampAgain   = "stamp the image again"
	removeStrays = "remove what does not belong there"
)

// fixError is a problem with a slot that something else than stamping fixes, or
// whose message says it.
type fixError struct {
	err error
	fix string
}

func (e *fixError) Error() string { return e.err.Error() + ": " + e.fix }
func (e *fixError) Unwrap() error { return e.err }

// Explain takes an error of Read or ReadInfo apart: what is wrong, and what to do.
func Explain(err error) (problem, fix string) {
	fix = stampAgain
	if e := (*fixError)(nil); errors.As(err, &e) {
		fix = e.fix
	}
	return strings.TrimSuffix(err.Error(), ": "+fix), fix
}

// Read reads a slot, or a file system that a person made with a site in it.
// With ErrNoSite the contents are valid but for the site.
func Read(r io.ReaderAt) (*Contents, error) {
	c, err := read(r)
	if err != nil && !errors.Is(err, ErrNoSite) {
		return nil, fmt.Errorf("reading the slot: %w", err)
	}
	return c, err
}

// beingWritten returns the slot that a Replace which was cut off had to write;
// nil: there was none. ErrBlank is a slot without anything.
func beingWritten(r io.ReaderAt) (*image, error) {
	first := make([]byte, sectorSize)
	if _, err := r.ReadAt(first, 0); err != nil {
		return nil, err
	}
	if len(bytes.TrimLeft(first, "\x00")) > 0 {
		return nil, nil
	}
	payload := readRecord(r)
	if payload == nil {
		return nil, ErrBlank
	}
	return &image{payload}, nil
}

func read(r io.ReaderAt) (*Contents, error) {
	whole, err := beingWritten(r)
	if err != nil {
		return nil, err
	}
	if whole != nil {
		c, err := read(whole)
		if c != nil {
			c.Unfinished = true
		}
		return c, err
	}
	in, err := open(r)
	if err != nil {
		return nil, err
	}
	c, err := in.contents()
	if c != nil && in.fat.Size() == ondisk.SlotSize {
		c.Unfinished = readHeader(r) != nil
	}
	return c, err
}

// contents reads everything that the contract names.
func (in *reader) contents() (*Contents, error) {
	label, err := in.fat.Label()
	if err != nil {
		return nil, err
	}
	c := &Contents{Label: label, Files: in.files}
	top, err := in.list(in.fat.Top())
	if err != nil {
		return nil, err
	}
	var near []string
	for _, e := range top {
		switch name := strings.ToLower(e.Name()); {
		case e.Dir && (name == ondisk.SlotFilesDir || name == ondisk.SlotPKIDir):
			err = in.dir(e, name)
		case e.Dir:
		case name == ondisk.SlotMeta:
			c.Info, err = in.info(e)
		case name == ondisk.SlotReportText:
			c.Report.Text, err = in.report(e, ReportTextSize)
		case name == ondisk.SlotReportJSON:
			c.Report.JSON, err = in.report(e, ReportJSONSize)
		case name == ondisk.SlotSite, name == ondisk.SlotInventory, name == ondisk.SlotIgnition:
			err = in.file(e, name)
		case name == ondisk.SlotSignature:
			c.Signature, err = in.signature(e)
		case looksLikeSite(name) && len(near) < 3:
			near = append(near, e.Name())
		}
		if err != nil {
			return nil, err
		}
	}
	if n := countEntries(in.files); n > maxEntries {
		return nil, tooManyEntries(in.fat.Top())
	}
	_, site := c.Files[ondisk.SlotSite]
	_, inventory := c.Files[ondisk.SlotInventory]
	switch {
	case site && inventory:
		return nil, ErrBothSites
	case !site && !inventory && len(near) > 0:
		return c, fmt.Errorf("%w (found %s: rename it)", ErrNoSite, strings.Join(near, ", "))
	case !site && !inventory:
		return c, ErrNoSite
	}
	return c, nil
}

// ReadInfo reads edgebake.json alone, whatever else is wrong with the slot.
func ReadInfo(r io.ReaderAt) (ondisk.SlotInfo, error) {
	if whole, err := beingWritten(r); err != nil {
		return ondisk.SlotInfo{}, fmt.Errorf("reading the slot: %w", err)
	} else if whole != nil {
		r = whole
	}
	in, err := open(r)
	if err != nil {
		return ondisk.SlotInfo{}, fmt.Errorf("reading the slot: %w", err)
	}
	e, err := in.fat.Stat(ondisk.SlotMeta)
	if err != nil {
		return ondisk.SlotInfo{}, fmt.Errorf("reading the slot: %w", err)
	}
	info, err := in.info(e)
	if err != nil {
		return ondisk.SlotInfo{}, fmt.Errorf("reading the slot: %w", err)
	}
	return info, nil
}

// Strays says what is at the top of a slot that the contract does not name,
// but for what systems put there themselves. No signature covers a slot, and
// there is firmware that boots EFI/BOOT from any FAT file system. It looks for both
// names of a file, and reads entries that this package passes over.
func Strays(r io.ReaderAt) error {
	in, err := open(r)
	if err != nil {
		return fmt.Errorf("reading the slot: %w", err)
	}
	var found []string
	seen := 0
	err = in.fat.EachNames(in.fat.Top(), func(n fat.Names) bool {
		switch name := n.Long; {
		case n.Odd != "":
			found = append(found, fmt.Sprintf("%q (%s)", name, n.Odd))
		case !named(n.Entry) && !litter(name):
			found = append(found, fmt.Sprintf("%q", name))
		case !alias(n):
			found = append(found, fmt.Sprintf("%q, which is %q too", name, n.Short))
		}
		seen++
		return seen <= maxEntries
	})
	if err == nil && seen > maxEntries {
		err = &fixError{fmt.Errorf("the top directory has more than %d entries", maxEntries), removeStrays}
	}
	if err != nil {
		return fmt.Errorf("reading the slot: %w", err)
	}
	if len(found) == 0 {
		return nil
	}
	const most = 5
	if n := len(found) - most; n > 0 {
		found = append(found[:most], fmt.Sprintf("%d more", n))
	}
	return fmt.Errorf("the slot has what no Site puts there and no signature covers: %s: remove it, or stamp the image again", strings.Join(found, ", "))
}

// named reports whether the contract names what is at the top of a slot.
func named(e fat.Entry) bool {
	switch strings.ToLower(e.Name()) {
	case ondisk.SlotFilesDir, ondisk.SlotPKIDir:
		return e.Dir
	case ondisk.SlotMeta, ondisk.SlotReportText, ondisk.SlotReportJSON, ondisk.SlotSite, ondisk.SlotInventory, ondisk.SlotIgnition, ondisk.SlotSignature, ondisk.SlotClaims:
		return !e.Dir
	}
	return false
}

// alias reports whether an entry's short name is one that systems make of its long
// one: no firmware starts a file with a number behind a tilde.
func alias(n fat.Names) bool {
	return strings.EqualFold(n.Short, n.Long) || strings.Contains(n.Short, "~")
}

// litter reports whether systems put a file or directory of that name onto every
// disk they see.
func litter(name string) bool {
	switch strings.ToLower(name) {
	case ".ds_store", "thumbs.db", "desktop.ini", "system volume information", "$recycle.bin", ".trashes", ".fseventsd", ".spotlight-v100":
		return true
	}
	return strings.HasPrefix(name, "._")
}

// looksLikeSite finds what editors and file managers make of site.yaml.
func looksLikeSite(name string) bool {
	for _, want := range []string{"site", "inventory"} {
		if strings.HasPrefix(name, want+".y") || strings.HasPrefix(name, want+" ") && strings.Contains(name, ".y") {
			return true
		}
	}
	return false
}

// Label reads the file system's label alone: most of what somebody plugs into
// a machine is not a slot, and is not looked at any further.
func Label(r io.ReaderAt) (string, error) {
	in, err := open(r)
	if err != nil {
		return "", fmt.Errorf("reading a file system's label: %w", err)
	}
	label, err := in.fat.Label()
	if err != nil {
		return "", fmt.Errorf("reading a file system's label: %w", err)
	}
	return label, nil
}

// reader gathers the files of a slot.
type reader struct {
	fat    *fat.Reader
	budget *budget
	files  map[string][]byte
	total  int64 // bytes of the Site's files so far
	own    int64 // and of edgebake's own
	seen   int   // directory entries so far
	skim   bool  // the Site's files are found, and their bytes not read
	all    bool  // dir takes what systems put there, too
}

func open(r io.ReaderAt) (*reader, error) {
	b := &budget{r: r, reads: maxReads, bytes: maxMeta}
	f, err := fat.Open(b)
	if err != nil {
		return nil, err
	}
	return &reader{fat: f, budget: b, files: map[string][]byte{}}, nil
}

// readOwn reads one of edgebake's own files.
func (in *reader) readOwn(e fat.Entry, limit int64) ([]byte, error) {
	if err := in.admitOwn(e, limit); err != nil {
		return nil, err
	}
	return in.fat.Read(e)
}

// admitOwn reports whether one of edgebake's own files may still be read.
func (in *reader) admitOwn(e fat.Entry, limit int64) error {
	if in.own += e.Size; in.own > maxOwn && e.Size <= limit {
		return &fixError{fmt.Errorf("reading %s: it is there more than once", e.Path), removeStrays}
	}
	return in.admit(e, limit)
}

// admit reports whether a file is small enough to be read.
func (in *reader) admit(e fat.Entry, limit int64) error {
	if e.Size > limit {
		return fmt.Errorf("reading %s: it has %d bytes, at most %d are allowed", e.Path, e.Size, limit)
	}
	in.budget.allow(e.Size)
	return nil
}

// read reads one of the Site's files.
func (in *reader) read(e fat.Entry, limit int64) ([]byte, error) {
	if in.total += e.Size; in.total > maxFiles && e.Size <= limit {
		return nil, &fixError{fmt.Errorf("reading %s: the files of a slot have more than %d MiB", e.Path, maxFiles>>20), removeStrays}
	}
	if in.skim {
		return nil, in.fat.Follow(e)
	}
	if err := in.admit(e, limit); err != nil {
		return nil, err
	}
	return in.fat.Read(e)
}

func (in *reader) file(e fat.Entry, name string) error {
	b, err := in.read(e, SizeLimit(name))
	// Editors on Windows put a mark before UTF-8 that parsers stumble over.
	in.files[name] = bytes.TrimPrefix(b, []byte("\xef\xbb\xbf"))
	return err
}

// list reads a directory, up to what a slot may have.
func (in *reader) list(d fat.Entry) ([]fat.Entry, error) {
	var out []fat.Entry
	err := in.fat.Each(d, func(e fat.Entry) bool {
		out = append(out, e)
		in.seen++
		return in.seen <= maxEntries+ownEntries
	})
	if err == nil && in.seen > maxEntries+ownEntries {
		err = tooManyEntries(d)
	}
	return out, err
}

func tooManyEntries(d fat.Entry) error {
	at := d.Path
	if at == "." {
		at = "the top directory"
	}
	return &fixError{fmt.Errorf("reading %s: there are more than %d files", at, maxEntries), removeStrays}
}

// dir takes everything in a directory, but for what systems put there
// themselves.
func (in *reader) dir(d fat.Entry, name string) error {
	if tooDeep(path.Join(name, "file")) {
		return fmt.Errorf("reading %s: directories are nested too deep", d.Path)
	}
	list, err := in.list(d)
	if err != nil {
		return err
	}
	for _, e := range list {
		base := e.Name()
		if !in.all && (strings.HasPrefix(base, "._") || base == ".DS_Store" || strings.EqualFold(base, "Thumbs.db") || strings.EqualFold(base, "desktop.ini")) {
			continue
		}
		if e.Dir {
			err = in.dir(e, path.Join(name, base))
		} else {
			in.files[path.Join(name, base)], err = in.read(e, maxFiles)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (in *reader) info(e fat.Entry) (info ondisk.SlotInfo, err error) {
	b, err := in.readOwn(e, maxInfo)
	if err != nil {
		return info, err
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return info, &fixError{fmt.Errorf("reading %s: %w; nobody but edgebake should write it", e.Path, err), stampAgain}
	}
	if info.Version != ondisk.SlotInfoVersion {
		return info, &fixError{fmt.Errorf("reading %s: it has version %d, this program knows %d", e.Path, info.Version, ondisk.SlotInfoVersion), "use the edgebake that made the image"}
	}
	return info, nil
}

// report reads what WriteReport left; a larger file is somebody else's. Nearly
// all of its room is empty, and it is read with every look at a site: a block of
// what pad added is the end.
func (in *reader) report(e fat.Entry, room int64) ([]byte, error) {
	if e.Size > room {
		return nil, nil
	}
	if err := in.admitOwn(e, room); err != nil {
		return nil, err
	}
	b, err := in.fat.ReadWhile(e, page, func(block []byte) bool { return len(unpad(block)) > 0 })
	switch b = unpad(b); int64(len(b)) {
	case 0:
		return nil, err
	case room: // no room for a line end
		return b, err
	}
	return append(b, '\n'), err
}

func unpad(b []byte) []byte { return bytes.TrimRight(b, "\n") }

// signature reads site.minisig. One that is too large is none, and must not
// hide the site.
func (in *reader) signature(e fat.Entry) ([]byte, error) {
	if e.Size == 0 || e.Size > maxSignature {
		return []byte{}, nil
	}
	return in.readOwn(e, maxSignature)
}

// Device is what a slot is written to: a block device or an image file.
type Device interface {
	io.ReaderAt
	io.WriterAt
	Sync() error
}

// Writer is what a slot is written to by who needs to read nothing of it.
type Writer interface {
	io.WriterAt
	Sync() error
}

// WriteWhole writes the slot, which Make or Encode has made, so that a power cut
// leaves the old contents, ErrBlank, or the new contents.
func WriteWhole(f Writer, img []byte) error {
	if err := writeWhole(f, trimmed(img), ondisk.SlotSize); err != nil {
		return fmt.Errorf("writing the slot: %w", err)
	}
	return nil
}

// writeWhole writes the slot, or its first half: size bytes, of which all behind
// img are zero.
func writeWhole(f Writer, img []byte, size int) error {
	if len(img) <= sectorSize {
		return fmt.Errorf("%d bytes are not a slot", len(img))
	}
	if err := write(f, 0, make([]byte, sectorSize)); err != nil {
		return err
	}
	if _, err := f.WriteAt(img[sectorSize:], sectorSize); err != nil {
		return err
	}
	if err := writeZeros(f, len(img), size); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return write(f, 0, img[:sectorSize])
}

// coherent is a Writer that may be sure that what is read from it is what it has. What
// is zero there is not written again: most of a slot is, and storing 16 MiB of zeros
// takes longer than all else.
type coherent interface {
	io.ReaderAt
	Coherent() bool
}

// writeZeros fills the bytes from one offset to another. A machine that writes its
// slot has little memory.
func writeZeros(f io.WriterAt, from, to int) error {
	zeros := make([]byte, max(0, min(128<<10, to-from)))
	var there []byte
	c, ok := f.(coherent)
	if ok = ok && c.Coherent(); ok {
		there = make([]byte, len(zeros))
	}
	for at := from; at < to; at += len(zeros) {
		b := zeros[:min(len(zeros), to-at)]
		if ok {
			if _, err := c.ReadAt(there[:len(b)], int64(at)); err == nil && bytes.Equal(there[:len(b)], b) {
				continue
			}
		}
		if _, err := f.WriteAt(b, int64(at)); err != nil {
			return err
		}
	}
	return nil
}

// WriteReport puts a report into the preallocated files, in place: a power
// cut may leave a report half old and half new, and touches nothing else. A
// text that is too long is cut; a JSON document that is too long is an error.
// ErrNoReport is returned where the files are missing.
func WriteReport(f Device, r Report) error {
	if err := writeReport(f, r); err != nil {
		return fmt.Errorf("writing the report into the slot: %w", err)
	}
	return nil
}

func writeReport(f Device, r Report) error {
	in, err := open(f)
	if err != nil {
		return err
	}
	fsys := in.fat
	const more = "\n[cut: more in firstboot status]\n"
	var errs []error
	wrote := false
	for _, part := range []struct {
		name string
		b    []byte
		cut  bool
	}{{ondisk.SlotReportText, r.Text, true}, {ondisk.SlotReportJSON, r.JSON, false}} {
		e, err := fsys.Stat(part.name)
		if errors.Is(err, fs.ErrNotExist) || err == nil && (e.Dir || e.Size == 0) {
			errs = append(errs, fmt.Errorf("%w: %s", ErrNoReport, part.name))
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ext, err := fsys.Extents(part.name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		room, b := int(min(e.Size, ReportJSONSize)), part.b
		if len(b) > room && part.cut && room > len(more) {
			b = append(bytes.Clone(b[:room-len(more)]), more...)
		}
		if len(b) > room {
			errs = append(errs, fmt.Errorf("%w: %s has room for %d bytes, the report has %d", ErrNoReport, part.name, room, len(b)))
			continue
		}
		b, err = pad(b, room)
		if err != nil {
			return err
		}
		for _, x := range ext {
			n := min(int64(len(b)), x.Len)
			if _, err := f.WriteAt(b[:n], x.Off); err != nil {
				return err
			}
			b = b[n:]
		}
		wrote = true
	}
	if wrote {
		errs = append(errs, f.Sync())
	}
	return errors.Join(errs...)
}

// Scrub writes the slot anew without its secrets. site becomes its site.yaml, also in place
// of an inventory.yaml (nil: the slot has neither). pki/ and every file that the contract
// does not name are removed. config.ign, files/ and the report stay, with stars in place of
// the secrets.
//
// That no secret stays matters more than what else was there. What cannot be
// written again is given up, in the order of concessions. A slot that cannot be
// read, because the power went during an earlier Scrub or somebody damaged it, is
// made from info and site alone. A file system larger than a slot is left alone
// (ErrForeign). info says what the disk's sectors are.
func Scrub(f Device, info ondisk.SlotInfo, site []byte, secrets ...string) error {
	if fsys, err := fat.Open(f); err == nil && fsys.Size() > ondisk.SlotSize {
		return fmt.Errorf("scrubbing the slot: %w", ErrForeign)
	}
	c, err := Read(f)
	if err != nil && !errors.Is(err, ErrNoSite) {
		c = &Contents{Info: info, Files: map[string][]byte{}}
	}
	if c.Info.Version == 0 {
		c.Info = info
	}
	c.Info.SectorSize = info.SectorSize
	delete(c.Files, ondisk.SlotInventory)
	delete(c.Files, ondisk.SlotSite)
	if site != nil {
		c.Files[ondisk.SlotSite] = site
	}
	for p, b := range c.Files {
		if strings.HasPrefix(p, ondisk.SlotPKIDir+"/") {
			delete(c.Files, p)
			continue
		}
		c.Files[p] = Hide(b, secrets...)
	}
	c.Signature = nil // of what was there
	c.Report.Text, c.Report.JSON = Hide(c.Report.Text, secrets...), Hide(c.Report.JSON, secrets...)
	img, err := c.encode()
	for _, concede := range concessions {
		if err != nil {
			concede(c, info)
			img, err = c.encode()
		}
	}
	if err == nil {
		err = writeWhole(f, img, ondisk.SlotSize)
	}
	if err != nil {
		return fmt.Errorf("scrubbing the slot: %w", err)
	}
	return nil
}

// concessions are what Scrub gives up where a slot cannot be written again as it was
// read, one after the other until it can be: laptops and other formatters put more
// into 16 MiB than Make does. The Site itself is never given up.
var concessions = []func(*Contents, ondisk.SlotInfo){
	// Names that no other system could read again, and files that are too large.
	func(c *Contents, _ ondisk.SlotInfo) {
		kept := map[string]bool{}
		for _, n := range fat.Acceptable(c.nodes()) {
			kept[n.Path] = true
		}
		maps.DeleteFunc(c.Files, func(name string, b []byte) bool { return !kept[name] || int64(len(b)) > SizeLimit(name) })
	},
	// files/, which mostly takes the most room.
	func(c *Contents, _ ondisk.SlotInfo) {
		maps.DeleteFunc(c.Files, func(name string, _ []byte) bool { return strings.HasPrefix(name, ondisk.SlotFilesDir+"/") })
	},
	// config.ign, which may be almost as large.
	func(c *Contents, _ ondisk.SlotInfo) { delete(c.Files, ondisk.SlotIgnition) },
	// The reports, and the slot's own edgebake.json.
	func(c *Contents, info ondisk.SlotInfo) { c.Report, c.Info = Report{}, info },
}
