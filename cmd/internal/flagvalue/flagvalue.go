// Package flagvalue explains errors about flag values of the wrong type.
package flagvalue

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/pflag"
)

// Explain adds the accepted values to a flag's error if the error is only that of a function
// in strconv.
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
