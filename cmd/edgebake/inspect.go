package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/outputs"
	"github.com/edgebake/edgebake/builder/signing"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/spf13/cobra"
)

func newInspect(s streams) *cobra.Command {
	var output console.Form
	var verify, packages, checkImages bool
	var top int
	c := &cobra.Command{
		Use:               "inspect IMAGE",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Show what is in an image, without mounting it",
		Long: `Inspect reads an image's partitions, versions, container images, packages and
the state of its slot. It prints no secret.`,
		Example: `  edgebake inspect my-edge.raw
  edgebake inspect my-edge.raw.zst --output json
  edgebake inspect my-edge.raw --verify
  edgebake inspect my-edge.raw --images
  edgebake inspect my-edge.raw --top 20`,
		Args: cli.Args(1, 1, "one image"),
		RunE: func(c *cobra.Command, a []string) error {
			if top < 0 {
				return cli.Usage(fmt.Errorf("--top %d: want the number of groups to list, 0 or more", top))
			}
			info, err := media.Inspect(a[0])
			if err != nil {
				return err
			}
			var errs []error
			var contents []media.Contents
			if top > 0 {
				var err error
				contents, err = media.ReadContents(a[0])
				errs = append(errs, err)
			}
			if verify {
				errs = append(errs, media.Verify(c.Context(), a[0], nil))
			}
			if checkImages {
				_, err := media.VerifyImages(a[0])
				errs = append(errs, err)
			}
			if err := errors.Join(errs...); err != nil {
				return err
			}
			warnOfReport(s, a[0], info)
			return output.Print(s, struct {
				*media.Info
				Contents []media.Contents `json:"contents,omitempty"`
			}{info, contents}, func() {
				printInfo(s, info, verify, checkImages, packages)
				printTop(s.Out, contents, top)
			})
		},
	}
	output.Flag(c)
	c.Flags().BoolVar(&verify, "verify", false, "also read the whole image and compare it with the golden digest")
	c.Flags().IntVar(&top, "top", 0, "also list this many of the largest packages, programs and images")
	c.Flags().BoolVar(&packages, "packages", false, "list the packages too")
	c.Flags().BoolVar(&checkImages, "images", false, "also check that every container image can run without a registry")
	return c
}

// warnOfReport warns if the report next to an image is damaged or belongs to another build, as after
// a build that was interrupted between writing the image and the report.
func warnOfReport(s streams, image string, info *media.Info) {
	name := outputs.Report(image)
	raw, err := os.ReadFile(name)
	if err != nil {
		return
	}
	var report struct{ Plan, Golden string }
	if json.Unmarshal(raw, &report) != nil {
		s.Warn("%s is damaged: build the image again", name)
		return
	}
	switch {
	case report.Plan != info.Image.Plan:
		s.Warn("%s belongs to another build (its plan is %.12s, the image's is %.12s): build the image again", name, report.Plan, info.Image.Plan)
	case info.Slot.Golden != "" && report.Golden != info.Slot.Golden:
		s.Warn("%s belongs to another build (its golden digest is %.12s, the image's is %.12s): build the image again", name, report.Golden, info.Slot.Golden)
	}
}

func printInfo(s streams, i *media.Info, verified, imagesVerified, packages bool) {
	w := s.Out
	printImage(w, i)
	printSlot(w, &i.Slot)
	fmt.Fprintf(w, "golden      %s", i.Slot.Golden)
	if i.Slot.Signed {
		fmt.Fprint(w, " (signed)")
	}
	if verified {
		fmt.Fprint(w, " (verified)")
	}
	fmt.Fprintln(w, "\npartitions")
	for _, p := range i.Partitions {
		printPartition(w, p)
	}
	printContainerImages(w, i.Image.Images, imagesVerified)
	fmt.Fprintf(w, "SBOM: %d packages, programs and modules\n", len(i.Packages))
	if packages {
		for _, p := range i.Packages {
			fmt.Fprintf(w, "  %s %s\n", p.Name, p.Version)
		}
	}
	if i.Slot.Report != "" {
		fmt.Fprintf(w, "last report of the machine:\n%s\n", strings.TrimRight(i.Slot.Report, "\n"))
	}
}

func printImage(w io.Writer, i *media.Info) {
	m := i.Image
	fmt.Fprintf(w, "image       %s (%s, %s; %s stored)\n", m.Name, i.Format, bytesize.Human(i.Size), bytesize.Human(i.Stored))
	fmt.Fprintf(w, "plan        %s\n", m.Plan)
	fmt.Fprintf(w, "arch        %s\n", m.Arch)
	if len(m.Boards) > 0 {
		fmt.Fprintf(w, "boards      %s\n", strings.Join(m.Boards, ", "))
	}
	if i.SectorSize != 512 {
		fmt.Fprintf(w, "sectors     %d bytes\n", i.SectorSize)
	}
	fmt.Fprintf(w, "date        %s\n", time.Unix(m.SourceDate, 0).UTC().Format(time.RFC3339))
	fmt.Fprintf(w, "kubernetes  %s\ncontainerd  %s\nkernel      %s\n", m.Kubernetes, m.Containerd, m.Kernel)
	if m.Yurthub != nil {
		fmt.Fprintf(w, "yurthub     %s (%s)\n", m.Yurthub.Version, m.Yurthub.Form)
	}
	if len(m.SiteKeys) > 0 {
		fmt.Fprintf(w, "sticks      %s; keys %s", cmp.Or(m.Removable, ondisk.SitesRepair), strings.Join(signing.KeyIDs(m.SiteKeys), ", "))
		if m.SitesNotBefore > 0 {
			fmt.Fprintf(w, ", signed since %s", time.Unix(m.SitesNotBefore, 0).UTC().Format(time.RFC3339))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "supports    node types %s; Sites %s\n", strings.Join(m.NodeTypes, ", "), strings.Join(m.SiteVersions, ", "))
}

func printSlot(w io.Writer, slot *media.SlotState) {
	fmt.Fprintf(w, "slot        %s", slot.State)
	if slot.Sites > 0 {
		fmt.Fprintf(w, " of %s", configs.Count(slot.Sites, "Site"))
	}
	if !slot.Stamped.IsZero() {
		fmt.Fprintf(w, ", stamped %s", slot.Stamped.Format(time.RFC3339))
	}
	if slot.Error != "" {
		fmt.Fprintf(w, ": %s: %s", slot.Error, slot.Fix)
	}
	fmt.Fprintln(w)
	site := slot.Site
	if site == nil {
		return
	}
	fmt.Fprintf(w, "site        %s (%s), API servers %s", site.NodeName, site.NodeType, strings.Join(site.Masters, ", "))
	if site.NodePool != "" {
		fmt.Fprintf(w, ", node pool %s", site.NodePool)
	}
	if !site.Token {
		fmt.Fprint(w, ", no token")
	}
	if !site.Match.IsZero() {
		fmt.Fprintf(w, ", for %s", site.Match)
	}
	fmt.Fprintln(w)
}

func printPartition(w io.Writer, p media.Partition) {
	printSizes(w, p)
	fmt.Fprintf(w, "  %s", p.GUID)
	if p.Error != "" {
		fmt.Fprintf(w, "  damaged: %s", p.Error)
	}
	fmt.Fprintln(w)
}

// printSizes prints the columns that build and inspect show for each partition.
func printSizes(w io.Writer, p media.Partition) {
	fmt.Fprintf(w, "  %-9s %-6s %9s", p.Label, p.FS, bytesize.Human(p.Size))
	switch {
	case p.Error != "":
		fmt.Fprintf(w, "  %9s       %9s     ", "?", "?")
	case p.Used > 0:
		fmt.Fprintf(w, "  %9s used  %9s free", bytesize.Human(p.Used), bytesize.Human(p.Free))
	default:
		fmt.Fprintf(w, "  %9s       %9s     ", "", "")
	}
	if p.Reserve > 0 {
		fmt.Fprintf(w, "  %9s reserve", bytesize.Human(p.Reserve))
	} else {
		fmt.Fprintf(w, "  %9s        ", "")
	}
}

func printContainerImages(w io.Writer, images []ondisk.ImageRef, verified bool) {
	fmt.Fprintf(w, "container images: %d", len(images))
	if verified {
		fmt.Fprint(w, " (verified)")
	}
	fmt.Fprintln(w)
	wide := 0
	for _, c := range images {
		wide = max(wide, len(c.Ref))
	}
	for _, c := range images {
		fmt.Fprintf(w, "  %-*s  %.19s  %9s\n", wide, c.Ref, c.Digest, bytesize.Human(c.Size))
	}
}
