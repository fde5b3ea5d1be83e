// Package ignition reads the Ignition configs of Sites. Ignition's own library validates them. This
// package also rejects the settings that first boot does not apply.
package ignition

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	ignerrors "github.com/coreos/ignition/v2/config/shared/errors"
	ign "github.com/coreos/ignition/v2/config/v3_6"
	"github.com/coreos/ignition/v2/config/v3_6/types"
	vjson "github.com/coreos/vcontext/json"
	vpath "github.com/coreos/vcontext/path"
	"github.com/coreos/vcontext/report"
	"github.com/coreos/vcontext/tree"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/vincent-petithory/dataurl"
)

// Parse parses an Ignition config (spec 3.0 to 3.6) with Ignition's own library, and rejects
// settings that first boot does not apply. warnings contains settings that may not do what the
// author expects. Warnings and problems have a position in the config.
func Parse(name string, data []byte) (cfg *types.Config, warnings, probs strict.Problems) {
	if len(data) > ondisk.SlotCapacity {
		probs.Add("", "has %s, but the slot has space for %s: put large files into the Image (files, overlays) instead", bytesize.MiB(int64(len(data))), bytesize.MiB(ondisk.SlotCapacity))
		probs[0].File = name
		return nil, nil, probs
	}
	isJSON := bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) // valid JSON, or JSON with a syntax error
	parsed, rep, err := ign.ParseCompatibleVersion(data)
	for _, e := range rep.Entries {
		// The library only warns about an unknown key. On an unattended machine, the setting would
		// silently be missing.
		if e.Kind == report.Info {
			continue
		}
		p := strict.NewProblem("", "%s", plain(e.Message))
		p.File = name
		if !isJSON {
			p.Msg = fmt.Sprintf("not an Ignition config, which is JSON: %s; %s", p.Msg, fromButane)
		}
		if s := e.Marker.StartP; s != nil {
			p.Line, p.Col = int(s.Line), int(s.Column)
		}
		if len(e.Context.Path) > 0 {
			p.Path = strings.TrimPrefix(e.Context.String(), "$.")
		}
		if e.Kind == report.Warn && isHarmless(e.Message) {
			warnings = append(warnings, p)
			continue
		}
		probs = append(probs, p)
	}
	if err != nil {
		if len(probs) == 0 {
			probs.Add("", "%s", parseError(err, data))
			probs[0].File = name
		}
		return nil, nil, probs.Cut(name, 0)
	}
	own := Check(&parsed)
	for _, u := range FindUnsupported(&parsed) {
		own = append(own, u.Problem)
	}
	probs = append(probs, Locate(name, data, own.Cut(name, 0))...)
	if len(probs) > 0 {
		return nil, nil, probs.First(name, 0)
	}
	for _, w := range Locate(name, data, decimalModes(data)) {
		// The library's own warning does not explain the special bits, so replace it.
		warnings = slices.DeleteFunc(warnings, func(p strict.Problem) bool { return p.Path == w.Path })
		warnings = append(warnings, w)
	}
	return &parsed, warnings, nil
}

var wrongType = regexp.MustCompile(`^json: cannot unmarshal (\w+)(?: \S+)? into Go (?:value|struct field (\S+)) of type (\S+)$`)

// plain rewrites encoding/json's message about a value of the wrong type in plain words.
func plain(message string) string {
	m := wrongType.FindStringSubmatch(message)
	if m == nil {
		return message
	}
	var path []string
	for part := range strings.SplitSeq(m[2], ".") {
		if part != "" && !unicode.IsUpper(rune(part[0])) { // skip the names of Go types
			path = append(path, part)
		}
	}
	field, want := cmp.Or(strings.Join(path, "."), "it"), "an object"
	switch t := strings.TrimLeft(m[3], "*"); {
	case strings.HasPrefix(t, "[]"):
		want = "a list"
	case t == "int":
		want = "a number"
	case t == "bool":
		want = "true or false"
	case t == "string":
		want = "a string"
	}
	if m[1] == "string" && strings.HasSuffix(field, "mode") {
		want += " in decimal (420 for 0644)"
	}
	return fmt.Sprintf("%s is %s, expected %s", field, map[string]string{"string": "a string", "number": "a number", "bool": "true or false", "array": "a list", "object": "an object"}[m[1]], want)
}

// isHarmless reports whether Ignition and first boot apply a setting in spite of this warning of
// Ignition's library.
func isHarmless(message string) bool {
	return message == ignerrors.ErrModeSpecialBits.Error() || message == ignerrors.ErrHardLinkSpecifiesOwner.Error()
}

// decimalModes warns about modes that were probably meant to be octal. JSON has only decimal
// numbers: 644 means 01204, and 420 means 0644.
func decimalModes(data []byte) (warnings strict.Problems) {
	// Read the modes from the text, because for specs before 3.6 the library clears special bits.
	type nodes []struct{ Mode *int }
	var cfg struct {
		Storage struct{ Files, Directories nodes }
	}
	if json.Unmarshal(data, &cfg) != nil {
		return nil // the library reports the error
	}
	warn := func(path string, mode *int) {
		if mode == nil || usualModes[*mode] {
			return
		}
		if octal, err := strconv.ParseInt(strconv.Itoa(*mode), 8, 32); err == nil && usualModes[int(octal)] {
			warnings.Add(path, "%d is %#o in octal: if %#o is meant, write %d", *mode, *mode, octal, octal)
		}
	}
	for i, f := range cfg.Storage.Files {
		warn(fmt.Sprintf("storage.files.%d.mode", i), f.Mode)
	}
	for i, d := range cfg.Storage.Directories {
		warn(fmt.Sprintf("storage.directories.%d.mode", i), d.Mode)
	}
	return warnings
}

// usualModes contains the modes that files and directories often have.
var usualModes = func() map[int]bool {
	modes := map[int]bool{0o1777: true, 0o2755: true, 0o2770: true, 0o2775: true, 0o4755: true, 0o6755: true}
	for _, owner := range []int{4, 5, 6, 7} { // group and others have no right that the owner lacks
		for group := range owner + 1 {
			for other := range group + 1 {
				if group&^owner == 0 && other&^group == 0 && group != 2 && group != 3 && other != 2 && other != 3 {
					modes[owner<<6|group<<3|other] = true
				}
			}
		}
	}
	return modes
}()

const fromButane = "a Butane config must be translated first (butane --strict)"

func parseError(err error, data []byte) string {
	if errors.Is(err, ignerrors.ErrUnknownVersion) || errors.Is(err, ignerrors.ErrInvalidVersion) {
		var head struct {
			Ignition struct{ Version string }
		}
		if json.Unmarshal(data, &head) == nil && head.Ignition.Version != "" {
			return fmt.Sprintf("ignition.version %s is not supported: use 3.0.0 to 3.6.0", strict.Shorten(head.Ignition.Version))
		}
		return "ignition.version is missing: give 3.0.0 to 3.6.0; " + fromButane
	}
	return fmt.Sprintf("not an Ignition config: %v", err)
}

// Locate sets the positions of problems in an Ignition config. If the position of a field is
// unknown, the problem gets the position of the nearest enclosing value.
func Locate(name string, data []byte, probs strict.Problems) strict.Problems {
	root, err := vjson.UnmarshalToContext(data)
	for i := range probs {
		probs[i].File = name
		if err != nil {
			continue // without position markers, the positions stay unknown
		}
		at := contextPath(probs[i].Path)
		var n tree.Node
		for {
			if n, err = root.Get(at); err == nil || len(at.Path) == 0 {
				break
			}
			at.Path = at.Path[:len(at.Path)-1]
		}
		if s := n.GetMarker().StartP; err == nil && s != nil {
			probs[i].Line, probs[i].Col = int(s.Line), int(s.Column)
		}
		err = nil
	}
	return probs
}

func contextPath(field string) vpath.ContextPath {
	at := vpath.New("json")
	for part := range strings.SplitSeq(field, ".") {
		if n, err := strconv.Atoi(part); err == nil {
			at.Path = append(at.Path, n)
		} else if part != "" {
			at.Path = append(at.Path, part)
		}
	}
	return at
}

// Unsupported is a part of an Ignition config that first boot does not apply. First boot configures
// an existing system and downloads nothing.
type Unsupported struct {
	Section string // name for messages
	Problem strict.Problem
}

// FindUnsupported lists the unsupported parts of cfg. `edgebake validate`, `edgebake stamp` and
// first boot reject them.
func FindUnsupported(cfg *types.Config) []Unsupported {
	var out []Unsupported
	add := func(there bool, section, path, format string, args ...any) {
		if there {
			out = append(out, Unsupported{section, strict.NewProblem(path, format, args...)})
		}
	}
	const image = "the disk is made by the Image (disk, kernel); remove this"
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
		add(part.n > 0, part.path, part.path, image)
	}
	const merge = "first boot fetches no further configs; merge them beforehand"
	add(len(cfg.Ignition.Config.Merge) > 0, "ignition.config.merge", "ignition.config", merge)
	add(cfg.Ignition.Config.Replace.Source != nil, "ignition.config.replace", "ignition.config", merge)
	for i, f := range cfg.Storage.Files {
		for _, r := range append([]types.Resource{f.Contents}, f.Append...) {
			if s := str(r.Source); s != "" && !strings.HasPrefix(s, "data:") {
				scheme, _, _ := strings.Cut(s, ":")
				add(true, "storage.files "+f.Path+" from "+scheme+":", fmt.Sprintf("storage.files.%d", i),
					"contents of %s must be inline (data:), since the network is not up when this config is applied", f.Path)
			}
		}
	}
	return out
}

// anyHash matches crypt(3) hashes, including DES. Ignition does not check hashes, so without this
// check a text that matches no password would be accepted.
var anyHash = regexp.MustCompile(`^(\$[0-9a-zA-Z]+\$|_[./0-9A-Za-z]{19}$|[./0-9A-Za-z]{13}$)`)

// lockedPasswd matches password fields of accounts without a password.
var lockedPasswd = regexp.MustCompile(`^[*!x]+$`)

// accountName matches user and group names that every tool accepts.
var accountName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}$`)

// Check returns problems that Ignition's library does not find. Without Check, they would only show
// on the machine.
func Check(cfg *types.Config) strict.Problems {
	var probs strict.Problems
	checkAccounts(cfg, &probs)
	checkNodes(cfg, &probs)
	checkUnits(cfg, &probs)
	return probs
}

// checkName validates the name of a user or group.
func checkName(path, what, s string, probs *strict.Problems) {
	if !accountName.MatchString(s) || isNumber(s) || s == "." || s == ".." {
		probs.Add(path, "%q is not a %s's name: at most 32 letters, digits, _, . and -, not only digits, and not beginning with -", strict.Shorten(s), what)
	}
}

func isNumber(s string) bool { return strings.Trim(s, "0123456789") == "" }

// checkAccountField validates a text that becomes a field of /etc/passwd or a similar file.
func checkAccountField(path, s string, probs *strict.Problems) {
	if strings.Contains(s, ":") || strict.BadText(s) != "" {
		probs.Add(path, "contains a colon, line break or control character, which account files cannot contain")
	}
}

func checkAccounts(cfg *types.Config, probs *strict.Problems) {
	for i, g := range cfg.Passwd.Groups {
		path := fmt.Sprintf("passwd.groups.%d", i)
		checkName(path+".name", "group", g.Name, probs)
		checkAccountField(path+".passwordHash", str(g.PasswordHash), probs)
		checkID(path+".gid", g.Gid, probs)
	}
	for i, u := range cfg.Passwd.Users {
		checkUser(fmt.Sprintf("passwd.users.%d", i), u, probs)
	}
}

func checkUser(path string, u types.PasswdUser, probs *strict.Problems) {
	checkName(path+".name", "user", u.Name, probs)
	checkAccountField(path+".passwordHash", str(u.PasswordHash), probs)
	if hash := str(u.PasswordHash); hash != "" && !lockedPasswd.MatchString(hash) && !anyHash.MatchString(hash) {
		probs.Add(path+".passwordHash", "is not a crypt(3) hash ($y$… or $6$…; `mkpasswd` prints one); clear-text passwords are rejected")
	}
	checkAccountField(path+".gecos", str(u.Gecos), probs)
	checkID(path+".uid", u.UID, probs)
	for _, f := range []struct{ name, value string }{{"homeDir", str(u.HomeDir)}, {"shell", str(u.Shell)}} {
		checkAccountField(path+"."+f.name, f.value, probs)
		if f.value != "" && !strings.HasPrefix(f.value, "/") {
			probs.Add(path+"."+f.name, "%q must be absolute", strict.Shorten(f.value))
		}
	}
	for j, g := range u.Groups {
		if !isNumber(string(g)) {
			checkName(fmt.Sprintf("%s.groups.%d", path, j), "group", string(g), probs)
		}
	}
	if g := str(u.PrimaryGroup); !isNumber(g) {
		checkName(path+".primaryGroup", "group", g, probs)
	}
	for j, k := range u.SSHAuthorizedKeys {
		if strings.ContainsAny(strings.TrimRight(string(k), "\n"), "\x00\r") {
			probs.Add(fmt.Sprintf("%s.sshAuthorizedKeys.%d", path, j), "contains a control character")
		}
	}
}

func checkID(path string, id *int, probs *strict.Problems) {
	if id != nil && (*id < 0 || *id >= 1<<32-1) {
		probs.Add(path, "must be from 0 to %d, not %d", uint32(1<<32-2), *id)
	}
}

// nodes collects the files, directories and links of a config.
type nodes struct {
	probs *strict.Problems
	paths []nodePath
	// notDirs maps each path of a file or a link to the field that defines it.
	notDirs map[string]string
}

type nodePath struct{ field, path string }

func (c *nodes) add(field string, n types.Node, mode *int, dir bool) {
	if bad := forms.BadFilePath(n.Path); bad != "" && n.Path != "/" {
		c.probs.Add(field+".path", "%s", bad)
	}
	if n.Path == "/" && !dir {
		c.probs.Add(field+".path", "/ can only be a directory")
	}
	checkID(field+".user.id", n.User.ID, c.probs)
	checkID(field+".group.id", n.Group.ID, c.probs)
	if mode != nil && (*mode < 0 || *mode > 0o7777) {
		c.probs.Add(field+".mode", "must be from 0 to 4095 (0o7777), not %d; JSON has no octal numbers: 0644 is 420", *mode)
	}
	c.paths = append(c.paths, nodePath{field, n.Path})
	if !dir {
		c.notDirs[n.Path] = field
	}
}

func checkNodes(cfg *types.Config, probs *strict.Problems) {
	c := &nodes{probs: probs, notDirs: map[string]string{}}
	for i, d := range cfg.Storage.Directories {
		c.add(fmt.Sprintf("storage.directories.%d", i), d.Node, d.Mode, true)
	}
	for i, f := range cfg.Storage.Files {
		field := fmt.Sprintf("storage.files.%d", i)
		c.add(field, f.Node, f.Mode, false)
		checkContents(field+".contents", f.Contents, probs)
		for j, a := range f.Append {
			checkContents(fmt.Sprintf("%s.append.%d", field, j), a, probs)
		}
	}
	for i, l := range cfg.Storage.Links {
		field := fmt.Sprintf("storage.links.%d", i)
		c.add(field, l.Node, nil, false)
		if bad := strict.BadText(str(l.Target)); bad != "" {
			probs.Add(field+".target", "%s", bad)
		}
	}
	c.checkParents()
	c.checkUnitFiles(cfg.Systemd.Units)
}

// checkParents reports paths below the path of a file or a link.
func (c *nodes) checkParents() {
	for _, n := range c.paths {
		for dir := path.Dir(n.path); dir != "/" && dir != "."; dir = path.Dir(dir) {
			if other := c.notDirs[dir]; other != "" {
				c.probs.Add(n.field+".path", "%s is inside %s (%s), which is not a directory", n.path, dir, other)
				break
			}
		}
	}
}

// checkUnitFiles reports units and drop-ins that the config also lists as files.
func (c *nodes) checkUnitFiles(units []types.Unit) {
	for i, u := range units {
		p := "/etc/systemd/system/" + u.Name
		if other := c.notDirs[p]; other != "" && (str(u.Contents) != "" || u.Mask != nil) {
			c.probs.Add(fmt.Sprintf("systemd.units.%d.name", i), "%s is also %s; keep one of the two", p, other)
		}
		for j, d := range u.Dropins {
			if other := c.notDirs[p+".d/"+d.Name]; other != "" {
				c.probs.Add(fmt.Sprintf("systemd.units.%d.dropins.%d.name", i, j), "%s is also %s; keep one of the two", p+".d/"+d.Name, other)
			}
		}
	}
}

func checkContents(field string, r types.Resource, probs *strict.Problems) {
	if s := str(r.Source); s != "" && !strings.HasPrefix(s, "data:") {
		return // an unsupported setting is reported elsewhere
	}
	if _, err := Contents(r); err != nil {
		probs.Add(field, "%v", err)
	}
}

func checkUnits(cfg *types.Config, probs *strict.Problems) {
	bad := func(name string) bool {
		return name == "" || len(name) > 255 || strings.ContainsAny(name, "/ ") || strict.BadText(name) != "" || strings.HasPrefix(name, ".")
	}
	for i, u := range cfg.Systemd.Units {
		path := fmt.Sprintf("systemd.units.%d", i)
		if bad(u.Name) {
			probs.Add(path+".name", "%q is not the name of a unit, e.g. hello.service", strict.Shorten(u.Name))
		}
		for j, d := range u.Dropins {
			if bad(d.Name) {
				probs.Add(fmt.Sprintf("%s.dropins.%d.name", path, j), "%q is not the name of a drop-in, e.g. 10-nice.conf", strict.Shorten(d.Name))
			}
		}
	}
}

// maxContents is the largest accepted size of an uncompressed resource, in bytes.
const maxContents = 64 << 20

// Contents returns the inline contents of a resource.
func Contents(r types.Resource) ([]byte, error) {
	if str(r.Source) == "" {
		return nil, nil
	}
	u, err := dataurl.DecodeString(*r.Source)
	if err != nil {
		return nil, fmt.Errorf("decoding its contents: %w: the data: URL is damaged; make the config again", err)
	}
	data := u.Data
	switch c := str(r.Compression); c {
	case "":
	case "gzip":
		if data, err = gunzip(data); err != nil {
			return nil, fmt.Errorf("uncompressing its contents: %w: make the config again, or remove compression if they are not compressed", err)
		}
	default:
		return nil, fmt.Errorf("uncompressing its contents: unknown compression %q: want gzip", c)
	}
	// In the spec, the hash is that of the uncompressed contents.
	if h := str(r.Verification.Hash); h != "" {
		if err := verifyContents(data, h); err != nil {
			return nil, err
		}
	}
	return data, nil
}

func gunzip(data []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	out, err := io.ReadAll(io.LimitReader(z, maxContents+1))
	if err != nil {
		return nil, err
	}
	if len(out) > maxContents {
		return nil, fmt.Errorf("more than %s when uncompressed", bytesize.MiB(maxContents))
	}
	return out, nil
}

func verifyContents(data []byte, want string) error {
	kind, sum, _ := strings.Cut(want, "-")
	var got string
	switch kind {
	case "sha512":
		s := sha512.Sum512(data)
		got = hex.EncodeToString(s[:])
	case "sha256":
		s := sha256.Sum256(data)
		got = hex.EncodeToString(s[:])
	default:
		return fmt.Errorf("verifying its contents: unknown hash %q: want sha512 or sha256", kind)
	}
	if !strings.EqualFold(got, sum) {
		return fmt.Errorf("verifying its contents: their hash is %s-%s, want %s: correct the hash, or the contents", kind, got, want)
	}
	return nil
}

func str(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// Holds reports whether a config contains a secret: in its text, or in the contents of a file.
func Holds(config []byte, secret strict.Secret) bool {
	word := []byte(secret.Reveal())
	if len(word) == 0 || len(config) == 0 {
		return false
	}
	if bytes.Contains(config, word) {
		return true
	}
	cfg, _, err := ign.ParseCompatibleVersion(config)
	if err != nil {
		return false
	}
	if text, err := json.Marshal(cfg); err == nil && bytes.Contains(text, word) { // the text may contain the secret in escaped form
		return true
	}
	for _, f := range cfg.Storage.Files {
		for _, r := range append([]types.Resource{f.Contents}, f.Append...) {
			if data, err := Contents(r); err == nil && bytes.Contains(data, word) {
				return true
			}
		}
	}
	return false
}
