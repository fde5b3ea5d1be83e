package configs

import (
	"fmt"
	"strings"
	"text/template"
)

// NameFacts is what a node name template can be made of. MAC and UUID are in
// lower case, MAC without colons.
type NameFacts struct{ Serial, MAC, UUID, Hostname string }

// ExpandNodeName carries out a node name template. The result is not yet a
// name: lower-case and check it.
func ExpandNodeName(tmpl string, facts NameFacts) (string, error) {
	t, err := template.New("nodeName").Option("missingkey=error").Parse(tmpl)
	if err != nil {
		return "", fmt.Errorf("reading the template %q: %s", tmpl, strings.TrimPrefix(err.Error(), "template: nodeName:"))
	}
	// A template can loop; a name is short.
	w := &limited{left: 1024}
	if err := t.Execute(w, facts); err != nil {
		return "", fmt.Errorf("carrying out the template %q (it knows .Serial, .MAC, .UUID and .Hostname): %s", tmpl, strings.TrimPrefix(err.Error(), "template: nodeName:"))
	}
	return w.String(), nil
}

type limited struct {
	strings.Builder
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	if l.left -= len(p); l.left < 0 {
		return 0, fmt.Errorf("the result is too long")
	}
	return l.Builder.Write(p)
}

// badNodeNameTemplate tries the template on a made-up machine.
func badNodeNameTemplate(tmpl string) string {
	sample := NameFacts{Serial: "sn12345", MAC: "525400123456", UUID: "6ba7b810-9dad-41d1-80b4-00c04fd430c8", Hostname: "host1"}
	name, err := ExpandNodeName(tmpl, sample)
	if err != nil {
		return err.Error()
	}
	if err := CheckNodeName(strings.ToLower(name)); err != nil {
		if strings.Contains(tmpl, "{{") {
			return fmt.Sprintf("on a machine with serial sn12345 and MAC 525400123456, %s", err)
		}
		return err.Error()
	}
	return ""
}
