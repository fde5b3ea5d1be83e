package builder

import (
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
)

// fieldError adds the Image's field to err, or to each error that is joined in err.
func fieldError(path string, err error) error {
	return joined.Each(err, func(e error) error { return &configs.FieldError{Path: path, Err: e} })
}
