package media

import (
	"bytes"
	"math/rand/v2"
	"regexp"
	"testing"
)

// TestHasToken compares hasToken with a regular expression.
func TestHasToken(t *testing.T) {
	want := regexp.MustCompile(`\b[a-z0-9]{6}\.[a-z0-9]{16}\b`)
	const token = "abcdef.0123456789abcdef"
	texts := []string{
		"", ".", "......", token, "x" + token, token + "x", "X" + token, token + "_", "-" + token + "-", "\x00" + token + "\x00", "." + token, token + ".",
		"token: " + token + "\n", token[1:], token[:len(token)-1], "abcdeF.0123456789abcdef", "abcdef.0123456789abcdeF", "abcdef..0123456789abcdef",
		"aaaaaa.abcdef.0123456789abcdef", token + "." + token, "\xff" + token + "\xff",
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		b := []byte(token)
		for range rnd.IntN(3) {
			b[rnd.IntN(len(b))] = ".a_Z-\x00"[rnd.IntN(6)]
		}
		pad := func() []byte { return bytes.Repeat([]byte{".aZ_ \x00"[rnd.IntN(6)]}, rnd.IntN(3)) }
		texts = append(texts, string(pad())+string(b)+string(pad()))
	}
	found := 0
	for _, s := range texts {
		got := hasToken([]byte(s))
		if got != want.MatchString(s) {
			t.Fatalf("%q: %v", s, got)
		}
		if got {
			found++
		}
	}
	if found < 100 || found > len(texts)-100 {
		t.Errorf("%d of %d texts have a token", found, len(texts))
	}
}
