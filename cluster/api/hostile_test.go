package api

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// TestAKubeconfigThatIsABurden comes from a server that has not proved itself:
// it is rejected by its signature, before it is parsed, and by its size and its
// aliases.
func TestAKubeconfigThatIsABurden(t *testing.T) {
	var bomb strings.Builder
	bomb.WriteString("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n")
	for i := range 9 {
		fmt.Fprintf(&bomb, "a%d: &a%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i), 10), ","))
	}
	large := "clusters:\n" + strings.Repeat("- {}\n", 400_000)
	for _, c := range []struct {
		name, kubeconfig string
		sig              func(string) map[string]string
		want             string
	}{
		{"large, unsigned", large, unsigned, "at most 131072 are read"},
		{"large, badly signed", large, func(p string) map[string]string { return jws(p, "abcdef", "aaaaaaaaaaaaaaaa") }, ErrSignature.Error()},
		{"no YAML, badly signed", "\x00", func(p string) map[string]string { return jws(p, "abcdef", "aaaaaaaaaaaaaaaa") }, ErrSignature.Error()},
		{"aliases", bomb.String() + "clusters: [{name: *a9}]\n", unsigned, "YAML aliases"},
		{"nested", "clusters: " + strings.Repeat("[", 100_000), unsigned, "exceeded max depth"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ca := newAuthority(t)
			m := &master{ca: ca.pem, sig: c.sig, kubeconfig: c.kubeconfig}
			d := discovery(ca, serve(t, m, ca.serving(t, "127.0.0.1")))
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := Discover(t.Context(), d)
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v", err)
			}
			// The answer itself, as JSON and as a string, takes some of it.
			if got := after.TotalAlloc - before.TotalAlloc; got > 64<<20 {
				t.Errorf("it took %d bytes of memory", got)
			}
		})
	}
}
