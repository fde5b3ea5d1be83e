package outputs

import (
	"context"
	"errors"
	"fmt"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk/file"
)

// Current returns the reports of the images that exist at the targets' outputs, if all of them
// equal those that the build would make. Otherwise it returns exists, the errors about existing
// files, with the images named that were built from another plan than the document's.
func Current(ctx context.Context, targets []Target, document string, exists error) ([]*builder.Report, error) {
	var reports []*builder.Report
	others := map[string]bool{} // outputs that were built from another plan
	for _, t := range targets {
		id, err := t.planID(ctx)
		if err != nil {
			return nil, exists
		}
		output := t.Options.Output
		info, err := media.Inspect(output)
		if err != nil {
			continue
		}
		if others[output] = info.Image.Plan != id; others[output] || info.Slot.State != media.SlotGolden {
			continue
		}
		if r, err := ReadReport(output); err == nil && r.Plan == id && r.Golden == info.Slot.Golden {
			reports = append(reports, r)
		}
	}
	if len(reports) == len(targets) {
		return reports, nil
	}
	return nil, joined.Each(exists, func(e error) error {
		var present *file.ExistsError
		if errors.As(e, &present) && others[present.Path] {
			return fmt.Errorf("output %s was built from another plan: %s or another input has changed since; --force replaces it", present.Path, configs.FileName(document))
		}
		return e
	})
}

// planID returns the ID of the target's plan.
func (t *Target) planID(ctx context.Context) (string, error) {
	p := t.Plan
	if p == nil {
		var err error
		if p, err = builder.Resolve(ctx, t.Image, t.Options); err != nil {
			return "", err
		}
	}
	return p.ID()
}
