package configs

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"text/template"
	"text/template/parse"
)

// Bounds of what a template may become and count to, so that one that never
// ends is an error too.
const (
	maxRendered = 16 << 20
	maxCount    = 10_000
)

// unknownField finds in the words of text/template what it did not find.
var unknownField = regexp.MustCompile(`can't evaluate field (\w+) in type (?:\[\])?\*?configs\.(\w+)`)

// RenderFile carries out the text of a file with template: true; the Image is
// its data.
func (i *Image) RenderFile(text string) (string, error) {
	t, err := template.New("").Option("missingkey=error").Parse(text)
	if err != nil {
		return "", fmt.Errorf("reading the template: %s", strings.TrimPrefix(err.Error(), "template: :"))
	}
	for _, t := range t.Templates() {
		if n := largeNumber(t.Root); n != "" {
			return "", fmt.Errorf("reading the template: it counts to %s; more than %d takes too long", n, maxCount)
		}
	}
	w := &bounded{left: maxRendered}
	if err := t.Execute(w, i); err != nil {
		return "", errors.New(templateError(err))
	}
	return w.String(), nil
}

// templateError words what went wrong for people who write YAML: fields of
// the Image have the names of its Go types in templates.
func templateError(err error) string {
	if m := unknownField.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Sprintf("the template asks for .%s, which is not a field of %s; fields begin with a capital letter, e.g. {{.Name}} or {{.Kubernetes.Version}}", m[1], m[2])
	}
	why := strings.TrimPrefix(err.Error(), "template: :")
	return fmt.Sprintf("rendering the template: %s; its data is the Image, e.g. {{.Name}} or {{.Kubernetes.Version}}", why)
}

// largeNumber finds a number that a loop would take too long to count to.
func largeNumber(n parse.Node) string {
	var list []parse.Node
	branch := func(b *parse.BranchNode) {
		list = append(list, b.Pipe, b.List)
		if b.ElseList != nil {
			list = append(list, b.ElseList)
		}
	}
	switch n := n.(type) {
	case *parse.NumberNode:
		if v, err := strconv.ParseInt(n.Text, 0, 64); err != nil || v > maxCount {
			return n.Text
		}
	case *parse.ListNode:
		if n != nil {
			list = n.Nodes
		}
	case *parse.ActionNode:
		list = []parse.Node{n.Pipe}
	case *parse.PipeNode:
		if n != nil {
			for _, c := range n.Cmds {
				list = append(list, c)
			}
		}
	case *parse.CommandNode:
		list = n.Args
	case *parse.RangeNode:
		branch(&n.BranchNode)
	case *parse.IfNode:
		branch(&n.BranchNode)
	case *parse.WithNode:
		branch(&n.BranchNode)
	case *parse.TemplateNode:
		list = []parse.Node{n.Pipe}
	}
	for _, c := range list {
		if large := largeNumber(c); large != "" {
			return large
		}
	}
	return ""
}

// bounded is a buffer that takes so many bytes.
type bounded struct {
	bytes.Buffer
	left int
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.left -= len(p); b.left < 0 {
		return 0, errors.New("the result is too long")
	}
	return b.Buffer.Write(p)
}
