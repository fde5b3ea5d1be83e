package overlays

import (
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// updated are the marks by which systemd sees that what it makes from /usr at
// the first boot of an exchanged /usr is made already: users of sysusers.d, the
// linker's cache, the hardware database, the journal's catalog
// (ConditionNeedsUpdate in systemd.unit). Debian's packages make all of it when
// they are installed; without the marks a boot does so again, before first boot
// may start.
var updated = []string{"etc/.updated", "var/.updated"}

// compiled are directories and files that the above is made from.
var compiled = []string{"sysusers.d", "hwdb.d", "ld.so.conf", "ld.so.conf.d", "catalog"}

// Fresh returns the image's own layer without the marks where a layer of the
// user brings what systemd then has to compile.
func Fresh(own tree.Layer, users []tree.Layer) tree.Layer {
	for _, l := range users {
		if slices.ContainsFunc(l.Nodes, func(n tree.Node) bool { return compiles(n.Path) }) {
			own.Nodes = slices.DeleteFunc(slices.Clone(own.Nodes), func(n tree.Node) bool { return slices.Contains(updated, n.Path) })
			break
		}
	}
	return own
}

// compiles reports whether something is made from the file.
func compiles(p string) bool {
	if strings.Contains(path.Base(p), ".so") && strings.Contains("/"+p, "/lib") {
		return true
	}
	for dir := p; dir != "."; dir = path.Dir(dir) {
		if slices.Contains(compiled, path.Base(dir)) {
			return true
		}
	}
	return false
}
