// Package templates renders the templates in documents: of node names, and of files in an Image.
package templates

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"text/template"
	"text/template/parse"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

// NameFacts contains the values for a template of a node name. A value that the machine does not
// have is empty.
type NameFacts struct{ Serial, MAC, UUID, Hostname string }

// An empty fact prints its name between two markers (missing), which NodeName turns into an error.
// So {{or .Serial .MAC}} works on a machine without a serial number, but {{.Serial}} is an error.
type (
	factSerial   string
	factMAC      string
	factUUID     string
	factHostname string
)

const missing = "\x00"

func shownFact(s, what string) string {
	if s == "" {
		return missing + what + missing
	}
	return s
}

func (f factSerial) String() string   { return shownFact(string(f), "serial number") }
func (f factMAC) String() string      { return shownFact(string(f), "MAC address") }
func (f factUUID) String() string     { return shownFact(string(f), "UUID") }
func (f factHostname) String() string { return shownFact(string(f), "host name") }

// MissingFactError means that a template of a node name uses a value that the machine does not
// have.
type MissingFactError struct{ Template, What string }

func (e *MissingFactError) Error() string {
	return fmt.Sprintf("the node name %q needs the machine's %s, but the machine has no valid one; write a fixed nodeName, or add another value, as in {{or .Serial .MAC}}", e.Template, e.What)
}

// unknownFact matches text/template's error for an unknown field.
var unknownFact = regexp.MustCompile(`can't evaluate field (\w+) in type struct`)

// NodeName renders a template of a node name. It neither converts the result to lower case nor
// validates it.
func NodeName(tmpl string, facts NameFacts) (string, error) {
	t, err := template.New("nodeName").Parse(tmpl)
	if err != nil {
		return "", fmt.Errorf("reading the template %q: %s", tmpl, strings.TrimPrefix(err.Error(), "template: nodeName:"))
	}
	if len(t.Templates()) > 1 || loops(t.Root) {
		return "", fmt.Errorf("reading the template %q: range, define, block and template are not accepted in a node name", tmpl)
	}
	data := struct {
		Serial   factSerial
		MAC      factMAC
		UUID     factUUID
		Hostname factHostname
	}{factSerial(facts.Serial), factMAC(facts.MAC), factUUID(facts.UUID), factHostname(facts.Hostname)}
	w := &bounded{left: 1024} // a name is short, but printf in a template could print pages
	if err := t.Execute(w, data); err != nil {
		if m := unknownFact.FindStringSubmatch(err.Error()); m != nil {
			return "", fmt.Errorf("the template %q uses .%s; available are .Serial, .MAC, .UUID and .Hostname%s", tmpl, m[1], strict.DidYouMean("."+m[1], []string{".Serial", ".MAC", ".UUID", ".Hostname"}))
		}
		why, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), "template: nodeName:"), " in type ")
		return "", fmt.Errorf("executing the template %q (it can use .Serial, .MAC, .UUID and .Hostname): %s", tmpl, why)
	}
	if _, rest, ok := strings.Cut(w.String(), missing); ok {
		what, _, _ := strings.Cut(rest, missing)
		return "", &MissingFactError{tmpl, what}
	}
	return w.String(), nil
}

// loops reports whether a template may run forever. Only a template of texts, values and conditions
// cannot.
func loops(n parse.Node) bool {
	list := func(l *parse.ListNode) bool { return l != nil && slices.ContainsFunc(l.Nodes, loops) }
	switch n := n.(type) {
	case nil, *parse.TextNode, *parse.ActionNode, *parse.CommentNode:
		return false
	case *parse.ListNode:
		return list(n)
	case *parse.IfNode:
		return list(n.List) || list(n.ElseList)
	case *parse.WithNode:
		return list(n.List) || list(n.ElseList)
	}
	return true
}

// BadNodeName returns why a template of a node name is invalid, or "". It renders the template with
// example values.
func BadNodeName(tmpl string) string {
	sample := NameFacts{Serial: "sn12345678", MAC: "525400123456", UUID: "6ba7b810-9dad-41d1-80b4-00c04fd430c8", Hostname: "host1"}
	name, err := NodeName(tmpl, sample)
	if err != nil {
		return err.Error()
	}
	if err := forms.CheckNodeName(strings.ToLower(name)); err != nil {
		if strings.Contains(tmpl, "{{") {
			return fmt.Sprintf("on a machine with serial number %s and MAC address %s, %s", sample.Serial, sample.MAC, err)
		}
		return err.Error()
	}
	return ""
}
