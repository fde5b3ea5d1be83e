package anatomy

import (
	"bytes"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
)

// TestSquarify checks that the parts fill the rectangle in proportion to their sizes, without
// overlaps.
func TestSquarify(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		sizes := make([]float64, 1+r.IntN(40))
		total := 0.0
		for i := range sizes {
			sizes[i] = math.Exp(8 * r.Float64())
			total += sizes[i]
		}
		slices.SortFunc(sizes, func(a, b float64) int { return int(math.Copysign(1, b-a)) })
		place := rect{3, 5, 100 + 1000*r.Float64(), 50 + 300*r.Float64()}
		got := squarify(sizes, place)
		if len(got) != len(sizes) {
			t.Fatalf("%d rectangles for %d sizes", len(got), len(sizes))
		}
		for i, p := range got {
			if want := sizes[i] / total * place.W * place.H; math.Abs(p.W*p.H-want) > 1e-6*place.W*place.H {
				t.Fatalf("part %d has %f, want %f", i, p.W*p.H, want)
			}
			if p.X < place.X-1e-6 || p.Y < place.Y-1e-6 || p.X+p.W > place.X+place.W+1e-6 || p.Y+p.H > place.Y+place.H+1e-6 {
				t.Fatalf("part %d %v lies outside of %v", i, p, place)
			}
			for _, q := range got[:i] {
				if overlap(p, q) > 1e-6*place.W*place.H {
					t.Fatalf("%v and %v overlap", p, q)
				}
			}
		}
	}
	for _, sizes := range [][]float64{nil, {0}, {0, 0}, {5, 0, 0}} {
		if got := squarify(sizes, rect{0, 0, 10, 10}); len(got) != len(sizes) {
			t.Errorf("%v: %v", sizes, got)
		}
	}
}

func overlap(a, b rect) float64 {
	w := min(a.X+a.W, b.X+b.W) - max(a.X, b.X)
	h := min(a.Y+a.H, b.Y+b.H) - max(a.Y, b.Y)
	return max(0, w) * max(0, h)
}

// TestHostileNames checks that the page escapes names from an image.
func TestHostileNames(t *testing.T) {
	const evil = `</title><script>alert(1)</script>"'><img src=x onerror=alert(2)>`
	now := time.Now()
	a := &Anatomy{
		Name: evil, Kubernetes: evil, Plan: evil, Builder: evil, Notes: []string{evil}, Size: 1,
		Partitions: []Partition{{Label: evil, FS: evil, Size: 1, Used: 1}},
		Contents: []media.Contents{{Label: evil, Bytes: 1 << 30, Groups: []media.Group{{Kind: media.KindPackage, Name: evil, Version: evil, Bytes: 1 << 30,
			Largest: []media.File{{Name: "/" + evil, Size: 1 << 29}, {Name: "/b", Size: 5}}}}}},
		Images: []ondisk.ImageRef{{Ref: evil, Digest: evil}}, Packages: []media.Package{{Name: evil, Version: evil}},
		Steps: []builder.StepTime{{Step: evil, Seconds: 1}}, Inputs: []Input{{evil, evil, evil}},
		Boot: &Boot{Node: evil, Result: evil, Started: now, Phases: []Phase{{Name: evil, Status: evil, Attempts: 3, Said: evil}}, Notes: []string{evil}},
	}
	var page bytes.Buffer
	if err := a.HTML(&page); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"<script", "<img", "onerror=alert(2)>"} {
		if strings.Contains(page.String(), bad) {
			t.Errorf("the page holds %s", bad)
		}
	}
	if n := strings.Count(page.String(), "alert(1)"); n < 15 {
		t.Errorf("the names are shown %d times", n)
	}
}

// TestReadable checks that text contrasts with its background by at least 4.5 (WCAG 2.2, AA), in
// the light and in the dark theme.
func TestReadable(t *testing.T) {
	colour := regexp.MustCompile(`--([a-z]+): (#[0-9a-f]{6});`)
	themes := strings.SplitN(pageText, "prefers-color-scheme: dark", 2)
	if len(themes) != 2 {
		t.Fatal("the page has no dark theme")
	}
	for i, css := range themes {
		colours := map[string]string{"white": "#ffffff"}
		for _, m := range colour.FindAllStringSubmatch(css, -1) {
			colours[m[1]] = m[2]
		}
		for _, pair := range []string{"ink page", "ink card", "soft page", "soft card", "ink track", "white package", "white program", "white image", "white boot", "white other"} {
			text, ground, _ := strings.Cut(pair, " ")
			if c := contrast(t, colours[text], colours[ground]); c < 4.5 {
				t.Errorf("theme %d: %s has a contrast of %.2f", i, pair, c)
			}
		}
	}
}

func contrast(t *testing.T, a, b string) float64 {
	t.Helper()
	light := func(hex string) float64 {
		sum := 0.0
		for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
			n, err := strconv.ParseUint(hex[1+2*i:3+2*i], 16, 8)
			if err != nil {
				t.Fatal(err)
			}
			c := float64(n) / 255
			if c <= 0.04045 {
				c /= 12.92
			} else {
				c = math.Pow((c+0.055)/1.055, 2.4)
			}
			sum += weight * c
		}
		return sum
	}
	if len(a) != 7 || len(b) != 7 {
		t.Fatalf("colours %q and %q", a, b)
	}
	x, y := light(a), light(b)
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

// TestReportOfAHostileName checks that the name in an image cannot lead to another directory, and
// that Read succeeds whatever the name.
func TestReportOfAHostileName(t *testing.T) {
	dir := t.TempDir()
	images := filepath.Join(dir, "images")
	if err := os.Mkdir(images, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{filepath.Join(dir, "secret"+reportEnding), filepath.Join(images, "shop"+reportEnding)} {
		if err := os.WriteFile(name, []byte(`{"plan": "aa11", "builder": "v1"}`), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, builder := range map[string]string{"shop": "v1", "../secret": "", "": "", strings.Repeat("x", 5000): "", "a\x00b": ""} {
		a := &Anatomy{Name: name, Arch: "amd64", Plan: "aa11"}
		if err := a.readReport(filepath.Join(images, "berlin.raw"), ""); err != nil || a.Builder != builder {
			t.Errorf("%.20q: built by %q, %v; want %q", name, a.Builder, err, builder)
		}
	}
}

// TestUnknownVersionsInText checks that no blank follows the name of a program without a version.
func TestUnknownVersionsInText(t *testing.T) {
	var out bytes.Buffer
	d := Difference{Packages: []Change{{Name: "yurthub"}, {Name: "runc", A: "1.1.15"}}}
	d.Text(&out)
	if text := out.String(); strings.Contains(text, " \n") || !strings.Contains(text, "  + yurthub\n  - runc 1.1.15\n") {
		t.Errorf("%q", text)
	}
}
