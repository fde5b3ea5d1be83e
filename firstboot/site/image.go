package site

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// HubForm returns the form in which yurthub runs on this image, or "" if the image has no yurthub.
func HubForm(image ondisk.ImageInfo) string {
	if y := image.Yurthub; y != nil {
		return y.Form
	}
	return ""
}

// ImageInfo returns the builder's description of the image. It is empty on a node that edgebake did
// not build. An unreadable description is an error, because checks against the image need it.
func ImageInfo(e *machine.Env) (ondisk.ImageInfo, error) {
	var info ondisk.ImageInfo
	b, err := e.Read(ondisk.ImageInfoFile)
	if errors.Is(err, fs.ErrNotExist) {
		return info, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &info)
	}
	if err == nil && (info.Version == 0 || info.Plan == "") {
		err = errors.New("it names no plan")
	}
	if err != nil {
		return ondisk.ImageInfo{}, run.NeedsPerson(fmt.Errorf("reading the description of this machine's image (%s): %w", ondisk.ImageInfoFile, err),
			member.Rewriting(e, "the disk is damaged: flash the machine again"))
	}
	if info.Version != ondisk.ImageInfoVersion {
		return ondisk.ImageInfo{}, run.NeedsPerson(fmt.Errorf("%s has version %d, but this firstboot supports %d", ondisk.ImageInfoFile, info.Version, ondisk.ImageInfoVersion),
			member.Rewriting(e, "build the image and its firstboot with the same edgebake, and flash the machine again"))
	}
	return info, nil
}
