package reports

import (
	"net/http"
	"os"
	"testing"
	"time"
	"unicode"

	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/ondisk"
)

// FuzzReport sends arbitrary reports. Each must be rejected, or be stored within the limits, read
// again unchanged, and contain no control characters.
func FuzzReport(f *testing.F) {
	for _, seed := range []string{
		`{"node":"shop-1","result":"running","phases":[{"name":"join","status":"running","waiting":"an API server"}]}`,
		`{"node":"shop-1","result":"failed","phases":[{"name":"\u001b[2J","status":"failed","error":"\ud800\u202e","fix":"` + "\xff" + `"}],"notes":["a","","b"]}`,
		`{"node":"shop-1","result":"done","phases":null,"notes":["\u0000"]}`,
		`{"node":"../x","result":"done"}`, `[]`, `{"NODE":"shop-1","Result":"done","phases":[{}]}`,
	} {
		f.Add([]byte(seed), true)
		f.Add([]byte(seed), false)
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, body []byte, own bool) {
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		path := identity.Path
		if own {
			path = clusterdoc.ReportPath(identity.Key, "shop-1")
		}
		code, _ := send(t, s.Receiver(identity, func() time.Time { return noon }), path, body)
		all := s.All()
		if (code == http.StatusNoContent) != (len(all) == 1) {
			t.Fatalf("the receiver answered %d and stored %+v", code, all)
		}
		for _, told := range all {
			if own && told.Node != "shop-1" {
				t.Errorf("the URL of shop-1 reported %s", told.Node)
			}
			for _, text := range []string{told.Node, told.Phase, told.Reason, told.Fix} {
				for _, r := range text {
					if unicode.IsControl(r) {
						t.Errorf("%q has a control character", text)
					}
				}
			}
			file := fileOf(dir, told.Node)
			if fi, err := os.Stat(file); err != nil || fi.Size() > 64<<10 || fi.Size() != int64(s.bytes) {
				t.Errorf("%v, %v, counted %d", fi, err, s.bytes)
			}
			again, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			if got := again.All(); len(got) != 1 || got[0] != told {
				t.Errorf("kept %+v, read %+v", told, got)
			}
			switch told.Result {
			case ondisk.ResultRunning, ondisk.ResultWaiting, ondisk.ResultDone, ondisk.ResultFailed:
			default:
				t.Errorf("result %q", told.Result)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
	})
}
