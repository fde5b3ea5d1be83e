package console

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// Form is the format of a command's output: text, json or yaml.
type Form string

// Text is the format for people.
const Text Form = "text"

// Flag declares --output.
func (f *Form) Flag(c *cobra.Command) {
	*f = Text
	c.Flags().VarP(f, "output", "o", "format of the output: text, json or yaml")
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"text", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp))
}

func (f *Form) String() string { return string(*f) }
func (f *Form) Type() string   { return "string" }

// Set rejects unknown formats, before the command does any work.
func (f *Form) Set(s string) error {
	if s != "text" && s != "json" && s != "yaml" {
		return errors.New("want text, json or yaml")
	}
	*f = Form(s)
	return nil
}

// Print prints v as JSON or YAML, or calls text.
func (f Form) Print(s Streams, v any, text func()) error {
	if f == Text {
		text()
		return nil
	}
	if list := reflect.ValueOf(v); list.Kind() == reflect.Slice && list.IsNil() {
		v = []any{} // print an empty list instead of null
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	return f.PrintJSON(s, b.Bytes())
}

// PrintJSON prints JSON text: unchanged, or converted to YAML.
func (f Form) PrintJSON(s Streams, text []byte) error {
	if f != "yaml" {
		_, err := s.JSON().Write(text)
		return err
	}
	out, err := yaml.JSONToYAML(text)
	if err == nil {
		_, err = s.Out.Write(out)
	}
	return err
}
