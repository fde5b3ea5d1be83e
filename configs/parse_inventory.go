package configs

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/ondisk"
	"go.yaml.in/yaml/v3"
)

// mergedInventory is what an Inventory is written out from: what a person has
// written, since a field that is given as false or taken away leaves no trace
// in a Site.
type mergedInventory struct {
	name     string
	defaults *yaml.Node
	sites    []*yaml.Node
}

// ParseInventory reads an Inventory. Each of its Sites is whole and valid. The
// error is Problems with everything found wrong; what is wrong with defaults is
// said once.
func ParseInventory(name string, data []byte) (*Inventory, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	return d.Inventory(Secret{}, false)
}

// setToken gives the token to the sites that have none, or to all.
func (inv *Inventory) setToken(token Secret, forced bool) {
	m := inv.merged
	credentials := empty()
	credentials.Content = append(credentials.Content, plain("token", "!!str"), encodeString(token.Reveal()))
	instead := func(n *yaml.Node) *yaml.Node {
		n = without(n, "credentials")
		n.Content = append(n.Content, plain("credentials", "!!str"), credentials)
		return n
	}
	d := yamltree.Get(m.defaults, "credentials")
	if forced || d == nil || isNull(d) || len(d.Content) == 0 {
		m.defaults = instead(m.defaults)
	}
	for i := range inv.Sites {
		own := &inv.Sites[i].Site.Credentials
		if given := yamltree.Get(m.sites[i], "credentials"); given != nil && (forced || own.Token.IsZero()) {
			m.sites[i] = without(m.sites[i], "credentials")
		}
		if forced || own.Token.IsZero() {
			*own = Credentials{Token: token}
		}
	}
}

// ParsePublicInventory asks for no credentials, as ParsePublicSite: a machine
// that is enrolled needs none.
func ParsePublicInventory(name string, data []byte) (*Inventory, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	return d.doc.inventory(false)
}

func (doc *document) inventory(credentials bool) (*Inventory, error) {
	if doc.kind != KindInventory {
		return nil, doc.wrongKind(KindInventory)
	}
	inv := new(Inventory)
	doc.decode(doc.root, reflect.ValueOf(inv).Elem(), "")
	undecoded := slices.Clone(doc.probs)
	if doc.nodes > doc.maxNodes() || doc.untold > 0 {
		return nil, doc.problems()
	}
	inv.merge(doc)
	report := inventoryReport{doc: doc, undecoded: undecoded}
	inv.validate(credentials, &report)
	report.finish(len(inv.Sites))
	if err := doc.problems(); err != nil {
		return nil, err
	}
	return inv, nil
}

// merge makes each Site whole.
func (inv *Inventory) merge(doc *document) {
	m := &mergedInventory{name: doc.file, defaults: empty()}
	if n := yamltree.Get(doc.root, "defaults"); n != nil && n.Kind == yaml.MappingNode {
		m.defaults = n
	}
	for _, reserved := range []string{"apiVersion", "kind"} {
		if n := yamltree.Get(m.defaults, reserved); n != nil {
			doc.problem(n, "defaults."+reserved, "stands once, at the top of the Inventory: remove it here")
		}
	}
	if n := yamltree.Get(m.defaults, "match"); n != nil {
		doc.problem(n, "defaults.match", "is of one machine: write it in each of sites")
	}
	if n := yamltree.Get(doc.root, "sites"); n != nil && n.Kind == yaml.SequenceNode {
		for _, item := range n.Content {
			if item = yamltree.Deref(item); item.Kind != yaml.MappingNode {
				item = empty()
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

// DefaultSpread is the default of a Site's SpreadSeconds in an Inventory of so many: a
// hundred machines a second. 0: the least is enough.
func DefaultSpread(sites int) int {
	if seconds := sites / 100; time.Duration(seconds)*time.Second > ondisk.BootSpread {
		return min(seconds, 600)
	}
	return 0
}

// site is the i-th Site, whole, with what could be decoded of it.
func (m *mergedInventory) site(i int) Site {
	node := mergeNodes("", without(m.defaults, "apiVersion", "kind", "match"), without(m.sites[i], "name", "match"))
	var s Site
	v := reflect.ValueOf(&s).Elem()
	// What is wrong with the form has been reported where it stands.
	scratch := &document{kind: KindInventory, where: map[string]position{}}
	scratch.decode(node, v, "")
	s.APIVersion, s.Kind = APIVersion, KindSite
	return s
}

// setDefaults fills in what neither the site nor the Inventory's defaults say.
func (s *InventorySite) setDefaults() {
	if s.Name == "" && !strings.Contains(s.NodeName, "{{") {
		s.Name = strings.ToLower(s.NodeName)
	}
	if s.NodeName == "" {
		s.NodeName = s.Name
	}
	applyDefaults(reflect.ValueOf(&s.Site).Elem())
}

// choices are fields of which one says what another would: a site that gives
// one of a group has the default's others taken away.
func choices() [][]string {
	return [][]string{
		{"caCertHashes", "caCert", "caFile", "unsafeSkipCAVerification"},
		{"ignition", "ignitionFile"},
	}
}

// mergeNodes is base changed by over, as the documentation of Inventory says.
func mergeNodes(path string, base, over *yaml.Node) *yaml.Node {
	gone := map[string]bool{}
	own := map[string]*yaml.Node{}
	for k, v := range entries(over) {
		own[k], gone[k] = v, true
		if path != "" {
			continue
		}
		for _, group := range choices() {
			if slices.Contains(group, k) && !isNull(v) {
				for _, other := range group {
					gone[other] = true
				}
			}
		}
	}
	out := empty()
	add := func(k string, v *yaml.Node) { out.Content = append(out.Content, plain(k, "!!str"), v) }
	for k, v := range entries(base) {
		o := own[k]
		switch {
		case !gone[k]:
			add(k, v)
		case o != nil && o.Kind == yaml.MappingNode && v.Kind == yaml.MappingNode && join(path, k) != "credentials":
			add(k, mergeNodes(join(path, k), v, o))
			delete(own, k)
		}
	}
	for k := range entries(over) {
		if v := own[k]; v != nil && !isNull(v) {
			add(k, v)
			delete(own, k)
		}
	}
	return out
}

func empty() *yaml.Node { return &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"} }

// entries are a mapping's, in order and without aliases; of a key that is given
// twice, which has been reported, the last counts.
func entries(m *yaml.Node) func(func(string, *yaml.Node) bool) {
	return func(yield func(string, *yaml.Node) bool) {
		for i := 0; i+1 < len(m.Content); i += 2 {
			if k := m.Content[i]; k.Kind == yaml.ScalarNode && !yield(k.Value, yamltree.Deref(m.Content[i+1])) {
				return
			}
		}
	}
}

// without is a mapping that lacks some keys.
func without(m *yaml.Node, names ...string) *yaml.Node {
	out := empty()
	for k, v := range entries(m) {
		if !slices.Contains(names, k) {
			out.Content = append(out.Content, plain(k, "!!str"), v)
		}
	}
	return out
}

// inventoryReport gathers problems and finds where they stand.
type inventoryReport struct {
	doc       *document
	undecoded Problems
	shared    map[Problem][]int // without position: of which sites
	order     []Problem
}

// at reports a problem of a field of the Inventory.
func (r *inventoryReport) at(path, format string, args ...any) {
	r.found(Problem{Path: path, Msg: atMost(maxMsg, fmt.Sprintf(format, args...))})
}

// found reports a problem, of which path and words are known.
func (r *inventoryReport) found(p Problem) {
	if r.doc.reported(r.undecoded, p.Path) {
		return
	}
	at := r.doc.find(p.Path)
	p.File, p.Line, p.Col = r.doc.file, at.line, at.col
	r.doc.probs = append(r.doc.probs, p)
}

// under is the problem of a field below another.
func (p Problem) under(path string) Problem {
	p.Path = path + "." + p.Path
	return p
}

// of reports a problem of the i-th Site: in the site where it says something on
// it, else in defaults, once for all sites.
func (r *inventoryReport) of(i int, p Problem) {
	own := fmt.Sprintf("sites[%d]", i)
	for path := p.Path; path != ""; path = parent(path) {
		if _, ok := r.doc.where[own+"."+path]; ok {
			r.found(p.under(own))
			return
		}
		if _, ok := r.doc.where["defaults."+path]; ok {
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

// finish reports what concerns more than one site.
func (r *inventoryReport) finish(sites int) {
	for _, p := range r.order {
		of := r.shared[p]
		_, given := r.doc.where["defaults."+p.Path]
		switch {
		case !given && len(of) < max(sites, 2):
			for _, i := range of {
				r.found(p.under(fmt.Sprintf("sites[%d]", i)))
			}
		case len(of) < sites:
			p.Msg = fmt.Sprintf("%s (in %d of %d Sites, the first is sites[%d])", p.Msg, len(of), sites, of[0])
			r.found(p.under("defaults"))
		default:
			r.found(p.under("defaults"))
		}
	}
}

func parent(path string) string {
	i := strings.LastIndexAny(path, ".[")
	return path[:max(i, 0)]
}

var siteName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`)

// validate reports every problem of the sites, and what two of them have that
// only one can.
func (inv *Inventory) validate(credentials bool, r *inventoryReport) {
	if len(inv.Sites) == 0 {
		r.at("sites", "needs at least one Site: - name: shop-1, with match: and what differs from defaults")
	}
	once := map[string]string{} // what only one can have -> which site has it
	claim := func(i int, path, what, key string) {
		at := inv.label(i)
		if first, taken := once[key]; taken && first != at {
			r.at(fmt.Sprintf("sites[%d].%s", i, path), "%s is also that of %s: only one machine can have it", what, first)
		} else if !taken {
			once[key] = at
		}
	}
	shared := inv.sharedNodeName(r)
	for i := range inv.Sites {
		s := &inv.Sites[i]
		own := fmt.Sprintf("sites[%d]", i)
		switch {
		case s.Name == "":
			r.found(Problem{Path: own + ".name", Missing: true, Msg: "is required, since nodeName is a template: files made for the Site have this name"})
		case !siteName.MatchString(s.Name) || len(s.Name) > 63 || strings.Contains(s.Name, ".."):
			r.at(own+".name", "%q must be lower-case letters, digits, - and ., beginning and ending with a letter or digit, at most 63", shorten(s.Name))
		default:
			claim(i, "name", fmt.Sprintf("%q", s.Name), "name "+s.Name)
		}
		var probs Problems
		s.Match.validate("match", &probs)
		for _, p := range probs {
			r.found(p.under(own))
		}
		if s.NodeType == NodeControlPlane {
			r.at(own+".nodeType", "control-plane nodes have Sites of their own: every machine that is stamped with the Inventory would have the cluster's keys")
		}
		for _, p := range s.validate(credentials) {
			// A node name that follows from a name which is wrong is not a second problem.
			if p.Path != "nodeName" || s.NodeName != s.Name || siteName.MatchString(s.Name) && len(s.Name) <= 63 {
				r.of(i, p)
			}
		}
		for _, k := range s.Match.keys() {
			claim(i, k.field, k.key, k.key)
		}
		// A node name that follows from a name which is taken is not a second problem.
		if (s.NodeName != s.Name || once["name "+s.Name] == inv.label(i)) && !(shared && yamltree.Get(inv.merged.sites[i], "nodeName") == nil) {
			inv.claimNodeName(i, claim)
		}
		inv.claimNetwork(i, claim)
	}
}

// claimer notes what only one machine can have.
type claimer func(i int, path, what, key string)

func (inv *Inventory) claimNodeName(i int, claim claimer) {
	name := inv.Sites[i].NodeName
	if name == "" || strings.Contains(name, "{{") {
		return
	}
	claim(i, "nodeName", "the node name "+name, "node "+strings.ToLower(name))
}

// sharedNodeName reports a node name that defaults give to several sites; the
// sites then need not be told of it.
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
	r.at("defaults.nodeName", "gives %d machines the node name %s: remove it, and each node is called as its site, or let it tell them apart, e.g. shop-{{.MAC}}", have, shorten(given.Value))
	return true
}

// claimNetwork notes the network cards and addresses of a site. Places that are
// alike may have equal addresses; a node pool is one place.
func (inv *Inventory) claimNetwork(i int, claim claimer) {
	s := &inv.Sites[i].Site
	for j, f := range s.Network.Interfaces {
		if mac := CardMAC(f.MAC); mac != "" {
			claim(i, fmt.Sprintf("network.interfaces[%d].mac", j), "MAC address "+mac, "MAC address "+mac)
		}
	}
	for _, n := range s.Network.subnets() {
		a := n.Addr().Unmap().WithZone("")
		if a.IsLinkLocalUnicast() {
			continue
		}
		claim(i, n.path, addressOf(a, s.NodePool), "address "+a.String()+" "+s.NodePool)
	}
}

func addressOf(a netip.Addr, pool string) string {
	if pool == "" {
		return "address " + a.String()
	}
	return fmt.Sprintf("address %s in node pool %s", a, pool)
}

// label names a site for people.
func (inv *Inventory) label(i int) string {
	if name := inv.Sites[i].Name; name != "" {
		return fmt.Sprintf("sites[%d] (%s)", i, shorten(name))
	}
	return fmt.Sprintf("sites[%d]", i)
}

// InlineFiles puts the contents of the files that the Inventory names, caFile
// and ignitionFile, into it: read gets a field's path in the document and the
// path that stands there. On a machine there are no such files.
func (inv *Inventory) InlineFiles(read func(field, path string) (string, error)) error {
	var errs []error
	changed := false
	inline := func(at string, m *yaml.Node) {
		for i := 0; i+1 < len(m.Content); i += 2 {
			instead, ok := map[string]string{"caFile": "caCert", "ignitionFile": "ignition"}[m.Content[i].Value]
			v := yamltree.Deref(m.Content[i+1])
			if !ok || isNull(v) || v.Value == "" {
				continue
			}
			text, err := read(at+"."+m.Content[i].Value, v.Value)
			errs = append(errs, err)
			m.Content[i], m.Content[i+1] = plain(instead, "!!str"), encodeString(text)
			changed = true
		}
	}
	inline("defaults", inv.merged.defaults)
	for i, m := range inv.merged.sites {
		inline(fmt.Sprintf("sites[%d]", i), m)
	}
	if err := errors.Join(errs...); err != nil || !changed {
		return err
	}
	data, err := EncodeSlotInventory(inv)
	if err != nil {
		return err
	}
	again, err := ParsePublicInventory(inv.merged.name, data)
	if err != nil {
		var probs Problems
		if errors.As(err, &probs) {
			for i := range probs { // lines of what was made, which nobody has seen
				probs[i].Line, probs[i].Col = 0, 0
			}
		}
		return err
	}
	*inv = *again
	return nil
}

// EncodeSlotInventory is the Inventory as stamping writes it into a slot, with
// its secrets; the bytes depend on what it says alone.
func EncodeSlotInventory(inv *Inventory) ([]byte, error) {
	root := empty()
	put := func(m *yaml.Node, name string, v *yaml.Node) {
		m.Content = append(m.Content, plain(name, "!!str"), v)
	}
	put(root, "apiVersion", encodeString(APIVersion))
	put(root, "kind", encodeString(KindInventory))
	if d := clean(inv.merged.defaults); len(d.Content) > 0 {
		put(root, "defaults", d)
	}
	return encodeInventory(root, inv.merged.sites, clean)
}

// sitesAtOnce are so many that what is written at once costs little more than
// its own.
const sitesAtOnce = 100

// encodeInventory writes the fields that come first, and then the sites as form
// makes them. Of thousands only some are written at once: yaml's encoder keeps
// all its events, of 200 bytes, until it is done.
func encodeInventory(first *yaml.Node, sites []*yaml.Node, form func(*yaml.Node) *yaml.Node) ([]byte, error) {
	out, err := encodeNode(first)
	for i := 0; i < len(sites) && err == nil; i += sitesAtOnce {
		list := empty()
		list.Content = append(list.Content, plain("sites", "!!str"), sequence(sites[i:min(i+sitesAtOnce, len(sites))], form))
		var b []byte
		b, err = encodeNode(list)
		if i > 0 {
			b = bytes.TrimPrefix(b, []byte("sites:\n"))
		}
		out = append(out, b...)
	}
	if err != nil {
		return nil, fmt.Errorf("encoding the inventory: %w", err)
	}
	return out, nil
}

// sequence is a list of nodes as form makes them.
func sequence(items []*yaml.Node, form func(*yaml.Node) *yaml.Node) *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for _, item := range items {
		n.Content = append(n.Content, form(item))
	}
	return n
}

// plainKey finds keys that need no quotes.
var plainKey = regexp.MustCompile(`^[A-Za-z]{2,}$`)

// clean is a node without comments, aliases and styles.
func clean(n *yaml.Node) *yaml.Node {
	n = yamltree.Deref(n)
	out := &yaml.Node{Kind: n.Kind, Tag: n.ShortTag(), Value: n.Value}
	if n.Kind == yaml.ScalarNode && out.Tag == "!!str" {
		out.Style = yaml.DoubleQuotedStyle
	}
	if n.Kind == yaml.MappingNode {
		sorted := maps.Collect(entries(n))
		for _, k := range slices.Sorted(maps.Keys(sorted)) {
			key := encodeString(k)
			if plainKey.MatchString(k) {
				key = plain(k, "!!str")
			}
			out.Content = append(out.Content, key, clean(sorted[k]))
		}
		return out
	}
	for _, c := range n.Content {
		out.Content = append(out.Content, clean(c))
	}
	return out
}
