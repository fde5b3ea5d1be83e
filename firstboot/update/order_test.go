package update

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
	format "github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/test/mediatest"
)

// ordered is a box that is a node, and the cluster with its Node.
type ordered struct {
	*box
	server      *httptest.Server
	away        bool
	locked      bool // another change of the machine holds the lock
	annotations map[string]string
	requests    int      // requests for the Node
	states      []string // the machine's answers, in order
	site        []string
	images      *slowLine
	// asked is called at each read of the Node, before the answer.
	asked func(n int)
}

const (
	nodePath = "/api/v1/nodes/edge1"
	imageURL = "https://images.example.com/new.raw.zst"
)

func newOrdered(t *testing.T) *ordered {
	b := &ordered{box: newBox(t), annotations: map[string]string{}}
	b.images = newLine(b.box, "new.raw.zst")
	b.server = httptest.NewTLSServer(b)
	t.Cleanup(b.server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: b.server.Certificate().Raw})
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "system:node:edge1", Organization: []string{"system:nodes"}},
		NotBefore: mediatest.Date.Add(-time.Hour), NotAfter: mediatest.Date.AddDate(1, 0, 0)}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	b.put("var/lib/kubelet/pki/current.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))+string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})))
	conf, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: b.server.URL, CAFile: ondisk.KubeCA}, kubeapi.User{CertFile: "/var/lib/kubelet/pki/current.pem", KeyFile: "/var/lib/kubelet/pki/current.pem"})
	if err != nil {
		t.Fatal(err)
	}
	b.put(ondisk.KubeletConf, string(conf))
	b.put(ondisk.KubeletConfig, "kind: KubeletConfiguration\n")
	b.put("var/lib/kubelet/kubeadm-flags.env", "KUBELET_KUBEADM_ARGS=\"--x=y\"\n")
	b.put(ondisk.KubeCA, string(ca))
	return b
}

// ServeHTTP is the API server.
func (b *ordered) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if b.requests++; b.requests > 3000 {
		panic("the machine asks without end")
	}
	if r.URL.Path != nodePath || !strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata") {
		b.t.Errorf("%s %s, %s", r.Method, r.URL.Path, r.Header.Get("Accept"))
	}
	if r.Method == http.MethodPatch {
		var patch struct {
			Metadata struct{ Annotations map[string]string }
		}
		body, err := io.ReadAll(r.Body)
		if err = errors.Join(err, json.Unmarshal(body, &patch)); err != nil || len(patch.Metadata.Annotations) != 1 {
			b.t.Errorf("%s: %v", body, err)
		}
		b.annotations[order.AnnotationAnswer] = patch.Metadata.Annotations[order.AnnotationAnswer]
		if s := b.answer().State; len(b.states) == 0 || b.states[len(b.states)-1] != s {
			b.states = append(b.states, s)
		}
	} else if b.asked != nil {
		b.asked(b.requests)
	}
	if b.away {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	json.NewEncoder(w).Encode(map[string]any{"metadata": map[string]any{"name": "edge1", "annotations": b.annotations}})
}

func (b *ordered) answer() order.Answer {
	return order.ParseAnswer(b.annotations[order.AnnotationAnswer])
}

// env returns the box's Env with connections to the cluster and to the image's server.
func (b *ordered) env() *machine.Env {
	e := b.box.env()
	if b.site != nil {
		b.box.site(e, b.site...)
	}
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if b.away {
			return nil, errors.New("network is unreachable")
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	e.Rand = func() float64 { return 0 }
	if b.locked {
		e.Lock = func(context.Context, string) (func(), error) { return nil, machine.ErrLocked }
	}
	e.GetRemote = b.images.get
	return e
}

// run carries out one run of the timer.
func (b *ordered) run() error { return CarryOutOrder(b.t.Context(), b.env(), func(run.Step) {}) }

func (b *ordered) must() {
	b.t.Helper()
	if err := b.run(); err != nil {
		b.t.Fatal(err)
	}
}

// says checks the state and the reason in the machine's answer, and that OrderStatus has the same.
func (b *ordered) says(state, reason string) {
	b.t.Helper()
	if a := b.answer(); a.State != state || !strings.Contains(a.Reason, reason) || reason == "" && a.Reason != "" {
		b.t.Errorf("answered %+v, want %s, %q", a, state, reason)
	}
	a, s := b.answer(), OrderStatus(b.env())
	if a.Order == "" || state == order.StateDone {
		if s != nil {
			b.t.Errorf("status %+v, answered %+v", s, a)
		}
	} else if s == nil || s.Order != a.Order || s.State != a.State || s.Reason != a.Reason {
		b.t.Errorf("status %+v, answered %+v", s, a)
	}
}

// TestOrderStatusWithoutOrder checks that nothing is logged without an order: every user may run
// firstboot status, but only root can read the Site.
func TestOrderStatusWithoutOrder(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	e := newOrdered(t).env()
	e.Log = slog.New(slog.NewTextHandler(&log, nil))
	if s := OrderStatus(e); s != nil || log.Len() > 0 {
		t.Errorf("%+v, logged %q", s, log.String())
	}
}

// TestUnreadableOrderRecord checks that a record that cannot be read does not count as missing: it
// limits how often an image is installed.
func TestUnreadableOrderRecord(t *testing.T) {
	t.Parallel()
	b := newOrdered(t)
	if err := os.MkdirAll(filepath.Join(b.root, OrderFile), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := CarryOutOrder(t.Context(), b.env(), func(run.Step) {}); err == nil || !strings.Contains(err.Error(), "reading the record of the last order") {
		t.Errorf("the error is %v", err)
	}
}

func (b *ordered) entry() bool {
	_, err := os.Stat(filepath.Join(b.root, entryB))
	return err == nil
}

// goldenOf returns an image's golden digest.
func goldenOf(t testing.TB, image string) string {
	t.Helper()
	file, err := os.ReadFile(imagePath(image))
	if err != nil {
		t.Fatal(err)
	}
	i, err := format.Open(bytes.NewReader(file), int64(len(file)))
	if err = errors.Join(err, i.Decode()); err != nil {
		t.Fatal(err)
	}
	return i.Index.Golden
}

func (b *ordered) give(words ...string) {
	b.t.Helper()
	b.annotations[order.AnnotationOrder] = strings.Join(append([]string{imageURL + "@sha256:" + goldenOf(b.t, "new.raw.zst")}, words...), " ")
}

// TestOrder checks that an order is carried out once. Its state is reported until the machine keeps
// the new system.
func TestOrder(t *testing.T) {
	b := newOrdered(t)
	b.must()
	if a := b.answer(); a.Plan != oldPlan || a.Serial != 5 || a.State != "" || b.requests != 2 {
		t.Errorf("without an order, the answer is %+v after %d requests", a, b.requests)
	}
	b.must()
	if b.requests != 3 {
		t.Errorf("%d requests: the answer was written again", b.requests)
	}
	b.give()
	b.must()
	b.updated()
	if !b.rebooted || strings.Join(b.states, " ") != " working restarting" {
		t.Errorf("restarted: %v; states %q", b.rebooted, b.states)
	}
	if a := b.answer(); !strings.HasPrefix(a.Order, imageURL+"@sha256:") {
		t.Errorf("%+v", a)
	}
	fetched := b.images.requests
	const entry = "edgebake-b+2-1.conf"
	b.bootsB(entry)
	b.must()
	b.says(order.StateTrial, "")
	b.blessed(entry)
	b.must()
	b.says(order.StateDone, "")
	if a := b.answer(); a.Plan != newPlan {
		t.Errorf("%+v", a)
	}
	b.rebooted = false
	b.must()
	if b.rebooted || b.images.requests != fetched {
		t.Error("the order was carried out twice")
	}
	// The same image is ordered again: nothing is done or downloaded.
	b.give("again=2")
	b.must()
	b.says(order.StateDone, alreadyRuns)
	if b.rebooted || b.images.requests != fetched {
		t.Errorf("%d requests for the image that runs", b.images.requests-fetched)
	}
	delete(b.annotations, order.AnnotationOrder)
	b.must()
	b.says(order.StateDone, alreadyRuns)
}

// TestOrderOfTheSameImage checks an order for the image that the machine runs already. The machine
// has no record of an order.
func TestOrderOfTheSameImage(t *testing.T) {
	b := newOrdered(t)
	b.images = newLine(b.box, "old.raw.zst")
	b.annotations[order.AnnotationOrder] = imageURL + "@sha256:" + goldenOf(t, "old.raw.zst")
	b.must()
	b.says(order.StateDone, alreadyRuns)
	if b.rebooted || b.entry() {
		t.Error("the machine was changed")
	}
}

// TestOrderOfABadSystem checks that if a system fails its trial, its order has failed, and is not
// retried automatically.
func TestOrderOfABadSystem(t *testing.T) {
	b := newOrdered(t)
	b.give()
	b.must()
	if err := os.Rename(filepath.Join(b.root, entryB), filepath.Join(b.root, "efi/loader/entries/edgebake-b+0-3.conf")); err != nil {
		t.Fatal(err)
	}
	b.rebooted = false
	for range 2 {
		if err := Finish(t.Context(), b.env()); err != nil {
			t.Fatal(err)
		}
		b.must()
		b.says(order.StateFailed, "the new system failed to start")
		if a := b.answer(); a.Plan != oldPlan || b.rebooted {
			t.Errorf("%+v, restarted: %v", a, b.rebooted)
		}
	}
	// Another text of the order is no reason to try the image again, unless it has a new again.
	try := func(again string, words ...string) {
		t.Helper()
		b.rebooted = false
		b.give(words...)
		b.must()
		if again != "" {
			b.says(order.StateFailed, again)
		}
		if b.rebooted != (again == "") {
			t.Errorf("%q: restarted: %v", words, b.rebooted)
		}
	}
	failed := func() {
		t.Helper()
		b.updated()
		if err := os.Rename(filepath.Join(b.root, entryB), filepath.Join(b.root, "efi/loader/entries/edgebake-b+0-3.conf")); err != nil {
			t.Fatal(err)
		}
		b.must()
		b.says(order.StateFailed, "the new system failed to start")
	}
	const hint = "add a new again=WORD to the order"
	try(hint, "limit-rate=1M")
	try("", "again=2")
	failed()
	try(hint, "again=2 max-bytes=900M")
	try(hint)
	try("", "again=3")
	failed()
	try("orders have installed this image 3 times", "again=4")
	// A person may still try it.
	if err := b.over(b.images, Options{}); err != nil {
		t.Fatal(err)
	}
	b.updated()
}

// TestOrdersInTurn checks that orders cannot restart a machine without end with two images of the
// same serial.
func TestOrdersInTurn(t *testing.T) {
	b := newOrdered(t)
	restarts := 0
	for n := range 20 {
		name, root := "new.raw.zst", ondisk.LabelRootB
		if n%2 == 1 {
			name, root = "old.raw.zst", ondisk.LabelRootA
		}
		b.images = newLine(b.box, name)
		b.annotations[order.AnnotationOrder] = fmt.Sprintf("%s@sha256:%s again=%d", imageURL, goldenOf(t, name), n)
		b.rebooted = false
		b.must()
		if !b.rebooted {
			b.says(order.StateFailed, "orders have installed this image 3 times")
			break
		}
		restarts++
		b.runs(root, name)
		if err := Finish(t.Context(), b.env()); err != nil {
			t.Fatal(err)
		}
		b.must()
		b.says(order.StateDone, "")
	}
	if restarts != 6 {
		t.Errorf("the machine was restarted %d times", restarts)
	}
}

// TestTrialsCount checks that attempts that did not restart the machine do not count as trials.
func TestTrialsCount(t *testing.T) {
	b := newOrdered(t)
	for n := range 2 * maxTrials {
		b.give(fmt.Sprintf("again=%d", n))
		e := b.env()
		e.Run = func(context.Context, machine.Cmd) error { return errors.New("no restart") }
		if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil {
			t.Fatal(err)
		}
		b.says(order.StateFailed, "no restart")
	}
	b.give("again=last")
	b.must()
	b.updated()
}

// TestOrderWithASlowIndex checks that a server that sends the index of an image slowly holds the
// machine for a limited time, and that an order is withdrawn or halted meanwhile.
func TestOrderWithASlowIndex(t *testing.T) {
	for name, change := range map[string]func(b *ordered){
		"stays":     func(*ordered) {},
		"withdrawn": func(b *ordered) { delete(b.annotations, order.AnnotationOrder) },
		"halted":    func(b *ordered) { b.annotations[order.AnnotationHalt] = "" },
	} {
		b := newOrdered(t)
		b.give()
		b.images.image = append(make([]byte, 1<<20), b.images.image...) // the place does not matter
		b.images.rate, b.images.piece = 180, 1000
		b.asked = func(int) {
			if b.answer().State == order.StateWorking {
				change(b)
			}
		}
		began := b.now
		b.must()
		if took := b.now.Sub(began); took > 70*time.Minute || name != "stays" && took > 5*time.Minute {
			t.Errorf("%s: it took %s", name, took)
		}
		if name == "stays" {
			b.says(order.StateWaiting, "has not sent it in 1h0m0s")
		} else {
			b.says(order.StateWithdrawn, "withdrawn or changed")
		}
	}
}

// TestOrderOfALocalAddress checks that an order cannot make the machine send requests to itself.
func TestOrderOfALocalAddress(t *testing.T) {
	for _, image := range []string{"http://127.0.0.1:10248/healthz", "oci://localhost:5000/edge:1", "https://[::1]:6443/x"} {
		b := newOrdered(t)
		b.annotations[order.AnnotationOrder] = image + "@sha256:" + strings.Repeat("ab", 32)
		e := b.env()
		e.GetRemote = host.New(io.Discard).GetRemote
		if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil {
			t.Fatal(err)
		}
		b.says(order.StateFailed, "loopback and link-local addresses are rejected")
	}
}

// TestOrderOfABadSystemAgain checks that the order of a system that has failed is not carried out
// once more if the machine cannot tell at first, or another update has begun since.
func TestOrderOfABadSystemAgain(t *testing.T) {
	for _, name := range []string{"unreadable entries", "another update"} {
		b := newOrdered(t)
		b.give()
		b.must()
		failed := filepath.Join(b.root, "efi/loader/entries/edgebake-b+0-3.conf")
		if err := os.Rename(filepath.Join(b.root, entryB), failed); err != nil {
			t.Fatal(err)
		}
		os.RemoveAll(filepath.Join(b.root, "run"))
		b.put("run/x", "")
		b.rebooted = false
		entries, away := filepath.Join(b.root, "efi/loader/entries"), filepath.Join(b.root, "away")
		if name == "another update" {
			if err := noteFailed(b.env()); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(failed); err != nil {
				t.Fatal(err)
			}
			b.put(planFile, "ffffffffffffffffffffffffffffffff\n")
		} else if err := os.Rename(entries, away); err != nil {
			t.Fatal(err)
		}
		asked := b.images.requests
		b.must()
		if name == "unreadable entries" {
			b.says(order.StateRestarting, "")
			if err := os.Rename(away, entries); err != nil {
				t.Fatal(err)
			}
			b.must()
		}
		b.says(order.StateFailed, "the new system failed to start")
		if b.rebooted || b.images.requests > asked {
			t.Errorf("%s: the order was carried out again", name)
		}
	}
}

// TestOrderReplacedByHand checks that an order that restarts the machine is not carried out again if a
// person installs a third image before the order's result is known.
func TestOrderReplacedByHand(t *testing.T) {
	third := strings.Repeat("f", 32)
	const replaced = "another image was installed after that of the order, and the machine runs "
	for _, c := range []struct {
		name          string
		prepare       func(b *ordered)
		state, reason string
	}{
		{"installed", func(*ordered) {}, order.StateRestarting, ""},
		{"installed after the order's run was killed", func(b *ordered) { b.put(committedFile, "") }, order.StateRestarting, ""},
		{"on trial", func(b *ordered) {
			b.runs(ondisk.LabelRootB, "new.raw.zst")
			b.put(ondisk.ImageInfoFile, strings.ReplaceAll(b.get(ondisk.ImageInfoFile), newPlan, third))
			b.put(machine.BootCountFile, "\x06\x00\x00\x00\\\x00l\x00o\x00a\x00d\x00e\x00r\x00")
		}, order.StateTrial, ""},
		{"kept", func(b *ordered) {
			b.runs(ondisk.LabelRootB, "new.raw.zst")
			b.put(ondisk.ImageInfoFile, strings.ReplaceAll(b.get(ondisk.ImageInfoFile), newPlan, third))
		}, order.StateFailed, replaced + third},
		{"kept, and its update finished", func(b *ordered) {
			b.runs(ondisk.LabelRootB, "new.raw.zst")
			b.put(ondisk.ImageInfoFile, strings.ReplaceAll(b.get(ondisk.ImageInfoFile), newPlan, third))
			if err := os.RemoveAll(filepath.Join(b.root, Dir)); err != nil {
				t.Fatal(err)
			}
		}, order.StateFailed, replaced + third},
		{"failed", func(b *ordered) {
			if err := os.Rename(filepath.Join(b.root, entryB), filepath.Join(b.root, "efi/loader/entries/edgebake-b+0-3.conf")); err != nil {
				t.Fatal(err)
			}
		}, order.StateFailed, replaced + oldPlan},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newOrdered(t)
			b.give()
			b.must()
			b.updated()
			b.put(planFile, third+"\n")
			c.prepare(b)
			b.rebooted = false
			asked := b.images.requests
			for range 2 {
				b.must()
				b.says(c.state, c.reason)
			}
			if b.rebooted || b.images.requests > asked {
				t.Error("the order was carried out again")
			}
		})
	}
}

// TestOrderHeld checks that with hold, the machine downloads everything and waits. It restarts once
// hold is removed from the order.
func TestOrderHeld(t *testing.T) {
	b := newOrdered(t)
	b.give("hold")
	looks, came := 0, int64(0)
	b.asked = func(int) {
		if b.answer().State != order.StateHeld {
			return
		}
		if looks++; looks == 1 {
			came = b.images.came
		}
		if b.entry() || b.rebooted {
			t.Error("the boot entry was written while the order was on hold")
		}
		if looks == 20 {
			b.give()
		}
	}
	began := b.now
	for looks < 20 {
		b.must()
		b.now = b.now.Add(12 * time.Minute) // the timer runs
	}
	b.must()
	b.updated()
	if strings.Join(b.states, " ") != "working held working restarting" || b.images.came > came+came/5 {
		t.Errorf("states %q, %d bytes came afterwards", b.states, b.images.came-came)
	}
	if took := b.now.Sub(began); took < 30*time.Minute || b.requests > 45 {
		t.Errorf("%d requests in %s", b.requests, took)
	}
}

// TestOrderWithdrawn checks that an order is stopped if it is withdrawn, changed or halted before
// the boot entry is written.
func TestOrderWithdrawn(t *testing.T) {
	for name, change := range map[string]func(b *ordered){
		"withdrawn": func(b *ordered) { delete(b.annotations, order.AnnotationOrder) },
		"changed":   func(b *ordered) { b.give("again=other") },
		"halted":    func(b *ordered) { b.annotations[order.AnnotationHalt] = "stopped" },
	} {
		for _, midway := range []bool{false, true} {
			if midway && name != "withdrawn" {
				continue
			}
			b := newOrdered(t)
			b.give("hold", "limit-rate=5k")
			asked := false
			b.asked = func(int) {
				if s := b.answer().State; s == order.StateHeld || midway && s == order.StateWorking {
					if !asked {
						change(b)
					}
					asked = true
				}
			}
			b.must()
			if b.entry() || b.rebooted {
				t.Errorf("%s: the order was carried out", name)
			}
			b.says(order.StateWithdrawn, "withdrawn or changed")
			if whole := int64(len(b.images.image)); midway && b.images.came > whole/2 {
				t.Errorf("%s: %d of %d bytes were fetched although the order was withdrawn", name, b.images.came, whole)
			}
			came := b.images.came
			// The same order, given again, continues.
			delete(b.annotations, order.AnnotationHalt)
			b.give()
			b.asked = nil
			b.must()
			b.updated()
			if b.images.came > came+came/5 && !midway {
				t.Errorf("%s: %d bytes came again", name, b.images.came-came)
			}
		}
	}
}

// TestOrderRejected checks that an order can do nothing that the command without --unsigned could
// not do.
func TestOrderRejected(t *testing.T) {
	golden := "@sha256:" + strings.Repeat("ab", 32)
	for name, c := range map[string]struct {
		order, image, want string
		site, info         string
		silent             bool // no request to the image's server
	}{
		"another image":   {imageURL + golden, "new.raw.zst", "its golden digest is", "", "", false},
		"unsigned":        {"", "unsigned.raw.zst", "has no signature", "", "", false},
		"foreign":         {"", "foreign.raw.zst", "for arm64", "", "", false},
		"no digest":       {imageURL, "new.raw.zst", "want URL@sha256:GOLDEN", "", "", true},
		"a file":          {"/etc/shadow" + golden, "new.raw.zst", "not a URL", "", "", true},
		"another scheme":  {"file:///etc/shadow" + golden, "new.raw.zst", "not a URL", "", "", true},
		"stick":           {Stick + golden, "new.raw.zst", "not a URL", "", "", true},
		"a login":         {"https://a:b@images.example.com/x" + golden, "new.raw.zst", "contains credentials", "", "", true},
		"unknown word":    {imageURL + golden + " unsigned", "new.raw.zst", `"unsigned" is unknown`, "", "", true},
		"long":            {imageURL + strings.Repeat("x", 3000) + golden, "new.raw.zst", "at most 2048", "", "", true},
		"control":         {"https://\x1b[2J" + golden, "new.raw.zst", "not a URL", "", "", true},
		"metered":         {imageURL + golden, "new.raw.zst", "max-bytes=20M", "ipvs: {profile: metered}", "", true},
		"too many bytes":  {"max-bytes=1M", "new.raw.zst", "allows 1.0 MB", "ipvs: {profile: metered}", "", false},
		"no keys":         {imageURL + golden, "new.raw.zst", "names no keys", "", "updateKeys", true},
		"no such address": {imageURL + golden, "", "404", "", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newOrdered(t)
			before := b.partition(ondisk.LabelRootB)
			if c.site != "" {
				b.site = []string{c.site}
			}
			if c.info != "" {
				b.put(ondisk.ImageInfoFile, strings.Replace(b.get(ondisk.ImageInfoFile), c.info, "x", 1))
			}
			value := c.order
			if c.image == "" {
				b.images.status = http.StatusNotFound
			} else {
				b.images = newLine(b.box, c.image)
				if value == "" || strings.HasPrefix(value, "max-bytes") {
					value = strings.TrimSpace(imageURL + "@sha256:" + goldenOf(t, c.image) + " " + value)
				}
			}
			b.annotations[order.AnnotationOrder] = value
			b.must()
			b.says(order.StateFailed, c.want)
			if len(b.annotations[order.AnnotationAnswer]) > 4096 || strings.Contains(b.annotations[order.AnnotationAnswer], `\u001b`) {
				t.Errorf("answered %q", b.annotations[order.AnnotationAnswer])
			}
			if b.rebooted || b.entry() || !bytes.Equal(before, b.partition(ondisk.LabelRootB)) {
				t.Error("the machine was changed")
			}
			asked := b.images.requests
			if c.silent && asked > 0 {
				t.Errorf("the server of the image got %d requests", asked)
			}
			b.must()
			if b.images.requests != asked {
				t.Error("the order was tried again")
			}
		})
	}
}

// TestOrderRetries checks that a server that is down for a day uses up no attempts. The pauses
// between attempts grow to an hour, and the answer has the time of the next one. A new order is
// tried at once.
func TestOrderRetries(t *testing.T) {
	busy := func(l *slowLine, is bool) {
		if l.status = 0; is {
			l.status = http.StatusServiceUnavailable
		}
	}
	for name, down := range map[string]func(*slowLine, bool){
		"unreachable": func(l *slowLine, is bool) {
			if l.err = nil; is {
				l.err = errors.New("connection refused")
			}
		},
		"503": busy, "metered": busy,
	} {
		t.Run(name, func(t *testing.T) {
			b := newOrdered(t)
			words, every := "", 10*time.Minute
			if name == "metered" {
				every = 14 * time.Minute
				b.site, words = []string{"ipvs: {profile: metered}"}, "max-bytes=8M"
			}
			b.give(words)
			down(b.images, true)
			var pauses []time.Duration // between attempts
			last, asked := b.now, 0
			for began := b.now; b.now.Sub(began) < 24*time.Hour; b.now = b.now.Add(every) { // the timer runs
				at := b.now
				b.must()
				if b.says(order.StateWaiting, "; next attempt after "); t.Failed() {
					return
				}
				if b.images.requests > asked {
					asked = b.images.requests
					pauses, last = append(pauses, at.Sub(last).Round(10*time.Minute)), at
				}
			}
			if want := []time.Duration{0, 10 * time.Minute, 20 * time.Minute, 40 * time.Minute, time.Hour, time.Hour}; len(pauses) < 20 || len(pauses) > 30 || !slices.Equal(pauses[:len(want)], want) && name != "metered" {
				t.Errorf("the pauses are %s", pauses)
			}
			b.says(order.StateWaiting, map[string]string{"503": "503", "unreachable": "refused", "metered": "503"}[name])
			b.give("again=2", words)
			if name == "metered" {
				b.now = b.now.Add(time.Hour)
			}
			b.must()
			if b.images.requests == asked {
				t.Error("the new order was not tried at once")
			}
			down(b.images, false)
			b.now = b.now.Add(time.Hour)
			b.must()
			b.updated()
		})
	}
}

// TestOrderCutOff checks that an order whose every try is cut off fails, and its reason says so.
func TestOrderCutOff(t *testing.T) {
	b := newOrdered(t)
	b.give()
	for range maxTries {
		b.cut, b.effects = 8, 0
		_ = b.run() // the power is off, so the result does not matter
		b.cut = 0
		os.RemoveAll(filepath.Join(b.root, "run"))
		b.put("run/x", "")
	}
	b.must()
	b.says(order.StateFailed, "gave up after 5 tries: each was cut off")
}

// TestTrialByHand checks that after an update by hand too, the machine answers that its system is on trial.
func TestTrialByHand(t *testing.T) {
	b := newOrdered(t)
	if err := b.order(Options{Image: b.inside("new.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	const entry = "edgebake-b+2-1.conf"
	b.bootsB(entry)
	b.must()
	b.says(order.StateTrial, "")
	b.blessed(entry)
	b.must()
	b.says("", "")
	if a := b.answer(); a.Plan != newPlan {
		t.Errorf("%+v", a)
	}
}

// TestOrderOnAFullDisk checks that the machine answers why nothing happens if its disk is full.
func TestOrderOnAFullDisk(t *testing.T) {
	for _, text := range []string{"", "again=!"} { // a valid order, and an invalid one
		b := newOrdered(t)
		b.give(text)
		e := b.env()
		write := e.WriteFile
		e.WriteFile = func(p string, data []byte, o machine.Owner) error {
			if !strings.HasPrefix(p, "/run/") {
				return syscall.ENOSPC
			}
			return write(p, data, o)
		}
		if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); !errors.Is(err, syscall.ENOSPC) {
			t.Error(err)
		}
		if a := b.answer(); a.State != order.StateWaiting || a.Reason != "recording the order: no space left on device" {
			t.Errorf("answered %+v", a)
		}
		b.give()
		b.must()
		b.updated()
	}
}

// TestOrderWaits checks that an order waits while another change of the machine runs.
func TestOrderWaits(t *testing.T) {
	b := newOrdered(t)
	b.give()
	b.locked = true
	for range 2 * maxTries {
		b.must()
		b.says(order.StateWaiting, "another update, convert, revert or reset")
	}
	b.locked = false
	b.must()
	b.updated()
}

// TestOrderOffline checks that if no API server answers, nothing happens, and no order is
// committed.
func TestOrderOffline(t *testing.T) {
	b := newOrdered(t)
	b.give()
	b.away = true
	b.must()
	if b.images.requests > 0 || b.entry() {
		t.Error("an unreadable order was carried out")
	}
	b.away = false
	b.asked = func(int) { b.away = b.away || b.answer().State == order.StateWorking }
	began := b.now
	b.must()
	if b.entry() || b.rebooted {
		t.Error("the boot entry was written without an API server")
	}
	if took := b.now.Sub(began); took > time.Hour {
		t.Errorf("the change lock was held for %s", took)
	}
	b.away, b.asked = false, nil
	b.must()
	b.updated()
}

// TestOrderPowerCuts checks that after a power cut the next run continues, and no byte is fetched
// twice.
func TestOrderPowerCuts(t *testing.T) {
	b := newOrdered(t)
	b.give()
	b.must()
	all, whole := b.effects, b.images.came
	for n := 1; n <= 5; n++ {
		b := newOrdered(t)
		b.give()
		b.cut = max(1, all*n/5-n%2)
		_ = b.run() // the power is off, so the result does not matter
		b.cut, b.effects, b.rebooted = 0, 0, false
		os.RemoveAll(filepath.Join(b.root, "run"))
		b.put("run/x", "")
		b.bootable()
		if b.entry() {
			const entry = "edgebake-b+2-1.conf"
			b.bootsB(entry)
			b.blessed(entry)
		}
		b.must()
		if !slices.Contains([]string{order.StateDone, order.StateRestarting}, b.answer().State) {
			t.Errorf("cut %d of %d: %+v", n, all, b.answer())
		}
		if b.images.came > whole+whole/3 {
			t.Errorf("cut %d of %d: %d bytes came, %d without a cut", n, all, b.images.came, whole)
		}
	}
}

// TestOrderMetered checks that on a metered link an idle machine reads its Node once an hour, and
// reports changes at once.
func TestOrderMetered(t *testing.T) {
	b := newOrdered(t)
	b.site = []string{"ipvs: {profile: metered}"}
	for range 144 { // one day
		b.must()
		b.now = b.now.Add(10 * time.Minute)
	}
	if b.requests < 20 || b.requests > 30 {
		t.Errorf("%d requests in a day", b.requests)
	}
	b.give("max-bytes=8M")
	before := b.requests
	for range 6 {
		b.must()
		b.now = b.now.Add(10 * time.Minute)
	}
	b.updated()
	if n := b.requests - before; n > 8 {
		t.Errorf("%d requests for an update", n)
	}
	const entry = "edgebake-b+2-1.conf"
	b.bootsB(entry)
	b.must()
	b.says(order.StateTrial, "")
	b.blessed(entry)
	b.must()
	b.says(order.StateDone, "")
}

// TestOrderWithoutNode checks that a machine that is not a node carries out no order. A damaged
// record counts as none.
func TestOrderWithoutNode(t *testing.T) {
	b := newOrdered(t)
	b.put(OrderFile, "{")
	b.give()
	b.must()
	b.updated()
	if err := os.Remove(filepath.Join(b.root, ondisk.KubeletConf)); err != nil {
		t.Fatal(err)
	}
	b.requests = 0
	b.must()
	if b.requests > 0 {
		t.Error("the cluster was asked")
	}
}

// TestOrderHeldForDays checks that long holds, and nightly power cuts during them, use up no
// attempts and download nothing. Other changes of the machine are possible meanwhile.
func TestOrderHeldForDays(t *testing.T) {
	for _, off := range []bool{false, true} {
		b := newOrdered(t)
		b.give("hold")
		came := int64(0)
		for day := range 3 * maxTries {
			ctx, cancel := context.WithCancel(t.Context())
			looks := 0
			b.asked = func(int) {
				if looks++; off && looks == 4 && b.answer().State == order.StateHeld {
					cancel()
				}
			}
			began := b.now
			if err := CarryOutOrder(ctx, b.env(), func(run.Step) {}); err != nil && !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			cancel()
			b.says(order.StateHeld, "")
			if took := b.now.Sub(began); took > time.Hour {
				t.Errorf("the change lock was held for %s", took)
			}
			if day == 0 {
				came = b.images.came
			}
			b.now = b.now.Add(24 * time.Hour)
		}
		if b.images.came != came {
			t.Errorf("%d bytes were fetched while the order was on hold", b.images.came-came)
		}
		b.asked = nil
		b.give()
		b.must()
		b.updated()
	}
}

// TestOrderConfirmedLate checks nightly power cuts after the download and before hold is read. They
// use up no attempts.
func TestOrderConfirmedLate(t *testing.T) {
	b := newOrdered(t)
	b.give()
	for range 3 * maxTries {
		b.away = false
		b.asked = func(int) {
			if b.answer().State == order.StateWorking {
				b.away = true
			}
		}
		b.must()
		var r orderRecord
		if err := json.Unmarshal([]byte(b.get(OrderFile)), &r); err != nil || r.State != order.StateWaiting || !strings.Contains(r.Reason, "no API server confirms") || b.entry() {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	b.away, b.asked = false, nil
	b.must()
	b.updated()
}

// TestOrderHeldLeavesTheLock checks that an update from a stick is possible while an order is on
// hold.
func TestOrderHeldLeavesTheLock(t *testing.T) {
	b := newOrdered(t)
	locked := false
	b.give("hold")
	e := b.env()
	e.Lock = func(context.Context, string) (func(), error) {
		locked = true
		return func() { locked = false }, nil
	}
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil {
		t.Fatal(err)
	}
	b.says(order.StateHeld, "")
	if locked {
		t.Error("the change lock is still held")
	}
	delete(b.annotations, order.AnnotationOrder)
	b.must()
	b.says(order.StateWithdrawn, "withdrawn or changed")
}
