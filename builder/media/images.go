package media

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/update"
)

// VerifyImages checks with store.Verify that each container image on an image's DATA partition can
// run without a registry.
func VerifyImages(path string) (*store.Summary, error) {
	m, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	s, err := m.verifyImages()
	if err != nil {
		return nil, fmt.Errorf("image %s is damaged, build or copy it again: %w", path, err)
	}
	return s, nil
}

func (m *Image) verifyImages() (*store.Summary, error) {
	if len(m.info.Images) == 0 {
		return &store.Summary{}, nil
	}
	p, err := m.partition(ondisk.LabelData)
	if err != nil {
		return nil, err
	}
	fs, err := ext4.Open(m.section(p))
	if err != nil {
		return nil, err
	}
	// A machine that has booted leaves a report in the slot. Its containerd may have changed the
	// store since.
	var seen Info
	if err := m.readSlot(&seen); err != nil {
		return nil, err
	}
	if _, err := fs.Stat(importFile(ondisk.ImportIndexFile)); err == nil {
		return verifyArchives(fs, len(m.info.Images), seen.Slot.Report != "")
	}
	files := update.StoreFiles(fs)
	files.InUse = seen.Slot.Report != ""
	s, err := store.Verify(files, update.StoreRoot)
	if err != nil {
		return nil, err
	}
	// image.json and the store must list the same images.
	if seen.Slot.Report == "" && len(s.Images) != len(m.info.Images) {
		return nil, fmt.Errorf("%s lists %s, but the store has %d", ondisk.ESPImageInfo, configs.Count(len(m.info.Images), "container image"), len(s.Images))
	}
	return s, nil
}

// importFile returns the path on DATA of a file for images that the first boot imports.
func importFile(name string) string {
	return strings.TrimPrefix(ondisk.ImportImageDir, "/var/") + "/" + name
}

// verifyArchives checks the archives of images that the first boot imports. Firstboot removes an
// archive after importing it.
func verifyArchives(fs *ext4.Reader, listed int, booted bool) (*store.Summary, error) {
	raw, err := fs.ReadFile(importFile(ondisk.ImportIndexFile))
	if err != nil {
		return nil, err
	}
	var index ondisk.ImportIndex
	if err := json.Unmarshal(raw, &index); err != nil {
		return nil, fmt.Errorf("reading the list of image archives: %w", err)
	}
	if len(index.Archives) != listed {
		return nil, fmt.Errorf("%s lists %s, but the list of archives to import has %d", ondisk.ESPImageInfo, configs.Count(listed, "container image"), len(index.Archives))
	}
	s := &store.Summary{}
	var errs []error
	for _, a := range index.Archives {
		s.Images = append(s.Images, a.Ref)
		f, err := fs.OpenFile(importFile(a.File))
		if booted && errors.Is(err, iofs.ErrNotExist) {
			continue // firstboot has imported and removed the archive
		}
		h := sha256.New()
		if err == nil {
			_, err = io.Copy(h, io.NewSectionReader(f, 0, f.Size()))
		}
		if got := hex.EncodeToString(h.Sum(nil)); err == nil && got != a.SHA256 {
			err = fmt.Errorf("sha256 is %s (%d bytes), expected %s", got, f.Size(), a.SHA256)
		}
		if err == nil {
			err = store.VerifyArchive(f, f.Size())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("archive %s of image %s: %w", a.File, a.Ref, err))
		}
	}
	return s, errors.Join(errs...)
}
