package templates

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"text/template"
)

// maxRendered is the largest accepted size of a rendered template, in bytes.
const maxRendered = 16 << 20

// unknownField matches text/template's error for an unknown field.
var unknownField = regexp.MustCompile(`can't evaluate field (\w+) in type (?:\[\])?\*?configs\.(\w+)`)

// File renders the text of a file with template: true. data is the Image.
func File(text string, data any) (string, error) {
	t, err := template.New("").Option("missingkey=error").Parse(text)
	if err != nil {
		return "", fmt.Errorf("reading the template: %s", strings.TrimPrefix(err.Error(), "template: :"))
	}
	w := &bounded{left: maxRendered}
	if err := t.Execute(w, data); err != nil {
		return "", errors.New(templateError(err))
	}
	return w.String(), nil
}

// templateError rewrites an error for people who know only YAML: in templates, the fields of an
// Image have their Go names.
func templateError(err error) string {
	if m := unknownField.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Sprintf("the template uses .%s, which is not a field of %s; fields begin with a capital letter, e.g. {{.Name}} or {{.Kubernetes.Version}}", m[1], m[2])
	}
	why := strings.TrimPrefix(err.Error(), "template: :")
	return fmt.Sprintf("rendering the template: %s; the template's data is the Image, e.g. {{.Name}} or {{.Kubernetes.Version}}", why)
}

// bounded is a buffer with a limited size.
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
