package site

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// A site on a stick is taken into the machine's own slot, as if it had been
// stamped there. What decides is whether somebody has brought it, since a stick
// may stay in the machine for years:
//   - What a stick holds is remembered, and unchanged it is not taken again. So
//     it does not undo a correction that came another way, and a site that was
//     taken before is taken again when somebody puts it back.
//   - Of two sites with a date the newer one holds. A signed one is compared with those
//     that were signed or stamped onto the disk only.

// stick is a removable slot with a valid site.
type stick struct {
	dev string
	// memory is the file that says what it held when it was last looked at.
	memory string
	// digest is of what it holds now.
	digest string
	// signed is when a key that the Image names has signed it; 0: it is
	// anybody's.
	signed int64
	// info and files are what the machine's slot would become.
	info   ondisk.SlotInfo
	files  map[string][]byte
	active *Active
	// before is the active Site that it would replace; nil: there is none.
	before *Active
	// entry is the site in the stick's inventory; nil: it holds one site.
	entry *configs.InventorySite
	// known: this is the machine's active Site already.
	known bool
}

// notTaken begins what is remembered of a stick that reset has seen. Its token
// would have the machine join again.
const notTaken = "not taken after reset: "

// newStick looks for a site that somebody has brought. One with problems does
// not hide another's; its error is returned when there is no other: of each stick
// a sentence that names it.
func newStick(e *machine.Env, reader *Reader) (*stick, error) {
	devs := e.RemovableSlots()
	if len(devs) == 0 {
		return nil, nil
	}
	var errs []error
	have, err := reader.read(e)
	if err != nil {
		have = nil
	}
	for _, s := range sticks(e, reader.Image, have, devs, &errs) {
		switch isNew, why := s.judge(e, have); {
		case isNew && !s.known:
			if by := s.claimedBy(e); by != nil {
				errs = append(errs, fmt.Errorf("stick %s is not taken: %w", s.dev, errClaimed(s, by, e.Facts())))
				continue
			}
			return s, nil
		case isNew:
			return s, nil
		case why != "":
			e.Note("the Site of stick %s is not taken: %s", s.dev, why)
		}
	}
	return nil, errors.Join(errs...)
}

// sticks reads the Sites of removable slots, for a machine whose active Site is have;
// those with none, and inventories without one for this machine, are passed
// over.
func sticks(e *machine.Env, image ondisk.ImageInfo, have *Active, devs []string, errs *[]error) []*stick {
	own, key := ownContents(e), e.Contents(KeyFile)
	var out []*stick
	names := map[string]int{}
	for _, dev := range devs {
		c, err := e.ReadSlot(dev)
		if err != nil {
			continue // no slot, or a blank one
		}
		got, err := admitFiles(e, image, have, dev, c)
		if err != nil {
			*errs = append(*errs, fmt.Errorf("stick %s is not taken: %w", dev, err))
			continue
		}
		m := hmac.New(sha256.New, key)
		fmt.Fprintf(m, "%d %s", c.Info.Stamped, got.digest)
		if len(got.omitted) > 0 {
			e.Note("of the Site of stick %s is left out, since the Image allows repairs only (sites.removable): %s", dev, strings.Join(got.omitted, ", "))
		}
		if member.HasJoined(e) {
			got.info.Stamped = min(got.info.Stamped, latestStamp(e, image, have))
		}
		name := stickName(e, dev)
		s := &stick{dev: dev, memory: name, digest: hex.EncodeToString(m.Sum(nil)), signed: got.signed, info: got.info, before: have, entry: got.entry, files: withOwnIgnition(got.files, own)}
		s.active, err = resolveSite(e, image, &found{contents: &slot.Contents{Info: s.info, Files: s.files}, site: got.site}, have)
		if err != nil {
			*errs = append(*errs, fmt.Errorf("stick %s is not taken: %w", dev, err))
			continue
		}
		if err := s.active.otherMachine(e, member.Node(e)); err != nil {
			*errs = append(*errs, fmt.Errorf("stick %s is not taken: %w", dev, err))
			continue
		}
		names[name]++
		out = append(out, s)
	}
	for _, s := range out {
		if names[s.memory] > 1 { // cheap ones share a serial number
			s.memory += " " + s.dev
		}
		sum := sha256.Sum256([]byte(s.memory))
		s.memory = seenDir + "/" + hex.EncodeToString(sum[:8])
	}
	return out
}

// takeSticks takes what new sites there are, one after the other.
func takeSticks(e *machine.Env, reader *Reader) error {
	for range machine.MaxSticks {
		s, err := newStick(e, reader)
		if s == nil {
			if err != nil {
				e.Note("%s", machine.OneLine(err))
			}
			return nil
		}
		if err := s.take(e); err != nil {
			return err
		}
	}
	return nil
}

// ownContents is what the machine's own slot holds, or held before it was
// spoilt.
func ownContents(e *machine.Env) *slot.Contents {
	if dev, err := machine.OwnSlot(e); err == nil {
		if c, err := e.ReadSlot(dev); err == nil || errors.Is(err, slot.ErrNoSite) && c != nil {
			return c
		}
	}
	c := &slot.Contents{Files: map[string][]byte{}}
	if ign := e.Contents(IgnitionCopy); ign != nil {
		c.Files[ondisk.SlotIgnition] = ign
	}
	return c
}

// withOwnIgnition keeps the machine's config.ign, which may hold its users and
// their keys, when a stick brings none. An empty one takes it away.
func withOwnIgnition(brought map[string][]byte, own *slot.Contents) map[string][]byte {
	files := maps.Clone(brought)
	if ign, ok := files[ondisk.SlotIgnition]; ok {
		if len(strings.TrimSpace(string(ign))) == 0 {
			delete(files, ondisk.SlotIgnition)
		}
		return files
	}
	for name, b := range own.Files {
		if _, ok := files[name]; !ok && (name == ondisk.SlotIgnition || strings.HasPrefix(name, ondisk.SlotFilesDir+"/")) {
			files[name] = b
		}
	}
	return files
}

// judge reports whether the stick's site is to be taken, or why it is not
// where somebody may wonder. have is the machine's active Site, nil:
// none.
func (s *stick) judge(e *machine.Env, have *Active) (isNew bool, why string) {
	remembered := e.Text(s.memory)
	unchanged := strings.TrimPrefix(remembered, notTaken) == s.digest
	token := s.active.Site.Credentials.Token
	same := have != nil && have.MAC == s.active.MAC
	lost := same && s.bringsLostKeys(e, have)
	switch {
	case same && have.Site.Credentials.Token == token && !lost:
		s.known = true
		return !unchanged, "" // to be remembered
	case unchanged && strings.HasPrefix(remembered, notTaken):
		return false, "it was there when the machine was reset: change it, or stamp it again"
	case unchanged && have == nil:
		return true, "" // there is no other
	case lost:
		return true, "" // whatever its date: the site is the machine's own
	case unchanged:
		// The machine's own copy of the token is forgotten. One whose
		// certificate has expired, or was lost, may use the stick's.
		return same && !token.IsZero() && have.Site.Credentials.Token.IsZero() && member.Enrolled(e) != nil, ""
	case s.signed == 0 && have != nil && stampedBefore(s.active, have):
		return false, fmt.Sprintf("it was stamped on %s, the Site in the slot on %s: stamp the stick again to go back to it",
			Date(s.active.Stamped), Date(have.Stamped))
	}
	return true, ""
}

// bringsLostKeys reports whether a control-plane node with the Site have has lost
// keys of its cluster, of which its slot has none any more, and the stick has
// them.
func (s *stick) bringsLostKeys(e *machine.Env, have *Active) bool {
	return s.active.Site.Credentials.Keys != nil && have.Site.Credentials.Keys == nil && member.KeysInPlace(e, have.Site) != nil
}

// stampedBefore reports whether a was stamped before b, where both have a date that
// can be true.
func stampedBefore(a, b *Active) bool {
	was, is := network.CredibleStamp(a.Image, a.Stamped), network.CredibleStamp(b.Image, b.Stamped)
	return was > 0 && is > 0 && was < is
}

// latestStamp is the latest date that a node believes of a stick. A stranger's
// could have its clock set years ahead, or newer sites be taken for old ones.
func latestStamp(e *machine.Env, image ondisk.ImageInfo, have *Active) int64 {
	latest := max(e.Now().Unix(), image.SourceDate)
	if have != nil {
		latest = max(latest, have.Stamped)
	}
	return latest
}

// Date is a moment in seconds since the epoch, as people read it.
func Date(seconds int64) string { return time.Unix(seconds, 0).UTC().Format(time.DateTime) }

// take copies the site into the machine's own slot, so that the stick may be
// pulled out, and remembers what the stick holds.
func (s *stick) take(e *machine.Env) error {
	if err := s.saveSigned(e); err != nil {
		return err
	}
	if !s.known {
		own, err := machine.OwnSlot(e)
		if err != nil {
			return err
		}
		// Before the site is taken: a power cut in between leaves it to this
		// machine.
		s.claim(e)
		c := slot.Contents{Info: s.info, Files: s.files}
		if have, err := e.ReadSlot(own); err == nil || errors.Is(err, slot.ErrNoSite) && have != nil {
			c.Info = have.Info // plan and golden digest are the disk's own
		}
		if stamped := network.CredibleStamp(s.active.Image, s.info.Stamped); stamped > 0 {
			c.Info.Stamped = stamped
		}
		if err := s.saveUnsigned(e, c.Info.Stamped); err != nil {
			return err
		}
		if err := s.saveClockDate(e, c.Info.Stamped); err != nil {
			return err
		}
		if err := e.WriteSlot(own, &c); err != nil {
			return fmt.Errorf("writing the Site of stick %s to the slot %s: %w", s.dev, own, err)
		}
		var damaged []error // and so absent
		if err := forgetAbsent(e, sticks(e, s.active.Image, s.active, e.RemovableSlots(), &damaged)); err != nil {
			return err
		}
	}
	if err := e.WriteFile(s.memory, []byte(s.digest+"\n"), machine.Mode(0o600)); err != nil {
		return fmt.Errorf("noting what stick %s holds: %w", s.dev, err)
	}
	if !s.known {
		e.Log.Info("took the Site of a stick", "stick", s.dev)
		e.Console("took the Site of stick " + s.dev)
		if !s.active.Site.Credentials.Token.IsZero() {
			e.Console("the bootstrap token stays on stick " + s.dev + ", also after the join: pull it out and keep it safe, or delete site.yaml from it")
		}
		if s.active.Site.Credentials.Keys != nil {
			e.Console("the cluster's keys stay on stick " + s.dev + ": pull it out and keep it safe, or delete site.yaml from it. Whoever has it has the cluster")
		}
	}
	return nil
}

// forgetAbsent forgets what sticks held that are not among the present ones now
// that another's site is taken: whoever plugs one in again means it.
func forgetAbsent(e *machine.Env, all []*stick) error {
	present := map[string]bool{}
	for _, s := range all {
		present[filepath.Base(s.memory)] = true
	}
	entries, err := os.ReadDir(e.Path(seenDir))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading what sticks held: %w", err)
	}
	for _, en := range entries {
		if present[en.Name()] {
			continue
		}
		if err := e.Remove(seenDir + "/" + en.Name()); err != nil {
			return fmt.Errorf("forgetting what a stick held: %w", err)
		}
	}
	return nil
}

// ResetSticks has no stick take the machine, whose Site was active, back into
// the cluster that it leaves, and says what the ones in it will do.
func ResetSticks(e *machine.Env, image ondisk.ImageInfo, active *Active, say func(string)) error {
	if err := makeKey(e); err != nil {
		return err
	}
	var damaged []error // they bring it nowhere
	present := sticks(e, image, active, e.RemovableSlots(), &damaged)
	for _, s := range present {
		if strings.TrimPrefix(e.Text(s.memory), notTaken) != s.digest {
			say(fmt.Sprintf("stick %s holds a Site that was not taken yet: the machine takes it at its next boot, unless the stick is pulled out", s.dev))
			continue
		}
		if err := e.WriteFile(s.memory, []byte(notTaken+s.digest+"\n"), machine.Mode(0o600)); err != nil {
			return fmt.Errorf("noting what stick %s holds: %w", s.dev, err)
		}
		token := ""
		if !s.active.Site.Credentials.Token.IsZero() {
			token = ", with its bootstrap token"
		}
		if s.active.Site.Credentials.Keys != nil {
			token = ", with the cluster's keys"
		}
		say(fmt.Sprintf("stick %s holds the former Site%s: it is not taken again until it is changed or stamped again; pull it out", s.dev, token))
	}
	return forgetAbsent(e, present)
}

var usbBus = regexp.MustCompile(`/usb\d+/`)

// stickName tells one stick from another: by its serial number, else by the
// port that it is in.
func stickName(e *machine.Env, dev string) string {
	part := filepath.Base(dev)
	entries, err := os.ReadDir(e.Path("/sys/block"))
	if err != nil {
		return part
	}
	for _, en := range entries {
		rest, ok := strings.CutPrefix(part, en.Name())
		if !ok || strings.Trim(rest, "p0123456789") != "" {
			continue
		}
		target, err := os.Readlink(e.Path(filepath.Join("/sys/block", en.Name())))
		if err != nil {
			return part
		}
		dir := filepath.Join("/sys/block", target)
		for d := dir; d != "/sys" && d != "/"; d = filepath.Dir(d) {
			// The first of these above a disk is the stick or card itself.
			if !e.Exists(filepath.Join(d, "idVendor")) && !e.Exists(filepath.Join(d, "cid")) {
				continue
			}
			if serial := e.Text(filepath.Join(d, "serial")); serial != "" {
				return "serial " + e.Text(filepath.Join(d, "idVendor")) + e.Text(filepath.Join(d, "cid")) + " " + serial + " " + rest
			}
			dir = d
			break
		}
		// The number of a bus may differ from boot to boot.
		return "port " + usbBus.ReplaceAllString(dir, "/usb/") + " " + rest
	}
	return part
}
