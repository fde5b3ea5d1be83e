package kubeapi

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// TestAKubeconfigThatIsABurden checks that a kubeconfig that is expensive to parse is rejected:
// because of its signature before it is parsed or, if the signature is valid, because of its size,
// aliases or keys.
func TestAKubeconfigThatIsABurden(t *testing.T) {
	var bomb strings.Builder
	bomb.WriteString("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n")
	for i := range 9 {
		fmt.Fprintf(&bomb, "a%d: &a%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i), 10), ","))
	}
	signed := func(p string) map[string]string { return jws(p, "abcdef", "0123456789abcdef") }
	equal := "{" + strings.Repeat("a,", 30_000) + "}"
	large := "clusters:\n" + strings.Repeat("- {}\n", 400_000)
	for _, c := range []struct {
		name, kubeconfig string
		sig              func(string) map[string]string
		want             string
	}{
		{"large, unsigned", large, unsigned, "more than the limit of 131072"},
		{"large, badly signed", large, func(p string) map[string]string { return jws(p, "abcdef", "aaaaaaaaaaaaaaaa") }, ErrSignature.Error()},
		{"no YAML, badly signed", "\x00", func(p string) map[string]string { return jws(p, "abcdef", "aaaaaaaaaaaaaaaa") }, ErrSignature.Error()},
		{"aliases", bomb.String() + "clusters: [{name: *a9}]\n", signed, "YAML aliases"},
		{"nested", "clusters: " + strings.Repeat("[", 100_000), signed, "exceeded max depth"},
		{"equal keys", equal, signed, "want at most 10000"},
		{"aliases, unsigned", bomb.String() + "clusters: [{name: *a9}]\n", unsigned, ErrUnsigned.Error()},
		{"nested, unsigned", "clusters: " + strings.Repeat("[", 100_000), unsigned, ErrUnsigned.Error()},
		{"equal keys, unsigned", equal, unsigned, ErrUnsigned.Error()},
		{"no CA, unsigned", "certificate-authority-data: YQ==\n", unsigned, "no certificate found"},
		{"many items of another form", "clusters: [" + strings.Repeat("a,", 30_000) + "]\n", signed, "more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ca := newAuthority(t)
			m := &master{ca: ca.pem, sig: c.sig, kubeconfig: c.kubeconfig}
			d := discovery(ca, serve(t, m, ca.serving(t, "127.0.0.1")))
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := Discover(t.Context(), d)
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 2000 {
				t.Errorf("got %.3000v", err)
			}
			// Decoding the answer from JSON to a string needs some memory.
			if got := after.TotalAlloc - before.TotalAlloc; got > 64<<20 {
				t.Errorf("the call used %d bytes of memory", got)
			}
		})
	}
}
