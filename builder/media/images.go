package media

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/edgebake/edgebake/builder/disk/ext4"
	"github.com/edgebake/edgebake/builder/images/store"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// VerifyImages checks the container images on an image's DATA partition: that
// each can run without a registry. See store.Verify for what that means.
func VerifyImages(path string) (*store.Summary, error) {
	m, err := open(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer m.close()
	s, err := m.verifyImages()
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", path, err)
	}
	return s, nil
}

func (m *image) verifyImages() (*store.Summary, error) {
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
	index := strings.TrimPrefix(ondisk.ImportImageDir, "/var/") + "/" + ondisk.ImportIndexFile
	if _, err := fs.Stat(index); err == nil {
		return nil, errors.New("its container images are archives to be imported at first boot (imageStore.mode: import), not a store")
	}
	// A machine that has booted wrote its report; its containerd has worked
	// on the store since.
	var seen Info
	if err := m.slot(&seen); err != nil {
		return nil, err
	}
	s, err := store.Verify(store.Files{
		InUse:   seen.Slot.Report != "",
		Stat:    fs.Stat,
		ReadDir: fs.ReadDir,
		Open: func(name string) (io.ReadCloser, error) {
			f, err := fs.OpenFile(name)
			if err != nil {
				return nil, err
			}
			return io.NopCloser(io.NewSectionReader(f, 0, f.Size())), nil
		},
	}, dataRoot, cmp.Or(m.info.Snapshotter, "overlayfs"))
	if err != nil {
		return nil, err
	}
	// The list on board and the store must name the same images.
	if seen.Slot.Report == "" && len(s.Images) != len(m.info.Images) {
		return nil, fmt.Errorf("%s lists %d container images, the store has %d", ondisk.ESPImageInfo, len(m.info.Images), len(s.Images))
	}
	return s, nil
}

// dataRoot is containerd's root on DATA, which is mounted on /var.
const dataRoot = "lib/containerd"
