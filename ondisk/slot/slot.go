// Package slot makes and reads the slot: a small FAT file system through which a golden image
// receives one Site, and through which the machine returns its report. edgebake writes the slot
// when it stamps an image. A person can edit it on any computer. firstboot reads it, writes its
// report into it, and removes the secrets from it.
//
// Contract (package ondisk defines the names of the files):
//   - The slot is always written as a whole, in an order that survives a power cut: the
//     first sector is zeroed, then the rest is written, then the first sector. If the
//     first sector is zero, readers return ErrBlank, unless Replace saved the new
//     contents in the second half.
//   - The two reports are the exception. They are preallocated, and WriteReport writes
//     them in place without changing any other sector.
//   - Scrub writes the whole slot without the secrets, so that none remain in free
//     clusters either.
//   - Read accepts what other systems write: upper case, short names, files of the
//     operating system, byte order marks. It ignores all other files.
//   - The limits in budget.go bound the cost of reading, because root reads the file
//     system of any stick that is plugged in.
//
// The package works on any io.ReaderAt, so firstboot can use it.
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

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Sizes of the reports in bytes. Unused space is filled with newlines, which are harmless at the
// end of text and of JSON.
const (
	ReportTextSize = 64 << 10
	ReportJSONSize = 256 << 10
)

var (
	// ErrBlank means that the slot was never written, or that a power cut interrupted writing it.
	ErrBlank = errors.New("the slot is blank")
	// ErrNoSite means that there is no Site. Read returns it together with the other contents.
	ErrNoSite = errors.New("no Site: stamp the image, or put a " + ondisk.SlotSite + " into the slot")
	// ErrBothSites means that there are both a Site and an Inventory. A person must remove one of
	// them.
	ErrBothSites = errors.New(ondisk.SlotSite + " and " + ondisk.SlotInventory + " both exist")
	// ErrNoReport means that the preallocated report was removed, or was replaced by a smaller
	// file.
	ErrNoReport = errors.New("no preallocated report in the slot")
	// ErrForeign means that the file system is larger than a slot: it is a stick with other files,
	// which writing a slot would destroy.
	ErrForeign = errors.New("this is a larger file system, not a slot: remove the Site from it by hand")
)

// Contents are the contents of a slot.
type Contents struct {
	// Label is the label of the file system; only Read sets it.
	Label string
	// Info is the content of edgebake.json. It is zero if there is no such file, as on a USB stick.
	Info ondisk.SlotInfo
	// Files maps paths to contents. It has site.yaml or inventory.yaml, config.ign, and the files
	// in files/ and pki/.
	Files map[string][]byte
	// Signature is the content of site.minisig, or nil. Verify checks it.
	Signature []byte
	// Report is the machine's report, as WriteReport wrote it.
	Report Report
	// Time is the modification time of the files. Zero means Info.Stamped.
	Time time.Time
	// Unfinished is set if Replace was interrupted, so that the second half of the slot has part of
	// the contents. The slot must then be written again.
	Unfinished bool
}

// Report is a machine's report in two formats.
type Report struct {
	Text []byte
	JSON []byte
}

// Make returns a slot of SlotSize bytes.
func Make(c Contents) ([]byte, error) {
	b, err := Encode(c)
	if err != nil {
		return nil, err
	}
	img := make([]byte, ondisk.SlotSize)
	copy(img, b)
	return img, nil
}

// Encode is like Make, but omits the zeros after the last used page. Most of a slot is zeros, and
// machines have little memory.
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
	text, textErr := pad(c.Report.Text, ReportTextSize)
	report, reportErr := pad(c.Report.JSON, ReportJSONSize)
	if err := errors.Join(textErr, reportErr, c.checkFiles()); err != nil {
		return nil, err
	}
	nodes := append(c.nodes(), node(ondisk.SlotMeta, append(meta, '\n')), node(ondisk.SlotReportText, text), node(ondisk.SlotReportJSON, report))
	if c.Signature != nil {
		nodes = append(nodes, node(ondisk.SlotSignature, c.Signature))
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
	if err != nil {
		return nil, err
	}
	if _, inventory := c.Files[ondisk.SlotInventory]; inventory && len(trimmed(img.b)) > half-sectorSize {
		total, _ := c.sizes()
		return nil, fmt.Errorf("the Inventory and its files need %s, but must leave half a slot (%s) free: %s",
			bytesize.MiB(int64(total)), bytesize.MiB(half), smallerInventory)
	}
	return img.b, readable(img)
}

// checkFiles returns all problems of the Site's files in one error.
func (c *Contents) checkFiles() error {
	var errs []error
	_, site := c.Files[ondisk.SlotSite]
	_, inventory := c.Files[ondisk.SlotInventory]
	if site && inventory {
		errs = append(errs, &fixError{ErrBothSites, removeOne})
	}
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		if !allowedPath(name) {
			errs = append(errs, fmt.Errorf("%s does not belong in a slot", name))
		}
		if n, limit := len(c.Files[name]), SizeLimit(name); int64(n) > limit {
			errs = append(errs, fmt.Errorf("%s has %d bytes, the slot has room for %d: %s", name, n, limit, Smaller(name)))
		}
		if tooDeep(name) {
			errs = append(errs, fmt.Errorf("%s is nested too deep; at most %d directories are allowed", name, maxDepth))
		}
	}
	if entries := countEntries(c.Files); entries > maxEntries {
		errs = append(errs, fmt.Errorf("%d files and directories are too many; at most %d are allowed", entries, maxEntries))
	}
	// If the largest file alone is too large, the error is already in errs.
	if total, largest := c.sizes(); total > maxFiles && int64(len(c.Files[largest])) <= SizeLimit(largest) {
		errs = append(errs, fmt.Errorf("the Site's files have %s in total, but a slot has room for %s: move large contents from %s to the Image (files, overlays)",
			bytesize.MiB(int64(total)), bytesize.MiB(maxFiles), largest))
	}
	return errors.Join(errs...)
}

// sizes returns the total size of the Site's files, and the name of the largest one (the first by
// name if several are largest).
func (c *Contents) sizes() (total int, largest string) {
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		if n := len(c.Files[name]); n > len(c.Files[largest]) {
			largest = name
		}
		total += len(c.Files[name])
	}
	return total, largest
}

// fatType returns the FAT type of a slot on a disk with this sector size. With 4 KiB sectors, FAT16
// would have 4,087 clusters in a slot, which is too close to the limit of FAT12.
func fatType(sectorSize int64) int {
	if sectorSize == 4096 {
		return 12
	}
	return 16
}

// readable returns the error with which Read would reject the slot, or nil.
func readable(img *image) error {
	in, err := open(img)
	if err == nil {
		in.checkOnly = true
		_, err = in.contents()
	}
	switch {
	case errors.Is(err, ErrNoSite):
		return nil
	case errors.Is(err, errCost):
		return errors.New("reading the slot again would take too long: put the files into fewer directories, or into the Image (files, overlays)")
	case err != nil:
		return fmt.Errorf("reading the slot again: %w", err)
	}
	return nil
}

// nodes returns the Site's files, sorted by name.
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

// Smaller returns the fix for a file that is too large for a slot.
func Smaller(name string) string {
	if name == ondisk.SlotInventory {
		return smallerInventory
	}
	return "move large contents to the Image (files, overlays)"
}

// smallerInventory is the fix for an inventory that is too large.
const smallerInventory = "split the inventory, or stamp each Site onto its own copy (edgebake stamp --each)"

const page = 4096

// image is a slot in memory, up to the last written page.
type image struct{ b []byte }

func (m *image) WriteAt(p []byte, off int64) (int, error) {
	end := off + int64(len(p))
	if off < 0 || end > ondisk.SlotSize {
		return 0, io.ErrShortWrite
	}
	if end > int64(len(m.b)) {
		whole := (end + page - 1) / page * page // no device has sectors larger than a page
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

// allowedPath reports whether a Site's file may have the path.
func allowedPath(name string) bool {
	switch name {
	case ondisk.SlotSite, ondisk.SlotInventory, ondisk.SlotIgnition:
		return true
	}
	dir, rest, ok := strings.Cut(name, "/")
	return ok && rest != "" && (dir == ondisk.SlotFilesDir || dir == ondisk.SlotPKIDir)
}

// pad appends newlines to a report until it has room bytes.
func pad(b []byte, room int) ([]byte, error) {
	if len(b) > room {
		return nil, fmt.Errorf("the report has %d bytes, but there is space for only %d", len(b), room)
	}
	padded := bytes.Repeat([]byte("\n"), room)
	copy(padded, b)
	return padded, nil
}

const (
	stampAgain   = "stamp the image again"
	removeOne    = "remove one of them"
	removeStrays = "remove the files that do not belong in a slot"
)

// fixError is a problem of a slot together with its fix, which the message ends with.
type fixError struct {
	err error
	fix string
}

func (e *fixError) Error() string { return e.err.Error() + ": " + e.fix }
func (e *fixError) Unwrap() error { return e.err }

// readError adds the operation to an error of reading a slot.
func readError(err error) error {
	const doing = "reading the slot: %w"
	if e := (*fixError)(nil); errors.As(err, &e) {
		return &fixError{fmt.Errorf(doing, e.err), e.fix}
	}
	return fmt.Errorf(doing, err)
}

// Explain splits an error of Read or ReadInfo into the problem and its fix.
func Explain(err error) (problem, fix string) {
	if e := (*fixError)(nil); errors.As(err, &e) {
		return e.err.Error(), e.fix
	}
	return err.Error(), stampAgain
}

// Read reads a slot, or any FAT file system with a Site. If it returns ErrNoSite, the contents are
// valid except for the missing Site.
func Read(r io.ReaderAt) (*Contents, error) {
	c, err := read(r)
	if err != nil && !errors.Is(err, ErrNoSite) {
		return nil, readError(err)
	}
	return c, err
}

// beingWritten returns the contents that an interrupted Replace was writing, or nil if none was
// interrupted. If the first sector is zero and there is no complete record, it returns ErrBlank.
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
		return nil, &fixError{ErrBlank, stampAgain}
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

// contents reads all files that belong in a slot.
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
	var similar []string // names that look like a misspelt site.yaml or inventory.yaml
	for _, e := range top {
		if err := in.entry(c, e); err != nil {
			return nil, err
		}
		if !e.Dir && !inContract(e) && looksLikeSite(strings.ToLower(e.Name())) && len(similar) < 3 {
			similar = append(similar, e.Name())
		}
	}
	if n := countEntries(in.files); n > maxEntries {
		return nil, tooManyEntries(in.fat.Top())
	}
	_, site := c.Files[ondisk.SlotSite]
	_, inventory := c.Files[ondisk.SlotInventory]
	switch {
	case site && inventory:
		return nil, &fixError{ErrBothSites, removeOne}
	case !site && !inventory && len(similar) > 0:
		return c, fmt.Errorf("%w (found %s: rename it)", ErrNoSite, strings.Join(similar, ", "))
	case !site && !inventory:
		return c, ErrNoSite
	}
	return c, nil
}

// entry reads a file or directory in the top directory of the slot into c, if it belongs in a slot.
func (in *reader) entry(c *Contents, e fat.Entry) (err error) {
	name := strings.ToLower(e.Name())
	if e.Dir {
		if name == ondisk.SlotFilesDir || name == ondisk.SlotPKIDir {
			return in.dir(e, name)
		}
		return nil
	}
	switch name {
	case ondisk.SlotMeta:
		c.Info, err = in.info(e)
	case ondisk.SlotReportText:
		c.Report.Text, err = in.report(e, ReportTextSize)
	case ondisk.SlotReportJSON:
		c.Report.JSON, err = in.report(e, ReportJSONSize)
	case ondisk.SlotSite, ondisk.SlotInventory, ondisk.SlotIgnition:
		return in.file(e, name)
	case ondisk.SlotSignature:
		c.Signature, err = in.signature(e)
	}
	return err
}

// ReadInfo reads only edgebake.json, even if other files are damaged.
func ReadInfo(r io.ReaderAt) (ondisk.SlotInfo, error) {
	if whole, err := beingWritten(r); err != nil {
		return ondisk.SlotInfo{}, readError(err)
	} else if whole != nil {
		r = whole
	}
	in, err := open(r)
	if err != nil {
		return ondisk.SlotInfo{}, readError(err)
	}
	e, err := in.fat.Stat(ondisk.SlotMeta)
	if err != nil {
		return ondisk.SlotInfo{}, readError(err)
	}
	info, err := in.info(e)
	if err != nil {
		return ondisk.SlotInfo{}, readError(err)
	}
	return info, nil
}

// Strays returns an error if the top directory has entries that neither belong in a slot nor come
// from operating systems. No signature covers the slot, and some firmware boots EFI/BOOT from any
// FAT file system. So it checks both names of each file, and entries that Read ignores.
func Strays(r io.ReaderAt) error {
	in, err := open(r)
	if err != nil {
		return readError(err)
	}
	var found []string
	seen := 0
	err = in.fat.EachNames(in.fat.Top(), func(n fat.Names) bool {
		switch name := n.Long; {
		case n.Odd != "":
			found = append(found, fmt.Sprintf("%q (%s)", name, n.Odd))
		case !inContract(n.Entry) && !systemFile(name):
			found = append(found, fmt.Sprintf("%q", name))
		case !derivedShortName(n):
			found = append(found, fmt.Sprintf("%q, also named %q", name, n.Short))
		}
		seen++
		return seen <= maxEntries
	})
	if err == nil && seen > maxEntries {
		err = &fixError{fmt.Errorf("the top directory has more than %d entries", maxEntries), removeStrays}
	}
	if err != nil {
		return readError(err)
	}
	if len(found) == 0 {
		return nil
	}
	const most = 5
	if n := len(found) - most; n > 0 {
		found = append(found[:most], fmt.Sprintf("%d more", n))
	}
	return fmt.Errorf("the slot has files that are not part of a Site and that no signature covers: %s: remove them, or stamp the image again", strings.Join(found, ", "))
}

// inContract reports whether an entry of the top directory belongs in a slot.
func inContract(e fat.Entry) bool {
	switch strings.ToLower(e.Name()) {
	case ondisk.SlotFilesDir, ondisk.SlotPKIDir:
		return e.Dir
	case ondisk.SlotMeta, ondisk.SlotReportText, ondisk.SlotReportJSON, ondisk.SlotSite, ondisk.SlotInventory, ondisk.SlotIgnition, ondisk.SlotSignature, ondisk.SlotClaims:
		return !e.Dir
	}
	return false
}

// derivedShortName reports whether an entry's short name is derived from its long name. A derived
// name with a tilde is harmless, because firmware does not boot such files.
func derivedShortName(n fat.Names) bool {
	return strings.EqualFold(n.Short, n.Long) || strings.Contains(n.Short, "~")
}

// systemFile reports whether operating systems create a file or directory with
// this name.
func systemFile(name string) bool {
	switch strings.ToLower(name) {
	case ".ds_store", "thumbs.db", "desktop.ini", "system volume information", "$recycle.bin", ".trashes", ".fseventsd", ".spotlight-v100":
		return true
	}
	return strings.HasPrefix(name, "._")
}

// looksLikeSite reports whether name is a variant of site.yaml or inventory.yaml, as editors and
// file managers create them.
func looksLikeSite(name string) bool {
	for _, want := range []string{"site", "inventory"} {
		if strings.HasPrefix(name, want+".y") || strings.HasPrefix(name, want+" ") && strings.Contains(name, ".y") {
			return true
		}
	}
	return false
}

// Label reads only the label of a file system, because most sticks are not a slot and need not be
// read further.
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

// reader reads the files of a slot.
type reader struct {
	fat             *fat.Reader
	budget          *budget
	files           map[string][]byte
	total           int64 // bytes of the Site's files read so far
	own             int64 // bytes of edgebake's own files read so far
	seen            int   // directory entries seen so far
	checkOnly       bool  // check the Site's files, but do not read their contents
	withSystemFiles bool  // include files that operating systems create
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
	if err := in.checkOwn(e, limit); err != nil {
		return nil, err
	}
	return in.fat.Read(e)
}

// checkOwn returns an error if one of edgebake's own files exceeds its limits.
func (in *reader) checkOwn(e fat.Entry, limit int64) error {
	if in.own += e.Size; in.own > maxOwn && e.Size <= limit {
		return &fixError{fmt.Errorf("reading %s: it exists more than once", e.Path), removeStrays}
	}
	return in.checkSize(e, limit)
}

// checkSize returns an error if a file is too large. Otherwise it adds the file to the budget.
func (in *reader) checkSize(e fat.Entry, limit int64) error {
	if e.Size > limit {
		return fmt.Errorf("reading %s: it has %d bytes, at most %d are allowed", e.Path, e.Size, limit)
	}
	in.budget.allow(e.Size)
	return nil
}

// read reads one of the Site's files.
func (in *reader) read(e fat.Entry, limit int64) ([]byte, error) {
	if in.total += e.Size; in.total > maxFiles && e.Size <= limit {
		return nil, &fixError{fmt.Errorf("reading %s: the files of a slot have more than %s in total", e.Path, bytesize.MiB(maxFiles)), removeStrays}
	}
	if in.checkOnly {
		return nil, in.fat.Follow(e)
	}
	if err := in.checkSize(e, limit); err != nil {
		return nil, err
	}
	return in.fat.Read(e)
}

func (in *reader) file(e fat.Entry, name string) error {
	b, err := in.read(e, SizeLimit(name))
	// Editors on Windows write a byte order mark, which parsers would reject.
	in.files[name] = bytes.TrimPrefix(b, []byte("\xef\xbb\xbf"))
	return err
}

// list reads a directory with at most maxEntries entries.
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
	return &fixError{fmt.Errorf("reading %s: there are more than %d files and directories in total", at, maxEntries), removeStrays}
}

// dir reads all files of a directory. It skips those that operating systems create, unless
// withSystemFiles is set.
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
		if !in.withSystemFiles && systemFile(base) {
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
		return info, &fixError{fmt.Errorf("reading %s: %w; only edgebake should write it", e.Path, err), stampAgain}
	}
	if info.Version != ondisk.SlotInfoVersion {
		return info, &fixError{fmt.Errorf("reading %s: its version is %d, but this program supports only version %d", e.Path, info.Version, ondisk.SlotInfoVersion), "use the edgebake that made the image"}
	}
	return info, nil
}

// report reads a report up to its first block of padding, because most of the file is padding. It
// ignores a file larger than room.
func (in *reader) report(e fat.Entry, room int64) ([]byte, error) {
	if e.Size > room {
		return nil, nil
	}
	if err := in.checkOwn(e, room); err != nil {
		return nil, err
	}
	b, err := in.fat.ReadWhile(e, page, func(block []byte) bool { return len(unpad(block)) > 0 })
	switch b = unpad(b); int64(len(b)) {
	case 0:
		return nil, err
	case room: // the report fills the file completely
		return b, err
	}
	return append(b, '\n'), err
}

func unpad(b []byte) []byte { return bytes.TrimRight(b, "\n") }

// signature reads site.minisig. A file of the wrong size is treated as an invalid signature, so
// that the Site can still be read.
func (in *reader) signature(e fat.Entry) ([]byte, error) {
	if e.Size == 0 || e.Size > maxSignature {
		return []byte{}, nil
	}
	return in.readOwn(e, maxSignature)
}

// Device is a block device or an image file that contains a slot.
type Device interface {
	io.ReaderAt
	io.WriterAt
	Sync() error
}

// Writer is the write-only view of a slot.
type Writer interface {
	io.WriterAt
	Sync() error
}

// WriteWhole writes a slot made by Make or Encode. A power cut leaves the old contents, a blank
// slot (ErrBlank), or the new contents.
func WriteWhole(f Writer, img []byte) error {
	if err := writeWhole(f, trimmed(img), ondisk.SlotSize); err != nil {
		return fmt.Errorf("writing the slot: %w", err)
	}
	return nil
}

// writeWhole writes size bytes, either the whole slot or its first half: img followed by zeros.
func writeWhole(f Writer, img []byte, size int) error {
	if len(img) <= sectorSize {
		return fmt.Errorf("%d bytes are too few for a slot", len(img))
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

// coherent is a Writer that reports whether its ReadAt returns the data on the device. If it does,
// writeZeros skips blocks that are already zero, because writing all 16 MiB would take most of the
// time.
type coherent interface {
	io.ReaderAt
	Coherent() bool
}

// writeZeros writes zeros to the bytes [from, to), in small blocks because machines have little
// memory.
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

// WriteReport writes a report into the preallocated files. A power cut may leave part of the old
// report, but changes nothing else. A text that is too long is truncated. If the JSON document is
// too long, or a file is missing, WriteReport returns ErrNoReport.
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
	const more = "\n[truncated: run firstboot status for the rest]\n"
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

// Scrub writes the slot again without its secrets. site replaces site.yaml and inventory.yaml; nil
// removes both. Scrub keeps config.ign, files/ and the report, with the secrets replaced by stars.
// It removes pki/, and files that do not belong in a slot. info has the sector size of the disk.
//
// Removing the secrets has priority: if the contents cannot be written again, Scrub drops part of
// them (see concessions). A slot that cannot be read is made from info and site alone. A file system
// larger than a slot is not changed (ErrForeign).
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
	c.Signature = nil // the signature covered the old files
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

// concessions are functions that drop contents. Scrub calls them in order until the rest fits, since
// other systems may have stored more in the slot than Make can. They never drop the Site itself.
var concessions = []func(*Contents, ondisk.SlotInfo){
	// Drop names that Write does not accept, and files that are too large.
	func(c *Contents, _ ondisk.SlotInfo) {
		kept := map[string]bool{}
		for _, n := range fat.Acceptable(c.nodes()) {
			kept[n.Path] = true
		}
		maps.DeleteFunc(c.Files, func(name string, b []byte) bool { return !kept[name] || int64(len(b)) > SizeLimit(name) })
	},
	// Drop files/, which is usually the largest part.
	func(c *Contents, _ ondisk.SlotInfo) {
		maps.DeleteFunc(c.Files, func(name string, _ []byte) bool { return strings.HasPrefix(name, ondisk.SlotFilesDir+"/") })
	},
	// Drop config.ign, which may be large too.
	func(c *Contents, _ ondisk.SlotInfo) { delete(c.Files, ondisk.SlotIgnition) },
	// Drop the reports, and replace edgebake.json.
	func(c *Contents, info ondisk.SlotInfo) { c.Report, c.Info = Report{}, info },
}
