package site

import (
	"bytes"
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/coreos/ignition/v2/config/v3_6/types"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/configs/templates"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Files that first boot keeps on DATA.
const (
	// KeyFile contains the key of the HMACs that identify Sites without revealing their contents.
	KeyFile = ondisk.StateDir + "/key"
	// IgnitionCopy is a copy of the Ignition config of the last applied Site.
	IgnitionCopy = ondisk.StateDir + "/config.ign"
	// StampedCopy contains the date of the Site in ondisk.SiteCopy, in seconds since the epoch.
	// Copies of former releases have none.
	StampedCopy = ondisk.StateDir + "/site-stamped"
	// seenDir records the contents of each stick, so that an unchanged stick is not used again.
	seenDir = ondisk.StateDir + "/sticks"
)

// These files describe /etc of this root file system (ROOT-A or ROOT-B) and are stored in it. A
// newly written root file system has none of these files, so the Site's settings are applied to it.
const (
	// AppliedFile identifies the Site whose settings are in place; kubelet.service waits for
	// it.
	AppliedFile = ondisk.EtcDir + "/applied"
	// manifestFile lists the files that package apply has made.
	manifestFile = ondisk.EtcDir + "/manifest.json"
	originalsDir = ondisk.EtcDir + "/originals"
)

// ResetFiles lists the files that a reset removes. The records of sticks stay, so that an old stick
// is not accepted afterwards (see ResetSticks).
var ResetFiles = []string{AppliedFile, ondisk.SiteCopy, IgnitionCopy, StampedCopy}

// Active is a machine's active Site. It never changes after it was read, so that it is not mixed with
// a Site that is stamped meanwhile: a Reader then returns another one.
type Active struct {
	Site *configs.Site
	// Image is the image that this machine runs.
	Image ondisk.ImageInfo
	// Node is the node name that the Site gives this machine.
	Node string
	// Hostname is Node, except on a member of a cluster with another name: until it leaves that
	// cluster, it keeps the name in its certificate.
	Hostname string
	// MAC is an HMAC of the Site's contents without the token, which is wiped after the join.
	MAC string
	// Device is the machine's own slot, or empty for a Site on a stick.
	Device string
	// Stamped is when the Site was stamped, in seconds since the epoch.
	Stamped int64
	// Rejected is the error of a newer Site in the slot that was rejected, or nil if there is none.
	Rejected error

	// mustRewrite means that the slot must be rewritten: it has an Inventory or a Site with match, or
	// a rewrite was interrupted.
	mustRewrite bool

	config   *types.Config // the Site's settings as an Ignition config
	ignition []byte        // the slot's config.ign; nil if there is none
	inputs   siteInputs
}

// siteInputs contains everything that an Active is made from, except the image.
type siteInputs struct {
	doc, ignition []byte
	stamped       int64
	machine       siteconf.Machine
	joined        member.JoinedAs
	member        string
	enrolled      bool
	key           []byte
}

// Reader reads the active Site. It resolves the Site again only if its inputs have changed.
type Reader struct {
	Image ondisk.ImageInfo
	Last  *Active // the last Active that was read without an error
}

func (r *Reader) read(e *machine.Env) (*Active, error) {
	a, err := Read(e, r.Image, r.Last)
	if err == nil {
		r.Last = a
	}
	return a, err
}

// ErrNoSite means that the slot has no Site for this machine, as in every golden image.
var ErrNoSite = errors.New("there is no Site in the slot")

// readSite reads and checks the Site in a slot. before is an earlier result, or nil.
func readSite(e *machine.Env, image ondisk.ImageInfo, dev string, before *Active) (*slot.Contents, *Active, error) {
	c, f, err := readContents(e, dev, before)
	if err != nil {
		return c, nil, err
	}
	a, err := resolveSite(e, image, f, before)
	if err == nil {
		a.mustRewrite = f.contents != c || c.Unfinished
	}
	return c, a, err
}

// readContents reads a slot, and finds the Site for this machine in it.
func readContents(e *machine.Env, dev string, before *Active) (c *slot.Contents, f *slotSite, err error) {
	c, err = e.ReadSlot(dev)
	if errors.Is(err, slot.ErrNoSite) || errors.Is(err, slot.ErrBlank) {
		return c, nil, fmt.Errorf("%w (%s: %w)", ErrNoSite, dev, err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("reading the slot %s: %w", dev, err)
	}
	f, err = forMachine(e, c, before)
	if isOthers(err) {
		return c, nil, fmt.Errorf("%w (%s: %w)", ErrNoSite, dev, err)
	}
	return c, f, err
}

// resolveSite makes an Active of f. It reuses the parts of before that have the same inputs.
func resolveSite(e *machine.Env, image ondisk.ImageInfo, f *slotSite, before *Active) (*Active, error) {
	c, doc := f.contents, f.contents.Files[ondisk.SlotSite]
	m := e.Facts()
	j, _ := member.ReadJoinedAs(e)
	cert, notEnrolled := member.Enrolment(e)
	memberName := member.CertNodeName(cert)
	inputs := siteInputs{doc, c.Files[ondisk.SlotIgnition], c.Info.Stamped, m, j, memberName, notEnrolled == nil, e.Contents(KeyFile)}
	if before != nil && reflect.DeepEqual(before.inputs, inputs) {
		a := *before
		a.Device, a.Rejected, a.mustRewrite = "", nil, false // these belong to the slot, not to the Site
		return &a, nil
	}
	same := before != nil && before.isMadeOf(doc, inputs.ignition)
	site := f.site
	if same {
		site = before.Site // only other inputs differ, for example after a join
	} else if site == nil {
		_, err := Parse(doc)
		return nil, err
	}
	if token := site.Credentials.Token; notEnrolled != nil && (ignition.Holds(inputs.ignition, token) || ignition.Holds([]byte(site.Ignition.Reveal()), token)) {
		return nil, run.NeedsPerson(errors.New("the Site's Ignition config contains the bootstrap token, which must be in credentials only"), "remove the token from the Ignition config, and stamp the Site again or bring it on a stick")
	}
	if !site.Match.IsZero() && !siteconf.Matches(site.Match, m) {
		return nil, run.NeedsPerson(errNotMeant, "stamp this machine's own Site")
	}
	name, err := nodeName(site, m, j, memberName)
	if err != nil {
		return nil, run.NeedsPerson(fmt.Errorf("finding this machine's node name: %w", err), "set nodeName in site.yaml")
	}
	hostname := name
	if notEnrolled == nil {
		hostname = memberName
	}
	a := &Active{Site: site, Image: image, Node: name, Hostname: hostname, Stamped: inputs.stamped, ignition: inputs.ignition, inputs: inputs}
	if same && before.Hostname == hostname && reflect.DeepEqual(before.inputs.machine, m) {
		a.config = before.config
	} else {
		called := *site
		called.NodeName = hostname
		if a.config, err = siteconf.Config(&called, m, inputs.ignition); err != nil {
			return nil, run.NeedsPerson(fmt.Errorf("the Site's settings have problems: %w", err), "correct site.yaml or its Ignition config")
		}
	}
	if same && bytes.Equal(before.inputs.key, inputs.key) {
		a.MAC = before.MAC
		return a, nil
	}
	if err := checkFitsImage(image, site); err != nil {
		return nil, err
	}
	a.MAC, err = siteMAC(inputs.key, site, inputs.ignition)
	return a, err
}

// nodeName returns the node name that the Site gives this machine. A member of a cluster keeps its
// name even if the machine's facts have changed since it joined.
func nodeName(site *configs.Site, m siteconf.Machine, joined member.JoinedAs, member string) (string, error) {
	was := cmp.Or(member, joined.Was)
	name, err := siteconf.NodeName(site, m)
	if missing := (*templates.MissingFactError)(nil); was != "" && errors.As(err, &missing) {
		return was, nil // at the join, the fact was not missing
	}
	if err == nil && was != "" && name != was {
		// Another network card may be the first one now. The machine is the same, and keeps its
		// name.
		if then, err := siteconf.NodeName(site, joined.Machine); err == nil && then == was {
			return was, nil
		}
	}
	return name, err
}

// Parse parses a Site from a slot or a stick. Its token may be missing.
func Parse(doc []byte) (*configs.Site, error) {
	site, err := configs.ParsePublicSite(ondisk.SlotSite, doc)
	if err != nil {
		return nil, run.NeedsPerson(fmt.Errorf("the Site has problems: %w", err), "correct site.yaml in the slot or on a stick, and restart the machine")
	}
	return site, nil
}

// checkFitsImage rejects a Site that does not fit the image, by the same rules as stamping.
func checkFitsImage(image ondisk.ImageInfo, site *configs.Site) error {
	probs := siteconf.CheckInfo(image, site)
	if probs == nil {
		return nil
	}
	if slices.ContainsFunc(probs, func(p configs.Problem) bool { return p.Path == "nodeType" }) {
		return run.NeedsPerson(fmt.Errorf("the Site has node type %s, but this image supports only %s", site.NodeType, strings.Join(image.NodeTypes, ", ")),
			"stamp a Site with one of these types, or write another image")
	}
	return rejectSite(probs)
}

func rejectSite(probs configs.Problems) error {
	return run.NeedsPerson(fmt.Errorf("the Site does not fit this image: %w", probs), "correct site.yaml in the slot or on a stick, and restart the machine")
}

// siteMAC returns an HMAC of a Site's contents without its token, so that it is the same after the
// token is removed.
func siteMAC(key []byte, site *configs.Site, ignition []byte) (string, error) {
	doc, err := withoutCredentials(site)
	if err != nil {
		return "", fmt.Errorf("identifying the Site: %w", err)
	}
	if token := site.Credentials.Token.Reveal(); token != "" {
		// In an old slot the Ignition config may contain the token, which is masked after the join.
		// Mask it here too, so that the Site does not count as changed.
		ignition = slot.Hide(ignition, token)
	}
	m := hmac.New(sha256.New, key)
	m.Write(doc)
	m.Write([]byte{0})
	m.Write(ignition)
	return hex.EncodeToString(m.Sum(nil)), nil
}

// Read reads the active Site from the slot or, if that is missing or invalid, from the copy of the
// last applied one. before is an earlier result, or nil. Phases use their pass's Reader instead.
func Read(e *machine.Env, image ondisk.ImageInfo, before *Active) (*Active, error) {
	dev, err := machine.OwnSlot(e)
	if err != nil {
		return nil, err
	}
	_, a, err := readSite(e, image, dev, before)
	if err == nil {
		a.Device = dev
		return a, nil
	}
	doc, copyErr := e.Read(ondisk.SiteCopy)
	if copyErr != nil {
		return nil, err
	}
	files := map[string][]byte{ondisk.SlotSite: doc}
	if ign, err := e.Read(IgnitionCopy); err == nil {
		files[ondisk.SlotIgnition] = ign
	}
	site, copyErr := Parse(doc)
	if copyErr != nil {
		return nil, err
	}
	c := &slot.Contents{Info: ondisk.SlotInfo{Stamped: copyStamped(e)}, Files: files}
	old, copyErr := resolveSite(e, image, &slotSite{contents: c, site: site}, before)
	if copyErr != nil {
		return nil, err
	}
	old.Device, old.Rejected = dev, err
	old.mustRewrite = pendingRewrite(e) != nil // check this even if this machine's own Site is invalid
	return old, nil
}

// copyStamped returns the date of the copy of the Site, or 0 if it has none.
func copyStamped(e *machine.Env) int64 { return slices.Max(append(secondsIn(e, StampedCopy), 0)) }

// isMadeOf reports whether the Site was made from this document and Ignition config.
func (a *Active) isMadeOf(doc, ignition []byte) bool {
	return bytes.Equal(a.inputs.doc, doc) && bytes.Equal(a.inputs.ignition, ignition)
}

// otherMachine returns an error if the Site gives a member another name: it is then probably
// another machine's Site. A Site that moves the member to another cluster may change the name.
func (a *Active) otherMachine(e *machine.Env, name string) error {
	moves := !a.Site.Credentials.Token.IsZero() &&
		(member.Unpinned(a.Site) || !slices.ContainsFunc(member.Pins(e), func(pin string) bool { return member.IsPinned(pin, a.Site.CAPins()) }))
	if name == "" || a.Node == name || moves {
		return nil
	}
	return run.NeedsPerson(fmt.Errorf("this machine is enrolled as %s, but the Site names it %s", name, a.Node), member.ResetForName)
}

// IsApplied reports whether the Site's settings are in place on this machine.
func (a *Active) IsApplied(e *machine.Env) bool { return e.Text(AppliedFile) == a.applied() }

// applied identifies the Site's settings on this machine, for AppliedFile.
func (a *Active) applied() string { return a.MAC + " " + a.Hostname }

// Sources returns a text that changes when the contents of a reachable slot change, valid or not.
func Sources(e *machine.Env) string {
	var all []string
	if dev, err := machine.OwnSlot(e); err == nil {
		all = append(all, slotDigest(e, dev))
	}
	for _, dev := range e.RemovableSlots() {
		all = append(all, dev+" "+slotDigest(e, dev))
	}
	return strings.Join(all, "\n")
}

// slotDigest returns a digest of a slot's contents, valid or not.
func slotDigest(e *machine.Env, dev string) string {
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

// IfAny returns the active Site, or nil if it cannot be read or edgebake did not build this node.
func IfAny(e *machine.Env, image ondisk.ImageInfo) *Active {
	active, err := Read(e, image, nil)
	if err != nil {
		e.Log.Info("continuing without a Site", "reason", err)
		return nil
	}
	return active
}
