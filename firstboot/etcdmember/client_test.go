package etcdmember

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func always() bool { return true }

// TestLook checks the state that AskPeer derives from each answer. An answer from any other program
// than etcd or first boot counts as none. test/cluster tests this with the real etcd.
func TestLook(t *testing.T) {
	for name, tt := range map[string]struct {
		handler http.Handler
		want    PeerState
	}{
		"blank":            {ServeBlank(BlankAnswer("today", false), always), Blank},
		"blank, used":      {ServeBlank(BlankAnswer("today", true), always), Spent},
		"blank, no more":   {ServeBlank(BlankAnswer("today", false), func() bool { return false }), Silent},
		"blank, of old":    {http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"seat":"blank"}`)) }), Blank},
		"a web server":     {http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) }), Silent},
		"an error":         {http.NotFoundHandler(), Silent},
		"no members":       {members404("[]"), Silent},
		"bootstrapping":    {members404(`[{"id":1,"peerURLs":["https://m1:2380"],"name":"m1"}]`), Leaderless},
		"lived":            {members404(`[{"id":1,"name":"m1","clientURLs":[]},{"id":2,"clientURLs":["https://m2:2379"]}]`), InUse},
		"another's answer": {http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"seat":"taken"}`)) }), Silent},
		"far too much":     {members404("[" + strings.Repeat(" ", maxAnswer) + "]"), Silent},
	} {
		s := httptest.NewServer(tt.handler)
		if peer, _ := AskPeer(t.Context(), s.Client(), s.URL); peer.State != tt.want {
			t.Errorf("%s: %d, want %d", name, peer.State, tt.want)
		}
		s.Close()
		if peer, _ := AskPeer(t.Context(), http.DefaultClient, s.URL); peer.State != Silent {
			t.Errorf("%s, switched off: %d", name, peer.State)
		}
	}
}

// members404 answers like etcd's peer port.
func members404(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/members" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(text))
	})
}

// TestServeBlank checks the answers of a machine without data: etcd on other nodes exits on answers
// that it does not expect.
func TestServeBlank(t *testing.T) {
	s := httptest.NewServer(ServeBlank(BlankAnswer("today", false), always))
	defer s.Close()
	for _, path := range []string{"/", "/members", "/members/hashkv", "/raft", "/version", BlankPath + "/x"} {
		resp, err := http.Get(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %s", path, resp.Status)
		}
	}
	resp, err := http.Post(s.URL+BlankPath, "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body.Close(); resp.StatusCode != http.StatusNotFound {
		t.Errorf("POST: %s", resp.Status)
	}
}

func TestInitialCluster(t *testing.T) {
	self := Member{ID: "9", PeerURLs: []string{"https://m1:2380"}, Learner: true}
	if got := InitialCluster(append(members("m2 m3"), self), self, "m1"); got != "m1=https://m1:2380,m2=https://m2:2380,m3=https://m3:2380" {
		t.Error(got)
	}
}
