package console

import (
	"bytes"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/edgebake/edgebake/builder"
	"github.com/vbauerster/mpb/v8/decor"
)

// TestBarCutsBetweenCharacters checks that a long line is truncated between characters.
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

// TestPlainLinesRemind checks that the log of a long step shows that it is still running, with its
// last detail.
func TestPlainLinesRemind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := newPlainLines(&out, false)
		p.Event(builder.Event{Step: "images", State: builder.StateWarning, Text: "not a step that runs"})
		p.Event(builder.Event{Step: "base", State: builder.StateStart, Text: "making it"})
		time.Sleep(20 * time.Second)
		p.Event(builder.Event{Step: "base", State: builder.StateDetail, Text: "Setting up libc6"})
		time.Sleep(45 * time.Second)
		p.Event(builder.Event{Step: "base", State: builder.StateDone, Seconds: 65})
		time.Sleep(time.Hour)
		p.Close()
		synctest.Wait()
		const want = "images: WARNING: not a step that runs\nbase: making it\nbase: running for 30s: Setting up libc6\nbase: running for 1m0s: Setting up libc6\nbase: done in 65.0 s\n"
		if out.String() != want {
			t.Errorf("%s\nwant\n%s", out.String(), want)
		}
	})
}
