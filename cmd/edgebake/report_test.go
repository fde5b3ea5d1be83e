package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image/png"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/anatomy"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
	"golang.org/x/net/html"
	"golang.org/x/sys/unix"
)

const hostile = `<img src=x onerror=alert(1)>&"'.conf`

// reported builds an image with a hostile file name and writes its report.
func reported(t *testing.T) *cli {
	t.Helper()
	c := newCLI(t)
	base := buildtest.Base()
	// As dpkg has it: some paths go through /bin and /lib, which are links.
	for name, text := range map[string]string{
		"systemd.list":          "/.\n/lib\n/lib/systemd\n/lib/systemd/systemd\n/usr/bin/su\n",
		"containerd:amd64.list": "/.\n/bin\n/bin/ping\n",
	} {
		base = append(base, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "./var/lib/dpkg/info/" + name, Mode: 0o644}, Body: text})
	}
	err := buildtest.Write(c.dir, base, func(s string) string { return strings.Replace(s, "overlays:\n", "overlays:\n  - dir: over\n", 1) })
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll("over/etc", 0o755); err != nil {
		t.Fatal(err)
	}
	c.file("over/etc/"+hostile, strings.Repeat("x", 70_000))
	c.file("over/etc/shop.conf", "a = 1\nb = 2\n")
	c.run(0, "build", "image.yaml", "--quiet")
	c.file("boot.json", `{"version": 1, "node": "shop-7", "result": "done", "started": "2026-01-01T00:00:10Z", "updated": "2026-01-01T00:01:00Z",
		"boot": {"firmwareTimestampMonotonic": 4000000, "loaderTimestampMonotonic": 500000, "initRDTimestampMonotonic": 6000000,
			"userspaceTimestampMonotonic": 8000000, "finishTimestampMonotonic": 20000000, "firstBootMonotonic": 26000000},
		"phases": [
		{"name": "network", "status": "done", "attempts": 1, "since": "2026-01-01T00:00:12Z", "seconds": 2},
		{"name": "join", "status": "done", "attempts": 3, "since": "2026-01-01T00:00:50Z", "seconds": 36.5, "error": "<b>no</b>"}]}`)
	c.run(0, "report", "tiny.raw", "-o", "report.html", "--boot", "boot.json")
	return c
}

func TestReport(t *testing.T) {
	c := reported(t)
	c.run(1, "report", "tiny.raw", "-o", "report.html")
	c.want(c.err, "--force replaces it")
	c.run(2, "report", "tiny.raw", "-o", "report.pdf")
	c.run(1, "report", "tiny.raw", "-o", "x.html", "--boot", "image.yaml")
	c.want(c.err, "not the report.json of a first boot")
	c.run(1, "report", "tiny.raw", "-o", "x.html", "--boot", "tiny.report.json")
	c.want(c.err, "tiny.report.json: it is not the report.json of a first boot")
	c.run(0, "report", "tiny.raw", "-o", "json", "--boot", "boot.json")
	var a anatomy.Anatomy
	if err := json.Unmarshal([]byte(c.out), &a); err != nil {
		t.Fatal(err)
	}
	const before = "[{firmware 0 3.5} {loader 3.5 0.5} {kernel 4 6} {initrd 10 2} {system 12 18}]"
	if a.Boot == nil || fmt.Sprint(a.Boot.Before) != before || a.Boot.Finished != 24 {
		t.Errorf("boot: %+v", a.Boot)
	}
	// Every byte has a group, and every group what it is.
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
	// Every byte of a partition is used, free or behind its file system.
	for _, p := range a.Partitions {
		behind := p.Label == ondisk.LabelRootA
		if p.FS != "" && (p.Used+p.Free+p.Reserve != p.Size || p.Used <= 0 || (p.Reserve > 0) != behind) {
			t.Errorf("%s of %d: %d used, %d free, %d behind it", p.Label, p.Size, p.Used, p.Free, p.Reserve)
		}
		if p.Label == ondisk.LabelRootA && (p.Used > 32<<20 || p.Reserve < 256<<20) {
			t.Errorf("%s has %d used, %d behind it", p.Label, p.Used, p.Reserve)
		}
	}
	for _, kind := range []string{"program", "boot", "other"} {
		if !kinds[kind] {
			t.Errorf("no group is a %s", kind)
		}
	}
	if len(a.Steps) == 0 || len(a.Inputs) == 0 {
		t.Errorf("the build is not told: %d steps, %d inputs", len(a.Steps), len(a.Inputs))
	}
	c.run(0, "inspect", "tiny.raw", "--top", "3")
	c.want(c.out, "largest 3", "█")
	if strings.Count(c.out, "█  ")+strings.Count(c.out, "█\n") != 3 {
		t.Errorf("want three bars:\n%s", c.out)
	}
}

// A stamped copy was built as the golden image beside it was.
func TestReportOfAStampedCopy(t *testing.T) {
	c := reported(t)
	built := func(args ...string) (steps int, notes string) {
		t.Helper()
		c.run(0, append([]string{"report", "-o", "json"}, args...)...)
		var a anatomy.Anatomy
		if err := json.Unmarshal([]byte(c.out), &a); err != nil {
			t.Fatal(err)
		}
		return len(a.Steps), strings.Join(a.Notes, "\n")
	}
	want, _ := built("tiny.raw")
	c.file("site.yaml", site)
	c.run(0, "stamp", "tiny.raw", "site.yaml", "-o", "berlin-7.raw")
	if got, notes := built("berlin-7.raw"); got != want || want == 0 || strings.Contains(notes, "built") {
		t.Errorf("%d steps, want %d; notes %q", got, want, notes)
	}
	if err := os.Mkdir("elsewhere", 0o755); err != nil {
		t.Fatal(err)
	}
	c.run(0, "stamp", "tiny.raw", "site.yaml", "-o", "elsewhere/berlin-7.raw")
	if got, notes := built("elsewhere/berlin-7.raw"); got != 0 || !strings.Contains(notes, "No berlin-7.report.json beside the image") {
		t.Errorf("%d steps, want none; notes %q", got, notes)
	}
	if got, notes := built("elsewhere/berlin-7.raw", "--build", "tiny.report.json"); got != want || strings.Contains(notes, "built") {
		t.Errorf("%d steps, want %d; notes %q", got, want, notes)
	}
	c.run(1, "report", "tiny.raw", "-o", "x.html", "--build", "gone.json")
	c.want(c.err, "reading the build's report: open gone.json: no such file")
	c.run(1, "report", "tiny.raw", "-o", "x.html", "--build", "boot.json")
	c.want(c.err, "boot.json: it is not the report of a build")
	for _, other := range []string{"image.yaml", "tiny.sbom.spdx.json"} {
		c.run(1, "report", "tiny.raw", "-o", "x.html", "--build", other)
		c.want(c.err, other+": it is not the report of a build: name the NAME.report.json")
	}
	c.run(1, "report", "tiny.raw", "-o", "boot.json", "--build", "boot.json", "--force")
	c.want(c.err, "--output boot.json", "the report of the build")
	c.file("other.report.json", `{"plan": "0123456789abcdef"}`)
	c.run(1, "report", "tiny.raw", "-o", "x.html", "--build", "other.report.json")
	c.want(c.err, "other.report.json is the report of another build (plan 0123456789ab, the image's is ")
}

func TestDiff(t *testing.T) {
	c := reported(t)
	c.run(0, "build", "image.yaml", "--quiet", "--output", "same.raw")
	c.run(0, "diff", "tiny.raw", "same.raw")
	c.want(c.out, "no file differs", "the same golden digest")
	c.file("site.yaml", site)
	c.run(0, "stamp", "same.raw", "site.yaml")
	c.run(0, "diff", "tiny.raw", "same.raw")
	c.want(c.out, "no file differs", "the same golden digest")
	// The slot keeps the digest when a file changes on the disk.
	c.patched("same.raw", "booted.raw", "a = 1\nb = 2\n", "a = 1\nb = 9\n")
	c.run(0, "diff", "tiny.raw", "booted.raw")
	c.want(c.out, "~ /etc/shop.conf, other bytes", "+ b = 9")
	if strings.Contains(c.out, "the same") {
		t.Errorf("they differ:\n%s", c.out)
	}
	// What only root may read is named and not shown, and capabilities count.
	c.file("notes.txt", "token")
	base, err := os.ReadFile("base.tar")
	if err != nil {
		t.Fatal(err)
	}
	c.file("base.tar", strings.Replace(string(base), "\x01\x00\x00\x02\x00\x20", "\x01\x00\x00\x02\x00\x30", 1))
	c.file("over/etc/shop.conf", "a = 1\nb = 3\n")
	c.file("over/etc/new.conf", "n")
	if err := os.Remove("over/etc/" + hostile); err != nil {
		t.Fatal(err)
	}
	c.run(0, "build", "image.yaml", "--quiet", "--output", "other.raw")
	c.run(0, "diff", "tiny.raw", "other.raw")
	c.want(c.out, "- b = 2", "+ b = 3", "+ /etc/new.conf", "- /etc/"+hostile, "/etc/shop.conf, other bytes",
		"/opt/site/notes, ", "/usr/bin/ping, other bytes")
	if strings.Contains(c.out, "token") {
		t.Errorf("a file of mode 0600 is shown:\n%s", c.out)
	}
	if strings.Contains(c.out, "\nPackages (") {
		t.Errorf("no package changed:\n%s", c.out)
	}
	c.run(0, "diff", "tiny.raw", "other.raw", "-o", "json")
	if strings.Contains(c.out, "token") {
		t.Errorf("a file of mode 0600 is shown:\n%s", c.out)
	}
	var d anatomy.Difference
	if err := json.Unmarshal([]byte(c.out), &d); err != nil || d.Equal || len(d.Config) == 0 {
		t.Errorf("%v: %s", err, c.out)
	}
}

// patched copies an image, and writes over the first place where a text is in
// it. Most of one is a hole, which stays one.
func (c *cli) patched(from, to, text, over string) {
	c.t.Helper()
	if said, err := exec.Command("cp", "--sparse=always", from, to).CombinedOutput(); err != nil {
		c.t.Fatalf("%v: %s", err, said)
	}
	f, err := os.OpenFile(to, os.O_RDWR, 0)
	if err != nil {
		c.t.Fatal(err)
	}
	defer f.Close()
	var end int64
	for {
		start, err := f.Seek(end, unix.SEEK_DATA)
		if err != nil {
			c.t.Fatalf("%s has no %q: %v", from, text, err)
		}
		if end, err = f.Seek(start, unix.SEEK_HOLE); err != nil {
			c.t.Fatal(err)
		}
		data := make([]byte, end-start)
		if _, err := f.ReadAt(data, start); err != nil {
			c.t.Fatal(err)
		}
		if i := bytes.Index(data, []byte(text)); i >= 0 {
			if _, err := f.WriteAt([]byte(over), start+int64(i)); err != nil {
				c.t.Fatal(err)
			}
			return
		}
	}
}

// TestBuildCountsAsReport: what a build says of its partitions is what report and
// inspect say, and adds up.
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
		line := fmt.Sprintf("in %s, %s free", configs.Count(part.Files, "file"), configs.HumanSize(part.Free))
		if part.Reserve > 0 {
			line += fmt.Sprintf(", %s reserve", configs.HumanSize(part.Reserve))
		}
		c.want(c.out, line+"\n")
	}
}

// TestReportPageExplainsItself: what opens shows that it does, and where an input came
// from is said in words.
func TestReportPageExplainsItself(t *testing.T) {
	c := reported(t)
	raw, err := os.ReadFile("report.html")
	if err != nil {
		t.Fatal(err)
	}
	page := string(raw)
	c.want(page, "summary::before { content: ", "details[open] > summary::before { content: ", "edgebake&#39;s own")
	if strings.Contains(page, "<td class=\"mono\">agent</td>") || strings.Contains(page, "::-webkit-details-marker") {
		t.Error("the page says agent, or hides what shows that a line opens")
	}
}

// TestReportInABrowser: Chromium shows the page, and every number on it is the
// JSON's.
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
	page := browse(t, chromium, "--dump-dom", "file://"+filepath.Join(c.dir, "report.html"))
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
	// What is light is light, and what is dark is dark.
	for theme, scheme := range map[string]string{"light": "1", "dark": "0"} {
		shot := filepath.Join(t.TempDir(), theme+".png")
		browse(t, chromium, "--blink-settings=preferredColorScheme="+scheme, "--window-size=1240,1800", "--screenshot="+shot, "file://"+filepath.Join(c.dir, "report.html"))
		bright, colours := brightness(t, shot)
		if (theme == "light") != (bright > 0.6) || (theme == "dark") != (bright < 0.35) || colours < 50 {
			t.Errorf("%s: brightness %.2f, %d colours", theme, bright, colours)
		}
	}
}

func browse(t *testing.T, chromium string, args ...string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, chromium, append([]string{"--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
		"--no-first-run", "--disable-background-networking", "--disable-component-update", "--user-data-dir=" + t.TempDir()}, args...)...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("chromium %q: %v\n%s", args, err, &said)
	}
	return out
}

func attribute(n *html.Node, key string) string {
	for _, a := range n.Attr {
		if a.Key == key {
			return a.Val
		}
	}
	return ""
}

// at is a value of the JSON by its path: names, indices and length.
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

// brightness is a picture's, from 0 to 1, and how many colours it has.
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
