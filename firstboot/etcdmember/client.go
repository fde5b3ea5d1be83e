package etcdmember

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// maxAnswer is the maximum number of bytes read of an answer, in which each member takes a few
// hundred.
const maxAnswer = 1 << 20

// AskPeer asks a node at port 2380 for its state, its bootstrap permit and the member IDs in its
// data. etcd answers without a quorum. An unexpected answer counts as none.
func AskPeer(ctx context.Context, client *http.Client, peerURL string) (Peer, []string) {
	if code, body, err := ask(ctx, client, http.MethodGet, peerURL+BlankPath, nil); err == nil && code == http.StatusOK {
		var a Answer
		if json.Unmarshal(body, &a) == nil {
			switch a.Seat {
			case seatBlank:
				return Peer{State: Blank, Permit: a.Permit}, nil
			case seatSpent:
				return Peer{State: Spent, Permit: a.Permit}, nil
			}
		}
	}
	code, body, err := ask(ctx, client, http.MethodGet, peerURL+"/members", nil)
	if err != nil || code != http.StatusOK {
		return Peer{State: Silent}, nil
	}
	var members []struct {
		ID         uint64   `json:"id"`
		PeerURLs   []string `json:"peerURLs"`
		ClientURLs []string `json:"clientURLs"`
	}
	if json.Unmarshal(body, &members) != nil || len(members) == 0 {
		return Peer{State: Silent}, nil
	}
	peer, ids := Peer{State: Leaderless}, []string(nil)
	for _, m := range members {
		if len(m.ClientURLs) > 0 {
			peer.State = InUse
		}
		ids = append(ids, strconv.FormatUint(m.ID, 10))
	}
	return peer, ids
}

// BlankPath is the only path that a control-plane node without data serves on port 2380. Other
// paths return 404: other nodes' etcd would exit on an unexpected answer.
const BlankPath = "/edgebake/seat"

// Answer is the answer at BlankPath. Older programs, without bootstrap permits, accept only
// {"seat":"blank"}. This answer counts as none for them, so they wait.
type Answer struct {
	Seat   string `json:"seat"`
	Permit string `json:"ticket"`
}

const (
	seatBlank = "blank"
	seatSpent = "spent"
)

// BlankAnswer returns the answer of a machine without data. spent means that its bootstrap permit
// was used before.
func BlankAnswer(permit string, spent bool) Answer {
	if spent {
		return Answer{seatSpent, permit}
	}
	return Answer{seatBlank, permit}
}

// ServeBlank returns the HTTP handler of a control-plane node without data. It answers only while
// blank returns true, because a person may restore the data meanwhile.
func ServeBlank(a Answer, blank func() bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != BlankPath || r.Method != http.MethodGet || !blank() {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		// If the peer has closed the connection, it will ask again.
		_ = json.NewEncoder(w).Encode(a)
	})
}

func ask(ctx context.Context, client *http.Client, method, url string, body []byte) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return resp.StatusCode, answer, err
}

// Client is a client of one member's JSON gateway. etcd's client library would be larger than all
// of first boot.
type Client struct {
	HTTP *http.Client
	URL  string // https://ADDRESS:2379
}

func (e Client) call(ctx context.Context, what string, request, answer any) error {
	return e.post(ctx, "to "+what+" members", "/v3/cluster/member/"+what, request, answer)
}

// post sends a request to a path of etcd's JSON gateway. what describes the request in errors.
func (e Client) post(ctx context.Context, what, path string, request, answer any) error {
	fail := func(err error) error { return fmt.Errorf("asking etcd at %s %s: %w", e.URL, what, err) }
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	code, text, err := ask(ctx, e.HTTP, http.MethodPost, e.URL+path, body)
	if err != nil {
		return fail(err)
	}
	if code != http.StatusOK {
		var failure struct {
			Message string `json:"message"`
		}
		if json.Unmarshal(text, &failure) != nil || failure.Message == "" {
			failure.Message = http.StatusText(code)
		}
		return fail(errors.New(failure.Message))
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fail(fmt.Errorf("its answer is not JSON: %w", err))
	}
	return nil
}

type memberAnswer struct {
	ID        string   `json:"ID"`
	Name      string   `json:"name"`
	PeerURLs  []string `json:"peerURLs"`
	IsLearner bool     `json:"isLearner"`
}

func (m memberAnswer) member() Member { return Member{m.ID, m.Name, m.PeerURLs, m.IsLearner} }

// Members lists the members. It needs a quorum: without one, the list would come from one member,
// and might be outdated.
func (e Client) Members(ctx context.Context) ([]Member, error) {
	_, out, err := e.List(ctx)
	return out, err
}

// List is like Members, and also returns the ID of etcd's cluster.
func (e Client) List(ctx context.Context) (cluster string, members []Member, err error) {
	var answer struct {
		Header struct {
			ClusterID string `json:"cluster_id"`
		} `json:"header"`
		Members []memberAnswer
	}
	if err := e.call(ctx, "list", map[string]bool{"linearizable": true}, &answer); err != nil {
		return "", nil, err
	}
	for _, m := range answer.Members {
		members = append(members, m.member())
	}
	if len(members) == 0 {
		return "", nil, errors.New("listing the members of etcd at " + e.URL + ": there are none")
	}
	return answer.Header.ClusterID, members, nil
}

// Active reports whether this member is connected to member id, which means that id's machine is
// running. It becomes false within seconds after that machine stops.
func (e Client) Active(ctx context.Context, id string) (bool, error) {
	n, err := strconv.ParseUint(id, 10, 64)
	if err != nil {
		return false, fmt.Errorf("asking etcd at %s whether member %q runs: this is not a member ID", e.URL, id)
	}
	code, text, err := ask(ctx, e.HTTP, http.MethodGet, e.URL+"/metrics", nil)
	if err == nil && code != http.StatusOK {
		err = errors.New(http.StatusText(code))
	}
	if err != nil {
		return false, fmt.Errorf("asking etcd at %s whether member %x runs: %w", e.URL, n, err)
	}
	remote := fmt.Sprintf("Remote=\"%x\"", n)
	for line := range strings.Lines(string(text)) {
		rest, ours := strings.CutPrefix(line, "etcd_network_active_peers{")
		labels, value, ok := strings.Cut(rest, "} ")
		if ours && ok && slices.Contains(strings.Split(labels, ","), remote) {
			return strings.TrimSpace(value) != "0", nil
		}
	}
	return false, nil
}

// Remove removes a member.
func (e Client) Remove(ctx context.Context, id string) error {
	return e.call(ctx, "remove", map[string]string{"ID": id}, &struct{}{})
}

// AddLearner adds a member without a vote, because a member without data must not complete a
// quorum.
func (e Client) AddLearner(ctx context.Context, peerURL string) (Member, error) {
	var answer struct{ Member memberAnswer }
	err := e.call(ctx, "add", map[string]any{"peerURLs": []string{peerURL}, "isLearner": true}, &answer)
	return answer.Member.member(), err
}

// Promote gives a vote to a learner that has caught up.
func (e Client) Promote(ctx context.Context, id string) error {
	return e.call(ctx, "promote", map[string]string{"ID": id}, &struct{}{})
}

// Snapshot writes the member's database to w in etcdctl's format, and verifies the SHA-256 at its
// end.
func (e Client) Snapshot(ctx context.Context, w io.Writer) error {
	fail := func(err error) error { return fmt.Errorf("asking etcd at %s for a snapshot: %w", e.URL, err) }
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.URL+"/v3/maintenance/snapshot", strings.NewReader("{}"))
	if err != nil {
		return fail(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := e.HTTP.Do(req)
	if err != nil {
		return fail(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fail(errors.New(http.StatusText(resp.StatusCode)))
	}
	sum, tail := sha256.New(), []byte(nil)
	for dec := json.NewDecoder(resp.Body); ; {
		var part struct {
			Result struct {
				Blob []byte `json:"blob"`
			} `json:"result"`
			Error struct {
				Message string `json:"message"`
			} `json:"error"`
		}
		err := dec.Decode(&part)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fail(err)
		}
		if part.Error.Message != "" {
			return fail(errors.New(part.Error.Message))
		}
		if _, err := w.Write(part.Result.Blob); err != nil {
			return err
		}
		tail = append(tail, part.Result.Blob...)
		if over := len(tail) - sha256.Size; over > 0 {
			sum.Write(tail[:over])
			tail = append(tail[:0], tail[over:]...)
		}
	}
	if !bytes.Equal(tail, sum.Sum(nil)) {
		return fail(errors.New("it is truncated or damaged: its checksum does not match"))
	}
	return nil
}

// Token returns the initial-cluster-token, from which etcd derives the IDs of the cluster and its
// members. Members of different bootstraps or restores therefore never accept each other.
func Token(cluster, beginning string) string {
	return cluster + "-" + strings.NewReplacer("-", "", ":", "").Replace(beginning)
}

// RestoreArgs returns the command that makes a one-member data directory from a snapshot. It raises
// revisions above all that clients may have seen, so that every watch starts again.
func RestoreArgs(snapshot, dataDir, name, peerURL, token string) []string {
	return []string{"etcdutl", "snapshot", "restore", snapshot, "--data-dir", dataDir, "--name", name,
		"--initial-cluster", name + "=" + peerURL, "--initial-advertise-peer-urls", peerURL, "--initial-cluster-token", token,
		"--bump-revision", "1000000000", "--mark-compacted"}
}

// InitialCluster returns etcd's --initial-cluster for a Join: the members, where self gets the
// name.
func InitialCluster(members []Member, self Member, name string) string {
	var parts []string
	for _, m := range members {
		if m.ID == self.ID {
			m.Name = name
		}
		for _, url := range m.PeerURLs {
			parts = append(parts, m.Name+"="+url)
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}
