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

// A Site on a stick is copied into the machine's own slot, as if it had been stamped there. A stick
// may stay in the machine for years, so a stick that somebody has just brought must be recognized:
//   - The contents of each stick are recorded. An unchanged stick is not used again, so it
//     does not undo a later correction. If a stick is absent while another one is used, its
//     record is removed, and it counts as new.
//   - Of two Sites with a date, the newer one is used. A signed Site is compared only with
//     Sites that were signed, or stamped onto the disk.

// stick is a removable slot with a valid Site.
type stick struct {
	dev string
	// memory is the file that records the stick's last contents.
	memory string
	// digest is an HMAC of the stick's current contents.
	digest string
	// signed is when the stick was signed with a key that the Image names, or 0 if it was not.
	signed int64
	// info and files are the contents to write to the machine's slot.
	info   ondisk.SlotInfo
	files  map[string][]byte
	active *Active
	// before is the active Site that would be replaced, or nil if there is none.
	before *Active
	// entry is the Site's entry in the stick's Inventory, or nil if there is no Inventory.
	entry *configs.InventorySite
	// known means that the stick's Site is this machine's active Site already.
	known bool
}

// notTaken is the beginning of the record of a stick that was present at a reset. Without this
// mark, the token on the stick would make the machine join again.
const notTaken = "not taken after reset: "

// newStick returns a stick with a new Site. If there is none, ignored describes the problem of each
// stick. have is the machine's active Site, or nil if it has none.
func newStick(e *machine.Env, image ondisk.ImageInfo, have *Active) (s *stick, ignored error) {
	devs := e.RemovableSlots()
	if len(devs) == 0 {
		return nil, nil
	}
	all, ignored := sticks(e, image, have, devs)
	for _, s := range all {
		switch isNew, why := s.judge(e, have); {
		case isNew && !s.known:
			if by := s.claimedBy(e); by != nil {
				ignored = errors.Join(ignored, fmt.Errorf("stick %s is ignored: %w", s.dev, errClaimed(s, by, e.Facts())))
				continue
			}
			return s, nil
		case isNew:
			return s, nil
		case why != "":
			e.Note("the Site of stick %s is ignored: %s", s.dev, why)
		}
	}
	return nil, ignored
}

// sticks returns the slots in devs that have a valid Site for this machine, whose active Site is
// have. It skips devices without a readable slot; ignored describes the problem of each other stick
// that it leaves out.
func sticks(e *machine.Env, image ondisk.ImageInfo, have *Active, devs []string) (out []*stick, ignored error) {
	own, key := ownContents(e), e.Contents(KeyFile)
	var errs []error
	names := map[string]int{}
	for _, dev := range devs {
		c, err := e.ReadSlot(dev)
		if err != nil {
			continue // it is not a slot, or it is blank
		}
		got, err := acceptStick(e, image, have, dev, c)
		if err != nil {
			errs = append(errs, fmt.Errorf("stick %s is ignored: %w", dev, err))
			continue
		}
		m := hmac.New(sha256.New, key)
		fmt.Fprintf(m, "%d %s", c.Info.Stamped, got.digest)
		if len(got.omitted) > 0 {
			e.Note("parts of the Site of stick %s are ignored, since the Image allows repairs only (sites.removable): %s", dev, strings.Join(got.omitted, ", "))
		}
		if member.HasJoined(e) {
			got.info.Stamped = min(got.info.Stamped, latestStamp(e, image, have))
		}
		name := stickName(e, dev)
		s := &stick{dev: dev, memory: name, digest: hex.EncodeToString(m.Sum(nil)), signed: got.signed, info: got.info, before: have, entry: got.entry, files: withOwnIgnition(got.files, own)}
		s.active, err = resolveSite(e, image, &slotSite{contents: &slot.Contents{Info: s.info, Files: s.files}, site: got.site}, have)
		if err != nil {
			errs = append(errs, fmt.Errorf("stick %s is ignored: %w", dev, err))
			continue
		}
		if err := s.active.otherMachine(e, member.LastNodeName(e)); err != nil {
			errs = append(errs, fmt.Errorf("stick %s is ignored: %w", dev, err))
			continue
		}
		names[name]++
		out = append(out, s)
	}
	for _, s := range out {
		if names[s.memory] > 1 { // cheap sticks share a serial number
			s.memory += " " + s.dev
		}
		sum := sha256.Sum256([]byte(s.memory))
		s.memory = seenDir + "/" + hex.EncodeToString(sum[:8])
	}
	return out, errors.Join(errs...)
}

// takeSticks copies the Sites of all new sticks into the slot, one after another, and returns the
// active Site. ignored describes the problems of the sticks that were not used.
func takeSticks(e *machine.Env, reader *Reader) (a *Active, ignored, err error) {
	for range machine.MaxSticks {
		a, err = reader.read(e)
		var s *stick
		if s, ignored = newStick(e, reader.Image, a); s == nil {
			return a, ignored, err
		}
		if err := s.take(e); err != nil {
			return nil, nil, err
		}
	}
	a, err = reader.read(e)
	return a, nil, err
}

// ownContents returns the contents of the machine's own slot or, if that is damaged, the copy of
// its config.ign.
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

// withOwnIgnition adds the machine's own config.ign, which may contain its users and their keys, to
// files without one. An empty config.ign on the stick removes it.
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

// judge reports whether the stick's Site must be used. If not, why is the reason, if a person needs
// to know it. have is the machine's active Site, or nil if there is none.
func (s *stick) judge(e *machine.Env, have *Active) (isNew bool, why string) {
	remembered := e.Text(s.memory)
	unchanged := strings.TrimPrefix(remembered, notTaken) == s.digest
	token := s.active.Site.Credentials.Token
	same := have != nil && have.MAC == s.active.MAC
	lost := same && s.bringsLostKeys(e, have)
	switch {
	case same && have.Site.Credentials.Token == token && !lost:
		s.known = true
		return !unchanged, "" // it is the active Site: only record the stick
	case unchanged && strings.HasPrefix(remembered, notTaken):
		return false, "it was plugged in when the machine was reset: change it, or stamp it again"
	case unchanged && have == nil:
		return true, "" // the machine has no other Site
	case lost:
		return true, "" // whatever its date, it is the machine's own Site
	case unchanged:
		// The token in the slot was removed. If the machine's certificate has expired or was lost,
		// it may use the token on the stick.
		return same && !token.IsZero() && have.Site.Credentials.Token.IsZero() && member.Enrolled(e) != nil, ""
	case s.signed == 0 && have != nil && stampedBefore(s.active, have):
		return false, fmt.Sprintf("it was stamped on %s, but the Site in the slot on %s: stamp the stick again to use it anyway",
			Date(s.active.Stamped), Date(have.Stamped))
	}
	return true, ""
}

// bringsLostKeys reports whether the stick has keys of the cluster that this control-plane node and
// its slot do not have any more.
func (s *stick) bringsLostKeys(e *machine.Env, have *Active) bool {
	return s.active.Site.Credentials.Keys != nil && have.Site.Credentials.Keys == nil && member.KeysInPlace(e, have.Site) != nil
}

// stampedBefore reports whether a was stamped before b, if both dates are credible.
func stampedBefore(a, b *Active) bool {
	was, is := network.CredibleStamp(a.Image, a.Stamped), network.CredibleStamp(b.Image, b.Stamped)
	return was > 0 && is > 0 && was < is
}

// latestStamp returns the latest date that a member accepts from a stick. A later date could set
// its clock years ahead, or make newer Sites count as old.
func latestStamp(e *machine.Env, image ondisk.ImageInfo, have *Active) int64 {
	latest := max(e.Now().Unix(), image.SourceDate)
	if have != nil {
		latest = max(latest, have.Stamped)
	}
	return latest
}

// Date formats seconds since the epoch for people.
func Date(seconds int64) string { return time.Unix(seconds, 0).UTC().Format(time.DateTime) }

// take copies the Site into the machine's own slot, so that the stick can be removed, and records
// the stick's contents.
func (s *stick) take(e *machine.Env) error {
	if err := s.saveSigned(e); err != nil {
		return err
	}
	if !s.known {
		own, err := machine.OwnSlot(e)
		if err != nil {
			return err
		}
		// Claim first: the Site is then reserved for this machine even after a power cut.
		s.claim(e)
		c := slot.Contents{Info: s.info, Files: s.files}
		if have, err := e.ReadSlot(own); err == nil || errors.Is(err, slot.ErrNoSite) && have != nil {
			c.Info = have.Info // the plan and the golden digest are those of the disk
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
		present, _ := sticks(e, s.active.Image, s.active, e.RemovableSlots()) // damaged sticks count as absent
		if err := forgetAbsent(e, present); err != nil {
			return err
		}
	}
	if err := e.WriteFile(s.memory, []byte(s.digest+"\n"), machine.Mode(0o600)); err != nil {
		return fmt.Errorf("recording the contents of stick %s: %w", s.dev, err)
	}
	if !s.known {
		e.Log.Info("using the Site of a stick", "stick", s.dev)
		e.Console("using the Site of stick " + s.dev)
		if !s.active.Site.Credentials.Token.IsZero() {
			e.Console("the bootstrap token stays on stick " + s.dev + ", also after the join: pull it out and keep it safe, or delete site.yaml from it")
		}
		if s.active.Site.Credentials.Keys != nil {
			e.Console("the cluster's keys stay on stick " + s.dev + ": pull it out and keep it safe, or delete site.yaml from it. Whoever has them controls the cluster")
		}
	}
	return nil
}

// forgetAbsent removes the records of sticks that are absent when another stick's Site is used. If
// a person plugs one of them in again, its Site will be used.
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
		return fmt.Errorf("reading the records of sticks: %w", err)
	}
	for _, en := range entries {
		if present[en.Name()] {
			continue
		}
		if err := e.Remove(seenDir + "/" + en.Name()); err != nil {
			return fmt.Errorf("removing the record of a stick: %w", err)
		}
	}
	return nil
}

// ResetSticks prevents sticks in the machine from bringing it back into the cluster that it leaves.
// It reports the effect of each stick. active is the former Site.
func ResetSticks(e *machine.Env, image ondisk.ImageInfo, active *Active, say func(string)) error {
	if err := makeKey(e); err != nil {
		return err
	}
	present, _ := sticks(e, image, active, e.RemovableSlots()) // a damaged stick has no effect
	for _, s := range present {
		if strings.TrimPrefix(e.Text(s.memory), notTaken) != s.digest {
			say(fmt.Sprintf("stick %s has a new Site, which this machine applies at its next boot unless the stick is removed", s.dev))
			continue
		}
		if err := e.WriteFile(s.memory, []byte(notTaken+s.digest+"\n"), machine.Mode(0o600)); err != nil {
			return fmt.Errorf("recording the contents of stick %s: %w", s.dev, err)
		}
		token := ""
		if !s.active.Site.Credentials.Token.IsZero() {
			token = ", with its bootstrap token"
		}
		if s.active.Site.Credentials.Keys != nil {
			token = ", with the cluster's keys"
		}
		say(fmt.Sprintf("stick %s has the Site of the cluster that this machine leaves%s: the Site is not used again until it is changed or stamped again; pull the stick out", s.dev, token))
	}
	return forgetAbsent(e, present)
}

var usbBus = regexp.MustCompile(`/usb\d+/`)

// stickName identifies a stick by its serial number or, if it has none, by its port.
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
			// The nearest directory with idVendor or cid is that of the stick or card itself.
			if !e.Exists(filepath.Join(d, "idVendor")) && !e.Exists(filepath.Join(d, "cid")) {
				continue
			}
			if serial := e.Text(filepath.Join(d, "serial")); serial != "" {
				return "serial " + e.Text(filepath.Join(d, "idVendor")) + e.Text(filepath.Join(d, "cid")) + " " + serial + " " + rest
			}
			dir = d
			break
		}
		// The number of a bus may change between boots.
		return "port " + usbBus.ReplaceAllString(dir, "/usb/") + " " + rest
	}
	return part
}
