package configs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Version is that of every document this package reads; APIVersion is what the
// document says.
const (
	Version    = "v1alpha1"
	APIVersion = "edgebake.io/" + Version
)

// Kinds of document.
const (
	KindImage     = "Image"
	KindSite      = "Site"
	KindInventory = "Inventory"
	KindCluster   = "Cluster"
)

// maxNodes bounds what aliases can blow a document up to; an Inventory has
// thousands of sites.
const (
	maxNodes          = 200_000
	maxInventoryNodes = 2_000_000
	maxSiteNodes      = 20_000
	maxItems          = 1000   // of one list in a Site
	maxSites          = 20_000 // of an Inventory
)

// ParseImage reads an Image: version first, then strictly, then defaults,
// then validation. The error is Problems with everything found wrong. Of a
// document for several architectures it is the first's; all are checked.
func ParseImage(name string, data []byte) (*Image, error) {
	all, err := ParseImages(name, data)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// ParseSite reads a Site as a person writes it. The error is Problems with
// everything found wrong.
func ParseSite(name string, data []byte) (*Site, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	return d.Site(Secret{}, false)
}

// ParsePublicSite reads a Site whose secrets have been forgotten, or are in
// another file. It is as strict as ParseSite but asks for no credentials.
func ParsePublicSite(name string, data []byte) (*Site, error) {
	site := new(Site)
	if err := parseKind(name, data, KindSite, site, func(*document) Problems { return site.validate(false) }); err != nil {
		return nil, err
	}
	return site, nil
}

// ErrGivenToken says what is wrong with a token that did not come with a document.
var ErrGivenToken = errors.New("the given token is not a bootstrap token: " + tokenWords + " (`kubeadm token create` makes one)")

// Document is a document whose YAML and kind have been read, and nothing else. It
// becomes a Go value once.
type Document struct {
	doc  *document
	data []byte
}

// Read reads a document of any kind that begins as one of edgebake's. The error is
// Problems.
func Read(name string, data []byte) (*Document, error) {
	doc, probs := readDocument(name, data)
	if probs != nil {
		return nil, probs
	}
	return &Document{doc, data}, nil
}

// Kind is the document's.
func (d *Document) Kind() string { return d.doc.kind }

// Site is the document as a Site. It gets the bootstrap token, if there is one and
// it has none itself; with forced, in any case.
func (d *Document) Site(token Secret, forced bool) (*Site, error) {
	site := new(Site)
	var bad error
	err := d.doc.parse(KindSite, site, func(*document) Problems {
		if token.IsZero() || !forced && !site.Credentials.Token.IsZero() {
			return site.Validate()
		}
		if !tokenForm.MatchString(token.Reveal()) {
			bad, site.Credentials = ErrGivenToken, Credentials{} // the document is not what has it
			return site.validate(false)
		}
		site.Credentials = Credentials{Token: token}
		return site.Validate()
	})
	if err := cmp.Or(err, bad); err != nil {
		return nil, err
	}
	return site, nil
}

// Inventory is the document as an Inventory. Its Sites get the bootstrap token as a
// Site does.
func (d *Document) Inventory(token Secret, forced bool) (*Inventory, error) {
	inv, err := d.doc.inventory(token.IsZero())
	if err != nil || token.IsZero() {
		return inv, err
	}
	if !tokenForm.MatchString(token.Reveal()) {
		return nil, ErrGivenToken
	}
	inv.setToken(token, forced)
	return inv, nil
}

// Image is the document as an Image, for the first of its architectures.
func (d *Document) Image() (*Image, error) {
	all, err := d.Images()
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// Any is the document as what its kind says: an *Image, a *Site, an *Inventory or
// a *ClusterFile.
func (d *Document) Any() (any, error) {
	switch d.doc.kind {
	case KindImage:
		return parsed(d.Image())
	case KindSite:
		return parsed(d.Site(Secret{}, false))
	case KindCluster:
		return parsed(d.Cluster())
	case KindInventory:
		return parsed(d.Inventory(Secret{}, false))
	}
	return nil, d.doc.wrongKind("")
}

// parsed keeps a nil pointer from becoming a non-nil any.
func parsed[T any](v *T, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return v, nil
}

func parseKind(name string, data []byte, kind string, into any, validate func(*document) Problems) error {
	doc, probs := readDocument(name, data)
	if probs != nil {
		return probs
	}
	return doc.parse(kind, into, validate)
}

// parse reads a document that was not read before.
func (doc *document) parse(kind string, into any, validate func(*document) Problems) error {
	if doc.kind != kind {
		return doc.wrongKind(kind)
	}
	v := reflect.ValueOf(into).Elem()
	doc.decode(doc.root, v, "")
	applyDefaults(v)
	if d, ok := into.(interface{ setDefaults() }); ok {
		d.setDefaults()
	}
	// A field that could not be decoded has been reported; what validation
	// says of its zero value would only confuse.
	undecoded := doc.probs
	if doc.untold > 0 || doc.nodes > doc.maxNodes() {
		return doc.problems()
	}
	for _, p := range validate(doc) {
		if doc.reported(undecoded, p.Path) {
			continue
		}
		p.File = doc.file
		at := doc.find(p.Path)
		p.Line, p.Col = at.line, at.col
		doc.probs = append(doc.probs, p)
	}
	return doc.problems()
}

// problems are the document's as an error, nil without any.
func (doc *document) problems() error {
	if doc.all {
		doc.probs.sort()
		return doc.probs.Err()
	}
	return doc.probs.first(doc.file, doc.untold).Err()
}

// reported tells whether problems of decoding are the reason of one at path: the field
// was not decoded, or is not there since its name was misspelt.
func (doc *document) reported(undecoded Problems, path string) bool {
	return slices.ContainsFunc(undecoded, func(u Problem) bool {
		_, there := doc.where[u.meant]
		return covers(u.Path, path) || !there && covers(u.meant, path)
	})
}

// covers reports whether path is outer or a field inside it.
func covers(outer, path string) bool {
	rest, ok := strings.CutPrefix(path, outer)
	return ok && outer != "" && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// document is one YAML document on its way into a Go value.
type document struct {
	file   string
	kind   string
	root   *yaml.Node
	more   []*yaml.Node        // the documents behind it, of a Cluster
	where  map[string]position // field path -> its value
	nodes  int
	probs  Problems
	untold int  // problems that were counted and not kept
	all    bool // all problems are kept
	// strict: the text itself goes to Kubernetes, to which 5 is not a string.
	strict bool
}

type position struct{ line, col int }

// find returns where path is, or where the nearest thing around it is; of a
// document whose text is not known, e.g. one in a slot, no line.
func (d *document) find(path string) position {
	if d.where == nil {
		return position{}
	}
	for {
		if at, ok := d.where[path]; ok {
			return at
		}
		i := strings.LastIndexAny(path, ".[")
		if i < 0 {
			return position{1, 1}
		}
		path = path[:i]
	}
}

func (d *document) problem(n *yaml.Node, path, format string, args ...any) {
	if d.full() {
		d.untold++
		return
	}
	d.report(Problem{File: d.file, Line: n.Line, Col: n.Column, Path: path, Msg: fmt.Sprintf(format, args...)})
}

// full reports whether further problems are only counted: a document of a stranger can
// have one in every value, and each would be worded, kept and logged.
func (d *document) full() bool { return len(d.probs) >= maxProblems && !d.all }

func (d *document) report(p Problem) {
	if d.full() {
		d.untold++
		return
	}
	p.Msg = atMost(maxMsg, p.Msg)
	d.probs = append(d.probs, p)
}

// wrongKind explains a document that is not of the kind wanted ("": any).
func (d *document) wrongKind(want string) error {
	at := d.find("kind")
	p := Problem{File: d.file, Line: at.line, Col: at.col, Path: "kind"}
	switch {
	case want == "":
		p.Msg = fmt.Sprintf("unknown kind %q%s; an Image says what is baked, a Site what is stamped, an Inventory has many Sites, a Cluster says what is minted", d.kind, DidYouMean(d.kind, kinds()))
	case slices.Contains(kinds(), d.kind):
		p.Msg = fmt.Sprintf("expected a document of kind %s, got one of kind %s", want, d.kind)
	default:
		p.Msg = fmt.Sprintf("unknown kind %q%s; wanted here: %s", d.kind, DidYouMean(d.kind, []string{want}), want)
	}
	return Problems{p}
}

func kinds() []string { return []string{KindImage, KindSite, KindInventory, KindCluster} }

// maxNodes bounds what aliases can blow the document up to.
func (d *document) maxNodes() int {
	switch d.kind {
	case KindInventory:
		return maxInventoryNodes
	case KindSite:
		return maxSiteNodes
	}
	return maxNodes
}

// readDocument parses data and reads its version and kind, nothing more.
func readDocument(file string, data []byte) (*document, Problems) {
	fail := func(n *yaml.Node, path, format string, args ...any) (*document, Problems) {
		p := Problem{File: file, Line: 1, Col: 1, Path: path, Msg: atMost(maxMsg, fmt.Sprintf(format, args...))}
		if n != nil {
			p.Line, p.Col = n.Line, n.Column
		}
		return nil, Problems{p}
	}
	if err := yamltree.DenserThan(data, maxInventoryNodes); err != nil {
		return nil, Problems{faultProblem(file, err)}
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return fail(nil, "", "the document is empty; `edgebake init` writes one to start from")
	} else if err != nil {
		return nil, Problems{syntaxProblem(file, data, err)}
	}
	var more []*yaml.Node
	for {
		var next yaml.Node
		err := dec.Decode(&next)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, Problems{syntaxProblem(file, data, err)}
		}
		more = append(more, &next)
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return fail(&doc, "", "the document must be a mapping that begins with apiVersion: %s", APIVersion)
	}
	d := &document{file: file, root: doc.Content[0], where: map[string]position{}}
	var version string
	for _, f := range []struct {
		name string
		into *string
	}{{"apiVersion", &version}, {"kind", &d.kind}} {
		v := yamltree.Value(d.root, f.name)
		if v == nil {
			return fail(d.root, f.name, "is missing; an edgebake document begins with apiVersion: %s and kind: %s", APIVersion, strings.Join(kinds(), ", "))
		}
		if v.Kind != yaml.ScalarNode {
			return fail(v, f.name, "must be a string")
		}
		*f.into = v.Value
		d.where[f.name] = position{v.Line, v.Column}
	}
	if version != APIVersion {
		return fail(yamltree.Value(d.root, "apiVersion"), "apiVersion", "%q is unknown to this edgebake, which reads %s", version, APIVersion)
	}
	if len(more) > 0 && d.kind != KindCluster {
		return fail(more[0], "", "a second document begins here; put each into a file of its own")
	}
	for _, n := range more {
		// Nothing between two --- is not a document.
		if len(n.Content) == 1 && !isNull(n.Content[0]) {
			d.more = append(d.more, n.Content[0])
		}
	}
	return d, nil
}

var secretType = reflect.TypeFor[Secret]()

// decode puts n into v, and a problem into d for everything that does not
// fit. It never stops early: all problems are reported at once.
func (d *document) decode(n *yaml.Node, v reflect.Value, path string) {
	if d.nodes++; d.nodes > d.maxNodes() {
		if d.nodes == d.maxNodes()+1 {
			d.problem(n, path, "the document is too large: its aliases make it more than %d values", d.maxNodes())
		}
		return
	}
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	d.where[path] = position{n.Line, n.Column}
	if v.Type() == secretType {
		var s string
		d.scalar(n, reflect.ValueOf(&s).Elem(), path, true)
		v.Set(reflect.ValueOf(NewSecret(s)))
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		// "debian:" with nothing behind it chooses debian, with defaults;
		// "openyurt:" says neither true nor false.
		if v.Type().Elem().Kind() != reflect.Struct && isNull(n) {
			return
		}
		v.Set(reflect.New(v.Type().Elem()))
		d.decode(n, v.Elem(), path)
	case reflect.Struct:
		d.structure(n, v, path)
	case reflect.Slice:
		d.list(n, v, path)
	case reflect.Map:
		d.mapping(n, v, path)
	case reflect.Interface:
		// Somebody else's form, which is not judged here.
	default:
		d.scalar(n, v, path, false)
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

func (d *document) structure(n *yaml.Node, v reflect.Value, path string) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.problem(n, path, "must be a mapping (%s), not %s", strings.Join(fieldNames(v.Type()), ", "), shape(n))
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		name := key.Value
		sub := join(path, name)
		if key.Kind != yaml.ScalarNode {
			d.problem(key, path, "a field's name must be a plain word")
			continue
		}
		if name == "<<" {
			d.problem(key, path, "merge keys (<<) are not read; write the fields out")
			continue
		}
		if line, twice := seen[name]; twice {
			d.problem(key, sub, "is given twice; first on line %d", line)
			continue
		}
		seen[name] = key.Line
		f, ok := fieldByName(v, name)
		if !ok && d.full() {
			d.untold++
			continue
		}
		if !ok {
			d.problem(key, sub, "unknown field%s", d.hint(name, v.Type()))
			d.probs[len(d.probs)-1].meant = d.meant(name, path, v.Type())
			continue
		}
		into := v.FieldByIndex(f.Index)
		d.decode(val, into, sub)
		// Later a 0 cannot be told from a field that is not there.
		if low, high, ok := bounds(f); ok && low > 0 && into.IsZero() && val.ShortTag() == "!!int" {
			d.problem(val, sub, "must be from %d to %d, not 0", low, high)
		}
	}
}

// maxItems bounds the lists of a machine, and its fleet.
func (d *document) maxItems(path string) int {
	switch {
	case d.kind == KindInventory && path == "sites":
		return maxSites
	case d.kind == KindInventory || d.kind == KindSite:
		return maxItems
	}
	return maxNodes
}

func (d *document) list(n *yaml.Node, v reflect.Value, path string) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.SequenceNode {
		what := shape(n)
		if n.Kind == yaml.ScalarNode && n.Style == 0 && strings.HasPrefix(n.Value, "-") {
			what += `; a space is missing after the "-"`
		}
		d.problem(n, path, "must be a list (each item on a line of its own after \"- \"), not %s", what)
		return
	}
	if most := d.maxItems(path); len(n.Content) > most {
		d.problem(n, path, "has %d items: want at most %d", len(n.Content), most)
		return
	}
	s := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
	for i, item := range n.Content {
		if d.nodes > d.maxNodes() {
			return
		}
		sub := fmt.Sprintf("%s[%d]", path, i)
		if isNull(item) {
			d.problem(item, sub, "is empty")
			continue
		}
		d.decode(item, s.Index(i), sub)
	}
	v.Set(s)
}

func (d *document) mapping(n *yaml.Node, v reflect.Value, path string) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		d.problem(n, path, "must be a mapping of names to values, not %s", shape(n))
		return
	}
	m := reflect.MakeMap(v.Type())
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		sub := keyPath(path, key.Value)
		if key.Kind == yaml.ScalarNode && key.Value == "<<" {
			d.problem(key, path, "merge keys (<<) are not read; write the fields out")
			continue
		}
		if key.Kind != yaml.ScalarNode {
			d.problem(key, path, "a name must be a plain word")
			continue
		}
		k := reflect.ValueOf(key.Value)
		if m.MapIndex(k).IsValid() {
			d.problem(key, sub, "is given twice")
			continue
		}
		e := reflect.New(v.Type().Elem()).Elem()
		d.decode(val, e, sub)
		m.SetMapIndex(k, e)
	}
	v.Set(m)
}

func (d *document) scalar(n *yaml.Node, v reflect.Value, path string, secret bool) {
	shown := shape(n)
	if n.Kind == yaml.ScalarNode && !secret {
		shown = strconv.Quote(shorten(n.Value))
	}
	if n.Kind != yaml.ScalarNode {
		if n.Kind == yaml.MappingNode && n.Style&yaml.FlowStyle != 0 && len(n.Content) > 0 && n.Content[0].Kind == yaml.MappingNode {
			shown += `; a value that begins with {{ needs quotes`
		}
		d.problem(n, path, "must be %s, not %s", wanted(v), shown)
		return
	}
	tag := n.ShortTag()
	if tag == "!!null" {
		return // as if it were not there
	}
	ok := false
	switch v.Kind() {
	case reflect.String:
		if d.strict && !fitsComponent(n, "string") {
			d.problem(n, path, "must be %s, not %s", componentWords["string"], componentValue(n, "string"))
			return
		}
		// Versions, modes and labels look like numbers and booleans: what
		// stands there is what is meant.
		if ok = slices.Contains([]string{"!!str", "!!int", "!!float", "!!bool", "!!timestamp"}, tag); ok {
			v.SetString(n.Value)
		}
	case reflect.Bool:
		if ok = tag == "!!bool"; ok {
			v.SetBool(strings.EqualFold(n.Value, "true"))
		}
	default:
		ok = tag == "!!int" && n.Decode(v.Addr().Interface()) == nil
	}
	if !ok {
		d.problem(n, path, "must be %s, not %s", wanted(v), shown)
	}
}

func wanted(v reflect.Value) string {
	switch v.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Uint32:
		return "a whole number, 0 or more"
	}
	return "a whole number"
}

// shape describes a value without quoting it: a token put in the wrong place
// is a secret still.
func shape(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	return "a single value"
}

func shorten(s string) string {
	if r := []rune(s); len(r) > 60 {
		return string(r[:57]) + "..."
	}
	return s
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func keyPath(path, key string) string { return path + "[" + strconv.Quote(key) + "]" }

// fieldName is the name a struct field has in the document.
func fieldName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
	return name
}

func fieldByName(v reflect.Value, name string) (reflect.StructField, bool) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if f.IsExported() && !f.Anonymous && fieldName(f) == name {
			return f, true
		}
	}
	for _, f := range fields(v.Type()) { // of an embedded Site
		if len(f.Index) > 1 && fieldName(f) == name {
			return f, true
		}
	}
	return reflect.StructField{}, false
}

func fieldNames(t reflect.Type) []string {
	var names []string
	for _, f := range fields(t) {
		names = append(names, fieldName(f))
	}
	return names
}

// fields are those that a person writes: exported ones, and in place of an
// embedded Site its own, but for the two that begin a document.
func fields(t reflect.Type) []reflect.StructField {
	var out []reflect.StructField
	for i := range t.NumField() {
		f := t.Field(i)
		switch {
		case !f.IsExported():
		case f.Anonymous:
			for _, in := range fields(f.Type) {
				shadow, _ := t.FieldByName(in.Name) // the outer field of that name, if there is one
				if n := fieldName(in); n != "apiVersion" && n != "kind" && len(shadow.Index) > 1 {
					in.Index = append([]int{i}, in.Index...)
					out = append(out, in)
				}
			}
		default:
			out = append(out, f)
		}
	}
	return out
}

// meant is the path that an unknown field in path was probably to have, or empty.
func (d *document) meant(name, path string, t reflect.Type) string {
	if k := closest(name, fieldNames(t)); k != "" {
		return join(path, k)
	}
	if places := placesOf(name, d.typ(), "", 0); len(places) == 1 {
		return places[0]
	}
	return ""
}

// hint says what a person may have meant by an unknown field: a name close
// to it, else the place where a field of that name exists.
func (d *document) hint(name string, t reflect.Type) string {
	if h := DidYouMean(name, fieldNames(t)); h != "" {
		return h
	}
	if places := placesOf(name, d.typ(), "", 0); len(places) > 0 {
		return fmt.Sprintf("; did you mean %s?", strings.Join(places, " or "))
	}
	names := fieldNames(t)
	if len(names) == 0 {
		return "; there are no fields here"
	}
	return "; known here: " + strings.Join(names, ", ")
}

// typ is what a document of this kind is read into.
func (d *document) typ() reflect.Type {
	switch d.kind {
	case KindImage:
		return reflect.TypeFor[Image]()
	case KindInventory:
		return reflect.TypeFor[Inventory]()
	case KindCluster:
		return reflect.TypeFor[Cluster]()
	case "ClusterConfiguration":
		return reflect.TypeFor[clusterConfiguration]()
	case "InitConfiguration":
		return reflect.TypeFor[initConfiguration]()
	}
	return reflect.TypeFor[Site]()
}

// placesOf lists the paths of t's fields called name or nearly so.
func placesOf(name string, t reflect.Type, path string, depth int) []string {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		if t.Kind() == reflect.Slice {
			path += "[]"
		}
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || t == secretType || depth > 6 {
		return nil
	}
	var found []string
	for _, f := range fields(t) {
		sub := join(path, fieldName(f))
		if n := strings.ToLower(name); distance(n, strings.ToLower(fieldName(f))) <= len(n)/4 {
			found = append(found, sub)
		}
		found = append(found, placesOf(name, f.Type, sub, depth+1)...)
	}
	return found[:min(len(found), 3)]
}

// alias are names that others have for what we name.
var alias = map[string]string{"x86_64": "amd64", "x86-64": "amd64", "x64": "amd64", "aarch64": "arm64", "armv8": "arm64"}

// DidYouMean suggests one of the known names for an unknown one, as the end of
// a message; it is empty where none is near.
func DidYouMean(name string, known []string) string {
	if k := closest(name, known); k != "" {
		return fmt.Sprintf("; did you mean %q?", k)
	}
	return ""
}

// closest is the known name that an unknown one was probably to be, or empty.
func closest(name string, known []string) string {
	if k := alias[strings.ToLower(name)]; slices.Contains(known, k) {
		return k
	}
	best, bestDist := "", 1+len(name)/4
	for _, k := range known {
		if dist := distance(strings.ToLower(name), strings.ToLower(k)); dist <= bestDist {
			best, bestDist = k, dist-1
		}
	}
	return best
}

// distance is the number of letters to insert, remove or change between a
// and b (Levenshtein).
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diag, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diag+cost)
		}
	}
	return row[len(b)]
}
