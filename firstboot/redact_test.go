package firstboot

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
)

// TestLogRedacts: no way of logging lets a secret through, also one that becomes known
// after With.
func TestLogRedacts(t *testing.T) {
	t.Parallel()
	r := &Runner{}
	var out bytes.Buffer
	l := slog.New(redacting{Handler: slog.NewJSONHandler(&out, nil), redact: r.redact})
	early := l.With("early", testToken)
	secrets := []string{testToken, testSecret}
	r.secrets.Store(&secrets)
	for name, log := range map[string]func(){
		"message":       func() { l.Info("the token " + testToken) },
		"attribute":     func() { l.Info("joining", "token", testToken) },
		"key":           func() { l.Info("joining", testToken, 1) },
		"struct":        func() { l.Info("joining", "token", struct{ S string }{testToken}) },
		"group":         func() { l.Info("joining", slog.Group("site", "token", testToken)) },
		"with":          func() { l.With("token", testToken).Info("joining") },
		"with, earlier": func() { early.Info("joining") },
		"with a group":  func() { l.With(slog.Group("site", "token", testToken)).Info("joining") },
		"below a group": func() { l.WithGroup("site").With("token", testToken).Info("joining", "secret", testSecret) },
		"group's name":  func() { l.WithGroup(testToken).Info("joining", "attempt", 1) },
	} {
		out.Reset()
		log()
		if got := out.String(); strings.Contains(got, testSecret) || !strings.Contains(got, configs.Mask) {
			t.Errorf("%s: %s", name, got)
		}
	}
	// Attributes of one logger are not another's, and a group holds what follows.
	out.Reset()
	site := l.With("node", "edge-1").WithGroup("site")
	site.With("zone", "north")
	site.Info("joining", "attempt", 1)
	if got := out.String(); !strings.Contains(got, `"node":"edge-1","site":{"attempt":"1"}}`) {
		t.Error(got)
	}
}
