// Package flagvalue words the errors of flags that have a value of another type.
package flagvalue

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/pflag"
)

// Explain returns the error of a flag's parser with what the flag accepts, where the error
// quotes only the function that failed.
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
