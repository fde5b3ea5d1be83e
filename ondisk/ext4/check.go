package ext4

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/edgebake/edgebake/ondisk/tree"
)

const (
	maxName    = 255
	maxPath    = 16 << 10 // far more than the 4096 bytes that a program can name
	maxSymlink = blockSize - 1

	// MaxLinks is the maximum number of hard links to a file.
	MaxLinks = 65000

	// maxProblems is the maximum number of problems listed in one error.
	maxProblems = 20
)

// Check returns an error if ext4 cannot store the node n, for example because of an attribute's
// size, a device number or a time. Write makes the same checks.
func Check(n tree.Node) error { return checkNode(&n) }

// problems collects up to maxProblems errors, so that one run reports all problems of a tree
// without filling the screen.
type problems struct {
	errs []error
	more int
}

func (p *problems) add(format string, a ...any) {
	if len(p.errs) == maxProblems {
		p.more++
		return
	}
	p.errs = append(p.errs, fmt.Errorf(format, a...))
}

func (p *problems) at(n *tree.Node, format string, a ...any) {
	p.add("%w", &NodeError{*n, fmt.Errorf(format, a...)})
}

// NodeError is a problem with one node. Node lets callers find out where the node comes from.
type NodeError struct {
	Node tree.Node
	Err  error
}

func (e *NodeError) Error() string { return describe(&e.Node) + ": " + e.Err.Error() }
func (e *NodeError) Unwrap() error { return e.Err }

func (p *problems) err() error {
	if p.more > 0 {
		return errors.Join(append(p.errs, fmt.Errorf("and %d more", p.more))...)
	}
	return errors.Join(p.errs...)
}

// describe names a node for a message.
func describe(n *tree.Node) string {
	if len(n.Path) > maxPath {
		return fmt.Sprintf("%q… (from %s)", n.Path[:60], n.Layer)
	}
	if n.Layer == "" {
		return fmt.Sprintf("%q", n.Path)
	}
	return fmt.Sprintf("%q (from %s)", n.Path, n.Layer)
}

// checkNode returns an error if ext4 cannot store n, or if n is malformed.
func checkNode(n *tree.Node) error {
	if n.Inode == nil {
		return errors.New("has no inode")
	}
	if err := checkPath(n.Path); err != nil {
		return err
	}
	switch n.Mode & tree.ModeType {
	case tree.ModeDir, tree.ModeSocket, tree.ModeFIFO:
	case tree.ModeRegular:
		if err := checkContent(n.Data); err != nil {
			return err
		}
	case tree.ModeSymlink:
		if n.Target == "" || len(n.Target) > maxSymlink || strings.ContainsRune(n.Target, 0) {
			return fmt.Errorf("a symbolic link's target must have 1 to %d bytes without zero bytes; this one has %d bytes", maxSymlink, len(n.Target))
		}
	case tree.ModeBlock, tree.ModeChar:
		if n.Major >= 1<<12 || n.Minor >= 1<<20 {
			return fmt.Errorf("device %d:%d is beyond 4095:1048575", n.Major, n.Minor)
		}
	default:
		return fmt.Errorf("mode %#o has no known file type", n.Mode)
	}
	if n.Mode > 0xffff {
		return fmt.Errorf("mode %#o has unknown bits", n.Mode)
	}
	if n.Path == "." && !n.IsDir() || n.Path == lostFound && !n.IsDir() {
		return errors.New("must be a directory")
	}
	if _, _, err := timestamp(n.MTime); err != nil {
		return fmt.Errorf("modification time: %w", err)
	}
	if _, _, err := planXattrs(n.Xattrs); err != nil {
		return err
	}
	return nil
}

func checkPath(p string) error {
	if p == "." {
		return nil
	}
	if p == "" || p[0] == '/' || path.Clean(p) != p || p == ".." || strings.HasPrefix(p, "../") {
		return errors.New("the path is not clean and relative to the root")
	}
	if len(p) > maxPath {
		return fmt.Errorf("the path is %d bytes long, at most %d are possible", len(p), maxPath)
	}
	if strings.ContainsRune(p, 0) {
		return errors.New("the path has a zero byte")
	}
	for rest := p; rest != ""; {
		name, after, _ := strings.Cut(rest, "/")
		if len(name) > maxName {
			return fmt.Errorf("a name of %d bytes; ext4 allows %d", len(name), maxName)
		}
		rest = after
	}
	return nil
}

func checkContent(c tree.Content) error {
	switch {
	case c.Size < 0 || c.Off < 0 || c.Off+c.Size < 0:
		return fmt.Errorf("content at offset %d with size %d is invalid", c.Off, c.Size)
	case ceilDiv(c.Size, blockSize) > maxBlocks:
		return fmt.Errorf("size %d is beyond ext4's 16 TiB", c.Size)
	case c.Blob == "" && int64(len(c.Inline)) != c.Size:
		return fmt.Errorf("its size is %d, but its inline content has %d bytes", c.Size, len(c.Inline))
	}
	return nil
}

// timestamp encodes a time as the seconds and the extra field, which has two more bits of the
// seconds and the nanoseconds ("Inode Timestamps").
func timestamp(t time.Time) (seconds, extra uint32, err error) {
	s := t.Unix()
	const least, most = -1 << 31, 1<<34 - 1<<31 - 1
	if s < least || s > most {
		return 0, 0, fmt.Errorf("%s is outside of what ext4 can express (%d to %d)",
			t.UTC().Format(time.RFC3339), time.Unix(least, 0).UTC().Year(), time.Unix(most, 0).UTC().Year())
	}
	epoch := uint32((s - int64(int32(s))) >> 32)
	return uint32(s), epoch&3 | uint32(t.Nanosecond())<<2, nil
}
