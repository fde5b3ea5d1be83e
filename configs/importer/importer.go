// Package importer converts CSV tables, as spreadsheets save them, to Inventories. Problems have
// the line of the row and name the column.
package importer

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Options configures the conversion.
type Options struct {
	// Map assigns fields to columns by their headers. "-" ignores a column.
	Map map[string]string
	// Path converts a path relative to the template to a path relative to the Inventory.
	Path func(string) string
	// Warn, if set, is called with a sentence for each field of the template that is left out.
	Warn func(string)
}

// Limits of a table. A chain of stores may need thousands of rows.
const (
	maxRows        = 50_000
	maxColumns     = 200
	maxImportNotes = 100
	maxAlike       = 3 // the same problem in at most this number of rows is reported for each row
)

// columnNames returns the fields for common headers. The headers are in the form of plainHeader.
func columnNames() map[string]string {
	return map[string]string{
		"name": "name", "site": "name", "store": "name", "shop": "name",
		"mac": "match.macs", "macs": "match.macs", "macaddress": "match.macs",
		"serial": "match.serial", "serialnumber": "match.serial", "serialno": "match.serial",
		"uuid": "match.uuid", "assettag": "match.assetTag",
		"nodename": "nodeName", "nodepool": "nodePool", "pool": "nodePool", "token": "credentials.token",
		"interface": "network.interfaces[0].name", "address": "network.interfaces[0].addresses",
		"ip": "network.interfaces[0].addresses", "ipaddress": "network.interfaces[0].addresses",
		"gateway": "network.interfaces[0].gateway", "dns": "network.dns", "ntp": "network.ntp",
	}
}

// column is one column of the table.
type column struct {
	header string
	path   []step // empty if the column is ignored
	field  string
	kind   reflect.Type
	free   bool // the column accepts any text
}

// step is one part of a field's path: a key, or an index in a list.
type step struct {
	key  string
	free bool // the user chose the key, for example that of a label
	item int  // index in a list if key is empty
}

// at returns the path of the column's field, in the format of Problem.Path.
func (c column) at() string {
	var p string
	for _, s := range c.path {
		switch {
		case s.key == "":
			p += fmt.Sprintf("[%d]", s.item)
		case s.free:
			p += fmt.Sprintf("[%q]", s.key)
		case p == "":
			p = s.key
		default:
			p += "." + s.key
		}
	}
	return p
}

// CSV converts a table with a row for each site to an Inventory. template is a Site with the fields
// that all sites have in common. A header names the field of its column, by its path or by a common
// name. The error is of type strict.Problems.
func CSV(name string, table []byte, templateName string, template []byte, o Options) (inventory []byte, sites int, err error) {
	defaults, probs := templateFields(templateName, template, o)
	im := &importer{name: name, template: templateName, defaults: defaults}
	text, err := tableText(name, table)
	if err == nil {
		err = im.read(text, o)
	}
	if probs = im.unsolved(probs); err != nil || defaults == nil {
		return nil, 0, append(probs, asProblems(err)...)
	}
	if err == nil {
		im.nameNodes(o.Warn)
	}
	im.known = probs
	inventory, err = im.encode()
	if len(probs) > 0 {
		return nil, 0, append(probs, im.ownProblems(asProblems(err))...)
	}
	return inventory, len(im.lines), err
}

// nameNodes removes a template for nodeName if the table contains names of sites, because the
// template would take precedence over them.
func (im *importer) nameNodes(warn func(string)) {
	has := func(field string) bool {
		return slices.ContainsFunc(im.columns, func(c column) bool { return c.field == field })
	}
	name := yamltree.Get(im.defaults, "nodeName")
	if !has("name") || has("nodeName") || name == nil || !strings.Contains(name.Value, "{{") {
		return
	}
	im.defaults = yamltree.Without(im.defaults, "nodeName")
	if warn != nil {
		warn(fmt.Sprintf("nodeName %s of %s is left out, since the table has names, and each node gets the name of its site; to use nodeName anyway, add it to defaults in the Inventory", name.Value, strict.FileName(im.template)))
	}
}

// ownProblems returns the problems of rows.
func (im *importer) ownProblems(rows strict.Problems) strict.Problems {
	return slices.DeleteFunc(rows, func(p strict.Problem) bool { return p.File != im.name || p.Missing })
}

// isKnown reports whether the template itself has this problem in the same field, for example a
// misspelt name.
func (im *importer) isKnown(field string, p strict.Problem) bool {
	return slices.ContainsFunc(im.known, func(t strict.Problem) bool { return t.Path == field && t.Msg == p.Msg })
}

// asProblems returns the problems in err. Any other error becomes one problem.
func asProblems(err error) strict.Problems {
	var probs strict.Problems
	if err != nil && !errors.As(err, &probs) {
		probs = strict.Problems{{Msg: err.Error()}}
	}
	return probs
}

// templateFields returns the fields of the template, and the problems of the template as a Site.
func templateFields(name string, template []byte, o Options) (*yaml.Node, strict.Problems) {
	doc, err := configs.Read(name, template)
	if err != nil {
		return nil, asProblems(err)
	}
	_, err = configs.ParsePublicSite(name, template)
	if doc.Kind != configs.KindSite {
		return nil, asProblems(err)
	}
	fields := yamltree.Without(doc.Root, "apiVersion", "kind")
	for i := 0; i+1 < len(fields.Content); i += 2 {
		if k := fields.Content[i].Value; o.Path != nil && (k == "caFile" || k == "ignitionFile") {
			fields.Content[i+1] = yamltree.Quoted(o.Path(fields.Content[i+1].Value))
		}
	}
	return fields, asProblems(err)
}

// unsolved removes problems of the template that a column may solve, such as a missing address. If
// some rows do not solve them, the validation of the Inventory reports these rows. If the header is
// invalid, the fields of its columns are unknown, so problems of all fields with subfields are
// removed.
func (im *importer) unsolved(template strict.Problems) strict.Problems {
	return slices.DeleteFunc(template, func(p strict.Problem) bool {
		return p.Missing || !im.headed && hasFields(p.Path) || p.Path != "" && slices.ContainsFunc(im.columns, func(c column) bool {
			return strict.Covers(p.Path, c.at())
		})
	})
}

// documentLine matches the beginning of an edgebake document, including comments.
var documentLine = regexp.MustCompile(`^(?:(?:[ \t]*#.*|---)?\n)*(?:apiVersion|kind):[ \t]`)

// tableText returns the table as UTF-8 text, without a byte order mark, and with \n as line ends.
func tableText(name string, b []byte) (string, error) {
	fail := func(line int, msg string) (string, error) {
		return "", strict.Problems{{File: name, Line: line, Msg: msg}}
	}
	if bytes.HasPrefix(b, []byte("PK\x03\x04")) {
		return fail(1, "is a spreadsheet file, not CSV: save it as CSV UTF-8")
	}
	text := strings.TrimPrefix(string(b), "\ufeff")
	if bad := strict.InvalidUTF8(b); bad < len(b) {
		return fail(strict.LineOf(b, bad), "is not UTF-8: save the table as CSV UTF-8")
	}
	text = strings.ReplaceAll(text, "\r\n", "\n")
	if at := documentLine.FindStringIndex(text); at != nil {
		return fail(1+strings.Count(text[:at[1]], "\n"), "is an edgebake document, not a table: name the table here, and the Site with --template")
	}
	return text, nil
}

// separator returns the separator of columns and the table without the line sep=. The separator is
// the one in that line or, if there is no such line, the most frequent candidate in the header.
func separator(text string) (sep rune, rest string) {
	first, after, _ := strings.Cut(text, "\n")
	if s, ok := strings.CutPrefix(strings.TrimSpace(strings.ToLower(strings.Trim(first, `"`))), "sep="); ok && utf8.RuneCountInString(s) == 1 {
		return []rune(s)[0], after // Excel writes the line sep=
	}
	sep = ','
	for _, c := range ";\t|" {
		if strings.Count(first, string(c)) > strings.Count(first, string(sep)) {
			sep = c
		}
	}
	return sep, text
}

type importer struct {
	name     string
	template string // name of the template's file
	defaults *yaml.Node
	columns  []column
	headed   bool // the whole header is valid
	sites    []*yaml.Node
	lines    []int // line of each site's row
	probs    strict.Problems
	known    strict.Problems // problems of the template itself, which rows do not repeat
}

func (im *importer) problem(line int, header, format string, args ...any) {
	p := strict.NewProblem("", format, args...)
	p.File, p.Line = im.name, line
	if header != "" {
		p.Path = fmt.Sprintf("column %q", strict.Shorten(header))
	}
	im.probs = append(im.probs, p)
}

func (im *importer) read(text string, o Options) error {
	sep, rest := separator(text)
	offset := strings.Count(text[:len(text)-len(rest)], "\n")
	if sep == '"' || sep == '\n' || sep == utf8.RuneError || !utf8.ValidRune(sep) {
		return strict.Problems{{File: im.name, Line: 1, Msg: "sep= does not name a valid separator: use ; or ,"}}
	}
	r := csv.NewReader(strings.NewReader(rest))
	r.Comma, r.FieldsPerRecord, r.TrimLeadingSpace = sep, -1, sep != '\t'
	for first := true; ; {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		var bad *csv.ParseError
		if errors.As(err, &bad) {
			im.problem(bad.StartLine+offset, "", "cannot be read as CSV: %s", quoteProblem(bad, offset))
			break
		}
		if err != nil {
			return fmt.Errorf("reading %s: %w", im.name, err)
		}
		line, _ := r.FieldPos(0)
		line += offset
		for i := range row {
			row[i] = strings.TrimSpace(row[i])
		}
		if !slices.ContainsFunc(row, func(c string) bool { return c != "" }) {
			continue
		}
		if first {
			first = false
			if im.header(line, row, o); len(im.probs) > 0 {
				return im.probs
			}
			im.headed = true
			continue
		}
		if len(im.sites) == maxRows {
			im.problem(line, "", "has more than %d rows: split the table", maxRows)
			break
		}
		im.row(line, row)
	}
	if len(im.columns) == 0 && len(im.probs) == 0 {
		im.problem(1, "", "is empty: the first line names the columns, e.g. name;serial;mac;address;gateway")
	} else if len(im.sites) == 0 && len(im.probs) == 0 {
		im.problem(1, "", "has no rows after the line with the columns' names")
	}
	return im.merged().Err()
}

// quoteProblem explains an error in the quoting of a row.
func quoteProblem(bad *csv.ParseError, offset int) string {
	at := fmt.Sprintf("byte %d", bad.Column)
	if bad.Line != bad.StartLine {
		at += fmt.Sprintf(" of line %d", bad.Line+offset)
	}
	if errors.Is(bad.Err, csv.ErrBareQuote) {
		return fmt.Sprintf("a cell without quotes around it contains a quote (%s): put quotes around the whole cell, and double the quote inside it", at)
	}
	return fmt.Sprintf("a cell in quotes does not end, or continues after its closing quote (%s): double each quote inside a cell in quotes", at)
}

// plainHeader returns a header in lower case, without blanks, dashes, underscores and dots.
func plainHeader(s string) string {
	return strings.NewReplacer(" ", "", "-", "", "_", "", ".", "").Replace(strings.ToLower(s))
}

func (im *importer) header(line int, row []string, o Options) {
	if len(row) > maxColumns {
		im.problem(line, "", "has %d columns, at most %d are read", len(row), maxColumns)
		return
	}
	given := map[string]string{}
	for h, f := range o.Map {
		if !slices.Contains(row, h) {
			im.problem(line, h, "is mapped to %s, but the table has no such column%s", f, strict.DidYouMean(h, row))
		}
	}
	for _, h := range row {
		c := column{header: h}
		field := o.Map[h]
		if field == "" {
			field = cmp.Or(columnNames()[plainHeader(h)], h)
		} else {
			field = cmp.Or(columnNames()[plainHeader(field)], field)
		}
		switch {
		case h == "":
			im.problem(line, fmt.Sprintf("%d", 1+len(im.columns)), "has no name")
		case field == "-":
		default:
			var bad string
			if c.path, c.kind, c.free, bad = fieldPath(field); bad != "" {
				name := ": name"
				if strings.HasSuffix(bad, "?") {
					name = " Name"
				}
				im.problem(line, h, "%s%s the field that it sets (--map %s=FIELD), or leave it out (--map %s=-)", bad, name, strconv.Quote(h), strconv.Quote(h))
			}
			c.field = field
			if other, twice := given[field]; twice && bad == "" {
				im.problem(line, h, "sets %s, which column %q sets already", field, other)
			}
			given[field] = h
		}
		im.columns = append(im.columns, c)
	}
	if im.defaults != nil {
		im.checkInterfaces(line)
	}
}

// checkInterfaces reports columns about an interface that neither the table nor the template names.
func (im *importer) checkInterfaces(line int) {
	reported := map[int]bool{}
	for _, c := range im.columns {
		i, ok := ofInterface(c.path)
		if !ok || reported[i] || im.namesInterface(i) || slices.ContainsFunc(im.columns, func(o column) bool {
			other, ok := ofInterface(o.path)
			return ok && other == i && (o.path[3].key == "name" || o.path[3].key == "mac")
		}) {
			continue
		}
		reported[i] = true
		im.problem(line, c.header, "sets %s, but neither the table nor the template names that interface: add a column interface to the table, with a name or a pattern such as en* in each row", c.field)
	}
}

// ofInterface reports whether a field belongs to an interface, and returns the index of the
// interface.
func ofInterface(path []step) (i int, ok bool) {
	if len(path) < 4 || path[0].key != "network" || path[1].key != "interfaces" {
		return 0, false
	}
	return path[2].item, true
}

// namesInterface reports whether the template names its i-th interface.
func (im *importer) namesInterface(i int) bool {
	n := im.defaults
	for _, k := range []string{"network", "interfaces"} {
		if n = yamltree.Deref(n); n == nil || n.Kind != yaml.MappingNode {
			return false
		}
		n = yamltree.Get(n, k)
	}
	if n == nil || n.Kind != yaml.SequenceNode || i >= len(n.Content) {
		return false
	}
	item := yamltree.Deref(n.Content[i])
	return item.Kind == yaml.MappingNode && (yamltree.Get(item, "name") != nil || yamltree.Get(item, "mac") != nil)
}

var pathPart = regexp.MustCompile(`^([A-Za-z]+)((?:\[\d\])*)$`)

// fieldPath parses the path of a field whose value fits in a cell, such as
// labels.example.com/region or network.interfaces[0].gateway. If the path is invalid, bad describes
// the problem.
func fieldPath(field string) (path []step, kind reflect.Type, free bool, bad string) {
	path, kind, free, bad = fieldOf(field)
	if bad == "" && (len(path) == 0 || !inCell(kind)) {
		return nil, nil, false, fmt.Sprintf("%q consists of several fields, so it does not fit into a cell", strict.Shorten(field))
	}
	return path, kind, free, bad
}

// fieldOf is like fieldPath, but accepts any field of a Site.
func fieldOf(field string) (path []step, kind reflect.Type, free bool, bad string) {
	fail := func(format string, args ...any) ([]step, reflect.Type, bool, string) {
		return nil, nil, false, fmt.Sprintf(format, args...)
	}
	t := reflect.TypeFor[configs.InventorySite]()
	rest := field
	for rest != "" {
		if t.Kind() == reflect.Map {
			return append(path, step{key: rest, free: true}), t.Elem(), false, ""
		}
		var part string
		part, rest, _ = strings.Cut(rest, ".")
		m := pathPart.FindStringSubmatch(part)
		if m == nil || t.Kind() != reflect.Struct || t == reflect.TypeFor[strict.Secret]() {
			return fail("%q is not a field of a Site%s", strict.Shorten(field), strict.DidYouMean(plainHeader(field), slices.Sorted(maps.Keys(columnNames()))))
		}
		f, ok := strict.FieldByName(t, m[1])
		if !ok {
			known := strict.FieldNames(t)
			if len(path) == 0 {
				known = append(known, slices.Sorted(maps.Keys(columnNames()))...)
			}
			return fail("%q is not a field of a Site%s", strict.Shorten(field), strict.DidYouMean(m[1], known))
		}
		path, t, free = append(path, step{key: m[1]}), f.Type, f.Tag.Get("text") == "any"
		for _, i := range strings.FieldsFunc(m[2], func(r rune) bool { return r == '[' || r == ']' }) {
			if t.Kind() != reflect.Slice {
				return fail("%q: %s is not a list", strict.Shorten(field), m[1])
			}
			n, _ := strconv.Atoi(i)
			path, t = append(path, step{item: n}), t.Elem()
		}
		for t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
	}
	return path, t, free, ""
}

// inCell reports whether a value of type t fits in a cell.
func inCell(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Struct:
		return t == reflect.TypeFor[strict.Secret]()
	case reflect.Slice:
		return t.Elem().Kind() == reflect.String
	}
	return t == reflect.TypeFor[strict.Secret]() || t.Kind() != reflect.Map
}

// hasFields reports whether a field of a Site has subfields.
func hasFields(field string) bool {
	path, t, _, bad := fieldOf(field)
	return bad == "" && len(path) > 0 && !inCell(t)
}

// row converts a row of the table to a site.
func (im *importer) row(line int, row []string) {
	if len(row) != len(im.columns) {
		fix := "put quotes around cells that contain the separator"
		if len(row) < len(im.columns) {
			fix = "add the empty cells"
		}
		im.problem(line, "", "has %s, but the first line names %s: %s", configs.Count(len(row), "cell"), configs.Count(len(im.columns), "column"), fix)
		return
	}
	site := yamltree.Mapping()
	for i, c := range im.columns {
		if row[i] != "" && c.path != nil {
			if bad := notValue(row[i], c); bad != "" {
				im.problem(line, c.header, "%s", bad)
				continue
			}
			if bad := im.set(site, im.defaults, c.path, cellValue(row[i], c)); bad != "" {
				im.problem(line, c.header, "%s", bad)
			}
		}
	}
	im.sites, im.lines = append(im.sites, site), append(im.lines, line)
}

var (
	// noValue matches texts like those that spreadsheets show for a formula without a value.
	// noValueSure matches only the actual ones.
	noValue     = regexp.MustCompile(`^(#(N/A|NAME\?|[A-Z0-9/_]+!)|Err:\d+)$`)
	noValueSure = regexp.MustCompile(`^(#(N/A|NAME\?|(NULL|DIV/0|VALUE|REF|NUM|SPILL|CALC|FIELD|ERROR)!)|Err:\d{3})$`)
	// quotedText matches ="007", a formula that keeps the leading zeros of a number.
	quotedText = regexp.MustCompile(`^=".*"$`)
	// rounded matches a number that a spreadsheet has rounded.
	rounded = regexp.MustCompile(`^\d([.,]\d+)?E\+\d+$`)
)

// notValue returns a message if a spreadsheet has replaced the text of a cell, such as a serial
// number by 1E+10. Otherwise, it returns "". A password may look like a formula, and is never
// quoted.
func notValue(text string, c column) string {
	quoted, secret := "", c.kind == reflect.TypeFor[strict.Secret]()
	if !secret {
		quoted = strconv.Quote(strict.Shorten(text)) + " "
	}
	none := noValue
	if secret || c.free {
		none = noValueSure
	}
	switch {
	case c.free && quotedText.MatchString(text), !c.free && strings.HasPrefix(text, "="):
		return quoted + "is a formula; write its value"
	case none.MatchString(text):
		return fmt.Sprintf("%q is the error of a formula: correct the formula in the spreadsheet", text)
	case strings.HasPrefix(c.field, "match.") && rounded.MatchString(text):
		return fmt.Sprintf("%q is a long number that a spreadsheet has rounded: set the column's format to text, and enter the number again", text)
	}
	return ""
}

// cellValue converts a cell to the type of its field. Blanks, commas, semicolons or vertical bars
// separate the items of a list.
func cellValue(text string, c column) *yaml.Node {
	switch {
	case c.kind.Kind() == reflect.Slice:
		n := yamltree.List()
		for _, item := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\n,;|", r) }) {
			n.Content = append(n.Content, yamltree.Quoted(item))
		}
		return n
	case c.kind.Kind() == reflect.Bool:
		low := strings.ToLower(text)
		if slices.Contains([]string{"yes", "y", "1", "true"}, low) {
			return yamltree.Plain("true", "!!bool")
		} else if slices.Contains([]string{"no", "n", "0", "false"}, low) {
			return yamltree.Plain("false", "!!bool")
		}
		return yamltree.Quoted(text) // validation rejects the text
	case c.kind.Kind() == reflect.Int:
		if _, err := strconv.Atoi(text); err == nil {
			return yamltree.Plain(text, "!!int")
		}
		return yamltree.Quoted(text)
	case c.field == "name":
		return yamltree.Quoted(strings.ToLower(text))
	}
	return yamltree.Quoted(text)
}

// set sets the value at path below n. A list begins as a copy of the template's list. set returns a
// description of the problem, or "".
func (im *importer) set(n, template *yaml.Node, path []step, v *yaml.Node) string {
	if len(path) == 1 && path[0].key != "" {
		n.Content = append(yamltree.Without(n, path[0].key).Content, yamltree.Plain(path[0].key, "!!str"), v)
		return ""
	}
	var below *yaml.Node // the value in the template
	if template != nil && template.Kind == yaml.MappingNode {
		below = yamltree.Get(template, path[0].key)
	}
	next := yamltree.Get(n, path[0].key)
	list := path[1].key == ""
	if next == nil {
		next = yamltree.Mapping()
		if list {
			next = yamltree.List()
			if below != nil && below.Kind == yaml.SequenceNode {
				next = yamltree.Clean(below)
			}
		}
		n.Content = append(n.Content, yamltree.Plain(path[0].key, "!!str"), next)
	}
	if !list {
		return im.set(next, below, path[1:], v)
	}
	i := path[1].item
	if i > len(next.Content) {
		return fmt.Sprintf("sets item %d of %s, but there is no item %d", i, path[0].key, i-1)
	}
	if i == len(next.Content) {
		next.Content = append(next.Content, yamltree.Mapping())
	}
	if len(path) == 2 {
		next.Content[i] = v
		return ""
	}
	item := next.Content[i]
	if item.Kind != yaml.MappingNode {
		return path[0].key + " has items without fields in the template"
	}
	return im.set(item, nil, path[2:], v)
}

// encode returns the Inventory. Its problems name the row and the column.
func (im *importer) encode() ([]byte, error) {
	root := yamltree.Mapping("apiVersion", yamltree.Plain(configs.APIVersion, "!!str"), "kind", yamltree.Plain(configs.KindInventory, "!!str"), "defaults", im.defaults)
	b, err := yamltree.EncodeWithList(root, "sites", im.sites, func(n *yaml.Node) *yaml.Node { return n })
	if err != nil {
		return nil, fmt.Errorf("encoding the Inventory: %w", err)
	}
	im.sites = nil // free the memory of the sites, of which there may be thousands
	_, err = configs.ParseWholeInventory(im.name, b, func(i int) string { return fmt.Sprintf("line %d", im.lines[i]) })
	var probs strict.Problems
	if errors.As(err, &probs) {
		return nil, im.byRow(probs)
	}
	return b, err
}

var siteIndex = regexp.MustCompile(`^sites\[(\d+)\]\.?(.*)$`)

// byRow converts the positions of problems in the Inventory to lines and columns of the table.
func (im *importer) byRow(probs strict.Problems) strict.Problems {
	for _, p := range probs {
		m := siteIndex.FindStringSubmatch(p.Path)
		if m == nil {
			im.probs = append(im.probs, strict.Problem{File: im.template, Path: strings.TrimPrefix(p.Path, "defaults."), Msg: p.Msg})
			continue
		}
		i, _ := strconv.Atoi(m[1])
		line, field, header := im.lines[i], m[2], ""
		if im.isKnown(field, p) {
			continue
		}
		for _, c := range im.columns {
			if strict.Covers(c.at(), field) || strict.Covers(field, c.at()) {
				header = c.header
			}
		}
		if header == "" && field != "" {
			p.Msg = field + ": " + p.Msg
		}
		im.problem(line, header, "%s", p.Msg)
		// If no column has the field, the template must contain the missing value, unless it is a
		// name.
		im.probs[len(im.probs)-1].Missing = p.Missing && header == "" && field != "name"
	}
	im.probs.Sort()
	return im.merged()
}

// merged replaces a problem that occurs in more than maxAlike rows by a single problem that lists
// their lines.
func (im *importer) merged() strict.Problems {
	alike := map[strict.Problem][]int{}
	kind := func(p strict.Problem) strict.Problem { p.Line = 0; return p }
	for _, p := range im.probs {
		alike[kind(p)] = append(alike[kind(p)], p.Line)
	}
	var out strict.Problems
	for _, p := range im.probs {
		lines := alike[kind(p)]
		switch {
		case len(lines) <= maxAlike:
			out = append(out, p)
		case p.Line == lines[0]:
			p.Msg += fmt.Sprintf(" (also in lines %s)", ranges(lines[1:]))
			out = append(out, p)
		}
	}
	if n := len(out); n > maxImportNotes {
		out = append(out[:maxImportNotes], strict.Problem{File: im.name, Msg: configs.Count(n-maxImportNotes, "more problem")})
	}
	return out
}

// ranges formats ascending numbers as in 3-7, 9, 11-20.
func ranges(n []int) string {
	var parts []string
	for i := 0; i < len(n); {
		j := i
		for j+1 < len(n) && n[j+1] <= n[j]+1 {
			j++
		}
		if len(parts) == 20 {
			return strings.Join(parts, ", ") + fmt.Sprintf(" and %d more", len(n)-i)
		}
		part := strconv.Itoa(n[i])
		if n[j] > n[i] {
			part += "-" + strconv.Itoa(n[j])
		}
		parts, i = append(parts, part), j+1
	}
	return strings.Join(parts, ", ")
}
