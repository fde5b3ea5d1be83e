package main

import (
	"github.com/edgebake/edgebake/builder/media"
	"golang.org/x/sys/unix"

	"encoding/binary"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/edgebake/edgebake/ondisk/fat"

	"filippo.io/age"
	"filippo.io/age/armor"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"

	"bytes"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/edgebake/edgebake/test/scripttest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"edgebake": main})
}

// dropped matches progress, and the messages that appear for every image of buildtest.
var dropped = regexp.MustCompile(`(?m)^((images: )?WARNING: (containerd\.version:|the image contains no kube-proxy,) .*|image\.yaml(:\d+:\d+)?: WARNING: (containerd\.version:|the image contains no kube-proxy,) .*|[a-z]+: (done in .* s|[\d.]+ [KMG]iB|pinning inputs))\n`)

// TestScript runs the scripts in testdata/script. `go test ./cmd/edgebake -run TestScript -update`
// writes the current output of the commands into the scripts.
func TestScript(t *testing.T) {
	made := newFixtures(t)
	goes, err := exec.Command("go", "env", "GOCACHE", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	tree, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dirs := strings.Fields(string(goes))
	scripttest.Run(t, func(e *testscript.Env) error {
		e.Setenv("EDGEBAKE_CACHE", filepath.Join(e.WorkDir, ".cache"))
		e.Values[scripttest.Dropped] = dropped
		e.Setenv("TREE", tree)
		e.Setenv("GOCACHE", dirs[0])
		e.Setenv("GOMODCACHE", dirs[1])
		return nil
	}, map[string]scripttest.Command{"fixture": made.command, "hurt": hurt, "disk": makeDisk, "blank": blank, "registry": startRegistry, "encrypt": encrypt, "signed": checkSigned, "eltorito": elTorito, "picmdline": piCommandLine, "overwrite": overwrite, "same": same})
}

// hurt overwrites the first bytes of a partition: `hurt IMAGE LABEL`.
func hurt(ts *testscript.TestScript, _ bool, args []string) {
	f, err := os.OpenFile(ts.MkAbs(args[0]), os.O_RDWR, 0)
	ts.Check(err)
	defer f.Close()
	fi, err := f.Stat()
	ts.Check(err)
	table, err := gpt.Read(f, fi.Size())
	ts.Check(err)
	for _, p := range table.Partitions {
		if p.Name == args[1] {
			_, err := f.WriteAt(bytes.Repeat([]byte("junk"), 1<<10), p.Start)
			ts.Check(err)
		}
	}
}

const oldData = "old data"

// makeDisk makes a file, with old data, that is used like a disk: `disk FILE SIZE`.
func makeDisk(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(oldData), 0o644))
	ts.Check(ts.Exec("truncate", "--size", args[1], args[0]))
}

// blank checks that nothing was written to a file that is used like a disk.
func blank(ts *testscript.TestScript, neg bool, args []string) {
	f, err := os.Open(ts.MkAbs(args[0]))
	ts.Check(err)
	defer f.Close()
	b := make([]byte, len(oldData))
	_, err = io.ReadFull(f, b)
	ts.Check(err)
	if (string(b) == oldData) == neg {
		ts.Fatalf("%s begins with %q", args[0], b)
	}
}

// startRegistry starts a registry, and sets $REGISTRY to its address.
func startRegistry(ts *testscript.TestScript, _ bool, _ []string) {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	ts.Defer(server.Close)
	ts.Setenv("REGISTRY", server.Listener.Addr().String())
}

// encrypt encrypts a file as age does: `encrypt [-armor] FILE OUT KEYFILE`. A passphrase may take
// the place of KEYFILE.
func encrypt(ts *testscript.TestScript, _ bool, args []string) {
	armored := args[0] == "-armor"
	if armored {
		args = args[1:]
	}
	var to age.Recipient
	if strings.HasSuffix(args[2], ".txt") {
		ids, err := age.ParseIdentities(strings.NewReader(ts.ReadFile(args[2])))
		ts.Check(err)
		to = ids[0].(*age.X25519Identity).Recipient()
	} else {
		pass, err := age.NewScryptRecipient(args[2])
		ts.Check(err)
		pass.SetWorkFactor(10)
		to = pass
	}
	var b bytes.Buffer
	out := io.WriteCloser(struct {
		io.Writer
		io.Closer
	}{&b, io.NopCloser(nil)})
	if armored {
		out = armor.NewWriter(&b)
	}
	w, err := age.Encrypt(out, to)
	ts.Check(err)
	_, err = io.WriteString(w, ts.ReadFile(args[0]))
	ts.Check(errors.Join(err, w.Close(), out.Close()))
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), b.Bytes(), 0o600))
}

// checkSigned verifies a stick as first boot does, and checks that it has exactly these files:
// `signed DIR FILE...`.
func checkSigned(ts *testscript.TestScript, _ bool, args []string) {
	entries, err := os.ReadDir(ts.MkAbs(args[0]))
	ts.Check(err)
	made := slot.Contents{Files: map[string][]byte{}}
	for _, e := range entries {
		info, err := e.Info()
		ts.Check(err)
		if info.Mode().Perm() != 0o600 {
			ts.Fatalf("%s has mode %v", e.Name(), info.Mode())
		}
		b := []byte(ts.ReadFile(filepath.Join(args[0], e.Name())))
		switch e.Name() {
		case ondisk.SlotClaims: // written by machines, not part of a slot
		case "site.minisig":
			made.Signature = b
		default:
			made.Files[e.Name()] = b
		}
	}
	img, err := slot.Make(made)
	ts.Check(err)
	got, err := slot.Read(bytes.NewReader(img))
	ts.Check(err)
	when, err := got.Verify([]string{publicKey})
	ts.Check(err)
	if since := time.Since(when); since < 0 || since > time.Hour {
		ts.Fatalf("signed on %v", when)
	}
	if have := slices.Sorted(maps.Keys(got.Files)); !slices.Equal(have, args[1:]) {
		ts.Fatalf("the stick has the files %q", have)
	}
}

// elTorito finds the EFI system partition of an ISO image as firmware finds it on a CD. El Torito
// records no size, so the partition extends to the end of the volume, which must contain all of it.
func elTorito(ts *testscript.TestScript, _ bool, args []string) {
	f, err := os.Open(ts.MkAbs(args[0]))
	ts.Check(err)
	defer f.Close()
	const block = 2048
	read := func(at uint32) []byte {
		b := make([]byte, block)
		_, err := f.ReadAt(b, int64(at)*block)
		ts.Check(err)
		return b
	}
	le := binary.LittleEndian
	volume := le.Uint32(read(16)[80:])
	catalog := read(le.Uint32(read(17)[71:]))
	at, count := le.Uint32(catalog[40:]), le.Uint16(catalog[38:])
	esp, err := fat.Open(io.NewSectionReader(f, int64(at)*block, 1<<40))
	ts.Check(err)
	if end := int64(at)*block + esp.Size(); count == 0 && end > int64(volume)*block {
		ts.Fatalf("the EFI system partition ends at %d, the volume at %d: firmware does not find it", end, int64(volume)*block)
	}
	_, err = esp.ReadFile("EFI/BOOT/BOOTX64.EFI")
	ts.Check(err)
	ts.Check(ts.Exec("sgdisk", "-p", args[0]))
	if want := fmt.Sprintf(`(?m)^ +\d+ +%d +\d+ .* EF00 `, int64(at)*block/512); !regexp.MustCompile(want).MatchString(ts.ReadFile("stdout")) {
		ts.Fatalf("no EFI system partition at %d", int64(at)*block/512)
	}
}

// piCommandLine checks the ESP of a disk for Raspberry Pi boards with fsck.fat. It prints the
// kernel command line of the system, which must name the disk's own partitions.
func piCommandLine(ts *testscript.TestScript, _ bool, args []string) {
	f, err := os.Open(ts.MkAbs(args[0]))
	ts.Check(err)
	defer f.Close()
	fi, err := f.Stat()
	ts.Check(err)
	table, err := gpt.Read(f, fi.Size())
	ts.Check(err)
	first := table.Partitions[0]
	if first.Name != ondisk.LabelESP {
		ts.Fatalf("the first partition is %s", first.Name)
	}
	esp, err := os.Create(ts.MkAbs("esp.fat"))
	ts.Check(err)
	defer esp.Close()
	_, err = io.Copy(esp, io.NewSectionReader(f, first.Start, first.Size))
	ts.Check(err)
	ts.Check(ts.Exec("fsck.fat", "-n", "esp.fat"))
	fsys, err := fat.Open(esp)
	ts.Check(err)
	info, err := media.Inspect(ts.MkAbs(args[0]))
	ts.Check(err)
	text, err := fsys.ReadFile(ondisk.ESPSystemDir(info.Image.Plan) + "/" + ondisk.ESPPiCommandLine)
	ts.Check(err)
	for _, p := range table.Partitions {
		if named := p.Name == ondisk.LabelESP || p.Name == ondisk.LabelRootA || p.Name == ondisk.LabelData; strings.Contains(string(text), "PARTUUID="+p.GUID) != named {
			ts.Fatalf("%s has GUID %s, the command line: %s", p.Name, p.GUID, text)
		}
	}
	fmt.Fprint(ts.Stdout(), string(text))
}

// overwrite copies an image, and overwrites the first occurrence of a text:
// `overwrite FROM TO TEXT WITH`. It keeps the image's holes.
func overwrite(ts *testscript.TestScript, _ bool, args []string) {
	text, over := []byte(strings.ReplaceAll(args[2], `\n`, "\n")), []byte(strings.ReplaceAll(args[3], `\n`, "\n"))
	ts.Check(ts.Exec("cp", "--sparse=always", args[0], args[1]))
	f, err := os.OpenFile(ts.MkAbs(args[1]), os.O_RDWR, 0)
	ts.Check(err)
	defer f.Close()
	for end := int64(0); ; {
		start, err := f.Seek(end, unix.SEEK_DATA)
		ts.Check(err)
		end, err = f.Seek(start, unix.SEEK_HOLE)
		ts.Check(err)
		data := make([]byte, end-start)
		_, err = f.ReadAt(data, start)
		ts.Check(err)
		if i := bytes.Index(data, text); i >= 0 {
			_, err := f.WriteAt(over, start+int64(i))
			ts.Check(err)
			return
		}
	}
}

// same checks that two images have the same bytes: `same IMAGE IMAGE`. Unlike cmp it skips holes,
// which are most of an image.
func same(ts *testscript.TestScript, _ bool, args []string) {
	t := ts.Value("tb").(testing.TB)
	if disktest.Sum(t, ts.MkAbs(args[0])) != disktest.Sum(t, ts.MkAbs(args[1])) {
		ts.Fatalf("%s and %s differ", args[0], args[1])
	}
}

// fixtures are directories with an Image and the results of its build. Each is made only once, for
// the first script that copies it.
type fixtures struct {
	t    testing.TB
	dir  string
	once map[string]func() error
}

func newFixtures(t testing.TB) *fixtures {
	f := &fixtures{t: t, dir: t.TempDir(), once: map[string]func() error{}}
	for name, fill := range map[string]func(dir string) error{
		// an Image and all files that it names
		"project": func(dir string) error { return buildtest.Write(dir, buildtest.Base(), nil) },
		// the same, built into tiny.raw and tiny.raw.zst
		"golden": func(dir string) error {
			return errors.Join(buildtest.Write(dir, buildtest.Base(), nil), f.build(dir))
		},
		// an Image for two architectures
		"several": func(dir string) error {
			return errors.Join(buildtest.Write(dir, buildtest.Base(), buildtest.Several), buildtest.WriteFor(dir, "amd64"), buildtest.WriteFor(dir, "arm64"))
		},
		// an Image for Raspberry Pi boards
		"pi": func(dir string) error { return buildtest.WritePi(dir, buildtest.PiBase(false), nil) },
		// golden image with hostile file names, and a dpkg database that lists them
		"reported": func(dir string) error { return errors.Join(writeReported(dir), f.build(dir)) },
		// golden image of a base that supports installers, and the source of a small installer
		"installable": func(dir string) error {
			err := errors.Join(buildtest.Write(dir, buildtest.InstallableBase(), nil), os.MkdirAll(filepath.Join(dir, "cmd", "installer"), 0o755))
			return errors.Join(err,
				os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module github.com/edgebake/edgebake\n\ngo 1.24\n"), 0o644),
				os.WriteFile(filepath.Join(dir, "cmd", "installer", "main.go"), []byte("package main\n\nfunc main() {}\n"), 0o644),
				f.build(dir))
		},
	} {
		f.once[name] = sync.OnceValue(func() error {
			dir := filepath.Join(f.dir, name)
			return errors.Join(os.Mkdir(dir, 0o755), fill(dir))
		})
	}
	return f
}

// build builds image.yaml in dir as both forms of golden image.
func (f *fixtures) build(dir string) error {
	for _, output := range []string{"tiny.raw.zst", "tiny.raw"} {
		cmd := exec.Command("edgebake", "build", "image.yaml", "--quiet", "--force", "--output", output, "--cache", filepath.Join(f.dir, "cache"))
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return errors.New(string(out))
		}
	}
	return nil
}

// command copies a fixture into the current directory. It keeps the holes of raw images.
func (f *fixtures) command(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 || f.once[args[0]] == nil {
		ts.Fatalf("usage: fixture NAME")
	}
	ts.Check(f.once[args[0]]())
	ts.Check(ts.Exec("cp", "-a", "--sparse=always", filepath.Join(f.dir, args[0])+"/.", ts.MkAbs(".")))
}
