package console

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/vbauerster/mpb/v8/decor"
)

// A long line is cut between characters.
func TestBarCutsBetweenCharacters(t *testing.T) {
	for _, text := range []string{strings.Repeat("ä", 100), "x" + strings.Repeat("漢", 100)} {
		b := &bar{text: text}
		if got := b.shown(decor.Statistics{}); !utf8.ValidString(got) || utf8.RuneCountInString(got) != 60 || !strings.HasPrefix(text, got) {
			t.Errorf("%q", got)
		}
	}
	if got := (&bar{text: "short"}).shown(decor.Statistics{}); got != "short" {
		t.Errorf("%q", got)
	}
}
