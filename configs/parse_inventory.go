package configs

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/ondisk"
	"go.yaml.in/yaml/v3"
)

// mergedInventory is an Inventory as the user wrote it, for encoding. A decoded Site does not show
// whether a field was removed, set to false, or missing.
type mergedInventory struct {
	name     string
	defaults *yaml.Node
	sites    []*yaml.Node
}

// ParseInventory parses an Inventory. Each of its Sites is complete and valid. Its error is of type
// Problems; a problem in defaults is reported once.
func ParseInventory(name string, data []byte) (*Inventory, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	return d.Inventory(Secret{}, false)
}

// setToken sets the token of all sites that have none. If forced is set, it also replaces tokens.
func (inv *Inventory) setToken(token Secret, forced bool) {
	m := inv.merged
	credentials := yamltree.Mapping()
	credentials.Content = append(credentials.Content, yamltree.Plain("token", "!!str"), yamltree.Quoted(token.Reveal()))
	instead := func(n *yaml.Node) *yaml.Node {
		n = yamltree.Without(n, "credentials")
		n.Content = append(n.Content, yamltree.Plain("credentials", "!!str"), credentials)
		return n
	}
	d := yamltree.Get(m.defaults, "credentials")
	if forced || d == nil || yamltree.IsNull(d) || len(d.Content) == 0 {
		m.defaults = instead(m.defaults)
	}
	for i := range inv.Sites {
		own := &inv.Sites[i].Site.Credentials
		if given := yamltree.Get(m.sites[i], "credentials"); given != nil && (forced || own.Token.IsZero()) {
			m.sites[i] = yamltree.Without(m.sites[i], "credentials")
		}
		if forced || own.Token.IsZero() {
			*own = Credentials{Token: token}
		}
	}
}

// ParsePublicInventory is like ParseInventory, for Sites that may lack their credentials.
func ParsePublicInventory(name string, data []byte) (*Inventory, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	return parseInventory(d.Document, false, sitePath)
}

// ParseWholeInventory is like ParsePublicInventory, but does not limit the number of reported
// problems. Messages name the i-th Site by site(i).
func ParseWholeInventory(name string, data []byte, site func(i int) string) (*Inventory, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	d.All = true
	return parseInventory(d.Document, false, site)
}

// sitePath returns the path of the i-th Site in an Inventory.
func sitePath(i int) string { return fmt.Sprintf("sites[%d]", i) }

func parseInventory(doc *strict.Document, credentials bool, site func(i int) string) (*Inventory, error) {
	if doc.Kind != KindInventory {
		return nil, doc.WrongKind(KindInventory)
	}
	inv := new(Inventory)
	doc.DecodeInto(inv)
	undecoded := slices.Clone(doc.Probs)
	if doc.Overflowed() {
		return nil, doc.Err()
	}
	inv.merge(doc)
	report := inventoryReport{doc: doc, undecoded: undecoded, site: site}
	inv.validate(credentials, &report)
	report.finish(len(inv.Sites))
	if err := doc.Err(); err != nil {
		return nil, err
	}
	return inv, nil
}

// merge completes each Site with the fields of defaults.
func (inv *Inventory) merge(doc *strict.Document) {
	m := &mergedInventory{name: doc.File, defaults: yamltree.Mapping()}
	if n := yamltree.Get(doc.Root, "defaults"); n != nil && n.Kind == yaml.MappingNode {
		m.defaults = n
	}
	for _, reserved := range []string{"apiVersion", "kind"} {
		if n := yamltree.Get(m.defaults, reserved); n != nil {
			doc.Addf(n, "defaults."+reserved, "belongs only at the top of the Inventory: remove it here")
		}
	}
	if n := yamltree.Get(m.defaults, "match"); n != nil {
		doc.Addf(n, "defaults.match", "applies to one machine: set it in each item of sites")
	}
	if n := yamltree.Get(doc.Root, "sites"); n != nil && n.Kind == yaml.SequenceNode {
		for _, item := range n.Content {
			if item = yamltree.Deref(item); item.Kind != yaml.MappingNode {
				item = yamltree.Mapping()
			}
			m.sites = append(m.sites, item)
		}
	}
	inv.merged = m
	for i := range inv.Sites {
		inv.Sites[i].Site = m.site(i)
		inv.Sites[i].setDefaults()
		if s := &inv.Sites[i].Site; s.SpreadSeconds == 0 {
			s.SpreadSeconds = DefaultSpread(len(inv.Sites))
		}
	}
}

// DefaultSpread returns the default of spreadSeconds for a number of Sites: one second for each
// hundred machines. 0 means that the minimum is enough.
func DefaultSpread(sites int) int {
	if seconds := sites / 100; time.Duration(seconds)*time.Second > ondisk.BootSpread {
		return min(seconds, 600)
	}
	return 0
}

// site returns the i-th Site, merged with defaults. It leaves out fields that cannot be decoded.
func (m *mergedInventory) site(i int) Site {
	node := mergeNodes("", yamltree.Without(m.defaults, "apiVersion", "kind", "match"), yamltree.Without(m.sites[i], "name", "match"))
	var s Site
	// The problems of decoding have already been reported for the Inventory.
	strict.New("", node, limits(KindInventory)).DecodeInto(&s)
	s.APIVersion, s.Kind = APIVersion, KindSite
	return s
}

// setDefaults sets fields that neither the site nor the Inventory's defaults set.
func (s *InventorySite) setDefaults() {
	if s.Name == "" && !strings.Contains(s.NodeName, "{{") {
		s.Name = strings.ToLower(s.NodeName)
	}
	if s.NodeName == "" {
		s.NodeName = s.Name
	}
	strict.ApplyDefaults(&s.Site)
}

// choices returns groups of alternative fields. A site that sets one field of a group inherits no
// field of the group from defaults.
func choices() [][]string {
	return [][]string{
		{"caCertHashes", "caCert", "caFile", "unsafeSkipCAVerification"},
		{"ignition", "ignitionFile"},
	}
}

// mergeNodes merges over into base, by the rules in the comment of the type Inventory.
func mergeNodes(path string, base, over *yaml.Node) *yaml.Node {
	replaced := map[string]bool{}
	own := map[string]*yaml.Node{}
	for k, v := range yamltree.Entries(over) {
		own[k], replaced[k] = v, true
		if path != "" {
			continue
		}
		for _, group := range choices() {
			if slices.Contains(group, k) && !yamltree.IsNull(v) {
				for _, other := range group {
					replaced[other] = true
				}
			}
		}
	}
	out := yamltree.Mapping()
	add := func(k string, v *yaml.Node) { out.Content = append(out.Content, yamltree.Plain(k, "!!str"), v) }
	for k, v := range yamltree.Entries(base) {
		o := own[k]
		switch {
		case !replaced[k]:
			add(k, v)
		case o != nil && o.Kind == yaml.MappingNode && v.Kind == yaml.MappingNode && strict.Join(path, k) != "credentials":
			add(k, mergeNodes(strict.Join(path, k), v, o))
			delete(own, k)
		}
	}
	for k := range yamltree.Entries(over) {
		if v := own[k]; v != nil && !yamltree.IsNull(v) {
			add(k, v)
			delete(own, k)
		}
	}
	return out
}

// inventoryReport collects the problems of an Inventory and finds their positions.
type inventoryReport struct {
	doc       *strict.Document
	undecoded Problems
	site      func(i int) string // the name of the i-th Site in messages
	shared    map[Problem][]int  // problems without a position → indexes of the sites that have them
	order     []Problem
}

// at reports a problem of the field at path in the Inventory.
func (r *inventoryReport) at(path, format string, args ...any) {
	r.found(strict.NewProblem(path, format, args...))
}

// found adds the position to a problem, and reports it.
func (r *inventoryReport) found(p Problem) {
	r.doc.AddValidation(r.undecoded, p)
}

// under returns the problem with path in front of its own path.
func under(path string, p Problem) Problem {
	p.Path = strings.TrimSuffix(path+"."+p.Path, ".")
	return p
}

// of reports a problem of the i-th Site. If the site itself sets the field, the problem is reported
// there. Otherwise, it is reported in defaults, once for all sites.
func (r *inventoryReport) of(i int, p Problem) {
	own := sitePath(i)
	for path := p.Path; path != ""; path = parent(path) {
		if r.doc.Has(own + "." + path) {
			r.found(under(own, p))
			return
		}
		if r.doc.Has("defaults." + path) {
			break
		}
	}
	if r.shared == nil {
		r.shared = map[Problem][]int{}
	}
	p = Problem{Path: p.Path, Msg: p.Msg, Missing: p.Missing}
	if r.shared[p] == nil {
		r.order = append(r.order, p)
	}
	r.shared[p] = append(r.shared[p], i)
}

// finish reports the problems that were collected in shared.
func (r *inventoryReport) finish(sites int) {
	for _, p := range r.order {
		of := r.shared[p]
		given := p.Path != "" && r.doc.Has("defaults."+p.Path)
		switch {
		case !given && len(of) < max(sites, 2):
			for _, i := range of {
				r.found(under(sitePath(i), p))
			}
		case len(of) < sites:
			p.Msg = fmt.Sprintf("%s (in %d of %d Sites, the first is %s)", p.Msg, len(of), sites, r.site(of[0]))
			r.found(under("defaults", p))
		default:
			r.found(under("defaults", p))
		}
	}
}

func parent(path string) string {
	i := strings.LastIndexAny(path, ".[")
	return path[:max(i, 0)]
}

var siteName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`)

// validate reports the problems of the sites, and each value that two sites have but only one
// machine can have.
func (inv *Inventory) validate(credentials bool, r *inventoryReport) {
	if len(inv.Sites) == 0 {
		r.at("sites", "needs at least one item, e.g. - name: shop-1, with match: and the fields that differ from defaults")
	}
	once := map[string]string{} // value that only one machine can have → the site that has it
	claim := func(i int, path, what, key string) {
		at := inv.label(i, r)
		if first, taken := once[key]; taken && first != at {
			r.at(sitePath(i)+"."+path, "%s is also used by %s: only one machine can have it", what, first)
		} else if !taken {
			once[key] = at
		}
	}
	shared := inv.sharedNodeName(r)
	for i := range inv.Sites {
		inv.validateSite(i, credentials, r)
		s := &inv.Sites[i]
		if s.hasSiteName() {
			claim(i, "name", fmt.Sprintf("%q", s.Name), "name "+s.Name)
		}
		for _, k := range s.Match.Keys() {
			claim(i, k.Field, k.Key, k.Key)
		}
		// If the name is a duplicate, so is the node name that is derived from it. Report only the
		// name.
		if (s.NodeName != s.Name || once["name "+s.Name] == inv.label(i, r)) && !(shared && yamltree.Get(inv.merged.sites[i], "nodeName") == nil) {
			inv.claimNodeName(i, claim)
		}
		inv.claimNetwork(i, claim)
	}
}

// hasSiteName reports whether the site has a valid name.
func (s *InventorySite) hasSiteName() bool {
	return siteName.MatchString(s.Name) && len(s.Name) <= 63 && !strings.Contains(s.Name, "..")
}

// validateSite reports the problems of the i-th site alone.
func (inv *Inventory) validateSite(i int, credentials bool, r *inventoryReport) {
	s := &inv.Sites[i]
	own := sitePath(i)
	switch {
	case s.Name == "":
		r.found(Problem{Path: own + ".name", Missing: true, Msg: "is required, since nodeName is a template: files made for the Site have this name"})
	case !s.hasSiteName():
		r.at(own+".name", "%q must be lower-case letters, digits, - and ., beginning and ending with a letter or digit, at most 63", strict.Shorten(s.Name))
	}
	var probs Problems
	s.Match.Validate("match", &probs)
	for _, p := range probs {
		r.found(under(own, p))
	}
	if s.NodeType == NodeControlPlane {
		r.at(own+".nodeType", "control-plane nodes need their own Sites: otherwise, every machine stamped with the Inventory would have the cluster's keys")
	}
	for _, p := range s.validate(credentials) {
		// If the name is invalid, so is the node name that is derived from it. Report only the
		// name.
		if p.Path != "nodeName" || s.NodeName != s.Name || siteName.MatchString(s.Name) && len(s.Name) <= 63 {
			r.of(i, p)
		}
	}
}

// claimer records that a site has a value that only one machine can have. If another site already
// has the value, it reports that.
type claimer func(i int, path, what, key string)

func (inv *Inventory) claimNodeName(i int, claim claimer) {
	name := inv.Sites[i].NodeName
	if name == "" || strings.Contains(name, "{{") {
		return
	}
	claim(i, "nodeName", "the node name "+name, "node "+strings.ToLower(name))
}

// sharedNodeName reports a node name in defaults that several sites inherit. It returns whether
// there is one, so that the sites need not be reported too.
func (inv *Inventory) sharedNodeName(r *inventoryReport) bool {
	given := yamltree.Get(inv.merged.defaults, "nodeName")
	if given == nil || given.Value == "" || strings.Contains(given.Value, "{{") {
		return false
	}
	have := 0
	for _, s := range inv.merged.sites {
		if yamltree.Get(s, "nodeName") == nil {
			have++
		}
	}
	if have < 2 {
		return false
	}
	r.at("defaults.nodeName", "gives %d machines the node name %s: remove it, so that each node gets the name of its site, or use a template, e.g. shop-{{.MAC}}", have, strict.Shorten(given.Value))
	return true
}

// claimNetwork claims the MAC addresses and IP addresses of a site. Sites in different node pools
// may have the same IP addresses, because their networks are separate.
func (inv *Inventory) claimNetwork(i int, claim claimer) {
	s := &inv.Sites[i].Site
	for j, f := range s.Network.Interfaces {
		if mac := forms.CardMAC(f.MAC); mac != "" {
			claim(i, fmt.Sprintf("network.interfaces[%d].mac", j), "MAC address "+mac, "MAC address "+mac)
		}
	}
	for _, n := range s.Network.Subnets() {
		a := n.Addr().Unmap().WithZone("")
		if a.IsLinkLocalUnicast() {
			continue
		}
		claim(i, n.Path, addressOf(a, s.NodePool), "address "+a.String()+" "+s.NodePool)
	}
}

func addressOf(a netip.Addr, pool string) string {
	if pool == "" {
		return "address " + a.String()
	}
	return fmt.Sprintf("address %s in node pool %s", a, pool)
}

// label returns the name of the i-th site for messages.
func (inv *Inventory) label(i int, r *inventoryReport) string {
	if name := inv.Sites[i].Name; name != "" {
		return fmt.Sprintf("%s (%s)", r.site(i), strict.Shorten(name))
	}
	return r.site(i)
}

// InlineFiles replaces caFile and ignitionFile by the contents of the files, which do not exist on
// the machine. It calls read with the path of the field in the document, and the path of the file.
func (inv *Inventory) InlineFiles(read func(field, path string) (string, error)) error {
	var errs []error
	changed := false
	inline := func(at string, m *yaml.Node) {
		for i := 0; i+1 < len(m.Content); i += 2 {
			instead, ok := map[string]string{"caFile": "caCert", "ignitionFile": "ignition"}[m.Content[i].Value]
			v := yamltree.Deref(m.Content[i+1])
			if !ok || yamltree.IsNull(v) || v.Value == "" {
				continue
			}
			text, err := read(at+"."+m.Content[i].Value, v.Value)
			errs = append(errs, err)
			m.Content[i], m.Content[i+1] = yamltree.Plain(instead, "!!str"), yamltree.Quoted(text)
			changed = true
		}
	}
	inline("defaults", inv.merged.defaults)
	for i, m := range inv.merged.sites {
		inline(sitePath(i), m)
	}
	if err := errors.Join(errs...); err != nil || !changed {
		return err
	}
	doc := strict.New(inv.merged.name, inv.merged.root(), limits(KindInventory))
	doc.Kind = KindInventory
	again, err := parseInventory(doc, false, sitePath)
	if err != nil {
		return err
	}
	*inv = *again
	return nil
}

// root returns the whole document as a YAML tree.
func (m *mergedInventory) root() *yaml.Node {
	return yamltree.Mapping("apiVersion", yamltree.Quoted(APIVersion), "kind", yamltree.Quoted(KindInventory), "defaults", m.defaults, "sites", yamltree.List(m.sites...))
}

// EncodeSlotInventory encodes the Inventory for a slot, including its secrets. Equal Inventories
// give equal bytes.
func EncodeSlotInventory(inv *Inventory) ([]byte, error) {
	root := yamltree.Mapping("apiVersion", yamltree.Quoted(APIVersion), "kind", yamltree.Quoted(KindInventory))
	if d := yamltree.Clean(inv.merged.defaults); len(d.Content) > 0 {
		yamltree.Set(root, "defaults", d)
	}
	b, err := yamltree.EncodeWithList(root, "sites", inv.merged.sites, yamltree.Clean)
	if err != nil {
		return nil, fmt.Errorf("encoding the inventory: %w", err)
	}
	return b, nil
}
