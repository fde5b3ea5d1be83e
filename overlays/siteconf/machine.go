package siteconf

import (
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/templates"
)

// Machine contains the properties that identify a machine. The zero Machine is no particular
// machine.
type Machine struct {
	Hostname string
	Serial   string   // SMBIOS or device tree
	UUID     string   // SMBIOS
	MACs     []string // physical network cards; the first one is preferred
	AssetTag string   // SMBIOS
}

// String returns text by which a person can identify the machine.
func (m Machine) String() string {
	var parts []string
	add := func(what, value string) {
		if value == "" {
			value = "none"
		}
		parts = append(parts, what+" "+value)
	}
	add("MAC", strings.Join(m.MACs, " "))
	add("serial", forms.Identity(m.Serial))
	add("UUID", forms.Identity(m.UUID))
	add("asset tag", forms.Identity(m.AssetTag))
	return strings.Join(parts, ", ")
}

// Matches reports whether the machine has all values in match. A vendor's placeholder, such as "To
// be filled by O.E.M.", matches nothing.
func Matches(match configs.Match, m Machine) bool {
	is := func(want, have string) bool {
		return want == "" || forms.Identity(want) != "" && strings.EqualFold(forms.Identity(want), forms.Identity(have))
	}
	card := len(match.MACs) == 0 || slices.ContainsFunc(match.MACs, func(want string) bool {
		mac := forms.CardMAC(want)
		return mac != "" && slices.ContainsFunc(m.MACs, func(have string) bool { return forms.CardMAC(have) == mac })
	})
	return !match.IsZero() && card && is(match.Serial, m.Serial) && is(match.UUID, m.UUID) && is(match.AssetTag, m.AssetTag)
}

// FindSite returns the Site that matches the machine, or nil. It is an error if several match,
// since at most one of them is meant for this machine.
func FindSite(inv *configs.Inventory, m Machine) (*configs.InventorySite, error) {
	var found []*configs.InventorySite
	var names []string
	for i := range inv.Sites {
		if s := &inv.Sites[i]; Matches(s.Match, m) {
			found, names = append(found, s), append(names, s.Name)
		}
	}
	switch len(found) {
	case 0:
		return nil, nil
	case 1:
		return found[0], nil
	}
	return nil, fmt.Errorf("the Sites %s all match this machine (%s)", strings.Join(names, ", "), m)
}

func (m Machine) isZero() bool {
	return m.Hostname == "" && m.Serial == "" && m.UUID == "" && m.AssetTag == "" && len(m.MACs) == 0
}

// NodeName evaluates the Site's template of the node name. If the machine lacks a value that the
// template uses, or has only a vendor's placeholder, the error is a *templates.MissingFactError.
func NodeName(site *configs.Site, m Machine) (string, error) {
	name, err := templates.NodeName(site.NodeName, templates.NameFacts{
		Serial:   namePart(forms.Identity(m.Serial)),
		MAC:      strings.ReplaceAll(primaryMAC(site, m), ":", ""),
		UUID:     strings.ToLower(forms.Identity(m.UUID)),
		Hostname: hostname(m.Hostname),
	})
	if err != nil {
		return "", err
	}
	name = strings.ToLower(name)
	if err := forms.CheckNodeName(name); err != nil {
		return "", err
	}
	return name, nil
}

// primaryMAC returns the MAC address of the Site's first interface that the machine has. If it has
// none of them, primaryMAC returns the machine's first MAC address.
func primaryMAC(site *configs.Site, m Machine) string {
	var good []string
	for _, s := range m.MACs {
		mac, err := net.ParseMAC(s)
		if err != nil || len(mac) != 6 || mac[0]&1 == 1 || mac.String() == "00:00:00:00:00:00" {
			continue
		}
		good = append(good, mac.String())
	}
	for _, i := range site.Network.Interfaces {
		want, err := net.ParseMAC(i.MAC)
		for _, have := range good {
			if err == nil && want.String() == have {
				return have
			}
		}
	}
	if len(good) == 0 {
		return ""
	}
	return good[0]
}

var notInName = regexp.MustCompile(`[^a-z0-9.-]+`)

// namePart replaces the characters of a serial number that are invalid in a name.
func namePart(s string) string {
	return strings.Trim(notInName.ReplaceAllString(strings.ToLower(s), "-"), "-.")
}

// hostname returns the machine's host name, or "" for a default name that many machines have.
func hostname(s string) string {
	s = namePart(s)
	first, _, _ := strings.Cut(s, ".")
	switch first {
	case "", "localhost", "none", "debian", "linux", "edgebake":
		return ""
	}
	return s
}
