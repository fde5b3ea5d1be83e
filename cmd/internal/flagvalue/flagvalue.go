// Package flagvalue explains the errors of flags with a value of the wrong
// type.
package flagvalue

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/pflag"
)

// Explain adds to the error of a flag's parser what the flag accepts, if the
// error names only the Go function that failed.
func Explain(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) || !errors.As(err, new(*strconv.NumError)) {
		return err
	}
	f := invalid.GetFlag()
	want := "a whole number"
	if f.Value.Type() == "bool" {
		want = fmt.Sprintf("true or false; --%s alone is true", f.Name)
	}
	return fmt.Errorf("--%s=%s: want %s", f.Name, invalid.GetValue(), want)
}
