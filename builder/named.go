package builder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/ondisk/file"
)

// named is a file or directory that an Image names.
type named struct {
	field, path string
	kind        namedKind
}

type namedKind int

const (
	namedFile namedKind = iota
	namedLayout
	namedOverlay
	namedPrograms // a directory with programs whose names are fixed
)

// namedKinds maps values of the struct tag "path" in configs.Image to kinds.
var namedKinds = map[string]namedKind{"file": namedFile, "layout": namedLayout, "overlay": namedOverlay, "programs": namedPrograms}

// namedBy lists the files and directories that an Image document names, but not those of
// imagesFrom. Relative paths are relative to dir.
func namedBy(img *configs.Image, dir string) []named {
	var list []named
	strict.Walk(img, func(f strict.Field) {
		kind, ok := namedKinds[f.Tag.Get("path")]
		if !ok {
			return
		}
		f.Texts(func(field string, v reflect.Value) {
			path := v.String()
			if path == "" || field == "cni.config" && (path == "bridge" || path == "none") {
				return
			}
			if !filepath.IsAbs(path) {
				path = filepath.Join(dir, path)
			}
			list = append(list, named{field, path, kind})
		})
	})
	return list
}

// LookForFiles returns errors for files and directories named by an Image that are missing or
// unusable, and for a containerd version for which images cannot be baked. It does not look for
// programs in a directory. Relative paths are relative to dir. A build prints the same warnings.
func LookForFiles(img *configs.Image, dir string) (warnings configs.Problems, _ error) {
	var errs []error
	for _, n := range namedBy(img, dir) {
		var err error
		switch n.kind {
		case namedFile:
			err = checkNamedFile(n.path)
		case namedLayout, namedPrograms:
			err = checkNamedDir(n.path)
		case namedOverlay:
			err = checkOverlay(n.path, dir)
		}
		errs = append(errs, fieldError(n.field, err))
	}
	listing, err := images.List(img, dir) // also reads imagesFrom
	if len(listing.Images) > 0 {
		errs = append(errs, checkStore(img))
	}
	return append(img.Warnings(), listing.Notes...), errors.Join(append(errs, err)...)
}

// NotRead returns an error if path is a file that the Image reads, or is in a directory that it
// reads. path is an output of edgebake; name describes the output in messages.
func NotRead(img *configs.Image, dir, name, path string) error {
	list := namedBy(img, dir)
	add := func(field string, parts ...string) {
		p := filepath.Join(parts...)
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		list = append(list, named{field, p, namedFile})
	}
	for i, f := range img.ImagesFrom {
		add(fmt.Sprintf("imagesFrom[%d]", i), f)
	}
	add("agents.firstboot", img.Agents.Firstboot)
	add("agents.ipvscare", img.Agents.IPVSCare)
	for _, s := range programSets(img) {
		if s.source.File == nil {
			continue
		}
		for _, p := range s.programs {
			add(s.field, s.source.File.Dir, p.name)
			add(s.field, s.source.File.Dir, "bin", p.name)
		}
	}
	var errs []error
	for _, n := range list {
		inside := false
		switch n.kind {
		case namedOverlay:
			// An overlay that contains the Image itself is reported separately.
			inside = checkOverlay(n.path, dir) == nil && isInside(path, n.path)
		case namedLayout: // the directory of a layout may also contain other files
			inside = isInside(path, filepath.Join(n.path, "blobs")) || file.Same(path, filepath.Join(n.path, "index.json")) || file.Same(path, filepath.Join(n.path, "oci-layout"))
		case namedFile:
			if file.Same(path, n.path) {
				errs = append(errs, fmt.Errorf("%s %s: the Image reads this file (%s): name another file", name, path, n.field))
			}
		}
		if inside {
			errs = append(errs, fmt.Errorf("%s %s: it is in a directory that the Image reads (%s): write elsewhere", name, path, n.field))
		}
	}
	return joined.Distinct(errs...)
}

// isInside reports whether path is in or below the directory dir. path need not exist.
func isInside(path, dir string) bool {
	outer, err := realPath(dir)
	if err != nil {
		return false
	}
	inner, err := realPath(filepath.Dir(path))
	return err == nil && isSameOrBelow(inner, outer)
}

// isSameOrBelow reports whether the path inner is outer or a path below outer.
func isSameOrBelow(inner, outer string) bool {
	return inner == outer || strings.HasPrefix(inner, strings.TrimSuffix(outer, "/")+"/")
}

func checkNamedDir(path string) error {
	fi, err := os.Stat(path)
	switch {
	case err != nil:
		return notThere(err)
	case !fi.IsDir():
		return fmt.Errorf("%s is not a directory", path)
	}
	return nil
}

// checkNamedFile returns an error if the Image cannot use the file. It does not open the file,
// since opening a named pipe would block forever.
func checkNamedFile(path string) error {
	fi, err := os.Stat(path)
	switch {
	case err != nil:
		return notThere(err)
	case !fi.Mode().IsRegular():
		return fmt.Errorf("%s is not a file", path)
	}
	return nil
}

// checkOverlay returns an error if the directory path cannot be an overlay of an Image in the
// directory dir.
func checkOverlay(path, dir string) error {
	fi, err := os.Stat(path)
	switch {
	case err != nil:
		return notThere(err)
	case !fi.IsDir():
		return fmt.Errorf("packing overlay %s: not a directory", path)
	}
	outer, outerErr := realPath(path)
	inner, innerErr := realPath(dir)
	if err := errors.Join(outerErr, innerErr); err != nil {
		return err
	}
	if isSameOrBelow(inner, outer) {
		return fmt.Errorf("packing overlay %s: it contains the Image, and therefore also the lock and the built images: move the overlay to its own directory", path)
	}
	return nil
}

func realPath(p string) (string, error) {
	p, err := filepath.Abs(p)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(p)
}

// notThere adds a hint to the error for a missing file: relative paths start at the Image's
// directory. Users often expect another directory.
func notThere(err error) error {
	var at *fs.PathError
	if !errors.As(err, &at) || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	at.Op = "open"
	return fmt.Errorf("%w: create it, or correct the path (a relative one starts at the Image's directory)", at)
}
