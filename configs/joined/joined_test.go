package joined

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
)

func TestErrors(t *testing.T) {
	a, b, c := errors.New("a"), errors.New("b"), errors.New("c")
	around := fmt.Errorf("neither %w nor %w", a, b)
	for _, tt := range []struct {
		err  error
		want []error
	}{
		{nil, nil},
		{a, []error{a}},
		{errors.Join(a, errors.Join(b, nil, c)), []error{a, b, c}},
		{errors.Join(around, c), []error{around, c}},
		{fmt.Errorf("doing: %w", errors.Join(a, b)), nil},
	} {
		want := tt.want
		if want == nil && tt.err != nil {
			want = []error{tt.err}
		}
		if got := Errors(tt.err); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", tt.err, got, want)
		}
	}
}

func TestEach(t *testing.T) {
	wrap := func(err error) error { return fmt.Errorf("reading: %w", err) }
	if err := Each(nil, wrap); err != nil {
		t.Error(err)
	}
	err := Each(errors.Join(io.EOF, errors.New("b")), wrap)
	if err.Error() != "reading: EOF\nreading: b" || !errors.Is(err, io.EOF) {
		t.Errorf("%q", err)
	}
}

func TestDistinct(t *testing.T) {
	if err := Distinct(nil, nil); err != nil {
		t.Error(err)
	}
	a := errors.New("a")
	if err := Distinct(a, nil, errors.Join(errors.New("a"), errors.New("b"))); err.Error() != "a\nb" {
		t.Errorf("%q", err)
	}
}

func TestAllAre(t *testing.T) {
	eof := fmt.Errorf("x: %w", io.EOF)
	if !AllAre(errors.Join(io.EOF, eof), io.EOF) || AllAre(errors.Join(eof, errors.New("b")), io.EOF) || !AllAre(eof, io.EOF) || AllAre(nil, io.EOF) {
		t.Error("AllAre")
	}
}
