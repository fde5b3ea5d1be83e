package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ipvs/files"
)

// RunDir has a note for each virtual server, so that ipvscare can remove one that has left the
// configuration. The note lists the names that may have a line in the hosts file: a name is added
// before its line is written, and removed after its line. A reboot removes notes and rules, but not
// the lines in the hosts file; these are recognised by the virtual address.

// addNote adds a virtual server and its name to the notes.
func (d *Daemon) addNote(s Server) error {
	d.namesMu.Lock()
	defer d.namesMu.Unlock()
	names, ok := d.names[s.VIP]
	if !ok {
		names = d.leftNames(s.VIP, s.Masters)
	}
	if all := addName(names, s.Host); !ok || len(all) > len(names) {
		return d.setNames(s.VIP, all)
	}
	return nil
}

// leftNames returns the names whose lines an earlier process may have left in the hosts file: lines
// with the virtual address or, without IPVS, with the address of an API server.
func (d *Daemon) leftNames(vip netip.AddrPort, masters []Master) []string {
	notes := readNotes(d.opt.RunDir)
	names := notes[vip]
	at := []netip.Addr{vip.Addr()}
	for _, m := range masters {
		if a, ok := m.addr(); ok {
			at = append(at, a.Addr())
		}
	}
	for _, name := range files.NamesAt(d.opt.HostsFile, at...) {
		if !inOtherNotes(notes, map[netip.AddrPort][]string{vip: nil}, name) {
			names = addName(names, name)
		}
	}
	return names
}

// setNames writes a note with exactly these names. d.namesMu must be held.
func (d *Daemon) setNames(vip netip.AddrPort, names []string) error {
	if d.opt.RunDir != "" {
		if err := files.Replace(notePath(d.opt.RunDir, vip), []byte(strings.Join(names, "\n")), 0o600); err != nil {
			return fmt.Errorf("recording the virtual server %s: %w", vip, err)
		}
	}
	d.names[vip] = names
	return nil
}

// configure records the names of the configured virtual servers. Call restore to undo that.
func (d *Daemon) configure(servers []Server) (restore func()) {
	d.namesMu.Lock()
	defer d.namesMu.Unlock()
	before := d.hosts
	d.hosts = make(map[netip.AddrPort]string)
	for _, s := range servers {
		d.hosts[s.VIP] = s.Host
	}
	return func() {
		d.namesMu.Lock()
		defer d.namesMu.Unlock()
		d.hosts = before
	}
}

// formerNames returns the former names of a virtual server: in remove those whose lines must be
// removed, in leave those whose lines stay, because another virtual server now has the name.
func (d *Daemon) formerNames(vip netip.AddrPort, present string) (remove, leave []string) {
	d.namesMu.Lock()
	defer d.namesMu.Unlock()
	names, ok := d.names[vip]
	if !ok {
		names = d.leftNames(vip, nil)
		d.names[vip] = names
	}
	for _, name := range names {
		taken := false
		for other, host := range d.hosts {
			taken = taken || other != vip && other.Addr().Is4() == vip.Addr().Is4() && strings.EqualFold(host, name)
		}
		switch {
		case strings.EqualFold(name, present), strings.EqualFold(name, d.hosts[vip]): // the group may not have the new name yet
		case taken:
			leave = append(leave, name)
		default:
			remove = append(remove, name)
		}
	}
	return remove, leave
}

// removeFormer removes the lines of all former names from the hosts file, and then the names from
// the note.
func (d *Daemon) removeFormer(ctx context.Context, vip netip.AddrPort, present string) error {
	if d.opt.HostsFile == "" {
		return nil
	}
	remove, gone := d.formerNames(vip, present)
	var errs []error
	for _, name := range remove {
		changed, err := files.KeepHosts(ctx, d.opt.HostsFile, d.opt.RunDir, files.NoLineFor(name, vip.Addr()))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, name)
		if changed {
			d.logf("%s: removed the line of %s from %s", vip, name, d.opt.HostsFile)
		}
	}
	if len(gone) == 0 {
		return errors.Join(errs...)
	}
	d.namesMu.Lock()
	defer d.namesMu.Unlock()
	left := slices.DeleteFunc(slices.Clone(d.names[vip]), func(name string) bool { return slices.Contains(gone, name) })
	return errors.Join(append(errs, d.setNames(vip, left))...)
}

// deleteNote removes the note of a virtual server.
func (d *Daemon) deleteNote(vip netip.AddrPort) error {
	d.namesMu.Lock()
	defer d.namesMu.Unlock()
	delete(d.names, vip)
	return removeNote(d.opt.RunDir, vip)
}

func notePath(runDir string, vip netip.AddrPort) string { return filepath.Join(runDir, vip.String()) }

func removeNote(runDir string, vip netip.AddrPort) error {
	if runDir == "" {
		return nil
	}
	err := os.Remove(notePath(runDir, vip))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// readNotes returns the virtual servers that have notes, with their names.
func readNotes(runDir string) map[netip.AddrPort][]string {
	names := make(map[netip.AddrPort][]string)
	entries, err := os.ReadDir(runDir)
	if runDir == "" || err != nil {
		return names
	}
	for _, e := range entries {
		vip, err := netip.ParseAddrPort(e.Name())
		if err != nil {
			continue
		}
		if b, err := os.ReadFile(filepath.Join(runDir, e.Name())); err == nil {
			names[vip] = strings.Fields(string(b))
		}
	}
	return names
}

// inOtherNotes reports whether the name is in the note of a virtual server that ours does not have.
func inOtherNotes(notes, ours map[netip.AddrPort][]string, name string) bool {
	for vip := range maps.Keys(notes) {
		if _, own := ours[vip]; !own && len(addName(notes[vip], name)) == len(notes[vip]) {
			return true
		}
	}
	return false
}

// addName returns names with name added, unless name is empty or already in names.
func addName(names []string, name string) []string {
	if name == "" || slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(n, name) }) {
		return names
	}
	return append(slices.Clone(names), name)
}
