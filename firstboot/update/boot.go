package update

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// The EFI system partition, which systemd mounts on demand.
const (
	espDir     = machine.ESPDir
	espUnit    = "efi.mount"
	entriesDir = espDir + "/" + "loader/entries"
	systemsDir = espDir + "/edgebake"
)

// unmountPatience limits the wait for other programs to release the EFI system partition.
const unmountPatience = 30 * time.Second

// maxVersion is the highest accepted version of a boot entry.
const maxVersion = 1 << 30

// tries is the number of times that a new system may fail to boot before the old one boots again.
const tries = 3

// entry is a boot entry of one of the two roots.
type entry struct {
	Name string // name of its file
	machine.EntryName
	// Version is -1 if it is missing or invalid.
	Version int
	Text    string
}

// entries reads the boot entries of both roots.
func entries(e *machine.Env) ([]entry, error) {
	list, err := os.ReadDir(e.Path(entriesDir))
	if err != nil {
		return nil, fmt.Errorf("reading the boot entries: %w", err)
	}
	var out []entry
	for _, f := range list {
		name, ok := machine.ParseEntryName(f.Name())
		if !ok {
			continue
		}
		text, err := e.Read(path.Join(entriesDir, f.Name()))
		if err != nil {
			return nil, fmt.Errorf("reading the boot entries: %w", err)
		}
		x := entry{Name: f.Name(), EntryName: name, Text: string(text)}
		if x.Version, err = strconv.Atoi(field(x.Text, "version")); err != nil || x.Version > maxVersion {
			x.Version = -1
		}
		out = append(out, x)
	}
	return out, nil
}

// field returns the value of a key in a boot entry.
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && key == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// entriesFor returns the boot entries of a root partition, by its label.
func entriesFor(all []entry, root string) (out []entry) {
	for _, x := range all {
		if x.Root == root {
			out = append(out, x)
		}
	}
	return out
}

// otherRoot returns the label of the root partition that is not in use.
func otherRoot(root string) string {
	if root == ondisk.LabelRootA {
		return ondisk.LabelRootB
	}
	return ondisk.LabelRootA
}

// retire removes the boot entries of a root partition, and kernels without an entry. It keeps the
// kernels of plan, which is being installed, so that a continued update does not download them
// again.
func retire(e *machine.Env, root, plan string) error {
	all, err := entries(e)
	if err != nil {
		return err
	}
	var kept []entry
	for _, x := range all {
		if x.Root != root {
			kept = append(kept, x)
			continue
		}
		if err := e.Remove(path.Join(entriesDir, x.Name)); err != nil {
			return fmt.Errorf("removing the boot entry %s: %w", x.Name, err)
		}
	}
	if err := e.Sync(entriesDir); err != nil {
		return err
	}
	dirs, err := unusedSystems(e, append(kept, entry{Text: "/" + ondisk.ESPSystemDir(plan) + "/"}))
	if err != nil {
		return err
	}
	for _, d := range dirs {
		if err := e.RemoveAll(d); err != nil {
			return fmt.Errorf("removing a system that no boot entry names: %w", err)
		}
	}
	return e.Sync(systemsDir)
}

// unusedSystems returns the directories in systemsDir to which no entry in kept refers.
func unusedSystems(e *machine.Env, kept []entry) ([]string, error) {
	list, err := os.ReadDir(e.Path(systemsDir))
	if err != nil {
		return nil, fmt.Errorf("reading the systems on the EFI system partition: %w", err)
	}
	var out []string
	for _, d := range list {
		used := false
		for _, x := range kept {
			used = used || strings.Contains(x.Text, "/edgebake/"+d.Name()+"/")
		}
		if d.IsDir() && !used {
			out = append(out, path.Join(systemsDir, d.Name()))
		}
	}
	return out, nil
}

// espFile is a file to write to the EFI system partition.
type espFile struct {
	path  string
	size  int64 // 0: too small to matter
	write func(io.Writer) error
}

// install writes the files that are missing or different to the EFI system partition, and then
// reads all files back from the disk.
func install(ctx context.Context, e *machine.Env, files []espFile) error {
	sums, there := make([][]byte, len(files)), make([]bool, len(files))
	need := int64(0)
	for i, f := range files {
		var err error
		if there[i], sums[i], err = f.there(e); err != nil {
			return err
		}
		if !there[i] {
			need += f.size // the old file is replaced only once the new one is complete
		}
	}
	if err := roomOnESP(e, need); err != nil {
		return err
	}
	for i, f := range files {
		if there[i] {
			continue
		}
		if err := e.Stream(f.path, machine.Mode(0o700), f.write); err != nil {
			return fmt.Errorf("writing %s: %w", f.path, err)
		}
	}
	if err := e.Sync(espDir); err != nil {
		return err
	}
	// After unmounting, the files are read from the disk, not from memory.
	unmount := func() error { return e.Unit(ctx, "stop", espUnit) }
	if err := e.Retry(ctx, machine.Wait{Every: time.Second, For: unmountPatience}, unmount); err != nil {
		return fmt.Errorf("unmounting the EFI system partition, to read it back: %w", err)
	}
	for i, f := range files {
		sum, err := sumOf(e, f.path)
		if err == nil && !bytes.Equal(sum, sums[i]) {
			err = errReadBack
		}
		if err != nil {
			return fmt.Errorf("reading %s back: %w", f.path, err)
		}
	}
	return nil
}

// there reports whether the file is in place already, and returns the SHA-256 of its new contents.
func (f espFile) there(e *machine.Env) (bool, []byte, error) {
	h := sha256.New()
	if err := f.write(h); err != nil {
		return false, nil, fmt.Errorf("reading the new contents of %s: %w", f.path, err)
	}
	sum, err := sumOf(e, f.path) // if it cannot be read, write it again
	return err == nil && bytes.Equal(sum, h.Sum(nil)), h.Sum(nil), nil
}

// sumOf returns the SHA-256 of a file.
func sumOf(e *machine.Env, p string) ([]byte, error) {
	f, err := os.Open(e.Path(p))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return h.Sum(nil), err
}

// makeEntry adapts an image's boot entry to this disk: it sets the version, and replaces the keys
// of guids (the image's partition GUIDs) with their values (the disk's).
func makeEntry(text string, guids map[string]string, version int) (string, error) {
	if field(text, "sort-key") != ondisk.ESPSortKey || field(text, "version") != strconv.Itoa(ondisk.ESPFirstVersion) {
		return "", errors.New("the image's boot entry has an unexpected sort-key or version: build the image again")
	}
	text = strings.Replace(text, fmt.Sprintf("version %d\n", ondisk.ESPFirstVersion), fmt.Sprintf("version %d\n", version), 1)
	var pairs []string
	for from, to := range guids {
		if from == "" || to == "" || !strings.Contains(text, from) {
			return "", errors.New("the image's boot entry does not name its partitions: build the image again")
		}
		pairs = append(pairs, from, to)
	}
	return strings.NewReplacer(pairs...).Replace(text), nil
}

// nextVersion returns a version higher than that of every entry, so that the loader prefers it.
func nextVersion(all []entry) int {
	v := ondisk.ESPFirstVersion
	for _, x := range all {
		v = max(v, x.Version)
	}
	return v + 1
}

// guidOf returns the PARTUUID of a partition, or "" if it cannot be found. Before Linux 6.9, sysfs
// does not show it.
func guidOf(e *machine.Env, p *machine.Partition) string {
	if p.UUID != "" {
		return p.UUID
	}
	const links = "/dev/disk/by-partuuid"
	list, err := os.ReadDir(e.Path(links))
	if err != nil {
		return ""
	}
	for _, l := range list {
		if to, err := os.Readlink(e.Path(path.Join(links, l.Name()))); err == nil && filepath.Base(to) == p.Name {
			return strings.ToLower(l.Name())
		}
	}
	return ""
}
