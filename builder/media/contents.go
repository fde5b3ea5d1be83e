package media

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/dpkg"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Kinds of a Group.
const (
	KindPackage = "package" // a Debian package
	KindProgram = "program" // a program outside Debian packages
	KindImage   = "image"   // a container image
	KindBoot    = "boot"    // a file on the EFI system partition
	KindOther   = "other"   // a file rendered by edgebake or created by packages
)

// Contents describes the files of a file system, grouped by their origin.
type Contents struct {
	Label string `json:"label"`
	FS    string `json:"fs"`
	// All sizes are in bytes. Size is the partition, Reserve the space after the file system, Free
	// the space in the file system, and Bytes the sum of the files.
	Size    int64 `json:"size"`
	Reserve int64 `json:"reserve"`
	Free    int64 `json:"free"`
	Bytes   int64 `json:"bytes"`
	Files   int   `json:"files"`
	// Groups are sorted by size, the largest first.
	Groups []Group `json:"groups"`
}

// Group is a package, a program, a container image, or other files.
type Group struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Bytes   int64  `json:"bytes"`
	Files   int    `json:"files"`
	// Largest lists the group's largest files, with their paths on the running system.
	Largest []File `json:"largest"`

	all []File
}

// largest is the maximum number of files in Group.Largest.
const largest = 8

// ReadContents describes the contents of an image's file systems. Each file belongs to one group.
func ReadContents(name string) ([]Contents, error) {
	m, err := Open(name)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return m.contents()
}

// contents describes the contents of the image's file systems.
func (m *Image) contents() ([]Contents, error) {
	var out []Contents
	b, err := m.fileOwners()
	if err != nil {
		return nil, fmt.Errorf("reading the contents of image %s: %w", m.path, err)
	}
	for _, p := range m.table.Partitions {
		var c *Contents
		switch p.Name {
		case ondisk.LabelESP:
			c, err = m.bootContents()
		case ondisk.LabelRootA, ondisk.LabelData:
			c, err = b.contents(p.Name)
			if err == nil {
				c.Reserve = p.Size - b.readers[p.Name].Info().Size
			}
		default:
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the contents of image %s, partition %s: %w", m.path, p.Name, err)
		}
		c.Label, c.Size = p.Name, p.Size
		for i := range c.Groups {
			c.Groups[i].Largest = c.Groups[i].all[:min(largest, len(c.Groups[i].all))]
		}
		out = append(out, *c)
	}
	return out, nil
}

// fileOwners maps files to the packages, programs and container images that they belong to.
type fileOwners struct {
	readers  map[string]*ext4.Reader // partition label → file system
	nodes    map[string][]tree.Node  // partition label → files, with their paths on the running system
	packages map[string]string       // path without symbolic links → package
	versions map[string]string       // package → version
	links    map[string]string       // path of a symbolic link → target
	programs map[string]Package      // path → program
	images   map[string][]string     // path of a directory or file → container images
}

// fileOwners reads ROOT-A and DATA, and the image's lists of packages, programs and container
// images.
func (m *Image) fileOwners() (*fileOwners, error) {
	b := &fileOwners{readers: map[string]*ext4.Reader{}, nodes: map[string][]tree.Node{}, packages: map[string]string{},
		versions: map[string]string{}, links: map[string]string{}, programs: map[string]Package{}}
	for _, label := range []string{ondisk.LabelRootA, ondisk.LabelData} {
		p, err := m.partition(label)
		if err != nil {
			return nil, err
		}
		r, err := ext4.Open(m.section(p))
		if err != nil {
			return nil, err
		}
		nodes, err := r.Nodes()
		if err != nil {
			return nil, err
		}
		if label == ondisk.LabelData {
			for i := range nodes {
				nodes[i].Path = path.Join("var", nodes[i].Path)
			}
		}
		for _, n := range nodes {
			if n.IsSymlink() {
				b.links[n.Path] = n.Target
			}
		}
		b.readers[label], b.nodes[label] = r, nodes
	}
	if err := b.readPackages(); err != nil {
		return nil, err
	}
	if err := m.readPrograms(b); err != nil {
		return nil, err
	}
	files := store.NodeFiles(b.nodes[ondisk.LabelData], b.readers[ondisk.LabelData])
	if _, err := files.Stat(path.Join(store.Root, store.MetaDB)); err != nil {
		return b, nil // without images, or with images that the first boot imports
	}
	var err error
	b.images, err = store.Owners(files, store.Root)
	return b, err
}

// readPackages reads dpkg's lists of packages and files.
func (b *fileOwners) readPackages() error {
	status := b.real("var/lib/dpkg/status") // a link on DATA to the lists on the root
	info := path.Dir(status) + "/info/"
	for label, nodes := range b.nodes {
		for _, n := range nodes {
			list, isList := strings.CutSuffix(n.Path, ".list")
			if !n.IsRegular() || n.Path != status && (!isList || !strings.HasPrefix(n.Path, info)) {
				continue
			}
			text, err := tree.ReadContent(n.Data, b.readers[label], maxList)
			if err != nil {
				return err
			}
			if n.Path == status {
				packages, err := dpkg.ParseStatus(bytes.NewReader(text))
				if err != nil {
					return err
				}
				for _, p := range packages {
					b.versions[p.Name] = p.Version
				}
				continue
			}
			name, _, _ := strings.Cut(strings.TrimPrefix(list, info), ":")
			for line := range strings.Lines(string(text)) {
				b.packages[b.real(strings.TrimSpace(line))] = name
			}
		}
	}
	return nil
}

// maxLinks is the largest number of symbolic links in a path, as in the kernel.
const maxLinks = 40

// real resolves the symbolic links in a path. For example, /bin is a link to /usr/bin in Debian.
func (b *fileOwners) real(p string) string {
	p = strings.TrimPrefix(path.Clean("/"+p), "/")
	for range maxLinks {
		next := b.follow(p)
		if next == p {
			break
		}
		p = next
	}
	return p
}

// follow replaces the first part of a path that is a symbolic link with the link's target.
func (b *fileOwners) follow(p string) string {
	for i := range len(p) {
		if p[i] != '/' {
			continue
		}
		if target, ok := b.links[p[:i]]; ok {
			if !path.IsAbs(target) {
				target = path.Join(path.Dir(p[:i]), target)
			}
			return strings.TrimPrefix(path.Join("/", target, p[i:]), "/")
		}
	}
	return p
}

// readPrograms reads the programs from the image's SBOM.
func (m *Image) readPrograms(b *fileOwners) error {
	raw, err := m.espFile(ondisk.ESPSBOM)
	if err != nil {
		return nil //nolint:nilerr // without an SBOM, programs count as files
	}
	packages, err := decodeSBOM(raw)
	if err != nil {
		return fmt.Errorf("reading %s: %w", ondisk.ESPSBOM, err)
	}
	for _, p := range packages {
		if p.File != "" {
			b.programs[p.File] = Package{p.Name, p.Version}
		}
	}
	return nil
}

// owner returns the group that a file belongs to, without sizes.
func (b *fileOwners) owner(p string) Group {
	if prog, ok := b.programs[p]; ok {
		return Group{Kind: KindProgram, Name: prog.Name, Version: prog.Version}
	}
	if pkg, ok := b.packages[p]; ok {
		return Group{Kind: KindPackage, Name: pkg, Version: b.versions[pkg]}
	}
	for dir := p; dir != "." && dir != "/"; dir = path.Dir(dir) {
		switch names := b.images[dir]; len(names) {
		case 0:
		case 1:
			return Group{Kind: KindImage, Name: names[0]}
		default:
			return Group{Kind: KindImage, Name: "shared: " + strings.Join(names, ", ")}
		}
	}
	parts := strings.Split(p, "/")
	return Group{Kind: KindOther, Name: "/" + strings.Join(parts[:min(2, max(1, len(parts)-1))], "/")}
}

func (b *fileOwners) contents(label string) (*Contents, error) {
	c := &Contents{FS: disk.Ext4, Free: b.readers[label].Info().FreeBytes}
	seen := map[*tree.Inode]bool{}
	var files []groupedFile
	for _, n := range b.nodes[label] {
		if n.IsRegular() && !seen[n.Inode] {
			seen[n.Inode] = true
			files = append(files, groupedFile{b.owner(n.Path), File{"/" + n.Path, n.Data.Size}})
		}
	}
	c.group(files)
	return c, nil
}

func (m *Image) bootContents() (*Contents, error) {
	fsys, err := m.esp()
	if err != nil {
		return nil, err
	}
	c := &Contents{FS: fmt.Sprintf("fat%d", fsys.Type())}
	if c.Free, err = fsys.Free(); err != nil {
		return nil, err
	}
	var files []groupedFile
	err = fsys.Walk(func(e fat.Entry) error {
		if !e.Dir {
			files = append(files, groupedFile{Group{Kind: KindBoot, Name: path.Base(e.Path)}, File{"/efi/" + e.Path, e.Size}})
		}
		return nil
	})
	c.group(files)
	return c, err
}

// groupedFile is a file with its group.
type groupedFile struct {
	group Group
	file  File
}

// group sums up files by group. It sorts groups, and the files of each group, by descending size.
func (c *Contents) group(files []groupedFile) {
	groups := map[string]*Group{}
	for _, f := range files {
		key := f.group.Kind + " " + f.group.Name
		g := groups[key]
		if g == nil {
			g = &f.group
			groups[key] = g
		}
		g.Bytes += f.file.Size
		g.Files++
		g.all = append(g.all, f.file)
		c.Bytes += f.file.Size
		c.Files++
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		g := groups[key]
		slices.SortFunc(g.all, func(a, b File) int {
			return cmp.Or(cmp.Compare(b.Size, a.Size), strings.Compare(a.Name, b.Name))
		})
		c.Groups = append(c.Groups, *g)
	}
	slices.SortStableFunc(c.Groups, func(a, b Group) int { return cmp.Compare(b.Bytes, a.Bytes) })
}

// Listing describes all files of an image's file systems.
type Listing struct {
	Contents []Contents
	// Files maps paths on the running system to files.
	Files map[string]Listed
}

// Listed is a file, a link or a directory.
type Listed struct {
	Size int64
	// SHA256 covers the content, mode, owner, extended attributes and link target.
	SHA256 string
	// Text is the content of a small text file that every user of the node may read. Other files
	// may contain secrets, for example on a disk that has booted.
	Text string
}

// ReadFiles reads every file of an image, and describes its contents as ReadContents does.
func ReadFiles(name string) (*Listing, error) {
	m, err := Open(name)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	l := &Listing{Files: map[string]Listed{}}
	if l.Contents, err = m.contents(); err != nil {
		return nil, err
	}
	for _, label := range []string{ondisk.LabelRootA, ondisk.LabelData} {
		if err := m.listTree(label, l.Files); err != nil {
			return nil, fmt.Errorf("reading the contents of image %s, partition %s: %w", name, label, err)
		}
	}
	if err := m.listBoot(l.Files); err != nil {
		return nil, fmt.Errorf("reading the contents of image %s, partition %s: %w", name, ondisk.LabelESP, err)
	}
	return l, nil
}

// maxText is the maximum size of Listed.Text in bytes.
const maxText = 64 << 10

// maxExpansion limits the bytes of a partition's files, as a multiple of the partition's size. Sparse
// files and hard links have more bytes than the disk, but a hostile image could claim so many that
// reading them takes hours.
const maxExpansion = 8

func (m *Image) listTree(label string, out map[string]Listed) error {
	p, err := m.partition(label)
	if err != nil {
		return err
	}
	r, err := ext4.Open(m.section(p))
	if err != nil {
		return err
	}
	prefix := "/"
	if label == ondisk.LabelData {
		prefix = "/var"
	}
	var total int64
	return r.Walk(func(n tree.Node) error {
		if n.IsRegular() {
			if total += n.Data.Size; n.Data.Size > maxExpansion*p.Size || total > maxExpansion*p.Size {
				return fmt.Errorf("%s: the files up to here have more than %d times as many bytes as the partition, so the image is damaged or hostile", n.Path, maxExpansion)
			}
		}
		h := sha256.New()
		fmt.Fprintf(h, "%o %d %d %d %d %q %q\n", n.Mode, n.UID, n.GID, n.Major, n.Minor, n.Target, n.Xattrs) // Printf prints maps in the order of their keys
		f := Listed{Size: n.Data.Size}
		switch {
		case n.IsRegular() && n.Data.Blob == "": // a small file, whose content is inline
			h.Write(n.Data.Inline)
		case n.IsRegular():
			file, err := r.OpenBlob(n.Data.Blob)
			if err != nil {
				return err
			}
			defer file.Close()
			var head bytes.Buffer
			if _, err := io.Copy(io.MultiWriter(h, &limitedWriter{&head, maxText + 1}), io.NewSectionReader(file, n.Data.Off, n.Data.Size)); err != nil {
				return err
			}
			if n.Mode&0o004 != 0 {
				f.Text = textOf(head.Bytes())
			}
		default:
			f.Size = 0
		}
		f.SHA256 = hex.EncodeToString(h.Sum(nil))
		out[path.Join(prefix, n.Path)] = f
		return nil
	})
}

func (m *Image) listBoot(out map[string]Listed) error {
	fsys, err := m.esp()
	if err != nil {
		return err
	}
	return fsys.Walk(func(e fat.Entry) error {
		if e.Dir {
			return nil
		}
		b, err := fsys.ReadFile(e.Path)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(b)
		f := Listed{Size: e.Size, SHA256: hex.EncodeToString(sum[:])}
		if !strings.HasSuffix(e.Path, ".json") { // package anatomy compares JSON files by their fields
			f.Text = textOf(b)
		}
		out["/efi/"+e.Path] = f
		return nil
	})
}

// textOf returns b as a string, or "" if it is too large or not text.
func textOf(b []byte) string {
	if len(b) > maxText || !utf8.Valid(b) || bytes.IndexByte(b, 0) >= 0 {
		return ""
	}
	return string(b)
}

// limitedWriter writes the first left bytes to w and discards the rest.
type limitedWriter struct {
	w    io.Writer
	left int
}

func (l *limitedWriter) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	if _, err := l.w.Write(p[:n]); err != nil {
		return 0, err
	}
	l.left -= n
	return len(p), nil
}
