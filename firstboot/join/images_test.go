package join_test

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
)

func TestImagesAreImportedOnce(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Put(ondisk.ImportImageDir+"/000-pause.tar", "archive")
	w.Put(ondisk.ImportImageDir+"/"+ondisk.ImportIndexFile, `{"version":1,"archives":[{"file":"000-pause.tar","ref":"example.com/pause:1",
"sha256":"`+fmt.Sprintf("%x", sha256.Sum256([]byte("archive")))+`","platform":"linux/amd64","names":["example.com/pause@sha256:0"],"labels":{"a":"b"}}]}`)
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	var ran []string
	for _, n := range w.EffectNames {
		if c, ok := strings.CutPrefix(n, "run ctr --namespace k8s.io images "); ok {
			ran = append(ran, strings.ReplaceAll(c, w.Root, ""))
		}
	}
	want := []string{
		"import --platform linux/amd64 " + ondisk.ImportImageDir + "/000-pause.tar",
		"tag --force example.com/pause:1 example.com/pause@sha256:0",
		"label example.com/pause:1 a=b", "label example.com/pause@sha256:0 a=b",
	}
	if !slices.Equal(ran, want) {
		t.Errorf("ran %q", ran)
	}
	w.PowerOn()
	if err := w.Boot(); err != nil || slices.ContainsFunc(w.EffectNames, func(n string) bool { return strings.Contains(n, "ctr") }) {
		t.Errorf("%v, %v", err, w.EffectNames)
	}
	w.Put(ondisk.ImportImageDir+"/000-pause.tar", "damaged")
	w.PowerOn()
	if err := w.Boot(); err == nil || !w.ConsoleHas("FAILED images") {
		t.Errorf("a damaged archive: %v", err)
	}
}
