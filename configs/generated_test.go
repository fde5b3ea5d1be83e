package configs_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/invopop/jsonschema"
)

// comments returns the comment of each type ("Image") and of each field ("Image.Name") in the
// source files, as one paragraph.
func comments(t *testing.T) map[string]string {
	t.Helper()
	docs := map[string]string{}
	flat := func(g *ast.CommentGroup) string { return strings.Join(strings.Fields(g.Text()), " ") }
	for _, file := range []string{"image.go", "site.go", "inventory.go", "controlplane.go", "clusterdoc/cluster.go"} {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			gd, ok := d.(*ast.GenDecl)
			if !ok || gd.Tok != token.TYPE {
				continue
			}
			for _, s := range gd.Specs {
				ts := s.(*ast.TypeSpec)
				st, ok := ts.Type.(*ast.StructType)
				if !ok {
					continue
				}
				docs[ts.Name.Name] = flat(gd.Doc)
				for _, f := range st.Fields.List {
					for _, n := range f.Names {
						docs[ts.Name.Name+"."+n.Name] = flat(f.Doc)
					}
				}
			}
		}
	}
	return docs
}

// fieldDoc returns the comment of a field in words for people who write YAML: "Name is the node's"
// becomes "The node's", while "Name of the node" stays the same.
func fieldDoc(docs map[string]string, t reflect.Type, f reflect.StructField) string {
	doc := docs[t.Name()+"."+f.Name]
	rest, ok := strings.CutPrefix(doc, f.Name+" ")
	if !ok || rest == "" {
		return doc
	}
	for _, noun := range []string{"of ", "in ", "with ", "servers", "addresses", "on "} {
		if strings.HasPrefix(rest, noun) {
			return doc
		}
	}
	for _, verb := range []string{"is ", "are "} {
		rest = strings.TrimPrefix(rest, verb)
	}
	// Keep the case of a value as it is written in a document.
	first, _, _ := strings.Cut(rest, " ")
	first = strings.TrimRight(first, ",.:;")
	if slices.Contains(strict.TagValues(f, "enum"), first) || slices.Contains(strict.TagValues(f, "default"), first) {
		return rest
	}
	return strings.ToUpper(rest[:1]) + rest[1:]
}

// TestEveryFieldIsExplained checks that every field has a comment, and that its names in JSON and
// YAML are the same.
func TestEveryFieldIsExplained(t *testing.T) {
	docs := comments(t)
	for _, root := range []reflect.Type{reflect.TypeFor[configs.Image](), reflect.TypeFor[configs.Site](), reflect.TypeFor[configs.Inventory](), reflect.TypeFor[clusterdoc.Cluster]()} {
		for _, row := range rows(docs, root) {
			if row.doc == "" {
				t.Errorf("%s: %s has no comment", root.Name(), row.path)
			}
		}
		walkTypes(root, map[reflect.Type]bool{}, func(st reflect.Type) {
			for i := range st.NumField() {
				f := st.Field(i)
				// omitempty of package yaml omits a struct without values, like omitzero of package
				// json.
				json := strings.Replace(f.Tag.Get("json"), "omitzero", "omitempty", 1)
				if !f.Anonymous && json != f.Tag.Get("yaml") {
					t.Errorf("%s.%s: json and yaml tags differ", st.Name(), f.Name)
				}
			}
		})
	}
}

func walkTypes(t reflect.Type, seen map[reflect.Type]bool, visit func(reflect.Type)) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || t == reflect.TypeFor[configs.Secret]() || seen[t] {
		return
	}
	seen[t] = true
	visit(t)
	for i := range t.NumField() {
		walkTypes(t.Field(i).Type, seen, visit)
	}
}

func TestSchemas(t *testing.T) {
	docs := comments(t)
	used := map[string]bool{}
	for name, v := range map[string]any{"image": &configs.Image{}, "site": &configs.Site{}, "inventory": &configs.Inventory{}, "cluster": &clusterdoc.Cluster{}} {
		r := &jsonschema.Reflector{
			Anonymous:      true,
			ExpandedStruct: true,
			Mapper: func(t reflect.Type) *jsonschema.Schema {
				if t == reflect.TypeFor[configs.Secret]() {
					return &jsonschema.Schema{Type: "string"}
				}
				return nil
			},
			LookupComment: func(t reflect.Type, field string) string {
				if field == "" {
					return docs[t.Name()]
				}
				if f, ok := t.FieldByName(field); ok {
					return fieldDoc(docs, t, f)
				}
				return ""
			},
		}
		s := r.Reflect(v)
		s.ID = jsonschema.ID("https://edgebake.io/schema/" + name + ".v1alpha1.json")
		if name == "inventory" {
			partSites(s)
		}
		constrained(t, s, name, used)
		s.Title = fmt.Sprintf("edgebake %s, %s", strings.ToUpper(name[:1])+name[1:], configs.APIVersion)
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		if err := enc.Encode(s); err != nil {
			t.Fatal(err)
		}
		golden(t, "schema/"+name+".v1alpha1.json", b.Bytes())
	}
	for field := range schemaForms() {
		if !used[field] {
			t.Errorf("there is no field %s", field)
		}
	}
	for name := range schemaRules() {
		if !used[name] {
			t.Errorf("there is no type %s", name)
		}
	}
}

// partSites changes the schema of an Inventory's sites to parts of a Site: no field is required,
// and apiVersion and kind are forbidden.
func partSites(s *jsonschema.Schema) {
	for _, name := range []string{"Site", "InventorySite"} {
		d := s.Definitions[name]
		for _, field := range []string{"apiVersion", "kind"} {
			d.Properties.Delete(field)
		}
		if name == "Site" {
			d.Properties.Delete("match") // the defaults apply to all machines
		}
		d.Required = slices.DeleteFunc(d.Required, func(field string) bool { return field != "match" })
	}
}

// row is the line for one field in the reference.
type row struct {
	path, typ, def string
	required       bool
	allowed        []string
	doc            string
	section        bool // the field is a struct, whose fields follow in further rows
}

func rows(docs map[string]string, root reflect.Type) []row {
	var out []row
	var walk func(t reflect.Type, path string)
	walk = func(t reflect.Type, path string) {
		for i := range t.NumField() {
			f := t.Field(i)
			if !f.IsExported() || f.Anonymous { // the Site in an Inventory, which has its own section, is an anonymous field
				continue
			}
			r := row{path: strict.Join(path, strict.FieldName(f)), required: strict.Required(f), doc: fieldDoc(docs, t, f), allowed: strict.TagValues(f, "enum")}
			if d := strict.TagValues(f, "default"); d != nil {
				r.def = d[0]
			}
			ft, sub := f.Type, r.path
			switch {
			case ft == reflect.TypeFor[configs.Secret]():
				r.typ = "secret string"
			case ft.Kind() == reflect.Map:
				r.typ = "map of strings"
			case ft.Kind() == reflect.Slice && ft.Elem().Kind() == reflect.String:
				r.typ = "list of strings"
			case ft.Kind() == reflect.Slice && ft.Elem().Kind() == reflect.Int:
				r.typ = "list of numbers"
			case ft.Kind() == reflect.Slice:
				r.typ, ft, sub = "list of objects", ft.Elem(), sub+"[]"
			case ft.Kind() == reflect.Pointer && ft.Elem().Kind() == reflect.Bool:
				r.typ = "true or false"
			case ft.Kind() == reflect.Pointer:
				r.typ, ft = "object", ft.Elem()
			case ft.Kind() == reflect.Struct:
				r.typ = "object"
			case ft.Kind() == reflect.Bool:
				r.typ = "true or false"
			case f.Tag.Get("list") == "too":
				r.typ = "string or list of strings"
			case ft.Kind() == reflect.String:
				r.typ = "string"
			default:
				r.typ = "number"
			}
			r.section = ft.Kind() == reflect.Struct && ft != reflect.TypeFor[configs.Secret]() && ft.NumField() > 0 && ft != reflect.TypeFor[configs.Site]()
			out = append(out, r)
			if r.section {
				walk(ft, sub)
			}
		}
	}
	walk(root, "")
	return out
}

// cell escapes s for a cell of a Markdown table.
func cell(s string) string { return strings.NewReplacer("|", "\\|", "<", "&lt;").Replace(s) }

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + cell(s) + "`"
}

// TestReference compares docs/reference.md with the types and their comments.
func TestReference(t *testing.T) {
	docs := comments(t)
	var b bytes.Buffer
	b.WriteString(`<!-- Generated from package configs: go test ./configs -update -->

# Reference

Every field of the documents that people write. ` + "`edgebake validate FILE`" + ` checks
one and reports everything wrong with it, ` + "`edgebake init`" + ` writes commented ones to
start from, and ` + "`edgebake schema`" + ` prints JSON schemas for editors.

How documents are read:

- Unknown fields, wrong types and fields given twice are errors.
- A string may be written without quotes, even where it looks like a number:
  ` + "`version: 2.3.7`, `mode: 0644`" + `. A value that begins with ` + "`*`, `&`, `!`, `{` or `[`" + ` needs them.
- Sizes are whole numbers with Mi, Gi or Ti: ` + "`512Mi`" + `.
- Digests are SHA-256, in hexadecimal digits.
- Dates are RFC 3339: ` + "`2026-01-31T12:00:00Z`" + `.
- Relative paths start at the directory of the document's file.
- Secret strings are never printed, and never written to a golden image, a log, the plan
  or a report.
- "One of" unions (base, source, credentials) must have exactly one member.
`)
	for _, doc := range []struct {
		name string
		t    reflect.Type
	}{{"Image", reflect.TypeFor[configs.Image]()}, {"Site", reflect.TypeFor[configs.Site]()}, {"Inventory", reflect.TypeFor[configs.Inventory]()}, {"Cluster", reflect.TypeFor[clusterdoc.Cluster]()}} {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n", doc.name, listed(docs[doc.name]))
		all := rows(docs, doc.t)
		tops := topLevel(all)
		fmt.Fprint(&b, "\n| field | type | default | what it is |\n|---|---|---|---|\n")
		for _, r := range tops {
			if !r.section {
				writeRow(&b, r)
			}
		}
		for _, top := range tops {
			if !top.section {
				continue
			}
			fmt.Fprintf(&b, "\n### %s\n\n%s%s\n", top.path, top.doc, map[bool]string{true: " Required."}[top.required])
			fmt.Fprint(&b, "\n| field | type | default | what it is |\n|---|---|---|---|\n")
			for _, r := range all {
				if strings.HasPrefix(r.path, top.path+".") || strings.HasPrefix(r.path, top.path+"[]") {
					writeRow(&b, r)
				}
			}
		}
	}
	golden(t, "../docs/reference.md", b.Bytes())
}

// listed restores the line breaks before the items of a list in a comment.
func listed(doc string) string {
	return strings.Replace(strings.ReplaceAll(doc, ". - ", ".\n- "), ": - ", ":\n\n- ", 1)
}

func topLevel(all []row) []row {
	return slices.DeleteFunc(slices.Clone(all), func(r row) bool { return strings.ContainsAny(r.path, ".[") })
}

func writeRow(b *bytes.Buffer, r row) {
	doc := cell(r.doc)
	if len(r.allowed) > 1 {
		doc += " One of " + "`" + strings.Join(r.allowed, "`, `") + "`."
	} else if len(r.allowed) == 1 {
		doc += " Always " + code(r.allowed[0]) + "."
	}
	def := code(r.def)
	if r.required && r.typ != "object" {
		def = "**required**"
	}
	fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", r.path, r.typ, def, doc)
}

// TestMigrationTable checks that docs/migrate.md lists every flag of the replaced tools once, and
// that the fields that it names exist.
func TestMigrationTable(t *testing.T) {
	page, err := os.ReadFile("../docs/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	docs := comments(t)
	known := map[string]bool{}
	for name, root := range map[string]reflect.Type{"Image": reflect.TypeFor[configs.Image](), "Site": reflect.TypeFor[configs.Site](), "Inventory": reflect.TypeFor[configs.Inventory](), "Cluster": reflect.TypeFor[clusterdoc.Cluster]()} {
		for _, r := range rows(docs, root) {
			known[name+"."+r.path] = true
		}
	}
	row := regexp.MustCompile("^\\| `(.+?)` \\| (.*?) \\| (.*?) \\|$")
	field := regexp.MustCompile("`([^`]+)`")
	seen := map[string]bool{}
	tool := ""
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "## "); ok {
			tool = name
		}
		m := row.FindStringSubmatch(line)
		if m == nil {
			if strings.HasPrefix(line, "| `") {
				t.Errorf("not a row of three: %s", line)
			}
			continue
		}
		flag := tool + " " + m[1]
		if seen[flag] {
			t.Errorf("%s is listed twice", flag)
		}
		seen[flag] = true
		fields := field.FindAllStringSubmatch(m[2], -1)
		for _, f := range fields {
			if !known[f[1]] {
				t.Errorf("%s: there is no field %s", flag, f[1])
			}
		}
		if len(fields) == 0 && m[3] == "" {
			t.Errorf("%s: neither a field nor a reason", flag)
		}
	}
	theirs, err := os.ReadFile("testdata/flags.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(theirs)) {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		if !seen[line] {
			t.Errorf("%s is not in the table", line)
		}
		delete(seen, line)
	}
	for f := range seen {
		if strings.Contains(f, "--") {
			t.Errorf("%s is in the table, but not a flag of that version", f)
		}
	}
}
