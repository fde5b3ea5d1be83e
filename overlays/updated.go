package overlays

import (
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// updated lists files that mark the files generated from /usr as up to date for systemd
// (ConditionNeedsUpdate in systemd.unit): users of sysusers.d, the linker's cache, the hardware
// database, the journal's catalog. Debian's packages generate them when they are installed. Without
// the marks, the first boot would generate them again, before firstboot.
var updated = []string{"etc/.updated", "var/.updated"}

// compiled lists the directories and files from which those files are generated.
var compiled = []string{"sysusers.d", "hwdb.d", "ld.so.conf", "ld.so.conf.d", "catalog"}

// Fresh returns the image's own layer, without the files in updated if a layer
// of the user contains sources of generated files.
func Fresh(own tree.Layer, users []tree.Layer) tree.Layer {
	for _, l := range users {
		if slices.ContainsFunc(l.Nodes, func(n tree.Node) bool { return compiles(n.Path) }) {
			own.Nodes = slices.DeleteFunc(slices.Clone(own.Nodes), func(n tree.Node) bool { return slices.Contains(updated, n.Path) })
			break
		}
	}
	return own
}

// compiles reports whether a file is the source of a generated one.
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
