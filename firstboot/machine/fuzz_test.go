package machine

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// FuzzLoaderText checks that loaderText decodes any contents of the boot loader's variable to valid
// text, and ASCII exactly.
func FuzzLoaderText(f *testing.F) {
	f.Add([]byte("0F9E2A1C-1B2C-4D5E-8F90-A1B2C3D4E5F6"))
	f.Add([]byte{6, 0, 0, 0, 0x3d, 0xd8, 0, 0xde, 'a'})
	f.Add([]byte{7, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if got := loaderText(b); !utf8.ValidString(got) || strings.ContainsRune(got, 0) || utf8.RuneCountInString(got) > len(b)/2 {
			t.Errorf("%q becomes %q", b, got)
		}
		ascii := strings.Map(func(r rune) rune {
			if r <= ' ' || r > '~' {
				return -1
			}
			return r
		}, string(b))
		if got := loaderText([]byte(utf16(ascii))); got != ascii {
			t.Errorf("%q becomes %q", ascii, got)
		}
	})
}

// utf16 returns a firmware variable that contains s, which must be ASCII.
func utf16(s string) string {
	var b strings.Builder
	b.WriteString("\x06\x00\x00\x00")
	for _, c := range s {
		b.WriteRune(c)
		b.WriteByte(0)
	}
	return b.String() + "\x00\x00"
}
