package builder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
)

// LookForFiles reports files and directories that an Image names and that are not
// there; dir is where its relative paths begin. Programs, whose names a build
// knows, are left to it.
func LookForFiles(img *configs.Image, dir string) error {
	var errs []error
	look := func(field, path string, check func(string) error) {
		if path == "" {
			return
		}
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		errs = append(errs, fieldError(field, check(path)))
	}
	if t := img.Base.Tar; t != nil {
		look("base.tar", t.File, checkNamedFile)
	}
	if d := img.Base.Debian; d != nil {
		for i, k := range d.Keyrings {
			look(fmt.Sprintf("base.debian.keyrings[%d]", i), k, checkNamedFile)
		}
	}
	if c := img.CNI.Config; c != "bridge" && c != "none" {
		look("cni.config", c, checkNamedFile)
	}
	for i, o := range img.Overlays {
		look(fmt.Sprintf("overlays[%d].dir", i), o.Dir, func(p string) error { return checkOverlay(p, dir) })
	}
	for i, f := range img.Files {
		look(fmt.Sprintf("files[%d].source", i), f.Source, checkNamedFile)
	}
	local := func(field, layout, archive string) {
		look(field+".layout", layout, checkNamedDir)
		look(field+".archive", archive, checkNamedFile)
	}
	if o := img.Base.OCI; o != nil {
		local("base.oci", o.Layout, o.Archive)
	}
	for n, i := range img.Images {
		local(fmt.Sprintf("images[%d]", n), i.Layout, i.Archive)
	}
	if y := img.Yurthub; y != nil && y.Image != nil {
		local("yurthub.image", y.Image.Layout, y.Image.Archive)
	}
	_, _, err := images.List(img, dir) // reads imagesFrom
	return errors.Join(append(errs, err)...)
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

// checkNamedFile says what is wrong with a file that the Image names. It does
// not open it: a named pipe would hold the build forever.
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

// checkOverlay says what is wrong with a directory that is to be laid over the
// root file system; dir is the Image's.
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
	if inner == outer || strings.HasPrefix(inner, strings.TrimSuffix(outer, "/")+"/") {
		return fmt.Errorf("packing overlay %s: the Image lies in it, and with it the lock and what is built: give the overlay a directory of its own", path)
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

// notThere says where relative paths begin: they are often written as seen
// from elsewhere.
func notThere(err error) error {
	var at *fs.PathError
	if !errors.As(err, &at) || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	at.Op = "open"
	return fmt.Errorf("%w: make it, or correct the path (a relative one begins at the Image's directory)", at)
}
