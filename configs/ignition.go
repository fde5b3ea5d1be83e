package configs

import (
	"errors"
	"fmt"
	"strings"

	ignerrors "github.com/coreos/ignition/v2/config/shared/errors"
	ign "github.com/coreos/ignition/v2/config/v3_6"
	"github.com/coreos/ignition/v2/config/v3_6/types"
	"github.com/coreos/vcontext/report"

	"github.com/edgebake/edgebake/configs/ondisk"
)

// ParseIgnition reads an Ignition config of any spec from 3.0 to 3.6, judged
// by Ignition's own library, and refuses what first boot does not apply. The
// problems carry the place in the config.
func ParseIgnition(name string, data []byte) (*types.Config, Problems) {
	var probs Problems
	if len(data) > ondisk.SlotRoom {
		probs.add("", "has %.1f MiB; the slot has room for %d MiB: put large files into the Image (files, overlays) instead", float64(len(data))/(1<<20), ondisk.SlotRoom>>20)
		probs[0].File = name
		return nil, probs
	}
	cfg, rep, err := ign.ParseCompatibleVersion(data)
	for _, e := range rep.Entries {
		// A key the library does not know is only a warning to it. To an
		// unattended machine it is a setting that is silently missing.
		if e.Kind == report.Info {
			continue
		}
		p := Problem{File: name, Msg: e.Message}
		if s := e.Marker.StartP; s != nil {
			p.Line, p.Col = int(s.Line), int(s.Column)
		}
		if len(e.Context.Path) > 0 {
			p.Path = strings.TrimPrefix(e.Context.String(), "$.")
		}
		probs = append(probs, p)
	}
	if err != nil {
		if len(probs) == 0 {
			probs.add("", "%s", ignitionError(err))
			probs[0].File = name
		}
		return nil, probs
	}
	for _, p := range unservedIgnition(&cfg) {
		p.File = name
		probs = append(probs, p)
	}
	if len(probs) > 0 {
		return nil, probs
	}
	return &cfg, nil
}

func ignitionError(err error) string {
	if errors.Is(err, ignerrors.ErrUnknownVersion) || errors.Is(err, ignerrors.ErrInvalidVersion) {
		return "ignition.version must be one of 3.0.0 to 3.6.0; a Butane config must be translated first (butane --strict)"
	}
	return fmt.Sprintf("not an Ignition config: %v", err)
}

// unservedIgnition lists the parts of cfg that first boot does not apply: it
// sets up a system that is already there, from what it has on board.
func unservedIgnition(cfg *types.Config) Problems {
	var probs Problems
	const image = "the disk is made by the Image (disk, kernel); take this out"
	for _, part := range []struct {
		path string
		n    int
	}{
		{"storage.disks", len(cfg.Storage.Disks)},
		{"storage.raid", len(cfg.Storage.Raid)},
		{"storage.filesystems", len(cfg.Storage.Filesystems)},
		{"storage.luks", len(cfg.Storage.Luks)},
		{"kernelArguments", len(cfg.KernelArguments.ShouldExist) + len(cfg.KernelArguments.ShouldNotExist)},
	} {
		if part.n > 0 {
			probs.add(part.path, image)
		}
	}
	if len(cfg.Ignition.Config.Merge) > 0 || cfg.Ignition.Config.Replace.Source != nil {
		probs.add("ignition.config", "first boot fetches no further configs; merge them beforehand")
	}
	for i, f := range cfg.Storage.Files {
		for _, r := range append([]types.Resource{f.Contents}, f.Append...) {
			if r.Source != nil && *r.Source != "" && !strings.HasPrefix(*r.Source, "data:") {
				probs.add(fmt.Sprintf("storage.files.%d", i), "contents of %s must be inline (data:): the network they would come over is set up by this very config", f.Path)
			}
		}
	}
	return probs
}
