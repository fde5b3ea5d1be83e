package firstboot

import (
	"bytes"
	"context"
	"encoding/base64"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/openyurt"
)

var update = flag.Bool("update", false, "write the golden files anew")

const ownDev = "/dev/vda2"

func golden(t *testing.T, name, got string) {
	t.Helper()
	p := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(p, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it anew):\n%s", p, got)
	}
}

// tree is what first boot left on the disk: every file, without what differs
// from run to run by nature.
func (w *world) tree() map[string]string {
	w.t.Helper()
	return w.treeOf(w.files())
}

func (w *world) treeOf(files []entry) map[string]string {
	out := map[string]string{}
	for _, f := range files {
		rel := f.path[1:]
		if top, _, _ := strings.Cut(rel, "/"); f.mode.IsDir() || top == "sys" || top == "proc" || top == "run" {
			continue
		}
		text := string(f.data)
		if f.mode&fs.ModeSymlink != 0 {
			out[rel] = text
			continue
		}
		switch {
		case "/"+rel == ondisk.StateFile, "/"+rel == site.KeyFile, "/"+rel == site.AppliedFile, "/"+rel == member.ServingCert, "/"+rel == member.ServingKey, strings.HasSuffix(rel, ".pem"), strings.HasSuffix(rel, "ca.crt"):
			text = "(differs from run to run)"
		case strings.HasSuffix(rel, ".conf") && strings.Contains(text, "certificate-authority-data"):
			a, _, _ := strings.Cut(text, "certificate-authority-data: ")
			text = a + "(CA)"
		}
		text = strings.ReplaceAll(text, w.cluster.pin, "(pin)")
		out[rel] = fmt.Sprintf("%v\n%s", f.mode.Perm(), text)
	}
	return out
}

func nativeWorld(t *testing.T, lines ...string) *world {
	w := newWorld(t, "testdata/machine.txtar")
	w.stamp(ownDev, w.site(append([]string{withToken}, lines...)...))
	return w
}

func TestNativeJoinSaysWhatItDoes(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "labels: {zone: north}", "users: [{name: ops, groups: [sudo], sshAuthorizedKeys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEpMoGNRS+z8FwDHhSd4GgSaiC6dqU4OHCcmMhtCbL43 ops@desk]}]")
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if s := w.state(); s.Result != ondisk.ResultDone || s.Node != "edge-sn0042" {
		t.Errorf("state: result %s, node %s", s.Result, s.Node)
	}
	golden(t, "native.console", strings.Join(w.console, "\n")+"\n")
	golden(t, "native.effects", strings.Join(w.names, "\n")+"\n")
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	golden(t, "native.again.console", strings.Join(w.console, "\n")+"\n")
	golden(t, "native.again.effects", strings.Join(w.names, "\n")+"\n")
	if w.joins != 1 {
		t.Errorf("kubeadm ran %d times", w.joins)
	}
}

func edgeWorld(t *testing.T, lines ...string) *world {
	return nativeWorld(t, append([]string{"nodeType: edge", "nodePool: shanghai"}, lines...)...)
}

func TestEdgeJoinSaysWhatItDoes(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	golden(t, "edge.console", strings.Join(w.console, "\n")+"\n")
	golden(t, "edge.effects", strings.Join(w.names, "\n")+"\n")
	golden(t, "edge.env", strings.ReplaceAll(w.get(hub.EnvFile), w.cluster.pin, "(pin)")+w.get(member.KubeadmFlags))
	w.edgeThenOffline()
	if s := w.state(); s.Result != ondisk.ResultWaiting {
		t.Errorf("offline the result is %s", s.Result)
	}
	w.offline = false
	if err := w.boot(); err != nil {
		t.Errorf("the link is back: %v", err)
	}
	if w.joins != 1 {
		t.Errorf("it joined %d times", w.joins)
	}
}

// edgeThenOffline checks that the Node was registered with the labels of its pool,
// and switches the machine on again without any network: everything on it is as it
// should be, and nothing is done.
func (w *world) edgeThenOffline() {
	w.t.Helper()
	labels := w.cluster.nodes["edge-sn0042"].Metadata.Labels
	if labels["openyurt.io/is-edge-worker"] != "true" || labels["apps.openyurt.io/nodepool"] != "shanghai" {
		w.t.Errorf("labels of the first POST: %v", labels)
	}
	noSecret(w.t, w)
	w.powerOn()
	w.offline = true
	if err := w.boot(); err == nil {
		w.t.Fatal("offline, and the node was said to be done")
	}
	for _, n := range w.names {
		if !strings.HasPrefix(n, "write "+ondisk.StateFile) && !strings.HasPrefix(n, "report") && !strings.HasPrefix(n, "run nft list ") {
			w.t.Errorf("offline it did: %s", n)
		}
	}
}

// podWorld is a machine whose image runs yurthub as a static pod.
func podWorld(t *testing.T) *world {
	w := edgeWorld(t)
	w.put(ondisk.ImageInfoFile, strings.Replace(w.get(ondisk.ImageInfoFile), `"version":"v1.7.0","form":"unit"`, `"version":"v1.6.1","form":"staticPod","image":"openyurt/yurthub:v1.6.1"`, 1))
	w.put(ondisk.ImageInfoFile, strings.Replace(w.get(ondisk.ImageInfoFile), "v1.36.3", "v1.30.3", 1))
	w.cluster.pools = "v1beta1"
	return w
}

func TestStaticPodForm(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	golden(t, "edge.pod.yaml", strings.ReplaceAll(w.get(openyurt.Manifest), w.cluster.pin, "(pin)"))
	golden(t, "pod.effects", strings.Join(w.names, "\n")+"\n")
	if w.has(hub.EnvFile) || w.units[openyurt.Unit] == "active" {
		t.Error("the unit was used too")
	}
	if slices.Contains(w.names, "restart kubelet.service") {
		t.Error("kubelet was restarted: it went elsewhere at first")
	}
	golden(t, "pod.env", w.get(member.KubeadmFlags))
	w.edgeThenOffline()
}

// TestStaticPodKilled takes the power away before each effect of a static
// pod's way: the next boot goes on, and ends where an undisturbed one does.
func TestStaticPodKilled(t *testing.T) {
	t.Parallel()
	machine := podWorld(t)
	machine.oneMaster()
	cutEach(t, machine, 45, func(w *world, left []entry) map[string]string {
		got, some := w.treeOf(left), map[string]string{}
		for _, p := range []string{"etc/kubernetes/manifests/yurthub.yaml", "etc/kubernetes/kubelet.conf", "var/lib/openyurt/kubelet.conf", "var/lib/kubelet/kubeadm-flags.env"} {
			if some[p] = got[p]; got[p] == "" {
				w.t.Errorf("%s is missing or empty", p)
			}
		}
		return some
	})
}

// TestStaticPodPoolChanged: kubelet registers with what the site says now, as in
// the other form.
func TestStaticPodPoolChanged(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	for _, pool := range []string{"shanghai", "beijing"} {
		w.stamp(ownDev, w.site("nodeType: edge", "nodePool: "+pool))
		w.powerOn()
		if err := w.boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
		}
		if flags := w.get(member.KubeadmFlags); !strings.Contains(flags, openyurt.LabelNodePool+"="+pool) || w.joins != 1 {
			t.Errorf("kubelet registers with %s, kubeadm ran %d times", flags, w.joins)
		}
	}
	w.powerOn()
	if err := w.boot(); err != nil || slices.Contains(w.names, "restart "+ondisk.UnitKubelet) {
		t.Errorf("%v, and it did %v", err, w.names)
	}
}

// TestStaticPodWaits: without its first certificate there is no Node, and
// nobody but first boot can say why.
func TestStaticPodWaits(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	w.cluster.clientCSR = "pending"
	e := w.env()
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		w.cluster.mu.Lock()
		switch {
		case w.said("client certificate (CSR csr-hub00, signer kubernetes.io/kube-apiserver-client) was denied"):
			w.cluster.clientCSR = ""
		case w.said("client certificate (CSR csr-hub00, signer kubernetes.io/kube-apiserver-client) is not approved yet"):
			w.cluster.clientCSR = "Denied"
		}
		w.cluster.mu.Unlock()
		return sleep(ctx, d)
	}
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !w.said("is not approved yet") || !w.said("was denied") || w.joins != 1 {
		t.Errorf("%d joins\n%s", w.joins, strings.Join(w.console, "\n"))
	}
	// Which kubeadm had to leave undone.
	if got := w.cluster.nodes["edge-sn0042"].Metadata.Annotations[hub.SocketAnnotation]; got != ondisk.CRISocket {
		t.Errorf("the Node's container runtime is noted as %q", got)
	}
}

// TestStaticPodKeepsItsServer: a list without the server of yurthub.conf
// would have yurthub wipe its identity.
func TestStaticPodKeepsItsServer(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if got := w.get(openyurt.Identity); !strings.Contains(got, "server: https://192.0.2.11:6443") {
		t.Fatalf("yurthub.conf:\n%s", got)
	}
	w.stamp(ownDev, strings.Replace(w.site("nodeType: edge", "nodePool: shanghai"), "192.0.2.11", "192.0.2.14", 1))
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if want := "--server-addr=https://192.0.2.14:6443,https://192.0.2.12:6443,https://192.0.2.13:6443,https://192.0.2.11:6443"; !strings.Contains(w.get(openyurt.Manifest), want) {
		t.Errorf("the manifest lacks %s:\n%s", want, w.get(openyurt.Manifest))
	}
}

// TestStaticPodIsNotTurned: kubelet has no certificate to go on with.
func TestStaticPodIsNotTurned(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.put(openyurt.Program, "program")
	_, convert := w.convert(pool)
	_, revert := w.revert()
	for _, err := range []error{convert, revert} {
		if err == nil || !strings.Contains(run.Advice(err), "`firstboot reset`") {
			t.Errorf("%v\n%s", err, run.Advice(err))
		}
	}
	if name, err := w.reset(); err != nil || name != "edge-sn0042" {
		t.Fatalf("%s, %v", name, err)
	}
	for _, p := range []string{openyurt.Manifest, openyurt.Identity, ondisk.KubeletConf, openyurt.KubeletConf} {
		if w.has(p) {
			t.Errorf("%s is still there", p)
		}
	}
}

// TestHubSaysWhatTheClusterLacks: yurthub only ever waits.
func TestHubSaysWhatTheClusterLacks(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name       string
		lack       func(*fakeCluster)
		words, fix string
	}{
		{"pending", func(c *fakeCluster) { c.csr = "pending" }, "(CSR csr-hub01, signer kubernetes.io/kubelet-serving) is not approved yet", "kubectl certificate approve csr-hub01"},
		{"denied", func(c *fakeCluster) { c.csr = "Denied" }, "(CSR csr-hub01, signer kubernetes.io/kubelet-serving) was denied: said by the approver", "yurthub asks again by itself"},
		{"denied, and asked again", func(c *fakeCluster) { c.csr = "Denied, pending" }, "(CSR csr-hub01, signer kubernetes.io/kubelet-serving) was denied: said by the approver; the one after it (CSR csr-hub01-again) is not approved yet", "kubectl certificate approve csr-hub01-again"},
		{"denied twice", func(c *fakeCluster) { c.csr = "Denied, Denied" }, "(CSR csr-hub01-again, signer kubernetes.io/kubelet-serving) was denied", "yurthub asks again by itself"},
		{"rbac", func(c *fakeCluster) { c.csr, c.noRBAC = "Approved", true }, "nodes may not list ConfigMaps in kube-system", "yurt-hub"},
		{"crd", func(c *fakeCluster) { c.csr, c.pools = "Approved", "" }, "has no NodePool CRD (nodepools.apps.openyurt.io/v1beta2)", "yurt-manager"},
		{"crd of before 1.7", func(c *fakeCluster) { c.csr, c.pools = "Approved", "v1beta1" }, "has no NodePool CRD (nodepools.apps.openyurt.io/v1beta2)", "of the release"},
		{"webhook", func(c *fakeCluster) { c.csr, c.noWebhook = "Approved", true }, "fails to list NodePools (nodepools.apps.openyurt.io/v1beta2)", "yurt-manager"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := edgeWorld(t)
			tc.lack(w.cluster)
			if err := w.boot(); err == nil {
				t.Fatal("it went through")
			}
			s := w.state()
			i := slices.IndexFunc(s.Phases, func(p ondisk.PhaseState) bool { return p.Name == "yurthub" })
			if p := s.Phases[i]; !strings.Contains(p.Error, tc.words) || !strings.Contains(p.Fix, tc.fix) {
				t.Errorf("error: %s\ncure: %s", p.Error, p.Fix)
			}
			if s.Result != ondisk.ResultWaiting {
				t.Errorf("result %s: the cluster can be healed while we wait", s.Result)
			}
			w.cluster.mu.Lock()
			w.cluster.csr, w.cluster.noRBAC, w.cluster.noWebhook, w.cluster.pools = "Approved", false, false, "v1beta2"
			w.cluster.mu.Unlock()
			if err := w.boot(); err != nil {
				t.Errorf("healed: %v", err)
			}
		})
	}
}

// TestStaticPodAsksForItsOwnVersion: yurthub before 1.7 lists NodePools of
// v1beta1, and never becomes ready without.
func TestStaticPodAsksForItsOwnVersion(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	w.cluster.pools = "v1beta2"
	if err := w.boot(); err == nil {
		t.Fatal("it went through")
	}
	if !w.said("the cluster has no NodePool CRD (nodepools.apps.openyurt.io/v1beta1)") {
		t.Errorf("it said\n%s", strings.Join(w.console, "\n"))
	}
	w.cluster.mu.Lock()
	w.cluster.pools = "v1beta1"
	w.cluster.mu.Unlock()
	if err := w.boot(); err != nil {
		t.Errorf("healed: %v", err)
	}
}

// TestPowerCut takes the power away before each effect in turn; the next boot
// must end as if it had never gone.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	t.Run("native", func(t *testing.T) { powerCut(t, 40) })
	t.Run("edge", func(t *testing.T) { powerCut(t, 55, "nodeType: edge", "nodePool: shanghai") })
}

func powerCut(t *testing.T, atLeast int, more ...string) {
	t.Parallel()
	lines := append(more, "labels: {zone: north}", "users: [{name: ops, groups: [sudo], sshAuthorizedKeys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEpMoGNRS+z8FwDHhSd4GgSaiC6dqU4OHCcmMhtCbL43 ops@desk]}]")
	w := nativeWorld(t, lines...)
	if len(more) > 0 { // native goes through three
		w.oneMaster()
	}
	cutEach(t, w, atLeast, (*world).treeOf)
}

// cutEach takes the power away from a machine before each effect of its first
// boot: the next boot, and a firstboot that was only killed and started again,
// end in the tree of an undisturbed machine. Cuts that leave the very same
// machine are followed once.
func cutEach(t *testing.T, machine *world, atLeast int, tree func(*world, []entry) map[string]string) {
	files := machine.files()
	whole := machine.cloneWith(t, files)
	if err := whole.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(whole.console, "\n"))
	}
	want, count := tree(whole, whole.files()), whole.effects
	if count < atLeast {
		t.Fatalf("only %d effects were counted", count)
	}
	cutBefore(t, machine, files, count, afterCut[*world]{
		next: func(t *testing.T, cut *world, left []entry, goesOn func(string, *world, []entry)) {
			var lost *world
			if len(cut.unsynced) > 0 { // else that is the same
				lost = cut.cloneWith(t, left)
				lost.lose()
				lost.powerOn()
			}
			cut.powerOn()
			goesOn("power cut", cut, cut.files())
			if lost != nil {
				goesOn("power cut that lost what was not synced", lost, lost.files())
			}
		},
		check: func(t *testing.T, w *world, when string) {
			if s := w.state(); s.Result != ondisk.ResultDone {
				t.Errorf("%s: result %s", when, s.Result)
			}
			now := w.files()
			sameTree(t, when, tree(w, now), want)
			noSecretIn(t, w, now)
		},
		said: noSecretSaid,
	})
}

// noSecret looks for the token everywhere it must not be once the node is
// Ready.
func noSecret(t *testing.T, w *world) {
	t.Helper()
	noSecretIn(t, w, w.files())
}

func noSecretIn(t *testing.T, w *world, files []entry) {
	t.Helper()
	for _, f := range files {
		if f.mode.IsRegular() {
			noTokenIn(t, f.path, f.data)
		}
	}
	for dev, d := range w.slots {
		noTokenIn(t, "slot "+dev, d.written())
	}
	noSecretSaid(t, w)
}

// noSecretSaid looks for the token in what was said so far.
func noSecretSaid(t *testing.T, w *world) {
	t.Helper()
	noTokenIn(t, "log", w.log.Bytes())
	noTokenIn(t, "console", []byte(strings.Join(w.console, "\n")))
	for _, b := range w.posted {
		noTokenIn(t, "posted report", b)
	}
}

func noTokenIn(t *testing.T, where string, b []byte) {
	t.Helper()
	for _, s := range []string{testToken, testSecret} {
		if bytes.Contains(b, []byte(s)) {
			t.Errorf("%s holds the token: %.200q", where, b[max(0, bytes.Index(b, []byte(s))-80):])
		}
	}
}

func TestSecretsNeverShowBeforeTheEndEither(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "report: {url: 'https://report.example/'}")
	w.joinError = func(n int) error {
		if n < 3 {
			return fmt.Errorf("couldn't use %s: Unauthorized", testToken)
		}
		return nil
	}
	var seen []string
	e := w.env()
	write := e.WriteFile
	e.WriteFile = func(p string, b []byte, o machine.Owner) error {
		if bytes.Contains(b, []byte(testSecret)) && !strings.HasPrefix(p, ondisk.RunDir+"/") {
			seen = append(seen, p)
		}
		return write(p, b, o)
	}
	if err := w.run(New(e)); err != nil {
		t.Fatal(err)
	}
	if len(seen) > 0 {
		t.Errorf("the token was written to %v", seen)
	}
	if w.joins != 3 {
		t.Errorf("kubeadm ran %d times, not 3", w.joins)
	}
	noSecret(t, w)
	c, err := slot.Read(w.slots[ownDev])
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(c.Report.Text), "result:  done") || len(w.posted) == 0 {
		t.Errorf("report on the slot: %s; posted %d times", c.Report.Text, len(w.posted))
	}
}

func TestPermanentFailuresNameTheirCure(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		prepare func(*world)
		phase   string
		words   string
		fix     string
	}{
		{"wrong pin", func(w *world) {
			w.stamp(ownDev, strings.Replace(w.site(withToken), w.cluster.pin, "sha256:"+strings.Repeat("0", 64), 1))
		}, "discovery", "is not the one that caCertHashes pins", "compare caCertHashes"},
		{"expired token", func(w *world) { w.cluster.revoked = true }, "discovery", "unknown or expired", "kubeadm token create"},
		{"name taken", func(w *world) { w.cluster.register("edge-sn0042", "", "another") }, "discovery", "name edge-sn0042 is taken", "kubectl delete node edge-sn0042"},
		{"no token", func(w *world) { w.stamp(ownDev, w.site()) }, "discovery", "the Site has no bootstrap token", "put a token"},
		{"bad Site", func(w *world) { w.stamp(ownDev, "apiVersion: edgebake.io/v1alpha1\nkind: Site\nmaster: x\n") }, "site-config", "the Site has problems", "correct site.yaml"},
		{"wrong type", func(w *world) {
			w.put(ondisk.ImageInfoFile, `{"version":1,"plan":"plan","nodeTypes":["edge"]}`)
		}, "site-config", "asks for node type native, this image makes edge", "stamp a Site"},
		{"damaged image.json", func(w *world) { w.put(ondisk.ImageInfoFile, `{"version":1,"pla`) }, "image", "reading what this machine's image says of itself (/", "flash the machine again"},
		{"empty image.json", func(w *world) { w.put(ondisk.ImageInfoFile, "") }, "image", "reading what this machine's image says of itself (/", "flash the machine again"},
		{"image.json of nothing", func(w *world) { w.put(ondisk.ImageInfoFile, "{}") }, "image", "does not say which plan", "flash the machine again"},
		{"disks", func(w *world) {
			w.stamp(ownDev, w.site(withToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"disks":[{"device":"/dev/sda"}]}}'`))
		}, "site-config", "storage.disks", "correct site.yaml"},
		{"the token in config.ign", func(w *world) {
			w.stampAt(ownDev, day(1), map[string]string{ondisk.SlotSite: w.site(withToken), ondisk.SlotIgnition: tokenInIgnition("data:;base64," + base64.StdEncoding.EncodeToString([]byte("token="+testToken)))})
		}, "site-config", "contains the bootstrap token", "take the token out"},
		{"an unknown group", func(w *world) {
			w.put("/etc/passwd", "root:x:0:0::/root:/bin/sh\n")
			w.put("/etc/group", "root:x:0:\n")
			w.stamp(ownDev, w.site(withToken, `users: [{name: admin, groups: [docker]}]`))
		}, "site-config", "users[0].groups[0]: the image has no group docker: add it to", "correct site.yaml"},
		{"a wrong hash", func(w *world) {
			w.stamp(ownDev, w.site(withToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/opt/a","contents":{"source":"data:,x","verification":{"hash":"sha256-`+strings.Repeat("0", 64)+`"}}}]}}'`))
		}, "site-config", "verifying its contents", "correct site.yaml"},
		{"no gzip", func(w *world) {
			w.stamp(ownDev, w.site(withToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/opt/a","contents":{"source":"data:,x","compression":"gzip"}}]}}'`))
		}, "site-config", "uncompressing its contents", "correct site.yaml"},
		{"an existing path", func(w *world) {
			w.put("/opt/a", "the image's\n")
			w.stamp(ownDev, w.site(withToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/opt/a","contents":{"source":"data:,x"}}]}}'`))
		}, "site-config", "/opt/a is in the image already (a file): add overwrite: true", "correct site.yaml"},
		{"a directory that the machine needs", func(w *world) {
			w.put("/etc/systemd/system/x.service", "[Service]\n")
			w.stamp(ownDev, w.site(withToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"directories":[{"path":"/etc/systemd","overwrite":true}]}}'`))
		}, "site-config", "exists already as a directory that the machine needs", "correct that in the Site's users or its Ignition config"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := nativeWorld(t)
			tc.prepare(w)
			if err := w.boot(); err == nil {
				t.Fatal("it went through")
			}
			s := w.state()
			i := slices.IndexFunc(s.Phases, func(p ondisk.PhaseState) bool { return p.Status == ondisk.PhaseFailed })
			if s.Result != ondisk.ResultFailed || i < 0 {
				t.Fatalf("result %s, phases %+v\n%s", s.Result, s.Phases, strings.Join(w.console, "\n"))
			}
			p := s.Phases[i]
			if p.Name != tc.phase || !strings.Contains(p.Error, tc.words) || !strings.Contains(p.Fix, tc.fix) {
				t.Errorf("%s: %s; fix: %s", p.Name, p.Error, p.Fix)
			}
			if !w.said("FAILED "+tc.phase) || !w.said("to fix: ") {
				t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
			}
			if bytes.Contains(w.log.Bytes(), []byte(testSecret)) {
				t.Error("the log holds the token")
			}
			c, err := slot.Read(w.slots[ownDev])
			if err != nil || !strings.Contains(string(c.Report.Text), "result:  failed") || !strings.Contains(string(c.Report.Text), tc.fix) {
				t.Errorf("the report on the slot, %v: %s", err, c.Report.Text)
			}
		})
	}
}
