package tree

import (
	"archive/tar"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Limits for indexing a tar, because a small compressed tar may contain any number of headers,
// which are kept in memory.
const (
	// maxEntries is much more than any root file system has.
	maxEntries = 2_000_000
	// entryBytes limits the average size of the names and extended attributes of an entry.
	entryBytes = 512
)

// FromTar indexes the uncompressed tar r, which may use PAX and GNU extensions. Files' contents
// become ranges of the blob with the given name. Owners, modes, extended attributes, devices and hard
// links are kept; hard links share an *Inode. The error lists all entries that a file system cannot
// represent exactly.
func FromTar(r io.ReaderAt, size int64, blob, layer string) ([]Node, error) {
	return fromTar(r, size, blob, layer, maxEntries)
}

func fromTar(r io.ReaderAt, size int64, blob, layer string, limit int) ([]Node, error) {
	// After Next, which reads only the header, the reader is at the start of the content.
	sr := io.NewSectionReader(r, 0, size)
	tr := tar.NewReader(sr)
	x := tarIndex{blob: blob, layer: layer, size: size, byPath: map[string]int{}}
	var end int64 // end of the last entry
	entries, text := 0, 0
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			cut := errors.Is(err, io.ErrUnexpectedEOF)
			switch {
			case x.name == "" && (cut || errors.Is(err, tar.ErrHeader)):
				x.errorf("not a tar archive (%d bytes): make one with tar -C DIR -cf FILE .", size)
			case cut:
				x.errorf("the tar is truncated after %s (%d bytes); fetch it again", x.name, size)
			default:
				x.errorf("reading the tar after %s: %w; it is damaged, fetch it again", x.last(), err)
			}
			return nil, joinErrors(x.errs)
		}
		if entries++; entries > limit {
			x.errorf("the tar has more than %d entries: check that it is the right archive", limit)
			return nil, joinErrors(x.errs)
		}
		if text += textOf(h); text > limit*entryBytes {
			x.errorf("the names and extended attributes in the tar have more than %d bytes in total: check that it is the right archive", limit*entryBytes)
			return nil, joinErrors(x.errs)
		}
		off, err := sr.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, &LayerError{layer, "", fmt.Errorf("reading the tar: %w", err)}
		}
		end = off
		if h.Typeflag == tar.TypeReg {
			end += (h.Size + 511) &^ 511
		}
		if err := x.add(h, off); err != nil {
			x.errs = append(x.errs, &LayerError{layer, h.Name, err})
		}
	}
	switch {
	case size == 0:
		x.errorf("not a tar archive, it is empty: fetch it again")
	case end+512 > size:
		x.errorf("the tar is truncated after %s: its end-of-archive marker is missing; fetch it again", x.last())
	}
	if len(x.errs) > 0 {
		return nil, joinErrors(x.errs)
	}
	return x.nodes, nil
}

// textOf returns the number of bytes of a header that are kept in memory.
func textOf(h *tar.Header) int {
	n := len(h.Name) + len(h.Linkname)
	for k, v := range h.PAXRecords {
		n += len(k) + len(v)
	}
	return n
}

type tarIndex struct {
	blob, layer string
	size        int64
	nodes       []Node
	byPath      map[string]int // index into nodes
	name        string         // name of the last entry
	errs        []error
}

func (x *tarIndex) errorf(format string, args ...any) {
	x.errs = append(x.errs, &LayerError{x.layer, "", fmt.Errorf(format, args...)})
}

func (x *tarIndex) last() string {
	if x.name == "" {
		return "its start"
	}
	return x.name
}

// add adds one entry; off is the offset of its content.
func (x *tarIndex) add(h *tar.Header, off int64) error {
	x.name = h.Name
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil // a comment, such as git archive writes
	}
	p, err := entryPath(h.Name)
	if err != nil {
		return err
	}
	if h.Typeflag == tar.TypeGNUSparse || hasSparse(h.PAXRecords) {
		return errors.New("sparse entry; write the archive without --sparse")
	}
	if h.Typeflag == tar.TypeLink {
		return x.link(p, h)
	}
	in, err := x.inode(h, off)
	if err != nil {
		return err
	}
	if i, ok := x.byPath[p]; ok {
		if !in.IsDir() || !x.nodes[i].IsDir() {
			return errTwice
		}
		x.nodes[i].Inode = in // a directory may be listed again; the last entry applies
		return nil
	}
	x.put(p, in)
	return nil
}

func (x *tarIndex) put(p string, in *Inode) {
	x.byPath[p] = len(x.nodes)
	x.nodes = append(x.nodes, Node{Path: p, Layer: x.layer, Inode: in})
}

func (x *tarIndex) link(p string, h *tar.Header) error {
	t, err := entryPath(h.Linkname)
	if err != nil {
		return fmt.Errorf("hard link to %w", err)
	}
	i, ok := x.byPath[t]
	switch {
	case !ok:
		return fmt.Errorf("hard link to %s, which must come earlier in the archive; pack both together", h.Linkname)
	case x.nodes[i].IsDir():
		return fmt.Errorf("hard link to the directory %s", h.Linkname)
	}
	if _, ok := x.byPath[p]; ok {
		return errTwice
	}
	x.put(p, x.nodes[i].Inode)
	return nil
}

// errTwice means that the archive contains a path twice, as after `tar -r`.
var errTwice = errors.New("path occurs twice in the archive; pack it again from a directory")

// maxID is the largest user or group ID. The next number, (uid_t)-1, means "do not change".
const maxID = 1<<32 - 2

func (x *tarIndex) inode(h *tar.Header, off int64) (*Inode, error) {
	if h.Uid < 0 || h.Gid < 0 || h.Uid > maxID || h.Gid > maxID {
		return nil, fmt.Errorf("owner %d:%d out of range", h.Uid, h.Gid)
	}
	in := &Inode{
		Mode: uint32(h.Mode) & 0o7777,
		UID:  uint32(h.Uid), GID: uint32(h.Gid),
		MTime: h.ModTime,
	}
	var err error
	switch h.Typeflag {
	case tar.TypeReg:
		in.Mode |= ModeRegular
		if h.Size > x.size-off {
			return nil, fmt.Errorf("content of %d bytes goes beyond the end of the archive; fetch it again", h.Size)
		}
		if h.Size > 0 {
			in.Data = Content{Blob: x.blob, Off: off, Size: h.Size}
		}
	case tar.TypeDir:
		in.Mode |= ModeDir
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) > 4095 || strings.ContainsRune(h.Linkname, 0) {
			return nil, fmt.Errorf("symbolic link with a target of %d bytes", len(h.Linkname))
		}
		in.Mode |= ModeSymlink
		in.Target = h.Linkname
	case tar.TypeChar:
		in.Mode |= ModeChar
		in.Major, in.Minor, err = deviceNumber(h)
	case tar.TypeBlock:
		in.Mode |= ModeBlock
		in.Major, in.Minor, err = deviceNumber(h)
	case tar.TypeFifo:
		in.Mode |= ModeFIFO
	default:
		return nil, fmt.Errorf("entry of unknown type %q", h.Typeflag)
	}
	if err == nil {
		in.Xattrs, err = xattrs(h.PAXRecords)
	}
	if err != nil {
		return nil, err
	}
	return in, nil
}

// deviceNumber returns the major and minor number of a device. As in the kernel's dev_t, they have
// 12 and 20 bits.
func deviceNumber(h *tar.Header) (major, minor uint32, err error) {
	if h.Devmajor < 0 || h.Devmajor >= 1<<12 || h.Devminor < 0 || h.Devminor >= 1<<20 {
		return 0, 0, fmt.Errorf("device number %d:%d out of range", h.Devmajor, h.Devminor)
	}
	return uint32(h.Devmajor), uint32(h.Devminor), nil
}

// PAX records with extended attributes.
const (
	xattrPrefix      = "SCHILY.xattr."        // star and GNU tar
	selinuxRecord    = "RHT.security.selinux" // GNU tar's SELinux label
	libarchivePrefix = "LIBARCHIVE.xattr."    // libarchive, which usually also writes xattrPrefix
)

// xattrs returns the extended attributes in an entry's records. If an attribute is present in
// several forms, star's form takes precedence.
func xattrs(records map[string]string) (map[string]string, error) {
	var out map[string]string
	put := func(name, value string) error {
		if name == "" || len(name) > 255 || len(value) > 64<<10 {
			return fmt.Errorf("extended attribute %q of %d bytes", name, len(value))
		}
		if err := CheckCapability(name, value); err != nil {
			return err
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = value
		return nil
	}
	// Apply the forms in ascending order of precedence.
	for _, form := range []func(k, v string) error{
		func(k, v string) error {
			coded, ok := strings.CutPrefix(k, libarchivePrefix)
			if !ok {
				return nil
			}
			name, err := url.PathUnescape(coded)
			if err != nil {
				return fmt.Errorf("extended attribute %q: %w", coded, err)
			}
			value, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(v, "="))
			if err != nil {
				return fmt.Errorf("extended attribute %q is not Base64: %w; write the archive again", name, err)
			}
			return put(name, string(value))
		},
		func(k, v string) error {
			if k != selinuxRecord {
				return nil
			}
			return put("security.selinux", strings.TrimRight(v, "\x00")+"\x00") // setfilecon(3) also appends a zero byte
		},
		func(k, v string) error {
			if name, ok := strings.CutPrefix(k, xattrPrefix); ok {
				return put(name, v)
			}
			if strings.HasPrefix(k, "SCHILY.acl.") {
				return errors.New("access control list in text form; write the archive with --no-acls, or with the ACL as extended attribute")
			}
			return nil
		},
	} {
		for _, k := range slices.Sorted(maps.Keys(records)) {
			if err := form(k, records[k]); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// CheckCapability returns an error for file capabilities that the kernel rejects
// (cap_convert_nscap). The kernel accepts revision 2, and revision 3 with a valid root user ID.
// Other attributes are not checked.
func CheckCapability(name, value string) error {
	const (
		effective = 1
		revision2 = 0x02000000
		revision3 = 0x03000000
	)
	if name != capability {
		return nil
	}
	if b := []byte(value); len(b) >= 20 {
		magic := binary.LittleEndian.Uint32(b) &^ effective
		if magic == revision2 && len(b) == 20 || magic == revision3 && len(b) == 24 && binary.LittleEndian.Uint32(b[20:]) <= maxID {
			return nil
		}
	}
	return fmt.Errorf("file capabilities of %d bytes are not of revision 2 or 3; set them again with setcap", len(value))
}

const capability = "security.capability"

func hasSparse(pax map[string]string) bool {
	for k := range pax {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// entryPath returns the path of the node for the name of a tar entry.
func entryPath(name string) (string, error) {
	p := strings.TrimRight(name, "/")
	if p == "" && name != "" {
		return "", fmt.Errorf("%q: absolute path; %s", name, packInside)
	}
	for strings.HasPrefix(p, "./") {
		p = strings.TrimLeft(p[2:], "/")
	}
	if p == "" && name != "" {
		p = "."
	}
	if err := checkPath(p); err != nil {
		// Double slashes and "/./" are harmless, so they are cleaned.
		q := path.Clean(p)
		if strings.HasPrefix(p, "/") || p == "" || strings.Contains("/"+p+"/", "/../") || checkPath(q) != nil {
			return "", err
		}
		p = q
	}
	return p, nil
}

// WriteTar writes nodes as a PAX tar. Equal nodes give equal bytes. Nodes that share an *Inode
// become hard links.
func WriteTar(w io.Writer, nodes []Node, blobs Blobs) error {
	nodes = slices.Clone(nodes)
	sortNodes(nodes)
	tw := tar.NewWriter(w)
	first := map[*Inode]string{}
	open := map[string]BlobFile{}
	defer func() {
		for _, f := range open {
			f.Close()
		}
	}()
	for _, n := range nodes {
		h := header(n)
		if to, ok := first[n.Inode]; ok && !n.IsDir() {
			h = &tar.Header{Format: tar.FormatPAX, Typeflag: tar.TypeLink, Name: n.Path, Linkname: to, ModTime: n.MTime}
		} else {
			first[n.Inode] = n.Path
		}
		if err := tw.WriteHeader(h); err != nil {
			return fmt.Errorf("writing %s to a tar: %w", n.Path, err)
		}
		if h.Typeflag != tar.TypeReg || n.Data.Size == 0 {
			continue
		}
		r, err := n.Data.reader(open, blobs)
		if err != nil {
			return fmt.Errorf("writing %s to a tar: %w", n.Path, err)
		}
		if k, err := io.Copy(tw, r); err != nil || k != n.Data.Size {
			return fmt.Errorf("writing %s to a tar: %d of %d bytes: %w", n.Path, k, n.Data.Size, cmp.Or(err, io.ErrUnexpectedEOF))
		}
	}
	return tw.Close()
}

// reader returns a reader of the content. It adds the blobs that it opens to open.
func (c Content) reader(open map[string]BlobFile, blobs Blobs) (io.Reader, error) {
	if c.Blob == "" {
		return strings.NewReader(string(c.Inline)), nil
	}
	f, ok := open[c.Blob]
	if !ok {
		var err error
		if f, err = blobs.OpenBlob(c.Blob); err != nil {
			return nil, err
		}
		open[c.Blob] = f
	}
	return io.NewSectionReader(f, c.Off, c.Size), nil
}

// ReadContent returns the content of a regular file of at most limit bytes.
func ReadContent(c Content, blobs Blobs, limit int64) ([]byte, error) {
	if c.Size > limit {
		return nil, fmt.Errorf("it has %d bytes, at most %d are allowed", c.Size, limit)
	}
	open := map[string]BlobFile{}
	defer func() {
		for _, f := range open {
			f.Close()
		}
	}()
	r, err := c.reader(open, blobs)
	if err != nil {
		return nil, err
	}
	b := make([]byte, c.Size)
	_, err = io.ReadFull(r, b)
	return b, err
}

func header(n Node) *tar.Header {
	h := &tar.Header{
		Format: tar.FormatPAX,
		Name:   n.Path,
		Mode:   int64(n.Mode & 0o7777),
		Uid:    int(n.UID), Gid: int(n.GID),
		ModTime: n.MTime,
	}
	switch n.Mode & ModeType {
	case ModeDir:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case ModeRegular:
		h.Typeflag = tar.TypeReg
		h.Size = n.Data.Size
	case ModeSymlink:
		h.Typeflag = tar.TypeSymlink
		h.Linkname = n.Target
	case ModeChar, ModeBlock:
		h.Typeflag = tar.TypeChar
		if n.Mode&ModeType == ModeBlock {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(n.Major), int64(n.Minor)
	case ModeFIFO:
		h.Typeflag = tar.TypeFifo
	}
	for _, k := range slices.Sorted(maps.Keys(n.Xattrs)) {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[xattrPrefix+k] = n.Xattrs[k]
	}
	return h
}

// PackDir writes a directory of the host, such as an overlay, as a tar that is the same on any
// host. Paths are relative and sorted. All entries belong to root and have the modification time
// mtime. Modes, symbolic links, hard links and file capabilities are kept. ACLs and other extended
// attributes are not.
func PackDir(ctx context.Context, w io.Writer, dir string, mtime time.Time) error {
	if fi, err := os.Stat(dir); err != nil {
		return fmt.Errorf("packing overlay: %w", err)
	} else if !fi.IsDir() {
		return fmt.Errorf("packing overlay %s: not a directory", dir)
	}
	// filepath.WalkDir does not follow links, not even if dir itself is one.
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return fmt.Errorf("packing overlay: %w", err)
	}
	p := packer{tw: tar.NewWriter(w), mtime: mtime, first: map[inodeID]string{}}
	var errs []error
	err = filepath.WalkDir(dir, func(name string, _ fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if len(errs) >= maxPackErrors {
			return fs.SkipAll
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("packing overlay: %w", err))
			return nil
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		if rel == "." {
			return nil
		}
		if err := p.file(name, filepath.ToSlash(rel)); err != nil {
			errs = append(errs, fmt.Errorf("packing overlay %s: %w", rel, err))
		}
		return nil
	})
	if err != nil || len(errs) > 0 {
		return joinErrors(append(errs, err))
	}
	return p.tw.Close()
}

// maxPackErrors limits the number of errors reported for one directory.
const maxPackErrors = 20

type packer struct {
	tw    *tar.Writer
	mtime time.Time
	first map[inodeID]string // first name of each file that has several names
}

func (p *packer) file(file, name string) error {
	fi, err := os.Lstat(file)
	if err != nil {
		return err
	}
	n := Node{Path: name, Inode: &Inode{Mode: uint32(fi.Mode().Perm()), MTime: p.mtime}}
	for bit, mode := range map[fs.FileMode]uint32{fs.ModeSetuid: ModeSetUID, fs.ModeSetgid: ModeSetGID, fs.ModeSticky: ModeSticky} {
		if fi.Mode()&bit != 0 {
			n.Mode |= mode
		}
	}
	switch fi.Mode().Type() {
	case fs.ModeDir:
		n.Mode |= ModeDir
	case fs.ModeSymlink:
		n.Mode = ModeSymlink | 0o777
		if n.Target, err = os.Readlink(file); err != nil {
			return err
		}
	case 0:
		n.Mode |= ModeRegular
		n.Data.Size = fi.Size()
	default:
		return fmt.Errorf("is neither file, directory nor symbolic link (%s)", fi.Mode().Type())
	}
	if id, ok := linked(fi); ok && !n.IsDir() {
		if to, ok := p.first[id]; ok {
			return p.tw.WriteHeader(&tar.Header{Format: tar.FormatPAX, Typeflag: tar.TypeLink, Name: name, Linkname: to, ModTime: p.mtime})
		}
		p.first[id] = name
	}
	if n.IsRegular() {
		value, err := readCapability(file)
		if err != nil {
			return fmt.Errorf("reading the file capabilities: %w", err)
		}
		if value != "" {
			n.Xattrs = map[string]string{capability: value}
		}
	}
	if err := p.tw.WriteHeader(header(n)); err != nil || !n.IsRegular() {
		return err
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.CopyN(p.tw, f, n.Data.Size)
	if err == io.EOF {
		return errors.New("the file became shorter while it was read; build again when no program writes to it")
	}
	return err
}
