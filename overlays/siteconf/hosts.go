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

// EditHosts replaces the block of /etc/hosts with the owner's name by entries,
// or removes it if there are none, and keeps every other line. The block is put
// first, because the first line with a name wins.
func EditHosts(hosts []byte, owner string, entries []HostsEntry) []byte {
	begin, end := "# BEGIN "+owner, "# END "+owner
	var rest [][]byte
	var held [][]byte // lines after a begin without an end so far
	inside := false
	for line := range bytes.Lines(hosts) {
		switch text := strings.TrimSpace(string(line)); {
		case text == begin:
			rest = append(rest, held...) // an earlier begin without an end
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
