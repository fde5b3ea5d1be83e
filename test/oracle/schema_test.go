package oracle

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/schema"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
	"golang.org/x/tools/txtar"
)

// beyondSchema lists the documents of testdata/bad whose errors a JSON schema cannot detect. Values
// are the reasons.
var beyondSchema = map[string]string{
	"cluster-certificate-validity-short":      "documents of kubeadm that follow",
	"cluster-certificate-validity-unreadable": "documents of kubeadm that follow",
	"cluster-cidrs-small":                     "arithmetic of networks",
	"cluster-component-fields":                "documents of kubelet and kube-proxy that follow",
	"cluster-component-strings":               "documents of kubeadm, kubelet and kube-proxy that follow",
	"cluster-family":                          "addresses compared with each other",
	"cluster-kubeadm-form":                    "documents of kubeadm that follow",
	"cluster-kubeadm-owned":                   "documents of kubeadm that follow",
	"cluster-kubeadm-version":                 "documents of kubeadm that follow",
	"cluster-no-proxy":                        "documents of kubeadm that follow",
	"cluster-overlap":                         "arithmetic of networks",
	"cluster-overlap-default":                 "arithmetic of networks",
	"cluster-twice":                           "fields of two list items compared",
	"family":                                  "addresses compared with each other",
	"ignition-invalid":                        "a document within a string",
	"ignition-syntax":                         "a document within a string",
	"ignition-token":                          "a document within a string",
	"ignition-types":                          "a document within a string",
	"ignition-version":                        "a document within a string",
	"image-control-plane":                     "names of images compared with the version",
	"image-images-ignore":                     "fields compared with each other",
	"image-network-managers":                  "names of packages",
	"image-podcidr-10_244_0_1_24":             "arithmetic of networks",
	"image-podcidr-10_96_0_0_12":              "arithmetic of networks",
	"image-raspberry-pi-packages":             "names of packages",
	"image-site-notbefore":                    "dates compared with each other",
	"image-site-notbefore-form":               "the form of a date",
	"image-yurthub-args":                      "which flags a version of yurthub has",
	"image-yurthub-args16":                    "which flags a version of yurthub has",
	"name-endpoint":                           "fields compared with each other",
	"no-resolver":                             "the form of values decides about other fields",
	"servers-nobody":                          "fields compared with each other",
	"site-match":                              "values that firmware gives many machines",
	"template-1":                              "a template within a string",
	"template-2":                              "a template within a string",
	"template-3":                              "a template within a string",
	"template-4":                              "a template within a string",
	"template-5":                              "a template within a string",
	"template-6":                              "a template within a string",
	"template-7":                              "a template within a string",
	"template-8":                              "a template within a string",
	"template-9":                              "a template within a string",
	"updates":                                 "the form of a time, and names of time zones",
	"updates-zone":                            "fields compared with each other",
	"vip":                                     "fields compared with each other",
	"vip-default-network":                     "arithmetic of networks",
	"vip-network":                             "arithmetic of networks",
	"vip-taken":                               "fields compared with each other",
}

// TestSchemas checks that a schema accepts all documents that validate accepts, and rejects all
// others whose errors JSON schema can express.
func TestSchemas(t *testing.T) {
	schemas := compileSchemas(t)
	bad, err := filepath.Glob("../../configs/testdata/bad/*.txtar")
	if err != nil || len(bad) < 80 {
		t.Fatalf("%d documents, %v", len(bad), err)
	}
	accepted := map[string]bool{}
	for _, file := range bad {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".txtar")
		for _, f := range archive.Files {
			if strings.HasSuffix(f.Name, ".yaml") && checkSchema(schemas, f.Data) == nil {
				accepted[name] = true
			}
		}
	}
	for name := range accepted {
		if beyondSchema[name] == "" {
			t.Errorf("the schema accepts testdata/bad/%s", name)
		}
	}
	for name := range beyondSchema {
		if !accepted[name] {
			t.Errorf("the schema rejects testdata/bad/%s: take it out of the exceptions", name)
		}
	}
	n := 0
	for where, doc := range documents(t) {
		d, err := configs.Read("x", doc)
		if err != nil {
			continue
		}
		switch d.Kind {
		case configs.KindImage:
			_, err = d.Images()
		case configs.KindSite:
			_, err = d.Site(configs.Secret{}, false)
		case configs.KindInventory:
			_, err = d.Inventory(configs.Secret{}, false)
		case configs.KindCluster:
			_, err = clusterdoc.Read(d)
		default:
			err = d.WrongKind("")
		}
		if err != nil {
			continue
		}
		n++
		if err := checkSchema(schemas, doc); err != nil && !errors.Is(err, errNotJSON) {
			t.Errorf("%s: validate accepts it, the schema does not: %v\n%s", where, err, doc)
		}
	}
	if t.Logf("%d valid documents", n); n < 15 {
		t.Errorf("only %d valid documents were found", n)
	}
}

func compileSchemas(t *testing.T) map[string]*jsonschema.Schema {
	t.Helper()
	schemas := map[string]*jsonschema.Schema{}
	for _, kind := range schema.Kinds() {
		raw, err := schema.Read(kind)
		if err != nil {
			t.Fatal(err)
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		c := jsonschema.NewCompiler()
		if err := c.AddResource(kind, doc); err != nil {
			t.Fatal(err)
		}
		if schemas[kind], err = c.Compile(kind); err != nil {
			t.Fatal(err)
		}
	}
	return schemas
}

// errNotJSON means that no schema applies to a document: it has no kind, or its YAML is invalid.
var errNotJSON = errors.New("not a document of ours")

// checkSchema checks a document with the schema of its kind, as an editor does.
func checkSchema(schemas map[string]*jsonschema.Schema, doc []byte) error {
	var v any
	d, err := configs.Read("x", doc)
	if err != nil {
		return errNotJSON
	}
	schema := schemas[strings.ToLower(d.Kind)]
	if err := yaml.Unmarshal(doc, &v); err != nil || schema == nil {
		return errNotJSON
	}
	raw, err := json.Marshal(asText(v))
	if err != nil {
		return errNotJSON
	}
	instance, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return errNotJSON
	}
	return schema.Validate(instance)
}

// asText returns a value in which the keys of mappings are text.
func asText(v any) any {
	switch v := v.(type) {
	case map[any]any:
		out := map[string]any{}
		for k, e := range v {
			if s, ok := k.(string); ok {
				out[s] = asText(e)
			}
		}
		return out
	case map[string]any:
		for k, e := range v {
			v[k] = asText(e)
		}
	case []any:
		for i, e := range v {
			v[i] = asText(e)
		}
	}
	return v
}

// documents returns all documents in the repository: examples and those of tests.
func documents(t *testing.T) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	err := filepath.WalkDir("../..", func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir() && slices.Contains([]string{".git", "build", "bin"}, e.Name()):
			return fs.SkipDir
		case strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "test.go"):
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				lit, ok := n.(*ast.BasicLit)
				if !ok || lit.Kind != token.STRING {
					return true
				}
				if s, err := strconv.Unquote(lit.Value); err == nil && strings.Contains(s, "apiVersion: edgebake.io") {
					out[path+" "+strconv.Itoa(int(lit.Pos()))] = []byte(s)
				}
				return true
			})
		case strings.HasSuffix(path, ".yaml") && strings.Contains(path, "examples"):
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			out[path] = b
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}
