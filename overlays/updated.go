package overlays

import (
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// updated lists the stamp files that mark the files generated from /usr as current
// (ConditionNeedsUpdate= in systemd.unit(5)): users of sysusers.d, the linker's cache, the hardware
// database, the journal's catalog. Debian's packages generate them when they are installed.
var updated = []string{"etc/.updated", "var/.updated"}

// compiled lists the names of files and directories from which systemd generates files.
var compiled = []string{"sysusers.d", "hwdb.d", "ld.so.conf", "ld.so.conf.d", "catalog"}

// Fresh returns own, edgebake's layer. If a layer of the user contains sources of generated files,
// it omits the files in updated.
func Fresh(own tree.Layer, users []tree.Layer) tree.Layer {
	for _, l := range users {
		if slices.ContainsFunc(l.Nodes, func(n tree.Node) bool { return compiles(n.Path) }) {
			own.Nodes = slices.DeleteFunc(slices.Clone(own.Nodes), func(n tree.Node) bool { return slices.Contains(updated, n.Path) })
			break
		}
	}
	return own
}

// compiles reports whether systemd generates other files from the file p.
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
