package worldtest

import (
	"bytes"
	"strings"
	"testing"
)

// NoSecret checks that the token is in no place where it must not be once the node is Ready.
func (w *World) NoSecret() {
	w.T.Helper()
	w.NoSecretIn(w.Files())
}

// NoSecretIn is NoSecret with the machine's files.
func (w *World) NoSecretIn(files []Entry) {
	w.T.Helper()
	for _, f := range files {
		if f.Mode.IsRegular() {
			noTokenIn(w.T, f.Path, f.Data)
		}
	}
	for dev, d := range w.Slots {
		noTokenIn(w.T, "slot "+dev, d.Written())
	}
	w.NoSecretSaid()
}

// NoSecretSaid checks that no output so far contains the token.
func (w *World) NoSecretSaid() {
	w.T.Helper()
	noTokenIn(w.T, "log", w.Log.Bytes())
	noTokenIn(w.T, "console", []byte(strings.Join(w.Console, "\n")))
	for _, b := range w.Reports {
		noTokenIn(w.T, "posted report", b)
	}
}

func noTokenIn(t *testing.T, where string, b []byte) {
	t.Helper()
	for _, s := range []string{TestToken, TestSecret} {
		if bytes.Contains(b, []byte(s)) {
			t.Errorf("%s contains the token: %.200q", where, b[max(0, bytes.Index(b, []byte(s))-80):])
		}
	}
}
