package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image/png"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/anatomy"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
	"golang.org/x/net/html"
)

const hostile = `<img src=x onerror=alert(1)>&"'.conf`

// writeReported writes an Image with a hostile file name.
func writeReported(dir string) error {
	base := buildtest.Base()
	// As in dpkg's lists, some paths lead through /bin and /lib, which are links.
	for name, text := range map[string]string{
		"systemd.list":          "/.\n/lib\n/lib/systemd\n/lib/systemd/systemd\n/usr/bin/su\n",
		"containerd:amd64.list": "/.\n/bin\n/bin/ping\n",
	} {
		base = append(base, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "./var/lib/dpkg/info/" + name, Mode: 0o644}, Body: text})
	}
	err := buildtest.Write(dir, base, func(s string) string { return strings.Replace(s, "overlays:\n", "overlays:\n  - dir: over\n", 1) })
	if err != nil {
		return err
	}
	etc := filepath.Join(dir, "over", "etc")
	return errors.Join(os.MkdirAll(etc, 0o755),
		os.WriteFile(filepath.Join(etc, hostile), bytes.Repeat([]byte("x"), 70_000), 0o644),
		os.WriteFile(filepath.Join(etc, "shop.conf"), []byte("a = 1\nb = 2\n"), 0o644),
		os.WriteFile(filepath.Join(dir, "boot.json"), []byte(`{"version": 1, "node": "shop-7", "result": "done", "started": "2026-01-01T00:00:10Z", "updated": "2026-01-01T00:01:00Z",
		"boot": {"firmwareTimestampMonotonic": 4000000, "loaderTimestampMonotonic": 500000, "initRDTimestampMonotonic": 6000000,
			"userspaceTimestampMonotonic": 8000000, "finishTimestampMonotonic": 20000000, "firstBootMonotonic": 26000000},
		"phases": [
		{"name": "network", "status": "done", "attempts": 1, "since": "2026-01-01T00:00:12Z", "seconds": 2},
		{"name": "join", "status": "done", "attempts": 3, "since": "2026-01-01T00:00:50Z", "seconds": 36.5, "error": "<b>no</b>"}]}`), 0o644))
}

// reported builds the Image and writes its report.
func reported(t *testing.T) *program {
	t.Helper()
	c := newCLI(t)
	if err := writeReported(c.dir); err != nil {
		t.Fatal(err)
	}
	c.run(0, "build", "image.yaml", "--quiet")
	c.run(0, "report", "tiny.raw", "-o", "report.html", "--boot", "boot.json")
	return c
}

func TestReport(t *testing.T) {
	c := reported(t)
	c.run(0, "report", "tiny.raw", "-o", "json", "--boot", "boot.json")
	var a anatomy.Anatomy
	if err := json.Unmarshal([]byte(c.out), &a); err != nil {
		t.Fatal(err)
	}
	const before = "[{firmware 0 3.5} {loader 3.5 0.5} {kernel 4 6} {initrd 10 2} {system 12 18}]"
	if a.Boot == nil || fmt.Sprint(a.Boot.Before) != before || a.Boot.Finished != 24 {
		t.Errorf("boot: %+v", a.Boot)
	}
	// Every byte belongs to a group, and every group has a kind.
	kinds := map[string]bool{}
	packages := map[string]bool{}
	for _, part := range a.Contents {
		sum, files := int64(0), 0
		for _, g := range part.Groups {
			sum, files, kinds[g.Kind] = sum+g.Bytes, files+g.Files, true
			if g.Kind == "package" {
				for _, f := range g.Largest {
					packages[fmt.Sprint(part.Label, " ", g.Name, " ", g.Version, " ", f.Name)] = true
				}
			}
		}
		if sum != part.Bytes || files != part.Files || part.Bytes == 0 || part.Bytes > part.Size-part.Reserve-part.Free {
			t.Errorf("%s: groups have %d bytes in %d files, the partition %d in %d; %d of %d are free", part.Label, sum, files, part.Bytes, part.Files, part.Free, part.Size)
		}
	}
	if want := map[string]bool{
		"ROOT-A systemd 257.1-1+b2 /usr/lib/systemd/systemd": true, "ROOT-A systemd 257.1-1+b2 /usr/bin/su": true,
		"ROOT-A containerd 1.7.24~ds1-6+b4 /usr/bin/ping": true,
	}; !maps.Equal(packages, want) {
		t.Errorf("files of packages: %v, want %v", packages, want)
	}
	// Each byte of a partition is used, free, or after the partition's file system.
	for _, p := range a.Partitions {
		behind := p.Label == ondisk.LabelRootA
		if p.FS != "" && (p.Used+p.Free+p.Reserve != p.Size || p.Used <= 0 || (p.Reserve > 0) != behind) {
			t.Errorf("%s: %d bytes; %d used, %d free, %d reserve", p.Label, p.Size, p.Used, p.Free, p.Reserve)
		}
		if p.Label == ondisk.LabelRootA && (p.Used > 32<<20 || p.Reserve < 256<<20) {
			t.Errorf("%s: %d used, %d reserve", p.Label, p.Used, p.Reserve)
		}
	}
	for _, kind := range []string{"program", "boot", "other"} {
		if !kinds[kind] {
			t.Errorf("no group has kind %s", kind)
		}
	}
	if len(a.Steps) == 0 || len(a.Inputs) == 0 {
		t.Errorf("the page has %d build steps and %d inputs", len(a.Steps), len(a.Inputs))
	}
}

// TestBuildCountsAsReport checks that build, report and inspect print the same sizes of partitions,
// and that the sizes add up.
func TestBuildCountsAsReport(t *testing.T) {
	c := reported(t)
	c.run(0, "report", "tiny.raw", "-o", "json")
	var a anatomy.Anatomy
	if err := json.Unmarshal([]byte(c.out), &a); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile("tiny.report.json")
	if err != nil {
		t.Fatal(err)
	}
	var built builder.Report
	if err := json.Unmarshal(raw, &built); err != nil {
		t.Fatal(err)
	}
	c.run(0, "build", "image.yaml", "--force")
	for _, part := range a.Contents {
		i := slices.IndexFunc(built.Partitions, func(p builder.PartitionReport) bool { return p.Label == part.Label })
		if got := built.Partitions[i].Files; got != part.Files || got == 0 {
			t.Errorf("%s: %d files in the build's report, %d in the image", part.Label, got, part.Files)
		}
		line := part.Label + `\s.*\s` + bytesize.Human(part.Free) + ` free\s+`
		if part.Reserve > 0 {
			line += bytesize.Human(part.Reserve) + ` reserve\s+`
		}
		if line += configs.Count(part.Files, "file") + `\n`; !regexp.MustCompile(line).MatchString(c.out) {
			t.Errorf("no line is %s:\n%s", line, c.out)
		}
	}
}

// TestReportPageExplainsItself checks that elements that can be opened are marked, and that the
// page describes the origin of each input.
func TestReportPageExplainsItself(t *testing.T) {
	c := reported(t)
	raw, err := os.ReadFile("report.html")
	if err != nil {
		t.Fatal(err)
	}
	page := string(raw)
	c.want(page, "summary::before { content: ", "details[open] > summary::before { content: ", "edgebake&#39;s own")
	if strings.Contains(page, "<td class=\"mono\">agent</td>") || strings.Contains(page, "::-webkit-details-marker") {
		t.Error("the page contains agent, or hides the marker of lines that open")
	}
}

// TestReportInABrowser checks that Chromium shows the page, and that the page's numbers are those
// of the JSON.
func TestReportInABrowser(t *testing.T) {
	chromium := desk.NeedProgram(t, "chromium", "chromium")
	c := reported(t)
	c.run(0, "report", "tiny.raw", "-o", "json", "--boot", "boot.json")
	var data any
	d := json.NewDecoder(strings.NewReader(c.out))
	d.UseNumber()
	if err := d.Decode(&data); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("report.html")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := html.Parse(bytes.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	var visit func(n *html.Node)
	visit = func(n *html.Node) {
		if n.Type == html.ElementNode {
			seen[n.Data]++
			path, value := attribute(n, "data-path"), attribute(n, "value")+attribute(n, "data-value")
			if path != "" {
				seen["number"]++
				if got := at(data, path); got != value {
					t.Errorf("%s is %s in the JSON and %s on the page", path, got, value)
				}
			}
			for _, a := range n.Attr {
				if strings.HasPrefix(a.Key, "on") || a.Key == "src" || a.Key == "href" {
					t.Errorf("<%s> has %s", n.Data, a.Key)
				}
			}
		}
		for child := n.FirstChild; child != nil; child = child.NextSibling {
			visit(child)
		}
	}
	visit(doc)
	if seen["number"] < 60 || seen["rect"] < 10 || seen["script"]+seen["img"]+seen["link"] > 0 {
		t.Errorf("the page has %v", seen)
	}
	for _, theme := range []string{"light", "dark"} {
		inTheme(t, chromium, theme, "1240,1800", "file://"+filepath.Join(c.dir, "report.html"))
	}
}

// inTheme renders a page in Chromium, and checks that it is light or dark and not empty. With
// -short it renders only the dark theme, because Chromium starts slowly.
func inTheme(t *testing.T, chromium, theme, size, url string) {
	t.Helper()
	if testing.Short() && theme == "light" {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	scheme := map[string]string{"light": "1", "dark": "0"}[theme]
	shot := filepath.Join(t.TempDir(), theme+".png")
	out, err := exec.CommandContext(ctx, chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
		"--no-first-run", "--disable-background-networking", "--disable-component-update", "--user-data-dir="+t.TempDir(),
		"--blink-settings=preferredColorScheme="+scheme, "--window-size="+size, "--screenshot="+shot, url).CombinedOutput()
	if err != nil {
		t.Fatalf("chromium: %v\n%s", err, out)
	}
	bright, colours := brightness(t, shot)
	if (theme == "light") != (bright > 0.6) || (theme == "dark") != (bright < 0.35) || colours < 50 {
		t.Errorf("%s in %s: brightness %.2f, %d colours", url, theme, bright, colours)
	}
}

func attribute(n *html.Node, key string) string {
	for _, a := range n.Attr {
		if a.Key == key {
			return a.Val
		}
	}
	return ""
}

// at returns the value at a path of the JSON: names, indices and "length".
func at(v any, path string) string {
	for part := range strings.SplitSeq(path, ".") {
		switch x := v.(type) {
		case map[string]any:
			v = x[part]
		case []any:
			if part == "length" {
				return strconv.Itoa(len(x))
			}
			i, err := strconv.Atoi(part)
			if err != nil || i >= len(x) {
				return "not there"
			}
			v = x[i]
		}
	}
	if n, ok := v.(json.Number); ok {
		if f, err := n.Float64(); err == nil && strings.ContainsAny(n.String(), ".e") {
			return strconv.FormatFloat(f, 'g', -1, 64)
		}
	}
	return fmt.Sprint(v)
}

// brightness returns the brightness of a picture, from 0 to 1, and its number of colours.
func brightness(t *testing.T, name string) (float64, int) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	colours := map[[3]uint32]bool{}
	sum, n := 0.0, 0
	for y := img.Bounds().Min.Y; y < img.Bounds().Max.Y; y += 3 {
		for x := img.Bounds().Min.X; x < img.Bounds().Max.X; x += 3 {
			r, g, b, _ := img.At(x, y).RGBA()
			colours[[3]uint32{r, g, b}] = true
			sum += float64(r+g+b) / 3 / 0xffff
			n++
		}
	}
	return sum / float64(n), len(colours)
}
