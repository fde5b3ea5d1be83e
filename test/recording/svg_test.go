package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestPicture checks that README's picture is drawn from the recording and uses no external files.
func TestPicture(t *testing.T) {
	var events []event
	b, err := os.ReadFile("../../" + session)
	if err == nil {
		err = json.Unmarshal(b, &events)
	}
	if err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile("../../" + picture)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(svg, render(events)) {
		t.Errorf("%s is not drawn from %s: go run ./test/recording -draw", picture, session)
	}
	if len(svg) > 150<<10 {
		t.Errorf("%s has %d bytes", picture, len(svg))
	}
	text := ""
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch tok := tok.(type) {
		case xml.StartElement:
			for _, a := range tok.Attr {
				if a.Name.Local == "href" || a.Name.Local == "src" {
					t.Errorf("it refers to %s", a.Value)
				}
			}
		case xml.CharData:
			text += string(tok) + "\n"
		}
	}
	if strings.Contains(text, "@import") || strings.Contains(text, "url(") {
		t.Error("its style refers to other files")
	}
	for _, want := range []string{"$ edgebake build", "$ edgebake stamp", "is Ready", "$ kubectl get nodes"} {
		if !strings.Contains(text, want) {
			t.Errorf("it lacks %q", want)
		}
	}
	for _, path := range []string{"/home/", "/root/", "/work/"} {
		if strings.Contains(text, path) {
			t.Errorf("it shows a path of the computer that made it: %s", path)
		}
	}
}

func TestWrap(t *testing.T) {
	for _, text := range []string{"", "short", "  " + strings.Repeat("word ", 40), strings.Repeat("x", 200), strings.Repeat("ü", 200)} {
		joined := ""
		for n, line := range wrap(text) {
			if utf8.RuneCountInString(line) > columns {
				t.Errorf("%q is wider than the terminal", line)
			}
			if n > 0 {
				line = strings.TrimLeft(line, " ")
			}
			joined += line
		}
		if strip := func(s string) string { return strings.ReplaceAll(s, " ", "") }; strip(joined) != strip(text) {
			t.Errorf("%q became %q", text, joined)
		}
	}
}
