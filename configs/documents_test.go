package configs_test

import (
	"bytes"
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"golang.org/x/tools/txtar"
)

// These tests cover all kinds of documents. They are in package configs_test, because clusterdoc
// imports configs.

var update = flag.Bool("update", false, "rewrite the golden files, schemas and references")

// golden compares got with a file. With -update, it writes the file.
func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs from the code; go test ./configs -update rewrites it. Now:\n%s", file, got)
	}
}

// TestBad reads each invalid document in testdata/bad and compares all problems.
func TestBad(t *testing.T) {
	cases, err := filepath.Glob("testdata/bad/*.txtar")
	if err != nil || len(cases) < 50 {
		t.Fatalf("%d cases: %v", len(cases), err)
	}
	for _, file := range cases {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			ar, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			doc := ar.Files[0]
			_, err = parse(doc.Name, doc.Data)
			var probs configs.Problems
			if !errors.As(err, &probs) || len(probs) == 0 {
				t.Fatalf("no problems found: %v", err)
			}
			for _, p := range probs {
				if p.File != doc.Name || p.Line < 1 || strings.Contains(p.Msg, "BUG") {
					t.Errorf("wrong file or line: %+v", p)
				}
			}
			got := err.Error() + "\n"
			if strings.Contains(got, "s3cret") || strings.Contains(got, "hunter2") || strings.Contains(got, "0123456789abcdef\n") {
				t.Errorf("a secret is quoted:\n%s", got)
			}
			golden(t, file, txtar.Format(&txtar.Archive{Comment: ar.Comment, Files: []txtar.File{doc, {Name: "problems", Data: []byte(got)}}}))
		})
	}
}

// TestExamples checks that every example is valid.
func TestExamples(t *testing.T) {
	kinds := map[string]int{}
	err := filepath.WalkDir("examples", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		v, err := parse(path, data)
		if err != nil {
			t.Error(err)
			return nil
		}
		kinds[v]++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if kinds["Image"] < 3 || kinds["Site"] < 3 || kinds["Inventory"] < 1 {
		t.Errorf("too few examples: %v", kinds)
	}
}

// parse reads a document of any kind.
func parse(name string, data []byte) (kind string, err error) {
	d, err := configs.Read(name, data)
	if err != nil {
		return "", err
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
	return d.Kind, err
}
