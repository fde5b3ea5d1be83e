// Package dpkg reads the list of installed Debian packages.
package dpkg

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Package is one installed package.
type Package struct {
	Name, Version, Arch, Source, Homepage string
}

// ParseStatus reads var/lib/dpkg/status, and sorts the packages by name.
func ParseStatus(r io.Reader) ([]Package, error) {
	var out []Package
	var p Package
	installed := false
	flush := func() {
		if p.Name != "" && installed {
			out = append(out, p)
		}
		p, installed = Package{}, false
	}
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		if s.Text() == "" {
			flush()
			continue
		}
		k, v, ok := strings.Cut(s.Text(), ": ")
		if !ok || strings.HasPrefix(k, " ") {
			continue
		}
		switch k {
		case "Package":
			p.Name = v
		case "Version":
			p.Version = v
		case "Architecture":
			p.Arch = v
		case "Source":
			p.Source = v
		case "Homepage":
			p.Homepage = v
		case "Status":
			installed = strings.HasSuffix(v, " installed")
		}
	}
	flush()
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("reading the package list: %w", err)
	}
	slices.SortFunc(out, func(a, b Package) int {
		return strings.Compare(a.Name+"\x00"+a.Arch, b.Name+"\x00"+b.Arch)
	})
	return out, nil
}
