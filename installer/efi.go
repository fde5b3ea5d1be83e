package installer

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf16"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/firstboot/efivar"
	"github.com/edgebake/edgebake/ondisk"
)

// The variable BootNext names the entry that the firmware boots next, once (UEFI, 3.1). The boot
// order is not changed, so that an installer that is attached again boots again.

// efiGlobal is the GUID of the variables that the specification names.
const efiGlobal = "8be4df61-93ca-11d2-aa0d-00e098032b8c"

// bootNext creates or finds an entry for the disk's loader, and makes it the next one to boot. dir
// is the directory in which the kernel shows the firmware's variables.
func bootNext(dir, arch string, found media.DiskContent) error {
	if found.ESPNumber == 0 {
		return errors.New("the disk has no EFI system partition")
	}
	option, err := loadOption(found, arch)
	if err != nil {
		return err
	}
	number, err := bootEntry(dir, option)
	if err != nil {
		return err
	}
	return writeVar(dir, "BootNext", binary.LittleEndian.AppendUint16(nil, number))
}

// bootEntry returns the number of the entry with this content. If there is none, it creates one.
func bootEntry(dir string, option []byte) (uint16, error) {
	for n := 0; n < 1<<16; n++ {
		name := fmt.Sprintf("Boot%04X", n)
		b, err := os.ReadFile(filepath.Join(dir, name+"-"+efiGlobal))
		switch {
		case err == nil && len(b) > 4 && bytes.Equal(b[4:], option):
			return uint16(n), nil
		case errors.Is(err, os.ErrNotExist):
			return uint16(n), writeVar(dir, name, option)
		}
	}
	return 0, errors.New("all boot entries of the firmware are taken")
}

// writeVar writes one of the firmware's variables.
func writeVar(dir, name string, value []byte) error {
	return efivar.Write(filepath.Join(dir, name+"-"+efiGlobal), value)
}

// loadOption returns an EFI_LOAD_OPTION that starts the loader on the disk's
// ESP.
func loadOption(found media.DiskContent, arch string) ([]byte, error) {
	guid, err := efiGUID(found.ESP.GUID)
	if err != nil {
		return nil, err
	}
	file := `\` + strings.ReplaceAll(ondisk.Loader(arch), "/", `\`)
	le := binary.LittleEndian
	var path []byte
	node := func(typ, sub byte, data []byte) {
		path = append(path, typ, sub)
		path = le.AppendUint16(path, uint16(4+len(data)))
		path = append(path, data...)
	}
	// A partition, by its number, position and GUID (UEFI, 10.3.5.1).
	var hd []byte
	hd = le.AppendUint32(hd, uint32(found.ESPNumber))
	hd = le.AppendUint64(hd, uint64(found.ESP.Start/found.Sector))
	hd = le.AppendUint64(hd, uint64(found.ESP.Size/found.Sector))
	hd = append(append(hd, guid...), 2, 2) // GPT; the signature is a GUID
	node(4, 1, hd)
	node(4, 4, ucs2(file))
	node(0x7f, 0xff, nil)
	out := le.AppendUint32(nil, 1) // active
	out = le.AppendUint16(out, uint16(len(path)))
	return append(append(out, ucs2("edgebake")...), path...), nil
}

// ucs2 returns a string in UEFI's encoding, with its terminating zero.
func ucs2(s string) (out []byte) {
	for _, u := range append(utf16.Encode([]rune(s)), 0) {
		out = binary.LittleEndian.AppendUint16(out, u)
	}
	return out
}

// efiGUID returns a GUID in the format of disks: its first three parts are
// little-endian.
func efiGUID(s string) ([]byte, error) {
	b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(b) != 16 {
		return nil, fmt.Errorf("%q is not a GUID", s)
	}
	for _, p := range [][2]int{{0, 4}, {4, 6}, {6, 8}} {
		for i, j := p[0], p[1]-1; i < j; i, j = i+1, j-1 {
			b[i], b[j] = b[j], b[i]
		}
	}
	return b, nil
}
