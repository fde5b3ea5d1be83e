package siteconf

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// Image is the image against which a Site is checked.
type Image struct {
	Info ondisk.ImageInfo
	// Root reads the files of the image. It is nil on a running machine, which has files of its own
	// too, and for an image of which only the description is known.
	Root Root
	// Strict also reports settings without effect, such as SSH keys without an SSH server. A
	// running machine does not set it, so that such a Site is accepted.
	Strict bool
}

// Root reads the files of an image. It follows links within the image, except that Lstat does not
// follow the last element of its path.
type Root interface {
	Lstat(path string) (FileInfo, error) // fs.ErrNotExist if there is none
	ReadFile(path string) ([]byte, error)
}

// FileInfo describes the file at a path.
type FileInfo struct {
	Mode fs.FileMode
	Link string // target, if the file is a link
}

// CheckSite returns everything in a Site and its separate Ignition config that the image does not
// support.
func CheckSite(img Image, site *configs.Site, userIgnition []byte) configs.Problems {
	probs := CheckInfo(img.Info, site)
	if img.Root != nil {
		probs = append(probs, CheckFiles(img, site, userIgnition)...)
	}
	return probs
}

// CheckInfo is the part of CheckSite that needs only the image's description.
func CheckInfo(info ondisk.ImageInfo, site *configs.Site) configs.Problems {
	c := &check{img: Image{Info: info}, site: site}
	c.image()
	c.networks()
	c.controlPlane()
	return c.probs
}

// CheckFiles is the part of CheckSite that needs the image's files.
func CheckFiles(img Image, site *configs.Site, userIgnition []byte) configs.Problems {
	c := &check{img: img, site: site}
	c.files(userIgnition)
	return c.probs
}

// check collects the problems of a Site.
type check struct {
	img   Image
	site  *configs.Site
	user  *types.Config // the Ignition config, from its own file or from the Site
	cfg   *types.Config // Site and user merged
	probs configs.Problems
}

func (c *check) add(path, format string, args ...any) {
	c.at(field{path: path}, format, args...)
}

// at adds a problem of a field. An Ignition field is reported in the config's own file, or under
// the Site's field ignition if the config is there.
func (c *check) at(f field, format string, args ...any) {
	p := configs.Problem{Path: f.path, Msg: fmt.Sprintf(format, args...)}
	switch {
	case f.ignition && c.site.Ignition.IsZero():
		p.File = ondisk.SlotIgnition
	case f.ignition:
		p.Path, p.Msg = "ignition", f.path+": "+p.Msg
	}
	c.probs = append(c.probs, p)
}

// field is a field of the Site or of the Ignition config.
type field struct {
	path     string
	ignition bool
}

func ignitionField(format string, args ...any) field {
	return field{fmt.Sprintf(format, args...), true}
}

func (f field) dot(name string) field { return field{f.path + "." + name, f.ignition} }

// item returns the i-th element of a list, in the notation of its document: [i] or .i.
func (f field) item(i int) field {
	if f.ignition {
		return f.dot(strconv.Itoa(i))
	}
	return field{fmt.Sprintf("%s[%d]", f.path, i), false}
}

// image reports differences from the image's description, such as another architecture.
func (c *check) image() {
	info, site := c.img.Info, c.site
	if site.Arch != "" && info.Arch != "" && site.Arch != info.Arch {
		c.add("arch", "the Site is for %s, the image for %s: build the image for %s", site.Arch, info.Arch, site.Arch)
	}
	if len(info.NodeTypes) > 0 && !slices.Contains(info.NodeTypes, site.NodeType) {
		c.add("nodeType", "the image does not support nodes of type %q, only %s: add %[1]s to nodeTypes of the Image and build it again, or change nodeType", site.NodeType, strings.Join(info.NodeTypes, ", "))
	}
	if y := info.Yurthub; y != nil {
		if len(site.Organizations) > 0 && y.Form == openyurt.FormUnit {
			c.add("organizations", "organizations would have no effect: yurthub %s of this image uses kubelet's certificate and requests none of its own: remove organizations", y.Version)
		}
		c.probs = append(c.probs, configs.CheckSiteYurthubArgs(site.Yurthub.ExtraArgs, y.Version)...)
	}
}

// networks reports addresses of the Site that are in the image's pod CIDR.
func (c *check) networks() {
	pods, err := netip.ParsePrefix(c.img.Info.PodCIDR)
	if err != nil {
		return // the cluster assigns pod addresses
	}
	const fix = "the image's pod network (cni.podCIDR %s): choose another address, or build the image with another podCIDR"
	one := func(path, s string) {
		if a, err := netip.ParseAddr(s); err == nil && pods.Contains(a) {
			c.add(path, "%s is in "+fix, a, pods)
		}
	}
	if !c.site.IPVS.Disabled {
		one("vip", c.site.VIP)
	}
	for i, m := range c.site.Masters {
		if host, _, err := net.SplitHostPort(m); err == nil {
			one(fmt.Sprintf("masters[%d]", i), host)
		}
	}
	for i, d := range c.site.Network.DNS {
		one(fmt.Sprintf("network.dns[%d]", i), d)
	}
	many := func(path string, addresses []string) {
		for i, s := range addresses {
			if p, err := netip.ParsePrefix(s); err == nil && p.Overlaps(pods) {
				c.add(fmt.Sprintf("%s.addresses[%d]", path, i), "%s overlaps "+fix, s, pods)
			}
		}
	}
	for i, f := range c.site.Network.Interfaces {
		path := fmt.Sprintf("network.interfaces[%d]", i)
		many(path, f.Addresses)
		for j, v := range f.VLANs {
			many(fmt.Sprintf("%s.vlans[%d]", path, j), v.Addresses)
		}
	}
}

// files reports conflicts with files of the image, and files that the image lacks.
func (c *check) files(userIgnition []byte) {
	if !c.site.Ignition.IsZero() {
		userIgnition = []byte(c.site.Ignition.Reveal())
	}
	if len(userIgnition) > 0 {
		user, _, probs := ignition.Parse(ondisk.SlotIgnition, userIgnition)
		if probs != nil {
			c.probs = append(c.probs, probs...)
			return
		}
		c.user = user
	}
	c.cfg = &types.Config{}
	for _, u := range c.site.Users {
		c.cfg.Passwd.Users = append(c.cfg.Passwd.Users, renderUser(u))
	}
	if c.user != nil {
		c.cfg.Passwd.Users = append(c.cfg.Passwd.Users, c.user.Passwd.Users...)
		c.cfg.Passwd.Groups, c.cfg.Storage, c.cfg.Systemd = c.user.Passwd.Groups, c.user.Storage, c.user.Systemd
	}
	c.packages()
	c.accounts()
	c.paths()
	c.units()
	for i, p := range c.probs {
		if p.File == ondisk.SlotIgnition {
			c.probs[i] = ignition.Locate(p.File, userIgnition, configs.Problems{p})[0]
		}
	}
}

// has reports whether one of the paths exists.
func (c *check) has(paths ...string) bool {
	return slices.ContainsFunc(paths, func(p string) bool {
		_, err := c.img.Root.Lstat(p)
		return err == nil
	})
}

// installed reports whether the image contains an installed Debian package.
func (c *check) installed(name string) bool {
	status, err := c.img.Root.ReadFile("/var/lib/dpkg/status")
	if err != nil {
		return false
	}
	for par := range strings.SplitSeq(string(status), "\n\n") {
		if strings.HasPrefix(par, "Package: "+name+"\n") && strings.Contains(par, "\nStatus: install ok installed\n") {
			return true
		}
	}
	return false
}

// packages reports settings for programs that the image lacks.
func (c *check) packages() {
	for i, f := range c.site.Network.Interfaces {
		if f.WiFi != nil && !c.has("/usr/sbin/wpa_supplicant", "/sbin/wpa_supplicant") && !c.installed("wpasupplicant") {
			c.add(fmt.Sprintf("network.interfaces[%d].wifi", i), "the image has no wpa_supplicant: add the package wpasupplicant to the Image (base.debian.packages)")
			break
		}
	}
	// A root without accounts was not made from a distribution: it may have other programs.
	if !c.img.Strict || !c.has("/etc/passwd") || c.has("/usr/sbin/sshd", "/sbin/sshd", "/usr/bin/sshd") || c.installed("openssh-server") {
		return
	}
	for _, u := range c.cfg.Passwd.Users {
		if len(u.SSHAuthorizedKeys) > 0 {
			c.at(c.userField(u.Name).dot("sshAuthorizedKeys"), "the image has no SSH server: add the package openssh-server to the Image (base.debian.packages), or remove the keys")
			break
		}
	}
}

// userField returns the field that defines a user, in the Site or in the Ignition config.
func (c *check) userField(name string) field {
	if i := slices.IndexFunc(c.site.Users, func(u configs.User) bool { return u.Name == name }); i >= 0 {
		return field{path: fmt.Sprintf("users[%d]", i)}
	}
	if c.user == nil {
		return field{path: "users"}
	}
	return ignitionField("passwd.users.%d", slices.IndexFunc(c.user.Passwd.Users, func(u types.PasswdUser) bool { return u.Name == name }))
}

// read reads an account file. If the image has none, ok is false, and the caller checks no
// accounts.
func (c *check) read(file string) (l Lines, ok bool) {
	b, err := c.img.Root.ReadFile(file)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			c.add("", "reading %s of the image: %v", file, err)
		}
		return nil, false
	}
	return ParseLines(b), true
}

// accounts reports users and groups that are missing from the image or conflict with it.
func (c *check) accounts() {
	users, ok := c.read("/etc/passwd")
	groups, okGroups := c.read("/etc/group")
	if !ok || !okGroups {
		return
	}
	have := Accounts{users, groups}
	for i, g := range c.cfg.Passwd.Groups {
		c.problems(ignitionField("passwd.groups.%d", i), have.CheckGroup(g))
		switch {
		case g.ShouldExist != nil && !*g.ShouldExist:
			have.Groups = have.Groups.without(g.Name)
		case have.Groups.Find(g.Name) == nil:
			have.Groups = append(have.Groups, []string{g.Name, "x", number(g.Gid), ""})
		}
	}
	for _, u := range c.cfg.Passwd.Users {
		row := have.Users.Find(u.Name)
		c.problems(c.userField(u.Name), have.CheckUser(u, row != nil && users.Find(u.Name) == nil))
		switch {
		case u.ShouldExist != nil && !*u.ShouldExist:
			have.Users = have.Users.without(u.Name)
		case row == nil:
			have.Users = append(have.Users, []string{u.Name, "x", number(u.UID)})
			if value(u.PrimaryGroup) == "" && have.Groups.Find(u.Name) == nil {
				have.Groups = append(have.Groups, []string{u.Name, "x", "", ""})
			}
		}
	}
	c.owners(have)
}

func (c *check) problems(at field, probs AccountProblems) {
	for _, p := range probs {
		f := at
		if p.Field != "" {
			f = f.dot(p.Field)
		}
		if p.Field == "groups" {
			f = f.item(p.Item)
		}
		c.at(f, "%s", p.Msg)
	}
}

// number returns an ID as text, or "".
func number(id *int) string {
	if id == nil {
		return ""
	}
	return strconv.Itoa(*id)
}

// nodes calls each for every path in the Ignition config, with the field that defines it.
func (c *check) nodes(each func(at field, kind string, n types.Node, f *types.File)) {
	for i, d := range c.cfg.Storage.Directories {
		each(ignitionField("storage.directories.%d", i), "directory", d.Node, nil)
	}
	for i, f := range c.cfg.Storage.Files {
		each(ignitionField("storage.files.%d", i), "file", f.Node, &f)
	}
	for i, l := range c.cfg.Storage.Links {
		each(ignitionField("storage.links.%d", i), "link", l.Node, nil)
	}
}

func (c *check) owners(have Accounts) {
	c.nodes(func(at field, _ string, n types.Node, _ *types.File) {
		if name := n.User.Name; name != nil && *name != "" && have.Users.Find(*name) == nil {
			c.at(at.dot("user.name"), "the image has no user %s: add it to passwd.users, or its package to the Image", *name)
		}
		if name := n.Group.Name; name != nil && *name != "" && have.Groups.Find(*name) == nil {
			c.at(at.dot("group.name"), "the image has no group %s: add it to passwd.groups, or its package to the Image", *name)
		}
	})
}

// paths reports files of the image that the config would replace without setting overwrite.
func (c *check) paths() {
	c.nodes(func(at field, kind string, n types.Node, f *types.File) {
		if n.Overwrite != nil && *n.Overwrite {
			return // first boot reports the paths that cannot be overwritten
		}
		found, err := c.img.Root.Lstat(n.Path)
		if err != nil || c.clearedAbove(n.Path) {
			return
		}
		touches := f != nil && f.Contents.Source == nil
		switch {
		case kind == "directory" && (found.Mode.IsDir() || found.Mode&fs.ModeSymlink != 0):
		case touches && found.Mode.IsRegular():
		case kind == "link" && c.sameLink(n.Path, found):
		default:
			c.at(at, "%s already exists in the image (a %s): add overwrite: true, or choose another path", n.Path, kindOf(found.Mode))
		}
	})
}

// clearedAbove reports whether the config overwrites a directory above p.
func (c *check) clearedAbove(p string) bool {
	return slices.ContainsFunc(c.cfg.Storage.Directories, func(d types.Directory) bool {
		return d.Overwrite != nil && *d.Overwrite && strings.HasPrefix(p, d.Path+"/")
	})
}

func (c *check) sameLink(p string, found FileInfo) bool {
	return slices.ContainsFunc(c.cfg.Storage.Links, func(l types.Link) bool {
		return l.Path == p && l.Target != nil && found.Mode&fs.ModeSymlink != 0 && path.Clean(*l.Target) == path.Clean(found.Link)
	})
}

func kindOf(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "directory"
	case m&fs.ModeSymlink != 0:
		return "link"
	}
	return "file"
}

// unitDirs lists the directories in which systemd searches for units.
var unitDirs = []string{"/etc/systemd/system/", "/usr/lib/systemd/system/", "/usr/local/lib/systemd/system/"}

// units reports units that the config enables but that do not exist.
func (c *check) units() {
	if !c.has("/usr/lib/systemd/system") {
		return // the image's units are unknown
	}
	for i, u := range c.cfg.Systemd.Units {
		if u.Enabled == nil || !*u.Enabled || c.hasUnit(u.Name) {
			continue
		}
		c.at(ignitionField("systemd.units.%d", i), "the image has no unit %s to enable: add its package to the Image, or contents to the unit", u.Name)
	}
}

func (c *check) hasUnit(name string) bool {
	wanted := []string{name}
	if base, rest, ok := strings.Cut(name, "@"); ok {
		wanted = append(wanted, base+"@"+rest[strings.LastIndexByte(rest, '.'):])
	}
	for _, w := range wanted {
		for _, dir := range unitDirs {
			if c.has(dir + w) {
				return true
			}
		}
		if slices.ContainsFunc(c.cfg.Systemd.Units, func(u types.Unit) bool { return u.Name == w && u.Contents != nil && *u.Contents != "" }) {
			return true
		}
		for _, f := range c.cfg.Storage.Files {
			if slices.ContainsFunc(unitDirs, func(dir string) bool { return f.Path == dir+w }) {
				return true
			}
		}
	}
	return false
}
