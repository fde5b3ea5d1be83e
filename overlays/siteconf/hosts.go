package siteconf

import (
	"bytes"
	"fmt"
	"strings"
)

// HostsEntry is one line of /etc/hosts.
type HostsEntry struct {
	IP    string
	Names []string
}

// EditHosts replaces the owner's block in /etc/hosts with entries and keeps all other lines. Without
// entries, it removes the block. The block comes first, because resolvers use the first line with a
// name.
func EditHosts(hosts []byte, owner string, entries []HostsEntry) []byte {
	begin, end := "# BEGIN "+owner, "# END "+owner
	var rest [][]byte
	var held [][]byte // lines since a begin marker that has no end marker yet
	inside := false
	for line := range bytes.Lines(hosts) {
		switch text := strings.TrimSpace(string(line)); {
		case text == begin:
			rest = append(rest, held...) // the earlier begin marker has no end marker
			held, inside = nil, true
		case text == end:
			held, inside = nil, false
		case inside:
			held = append(held, line)
		default:
			rest = append(rest, line)
		}
	}
	rest = append(rest, held...)

	var b bytes.Buffer
	if len(entries) > 0 {
		fmt.Fprintln(&b, begin)
		for _, e := range entries {
			fmt.Fprintf(&b, "%s\t%s\n", e.IP, strings.Join(e.Names, " "))
		}
		fmt.Fprintln(&b, end)
	}
	for _, line := range rest {
		b.Write(line)
	}
	return b.Bytes()
}
