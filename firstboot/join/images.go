package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
)

// ImagesPhase imports the container images of an Image with imageStore.mode import. In other Images
// they are in containerd's store already.
func ImagesPhase() run.Phase {
	return run.Phase{
		Name: "images", Doc: "the image's container images are in containerd's store", Timeout: time.Hour,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			left, err := archivesLeft(e)
			if err != nil || len(left) > 0 {
				return run.Todo, err
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			left, err := archivesLeft(e)
			if err != nil {
				return err
			}
			for i, a := range left {
				e.Waiting("image %d of %d, %s, to be imported", i+1, len(left), a.Ref)
				if err := importArchive(ctx, e, a); err != nil {
					return fmt.Errorf("importing image %s: %w", a.Ref, err)
				}
			}
			return nil
		},
	}
}

// archivesLeft lists the archives that are not imported. An archive's file is removed after its
// import.
func archivesLeft(e *machine.Env) ([]ondisk.ImportArchive, error) {
	b, err := e.Read(ondisk.ImportImageDir + "/" + ondisk.ImportIndexFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var index ondisk.ImportIndex
	if err == nil {
		err = json.Unmarshal(b, &index)
	}
	if err == nil && index.Version != ondisk.ImportIndexVersion {
		err = fmt.Errorf("version %d is not supported (this program supports %d)", index.Version, ondisk.ImportIndexVersion)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the list of image archives: %w", err)
	}
	return slices.DeleteFunc(index.Archives, func(a ondisk.ImportArchive) bool {
		return !e.Exists(ondisk.ImportImageDir + "/" + a.File)
	}), nil
}

func importArchive(ctx context.Context, e *machine.Env, a ondisk.ImportArchive) error {
	path := ondisk.ImportImageDir + "/" + a.File
	sum, err := file.SHA256(e.Path(path))
	if err != nil {
		return err
	}
	if sum != a.SHA256 {
		return run.NeedsPerson(fmt.Errorf("the image archive %s is damaged: its SHA-256 is %s, expected %s", path, sum, a.SHA256),
			fmt.Sprintf("import %s by hand (`ctr --namespace k8s.io images import FILE`) and remove %s; or %s. The device may be failing",
				a.Ref, path, member.Rewriting(e, "write the disk image to the device again")))
	}
	ctr := func(args ...string) error {
		return e.Run(ctx, machine.Cmd{Args: append([]string{"ctr", "--namespace", "k8s.io", "images"}, args...)})
	}
	if err := ctr("import", "--platform", a.Platform, e.Path(path)); err != nil {
		return err
	}
	for _, name := range a.Names {
		if err := ctr("tag", "--force", a.Ref, name); err != nil {
			return err
		}
	}
	for _, name := range append([]string{a.Ref}, a.Names...) {
		for _, k := range slices.Sorted(maps.Keys(a.Labels)) {
			if err := ctr("label", name, k+"="+a.Labels[k]); err != nil {
				return err
			}
		}
	}
	return e.Remove(path) // do this last: without its file, an archive counts as imported
}
