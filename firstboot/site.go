package firstboot

import (
	"bytes"
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
	"github.com/edgebake/edgebake/firstboot/apply"
	"github.com/edgebake/edgebake/overlays/node"
)

// What firstboot keeps beside the state, on DATA.
const (
	// keyFile holds the key of the HMACs below, so that they tell nothing.
	keyFile = ondisk.StateDir + "/key"
	// ignitionCopy is the Ignition config last taken from a slot.
	ignitionCopy = ondisk.StateDir + "/config.ign"
	// seenDir remembers what each stick held: unchanged it is not taken again.
	seenDir = ondisk.StateDir + "/sticks"
)

// What describes this root's /etc is kept in it: a root that was just written
// has none of it, and gets the site's settings anew.
const (
	// appliedFile names the site whose settings are in place; kubelet.service
	// waits for it.
	appliedFile = ondisk.EtcDir + "/applied"
	// manifestFile lists what the applier made.
	manifestFile = ondisk.EtcDir + "/manifest.json"
	originalsDir = ondisk.EtcDir + "/originals"
)

// Active is the site that a machine goes by, read once in a pass: a stamp in
// the middle of one must not mix two sites.
type Active struct {
	Site *configs.Site
	// Image is the image that the site is used on.
	Image ondisk.ImageInfo
	// Node is its name on this machine.
	Node string
	// Hostname is what the machine is called: Node, but for a member of a
	// cluster, whose certificate is for another name until it leaves.
	Hostname string
	// MAC names the site's contents without its token, which is forgotten.
	MAC string
	// Device is the machine's own slot; empty where it has none.
	Device string
	// Stamped is when the site was written, in seconds since the epoch.
	Stamped int64
	// Note is what is wrong with a newer site that was not taken.
	Note string

	config   []byte // the settings, as Ignition
	ignition []byte // the slot's config.ign, if there is one
}

// errNoSite: there is none yet, which is the state of every golden image.
var errNoSite = errors.New("there is no site in the slot")

// ownSlot is this disk's slot.
func ownSlot(e *Env) (string, error) {
	d, err := e.rootDisk()
	if err != nil {
		return "", err
	}
	p := d.part(ondisk.LabelSlot)
	if p == nil {
		return "", fmt.Errorf("disk %s has no partition %s", d.Name, ondisk.LabelSlot)
	}
	return "/dev/" + p.Name, nil
}

// readSite reads and checks what a slot holds.
func readSite(e *Env, image ondisk.ImageInfo, dev string) (*slot.Contents, *Active, error) {
	c, err := e.ReadSlot(dev)
	if errors.Is(err, slot.ErrNoSite) || errors.Is(err, slot.ErrBlank) {
		return c, nil, fmt.Errorf("%w (%s: %w)", errNoSite, dev, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("reading the slot %s: %w", dev, err)
	}
	doc, ok := c.Files[ondisk.SlotSite]
	if !ok {
		if _, ok := c.Files[ondisk.SlotInventory]; ok {
			return c, nil, Permanent(fmt.Errorf("the slot %s holds an %s, which this image's first boot does not read", dev, ondisk.SlotInventory),
				"stamp one site onto the slot")
		}
		return c, nil, errNoSite
	}
	a, err := resolveSite(e, image, c, doc)
	return c, a, err
}

// resolveSite makes of a site's document the site on this machine.
func resolveSite(e *Env, image ondisk.ImageInfo, c *slot.Contents, doc []byte) (*Active, error) {
	site, err := configs.ParsePublicSite(ondisk.SlotSite, doc) // the token may be forgotten already
	if err != nil {
		return nil, Permanent(fmt.Errorf("the site has problems: %w", err), "correct site.yaml in the slot or on a stick, and restart the machine")
	}
	m := e.facts()
	name, err := node.NodeName(site, m)
	if err != nil {
		return nil, Permanent(fmt.Errorf("this machine gets no node name: %w", err), "set nodeName in site.yaml")
	}
	j, _ := readJoinedAs(e)
	cert, notEnrolled := enrolment(e)
	member := nodeIn(cert)
	if was := cmp.Or(member, j.Was); was != "" && name != was {
		// Another card may sort first since; the machine is the same, and joins
		// again as what it was.
		if then, err := node.NodeName(site, j.Machine); err == nil && then == was {
			name = was
		}
	}
	hostname := name
	if notEnrolled == nil {
		hostname = member
	}
	called := *site
	called.NodeName = hostname
	config, err := node.Render(&called, m, c.Files[ondisk.SlotIgnition])
	if err != nil {
		return nil, Permanent(fmt.Errorf("the site's settings have problems: %w", err), "correct site.yaml or its Ignition config")
	}
	if err := servedBy(image, site); err != nil {
		return nil, err
	}
	a := &Active{Site: site, Image: image, Node: name, Hostname: hostname, Stamped: c.Info.Stamped, config: config, ignition: c.Files[ondisk.SlotIgnition]}
	a.MAC, err = siteMAC(e, site, c)
	return a, err
}

// servedBy refuses a site that the image was not made for, by the rules that
// stamping goes by.
func servedBy(image ondisk.ImageInfo, site *configs.Site) error {
	probs := node.CheckSite(node.Image{Info: image}, site, nil)
	if probs == nil {
		return nil
	}
	if slices.ContainsFunc(probs, func(p configs.Problem) bool { return p.Path == "nodeType" }) {
		return Permanent(fmt.Errorf("the site asks for node type %s, this image makes %s", site.NodeType, strings.Join(image.NodeTypes, ", ")),
			"stamp a site with one of these types, or write another image")
	}
	return goesNot(probs)
}

func goesNot(probs configs.Problems) error {
	return Permanent(fmt.Errorf("the site does not go with this image: %w", probs), "correct site.yaml in the slot or on a stick, and restart the machine")
}

// fits refuses a site that asks for what this system has not, before any of it
// is applied.
func fits(e *Env, a *Active) error {
	baked, err := apply.NewBaked(applier(e))
	if err != nil {
		return fmt.Errorf("looking for what the site needs: %w", err)
	}
	if probs := node.CheckSite(node.Image{Info: a.Image, Root: baked}, a.Site, a.ignition); probs != nil {
		return goesNot(probs)
	}
	return nil
}

// siteMAC names a site by its contents. The token is left out: it is
// forgotten after the join, and the site is still the same.
func siteMAC(e *Env, site *configs.Site, c *slot.Contents) (string, error) {
	key, err := macKey(e)
	if err != nil {
		return "", err
	}
	doc, err := withoutToken(site)
	if err != nil {
		return "", fmt.Errorf("naming the site: %w", err)
	}
	ignition := c.Files[ondisk.SlotIgnition]
	if token := site.Credentials.Token.Reveal(); token != "" {
		// As it is after the token was forgotten: else it would be applied
		// once more, with stars in the place of the token.
		ignition = slot.HideInIgnition(ignition, token)
	}
	m := hmac.New(sha256.New, key)
	m.Write(doc)
	m.Write([]byte{0})
	m.Write(ignition)
	return hex.EncodeToString(m.Sum(nil)), nil
}

func macKey(e *Env) ([]byte, error) {
	if b, err := e.read(keyFile); err == nil && len(b) == 32 {
		return b, nil
	}
	b := e.Random(32)
	if err := e.WriteFile(keyFile, b, Mode(0o600)); err != nil {
		return nil, fmt.Errorf("making a key for this machine: %w", err)
	}
	return b, nil
}

// activeSite reads the site to go by: the slot's own, or, when that is gone or
// spoilt on a node that has taken one before, the copy of that one. It is for
// who begins a pass, and hands it on.
func activeSite(e *Env, image ondisk.ImageInfo) (*Active, error) {
	dev, err := ownSlot(e)
	if err != nil {
		return nil, err
	}
	_, a, err := readSite(e, image, dev)
	if err == nil {
		a.Device = dev
		return a, nil
	}
	doc, copyErr := e.read(ondisk.SiteCopy)
	if copyErr != nil {
		return nil, err
	}
	files := map[string][]byte{}
	if ign, err := e.read(ignitionCopy); err == nil {
		files[ondisk.SlotIgnition] = ign
	}
	old, copyErr := resolveSite(e, image, &slot.Contents{Files: files}, doc)
	if copyErr != nil {
		return nil, err
	}
	old.Device, old.Note = dev, err.Error()
	return old, nil
}

// isApplied reports whether the machine's settings are those of the site.
func (a *Active) isApplied(e *Env) bool { return e.text(appliedFile) == a.applied() }

// applied names the settings of the site on this machine.
func (a *Active) applied() string { return a.MAC + " " + a.Hostname }

// siteSources tells one state of all slots in reach from another, whether
// their sites are valid or not.
func siteSources(e *Env) string {
	var all []string
	if dev, err := ownSlot(e); err == nil {
		all = append(all, slotDigest(e, dev))
	}
	for _, dev := range e.removableSlots() {
		all = append(all, dev+" "+slotDigest(e, dev))
	}
	return strings.Join(all, "\n")
}

// slotDigest tells one state of the slot's site from another, valid or not.
func slotDigest(e *Env, dev string) string {
	c, err := e.ReadSlot(dev)
	if err != nil {
		return "unreadable"
	}
	return contentsDigest(c)
}

func contentsDigest(c *slot.Contents) string {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		if name == ondisk.SlotReportText || name == ondisk.SlotReportJSON {
			continue
		}
		fmt.Fprintf(h, "%s\x00%d\x00", name, len(c.Files[name]))
		h.Write(c.Files[name])
	}
	if c.Signature != nil {
		fmt.Fprintf(h, "%s\x00%d\x00%s", ondisk.SlotSignature, len(c.Signature), c.Signature)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// sitePhase finds the site and makes the operating system's settings what it
// says.
func sitePhase(image ondisk.ImageInfo) Phase {
	return Phase{
		Name: "site-config", Doc: "the site's settings are in place", Timeout: 5 * time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			if s, err := newStick(e, image); s != nil {
				return Todo, nil
			} else if err != nil {
				e.Note("the site of %s", oneLine(err))
			}
			a, err := activeSite(e, image)
			if errors.Is(err, errNoSite) {
				return Todo, nil // Run waits
			}
			if err != nil {
				return Todo, err
			}
			if !a.isApplied(e) || e.text("/proc/sys/kernel/hostname") != a.Hostname {
				return Todo, nil
			}
			if held, err := kubeletHeld(ctx, e); held || err != nil {
				return Todo, err
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			if err := takeSticks(e, image); err != nil {
				return err
			}
			a, err := activeSite(e, image)
			if errors.Is(err, errNoSite) {
				a, err = waitForSite(ctx, e, image)
			}
			if err != nil {
				return err
			}
			return applySite(ctx, e, a)
		},
	}
}

// waitForSite waits, within its attempt, for somebody to bring a site.
func waitForSite(ctx context.Context, e *Env, image ondisk.ImageInfo) (*Active, error) {
	e.Waiting("a site: stamp one onto this disk, or plug in a stick named EDGEBAKE that holds site.yaml")
	var found *Active
	var siteErr error
	err := e.poll(ctx, standstill, func() (bool, error) {
		if s, err := newStick(e, image); s != nil {
			if err := s.take(e); err != nil {
				return false, err
			}
		} else if err != nil {
			e.Waiting("a site: the one on %s", oneLine(err))
		}
		found, siteErr = activeSite(e, image)
		return !errors.Is(siteErr, errNoSite), nil
	})
	if err != nil {
		return nil, Advise(errNoSite, "stamp a site: edgebake stamp IMAGE SITE; or plug in a stick named EDGEBAKE that holds site.yaml")
	}
	return found, siteErr
}

// applySite makes the machine's settings those of the site.
func applySite(ctx context.Context, e *Env, a *Active) error {
	if !a.isApplied(e) {
		if err := endTrial(ctx, e); err != nil {
			return err
		}
		if err := fits(e, a); err != nil {
			return err
		}
		changes, err := apply.Apply(ctx, applier(e), a.config)
		if err != nil {
			if bad := (*apply.Unsupported)(nil); errors.As(err, &bad) {
				return Permanent(err, "take these sections out of the Ignition config; disks are laid out when the image is built")
			}
			if bad := (*apply.Refused)(nil); errors.As(err, &bad) {
				return Permanent(err, "correct the site's users or its Ignition config as said, and stamp it again or bring it on a stick")
			}
			return fmt.Errorf("applying the site's settings: %w", err)
		}
		if err := takeEffect(ctx, e, changes); err != nil {
			return err
		}
		if err := keepSite(e, a); err != nil {
			return err
		}
	}
	if err := e.SetHostname(a.Hostname); err != nil {
		return fmt.Errorf("setting the host name to %s: %w", a.Hostname, err)
	}
	// Last: from here on Check finds the settings in place.
	if _, err := e.write(appliedFile, []byte(a.applied()+"\n"), Mode(0o600)); err != nil {
		return fmt.Errorf("noting which site is in place: %w", err)
	}
	if held, err := kubeletHeld(ctx, e); !held || err != nil {
		return err
	}
	if e.exists(hubManifest) { // of DATA, and the rules are of a root that is new
		if err := closePorts(ctx, e, ports{open: a.Site.Yurthub.OpenPort, pod: true}); err != nil {
			return err
		}
	}
	if err := e.Unit(ctx, "start", ondisk.UnitKubelet); err != nil {
		return fmt.Errorf("starting kubelet: %w", err)
	}
	return nil
}

// kubeletHeld reports whether kubelet of an enrolled node does not run: it
// waited for the site's settings, on a root that had none.
func kubeletHeld(ctx context.Context, e *Env) (bool, error) {
	if enrolled(e) != nil {
		return false, nil
	}
	state, err := e.UnitState(ctx, ondisk.UnitKubelet)
	return err == nil && state == "inactive", err
}

// keepSite copies the site for the day when the slot is spoilt. It has no
// token; a Wi-Fi key stays in it, which is in the settings on this disk too.
func keepSite(e *Env, a *Active) error {
	doc, err := withoutToken(a.Site)
	if err == nil {
		err = e.WriteFile(ondisk.SiteCopy, doc, Mode(0o600))
	}
	if err == nil && a.ignition != nil {
		// Without the token too: the slot may have to be made again from this
		// when nobody knows any more what to take out.
		err = e.WriteFile(ignitionCopy, slot.HideInIgnition(a.ignition, a.Site.Credentials.Token.Reveal()), Mode(0o600))
	} else if err == nil {
		err = e.Remove(ignitionCopy)
	}
	if err != nil {
		return fmt.Errorf("keeping a copy of the site: %w", err)
	}
	return nil
}

// withoutToken is the site as it stays in the slot after the join. What its
// settings need, a Wi-Fi key or a password's hash, stays: without it the next
// boot would take it for corrected.
func withoutToken(site *configs.Site) ([]byte, error) {
	s := *site
	s.Credentials = configs.Credentials{}
	return configs.EncodeSlot(&s)
}

func applier(e *Env) apply.Target {
	return apply.Target{
		Root: e.Root, Manifest: manifestFile, Originals: originalsDir,
		WriteFile: func(p string, b []byte, m apply.Meta) error {
			if before := e.contents(p); hidesToken(b, before) {
				b = before
			}
			return e.WriteFile(p, b, Owner{Mode: m.Mode, UID: m.UID, GID: m.GID})
		},
		Mkdir: func(p string, m apply.Meta) error {
			return e.Mkdir(p, Owner{Mode: m.Mode, UID: m.UID, GID: m.GID})
		},
		Symlink: e.Symlink, Link: e.Link, Remove: e.Remove,
		Unit: e.Unit,
	}
}

// hidesToken reports whether after is before, with a filling in the place of a
// bootstrap token: the slot's config.ign has that once the token is forgotten,
// and what was made from it earlier is still what was meant.
func hidesToken(after, before []byte) bool {
	const shortest = 20 // a token has 23 bytes, and more in another encoding
	if len(after) != len(before) || bytes.Equal(after, before) {
		return false
	}
	for i := 0; i < len(after); {
		if after[i] == before[i] {
			i++
			continue
		}
		filling := after[i]
		if !strings.ContainsRune("*A0", rune(filling)) {
			return false
		}
		from, to := i, i
		for from > 0 && after[from-1] == filling {
			from--
		}
		for to < len(after) && after[to] == filling {
			to++
		}
		if to-from < shortest {
			return false
		}
		i = to
	}
	return true
}

// takeEffect tells the running system what has changed below it: the files
// were applied to a machine that is up.
func takeEffect(ctx context.Context, e *Env, c apply.Changes) error {
	if len(c.Units) > 0 {
		if err := e.Unit(ctx, "daemon-reload", ""); err != nil {
			return fmt.Errorf("reloading systemd: %w", err)
		}
	}
	under := func(dir string) bool {
		return slices.ContainsFunc(c.Paths, func(p string) bool { return strings.HasPrefix(p, dir) })
	}
	for _, r := range []struct{ dir, unit string }{
		{"/etc/modules-load.d/", "systemd-modules-load.service"},
		{"/etc/sysctl.d/", "systemd-sysctl.service"},
		{"/etc/systemd/resolved.conf.d/", "systemd-resolved.service"},
		{"/etc/systemd/timesyncd.conf.d/", "systemd-timesyncd.service"},
	} {
		if !under(r.dir) {
			continue
		}
		if err := e.Unit(ctx, "restart", r.unit); err != nil {
			e.Log.Warn("a setting takes effect at the next boot only", "unit", r.unit, "error", err)
		}
	}
	if under("/etc/systemd/network/") {
		if err := e.Run(ctx, Cmd{Args: []string{"networkctl", "reload"}}); err != nil {
			e.Log.Warn("network settings take effect at the next boot only", "error", err)
		}
	}
	for _, u := range wpaUnits(c.Paths) {
		if err := e.Unit(ctx, "try-restart", u); err != nil {
			e.Log.Warn("Wi-Fi settings take effect at the next boot only", "unit", u, "error", err)
		}
	}
	for _, u := range c.Units {
		verb := ""
		switch {
		case u.Name == ondisk.UnitFirstboot:
		case u.Masked || u.Disabled:
			verb = "stop"
		case u.Enabled && u.Changed:
			verb = "restart"
		case u.Enabled:
			verb = "start"
		case u.Changed:
			verb = "try-restart"
		}
		if verb == "" {
			continue
		}
		if err := e.Unit(ctx, verb, u.Name); err != nil {
			// The site's own unit is the site's own trouble; joining goes on.
			e.Log.Warn("a unit of the site", "unit", u.Name, "verb", verb, "error", err)
		}
	}
	return nil
}

// wpaUnits are the units that read the Wi-Fi settings among paths.
func wpaUnits(paths []string) []string {
	var out []string
	for _, p := range paths {
		if name, ok := strings.CutPrefix(p, "/etc/wpa_supplicant/wpa_supplicant-"); ok {
			out = append(out, "wpa_supplicant@"+strings.TrimSuffix(name, ".conf")+".service")
		}
	}
	return out
}

// setHosts keeps the owner's lines in /etc/hosts, and leaves all others.
// ipvscare, which keeps a line there too, waits meanwhile.
func (e *Env) setHosts(ctx context.Context, owner string, entries ...node.HostsEntry) error {
	release, err := e.Lock(ctx, ondisk.HostsLock)
	if err != nil {
		return fmt.Errorf("writing to /etc/hosts: %w", err)
	}
	defer release()
	old, _ := e.read("/etc/hosts") // none: a new one is written
	if _, err := e.write("/etc/hosts", node.EditHosts(old, owner, entries), Mode(0o644)); err != nil {
		return fmt.Errorf("writing to /etc/hosts: %w", err)
	}
	return nil
}

func (e *Env) hasHosts(owner string, entries ...node.HostsEntry) bool {
	old, _ := e.read("/etc/hosts")
	return bytes.Equal(node.EditHosts(old, owner, entries), old)
}
