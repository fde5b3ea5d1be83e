//go:build !linux

package merge

import (
	"context"
	"errors"
	"fmt"
)

// Merge is supported only on Linux.
func Merge(_ context.Context, o Options) (*Report, error) {
	return nil, fmt.Errorf("merging the image store %s into %s: %w on this system", o.From, o.Into, errors.ErrUnsupported)
}
