package firstboot

import (
	"bytes"
	"context"
	"encoding/base64"
	"flag"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/openyurt"
)

var rewrite = flag.Bool("update", false, "rewrite the golden files")

// tree returns the contents of every file on the disk, without the parts that differ between runs.
func (w *world) tree() map[string]string {
	w.T.Helper()
	return w.treeOf(w.Files())
}

func (w *world) treeOf(files []worldtest.Entry) map[string]string {
	out := map[string]string{}
	for _, f := range files {
		rel := f.Path[1:]
		if top, _, _ := strings.Cut(rel, "/"); f.Mode.IsDir() || top == "sys" || top == "proc" || top == "run" {
			continue
		}
		text := string(f.Data)
		if f.Mode&fs.ModeSymlink != 0 {
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
		text = strings.ReplaceAll(text, w.Cluster.Pin, "(pin)")
		out[rel] = fmt.Sprintf("%v\n%s", f.Mode.Perm(), text)
	}
	return out
}

func TestNativeJoinSaysWhatItDoes(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "labels: {zone: north}", "users: [{name: ops, groups: [sudo], sshAuthorizedKeys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEpMoGNRS+z8FwDHhSd4GgSaiC6dqU4OHCcmMhtCbL43 ops@desk]}]")
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if s := w.State(); s.Result != ondisk.ResultDone || s.Node != "edge-sn0042" {
		t.Errorf("state: result %s, node %s", s.Result, s.Node)
	}
	worldtest.Golden(t, *rewrite, "native.console", strings.Join(w.Console, "\n")+"\n")
	worldtest.Golden(t, *rewrite, "native.effects", strings.Join(w.EffectNames, "\n")+"\n")
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	worldtest.Golden(t, *rewrite, "native.again.console", strings.Join(w.Console, "\n")+"\n")
	worldtest.Golden(t, *rewrite, "native.again.effects", strings.Join(w.EffectNames, "\n")+"\n")
	if w.Joins != 1 {
		t.Errorf("kubeadm ran %d times", w.Joins)
	}
}

func TestEdgeJoinSaysWhatItDoes(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	worldtest.Golden(t, *rewrite, "edge.console", strings.Join(w.Console, "\n")+"\n")
	worldtest.Golden(t, *rewrite, "edge.effects", strings.Join(w.EffectNames, "\n")+"\n")
	worldtest.Golden(t, *rewrite, "edge.env", strings.ReplaceAll(w.Get(hub.EnvFile), w.Cluster.Pin, "(pin)")+w.Get(member.KubeadmFlags))
	w.edgeThenOffline()
	if s := w.State(); s.Result != ondisk.ResultWaiting {
		t.Errorf("without an API server, the result is %s", s.Result)
	}
	w.Offline = false
	if err := w.Boot(); err != nil {
		t.Errorf("after the link came back: %v", err)
	}
	if w.Joins != 1 {
		t.Errorf("kubeadm joined %d times", w.Joins)
	}
}

// edgeThenOffline checks that the Node was registered with the labels of its pool,
// and boots the machine again without any network: no phase has anything to do.
func (w *world) edgeThenOffline() {
	w.T.Helper()
	labels := w.Cluster.Nodes["edge-sn0042"].Metadata.Labels
	if labels["openyurt.io/is-edge-worker"] != "true" || labels["apps.openyurt.io/nodepool"] != "shanghai" {
		w.T.Errorf("labels of the first POST: %v", labels)
	}
	w.NoSecret()
	w.PowerOn()
	w.Offline = true
	if err := w.Boot(); err == nil {
		w.T.Fatal("first boot was reported as done although no API server answers")
	}
	for _, n := range w.EffectNames {
		if !strings.HasPrefix(n, "write "+ondisk.StateFile) && !strings.HasPrefix(n, "report") && !strings.HasPrefix(n, "run nft list ") {
			w.T.Errorf("without an API server, first boot did: %s", n)
		}
	}
}

func TestStaticPodForm(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	worldtest.Golden(t, *rewrite, "edge.pod.yaml", strings.ReplaceAll(w.Get(openyurt.Manifest), w.Cluster.Pin, "(pin)"))
	worldtest.Golden(t, *rewrite, "pod.effects", strings.Join(w.EffectNames, "\n")+"\n")
	if w.Has(hub.EnvFile) || w.Units[openyurt.Unit] == "active" {
		t.Error("the systemd unit was used too")
	}
	if slices.Contains(w.EffectNames, "restart kubelet.service") {
		t.Error("kubelet was restarted, so it connected elsewhere at first")
	}
	worldtest.Golden(t, *rewrite, "pod.env", w.Get(member.KubeadmFlags))
	w.edgeThenOffline()
}

// TestStaticPodKilled cuts the power before each effect of a join with a static pod: the next boot
// completes the join, and ends in the same state as an undisturbed one.
func TestStaticPodKilled(t *testing.T) {
	t.Parallel()
	machine := podWorld(t)
	machine.UseSingleMaster()
	cutEach(t, machine, 45, func(w *world, left []worldtest.Entry) map[string]string {
		got, some := w.treeOf(left), map[string]string{}
		for _, p := range []string{"etc/kubernetes/manifests/yurthub.yaml", "etc/kubernetes/kubelet.conf", "var/lib/openyurt/kubelet.conf", "var/lib/kubelet/kubeadm-flags.env"} {
			if some[p] = got[p]; got[p] == "" {
				w.T.Errorf("%s is missing or empty", p)
			}
		}
		return some
	})
}

// TestStaticPodPoolChanged checks that kubelet registers with the Site's new labels, as it does if
// yurthub is a unit.
func TestStaticPodPoolChanged(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	for _, pool := range []string{"shanghai", "beijing"} {
		w.Stamp(worldtest.SlotDevice, w.Site("nodeType: edge", "nodePool: "+pool))
		w.PowerOn()
		if err := w.Boot(); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
		}
		if flags := w.Get(member.KubeadmFlags); !strings.Contains(flags, openyurt.LabelNodePool+"="+pool) || w.Joins != 1 {
			t.Errorf("kubelet registers with %s, kubeadm ran %d times", flags, w.Joins)
		}
	}
	w.PowerOn()
	if err := w.Boot(); err != nil || slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) {
		t.Errorf("%v, but first boot did %v", err, w.EffectNames)
	}
}

// TestStaticPodWaits checks that first boot reports the reason if yurthub has no first certificate.
// There is no Node yet that could show it.
func TestStaticPodWaits(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	w.Cluster.HubClientCSR = "pending"
	e := w.Env()
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		w.Cluster.Mu.Lock()
		switch {
		case w.ConsoleHas("client certificate (CSR csr-hub00, signer kubernetes.io/kube-apiserver-client) was denied"):
			w.Cluster.HubClientCSR = ""
		case w.ConsoleHas("client certificate (CSR csr-hub00, signer kubernetes.io/kube-apiserver-client) is not approved yet"):
			w.Cluster.HubClientCSR = "Denied"
		}
		w.Cluster.Mu.Unlock()
		return sleep(ctx, d)
	}
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !w.ConsoleHas("is not approved yet") || !w.ConsoleHas("was denied") || w.Joins != 1 {
		t.Errorf("kubeadm joined %d times\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
	// kubeadm could not set the annotation.
	if got := w.Cluster.Nodes["edge-sn0042"].Metadata.Annotations[hub.SocketAnnotation]; got != ondisk.CRISocket {
		t.Errorf("the Node's annotation of its container runtime is %q", got)
	}
}

// TestStaticPodKeepsItsServer checks that the server of yurthub.conf stays in the list: without it,
// yurthub would wipe its identity.
func TestStaticPodKeepsItsServer(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	if got := w.Get(openyurt.Identity); !strings.Contains(got, "server: https://192.0.2.11:6443") {
		t.Fatalf("yurthub.conf:\n%s", got)
	}
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site("nodeType: edge", "nodePool: shanghai"), "192.0.2.11", "192.0.2.14", 1))
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if want := "--server-addr=https://192.0.2.14:6443,https://192.0.2.12:6443,https://192.0.2.13:6443,https://192.0.2.11:6443"; !strings.Contains(w.Get(openyurt.Manifest), want) {
		t.Errorf("the manifest lacks %s:\n%s", want, w.Get(openyurt.Manifest))
	}
}

// TestStaticPodIsNotTurned checks that the node cannot be converted or reverted in place, because
// kubelet has no certificate of its own.
func TestStaticPodIsNotTurned(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.Put(openyurt.Program, "program")
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
		if w.Has(p) {
			t.Errorf("%s is still there", p)
		}
	}
}

// TestHubSaysWhatTheClusterLacks checks that first boot reports missing objects and rights for
// which yurthub waits, because yurthub does not report them.
func TestHubSaysWhatTheClusterLacks(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name       string
		lack       func(*worldtest.Cluster)
		words, fix string
	}{
		{"pending", func(c *worldtest.Cluster) { c.HubServerCSR = "pending" }, "(CSR csr-hub01, signer kubernetes.io/kubelet-serving) is not approved yet", "kubectl certificate approve csr-hub01"},
		{"denied", func(c *worldtest.Cluster) { c.HubServerCSR = "Denied" }, "(CSR csr-hub01, signer kubernetes.io/kubelet-serving) was denied: said by the approver", "yurthub sends another request"},
		{"denied, and asked again", func(c *worldtest.Cluster) { c.HubServerCSR = "Denied, pending" }, "(CSR csr-hub01, signer kubernetes.io/kubelet-serving) was denied: said by the approver; the next request (CSR csr-hub01-again) is not approved yet", "kubectl certificate approve csr-hub01-again"},
		{"denied twice", func(c *worldtest.Cluster) { c.HubServerCSR = "Denied, Denied" }, "(CSR csr-hub01-again, signer kubernetes.io/kubelet-serving) was denied", "yurthub sends another request"},
		{"rbac", func(c *worldtest.Cluster) { c.HubServerCSR, c.NoRBAC = "Approved", true }, "nodes may not list ConfigMaps in kube-system", "yurt-hub"},
		{"crd", func(c *worldtest.Cluster) { c.HubServerCSR, c.NodePoolVersion = "Approved", "" }, "has no NodePool CRD (nodepools.apps.openyurt.io/v1beta2)", "yurt-manager"},
		{"crd of before 1.7", func(c *worldtest.Cluster) { c.HubServerCSR, c.NodePoolVersion = "Approved", "v1beta1" }, "has no NodePool CRD (nodepools.apps.openyurt.io/v1beta2)", "of yurthub's release"},
		{"webhook", func(c *worldtest.Cluster) { c.HubServerCSR, c.ConversionFails = "Approved", true }, "fails to list NodePools (nodepools.apps.openyurt.io/v1beta2)", "yurt-manager"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := edgeWorld(t)
			tc.lack(w.Cluster)
			if err := w.Boot(); err == nil {
				t.Fatal("first boot succeeded, want an error")
			}
			s := w.State()
			i := slices.IndexFunc(s.Phases, func(p ondisk.PhaseState) bool { return p.Name == "yurthub" })
			if p := s.Phases[i]; !strings.Contains(p.Error, tc.words) || !strings.Contains(p.Fix, tc.fix) {
				t.Errorf("error: %s\nfix: %s", p.Error, p.Fix)
			}
			if s.Result != ondisk.ResultWaiting {
				t.Errorf("result %s, want waiting: someone may add what the cluster lacks", s.Result)
			}
			w.Cluster.Mu.Lock()
			w.Cluster.HubServerCSR, w.Cluster.NoRBAC, w.Cluster.ConversionFails, w.Cluster.NodePoolVersion = "Approved", false, false, "v1beta2"
			w.Cluster.Mu.Unlock()
			if err := w.Boot(); err != nil {
				t.Errorf("after the missing objects were added: %v", err)
			}
		})
	}
}

// TestStaticPodAsksForItsOwnVersion checks that first boot looks for NodePools of v1beta1: yurthub
// before 1.7 lists that version, and is never ready without it.
func TestStaticPodAsksForItsOwnVersion(t *testing.T) {
	t.Parallel()
	w := podWorld(t)
	w.Cluster.NodePoolVersion = "v1beta2"
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded, want an error")
	}
	if !w.ConsoleHas("the cluster has no NodePool CRD (nodepools.apps.openyurt.io/v1beta1)") {
		t.Errorf("the console has\n%s", strings.Join(w.Console, "\n"))
	}
	w.Cluster.Mu.Lock()
	w.Cluster.NodePoolVersion = "v1beta1"
	w.Cluster.Mu.Unlock()
	if err := w.Boot(); err != nil {
		t.Errorf("after the missing objects were added: %v", err)
	}
}

// TestPowerCut cuts the power before each effect in turn; the
// next boot must end in the same state as an undisturbed one.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	t.Run("native", func(t *testing.T) { powerCut(t, 40) })
	t.Run("edge", func(t *testing.T) { powerCut(t, 55, "nodeType: edge", "nodePool: shanghai") })
}

func powerCut(t *testing.T, atLeast int, more ...string) {
	t.Parallel()
	lines := append(more, "labels: {zone: north}", "users: [{name: ops, groups: [sudo], sshAuthorizedKeys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEpMoGNRS+z8FwDHhSd4GgSaiC6dqU4OHCcmMhtCbL43 ops@desk]}]")
	w := nativeWorld(t, lines...)
	if len(more) > 0 { // native nodes are tested in three variants
		w.UseSingleMaster()
	}
	cutEach(t, w, atLeast, (*world).treeOf)
}

// cutEach cuts the power of a machine before each effect of its first boot, or only kills first
// boot there. The next boot must end in the tree of an undisturbed machine.
func cutEach(t *testing.T, machine *world, atLeast int, tree func(*world, []worldtest.Entry) map[string]string) {
	files := machine.Files()
	whole := machine.CloneWith(t, files)
	if err := whole.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(whole.Console, "\n"))
	}
	want, count := tree(whole, whole.Files()), whole.Effects
	if count < atLeast {
		t.Fatalf("only %d effects were counted", count)
	}
	worldtest.CutBefore(t, machine, files, count, worldtest.AfterCut[*world]{
		Next: func(t *testing.T, cut *world, left []worldtest.Entry, goesOn func(string, *world, []worldtest.Entry)) {
			var lost *world
			if len(cut.Unsynced) > 0 { // otherwise losing unsynced files changes nothing
				lost = cut.CloneWith(t, left)
				lost.LoseUnsynced()
				lost.PowerOn()
			}
			cut.PowerOn()
			goesOn("power cut", cut, cut.Files())
			if lost != nil {
				goesOn("power cut that lost what was not synced", lost, lost.Files())
			}
		},
		Check: func(t *testing.T, w *world, when string) {
			if s := w.State(); s.Result != ondisk.ResultDone {
				t.Errorf("%s: result %s", when, s.Result)
			}
			now := w.Files()
			sameTree(t, when, tree(w, now), want)
			w.NoSecretIn(now)
		},
		Said: func(_ *testing.T, w *world) { w.NoSecretSaid() },
	})
}

func TestSecretsNeverShowBeforeTheEndEither(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "report: {url: 'https://report.example/'}")
	w.JoinError = func(n int) error {
		if n < 3 {
			return fmt.Errorf("couldn't use %s: Unauthorized", worldtest.TestToken)
		}
		return nil
	}
	var seen []string
	e := w.Env()
	write := e.WriteFile
	e.WriteFile = func(p string, b []byte, o machine.Owner) error {
		if bytes.Contains(b, []byte(worldtest.TestSecret)) && !strings.HasPrefix(p, ondisk.RunDir+"/") {
			seen = append(seen, p)
		}
		return write(p, b, o)
	}
	if err := w.Run(New(e)); err != nil {
		t.Fatal(err)
	}
	if len(seen) > 0 {
		t.Errorf("the token was written to %v", seen)
	}
	if w.Joins != 3 {
		t.Errorf("kubeadm ran %d times, not 3", w.Joins)
	}
	w.NoSecret()
	c, err := slot.Read(w.Slots[worldtest.SlotDevice])
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(c.Report.Text), "result:  done") || len(w.Reports) == 0 {
		t.Errorf("report on the slot: %s; posted %d times", c.Report.Text, len(w.Reports))
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
			w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(worldtest.WithToken), w.Cluster.Pin, "sha256:"+strings.Repeat("0", 64), 1))
		}, "discovery", "is not the one that caCertHashes pins", "compare caCertHashes"},
		{"expired token", func(w *world) { w.Cluster.TokenRevoked = true }, "discovery", "unknown or expired", "kubeadm token create"},
		{"name taken", func(w *world) { w.Cluster.Register("edge-sn0042", "", "another") }, "discovery", "name edge-sn0042 is taken", "kubectl delete node edge-sn0042"},
		{"no token", func(w *world) { w.Stamp(worldtest.SlotDevice, w.Site()) }, "discovery", "the Site has no bootstrap token", "put a token"},
		{"bad Site", func(w *world) {
			w.Stamp(worldtest.SlotDevice, "apiVersion: edgebake.io/v1alpha1\nkind: Site\nmaster: x\n")
		}, "site-config", "the Site has problems", "correct site.yaml"},
		{"wrong type", func(w *world) {
			w.Put(ondisk.ImageInfoFile, `{"version":1,"plan":"plan","nodeTypes":["edge"]}`)
		}, "site-config", "has node type native, but this image supports only edge", "stamp a Site"},
		{"damaged image.json", func(w *world) { w.Put(ondisk.ImageInfoFile, `{"version":1,"pla`) }, "image", "reading the description of this machine's image (/", "flash the machine again"},
		{"empty image.json", func(w *world) { w.Put(ondisk.ImageInfoFile, "") }, "image", "reading the description of this machine's image (/", "flash the machine again"},
		{"image.json of nothing", func(w *world) { w.Put(ondisk.ImageInfoFile, "{}") }, "image", "names no plan", "flash the machine again"},
		{"disks", func(w *world) {
			w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"disks":[{"device":"/dev/sda"}]}}'`))
		}, "site-config", "storage.disks", "correct site.yaml"},
		{"the token in config.ign", func(w *world) {
			w.StampAt(worldtest.SlotDevice, worldtest.Day(1), map[string]string{ondisk.SlotSite: w.Site(worldtest.WithToken), ondisk.SlotIgnition: tokenInIgnition("data:;base64," + base64.StdEncoding.EncodeToString([]byte("token="+worldtest.TestToken)))})
		}, "site-config", "contains the bootstrap token", "remove the token from the Ignition config"},
		{"an unknown group", func(w *world) {
			w.Put("/etc/passwd", "root:x:0:0::/root:/bin/sh\n")
			w.Put("/etc/group", "root:x:0:\n")
			w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, `users: [{name: admin, groups: [docker]}]`))
		}, "site-config", "users[0].groups[0]: the image has no group docker: add it to", "correct site.yaml"},
		{"a wrong hash", func(w *world) {
			w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/opt/a","contents":{"source":"data:,x","verification":{"hash":"sha256-`+strings.Repeat("0", 64)+`"}}}]}}'`))
		}, "site-config", "verifying its contents", "correct site.yaml"},
		{"no gzip", func(w *world) {
			w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/opt/a","contents":{"source":"data:,x","compression":"gzip"}}]}}'`))
		}, "site-config", "uncompressing its contents", "correct site.yaml"},
		{"an existing path", func(w *world) {
			w.Put("/opt/a", "the image's\n")
			w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/opt/a","contents":{"source":"data:,x"}}]}}'`))
		}, "site-config", "/opt/a already exists in the image (a file): add overwrite: true", "correct site.yaml"},
		{"a directory that the machine needs", func(w *world) {
			w.Put("/etc/systemd/system/x.service", "[Service]\n")
			w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, `ignition: '{"ignition":{"version":"3.5.0"},"storage":{"directories":[{"path":"/etc/systemd","overwrite":true}]}}'`))
		}, "site-config", "is a directory that the machine needs", "correct the Site's users or its Ignition config"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := nativeWorld(t)
			tc.prepare(w)
			if err := w.Boot(); err == nil {
				t.Fatal("first boot succeeded, want an error")
			}
			s := w.State()
			i := slices.IndexFunc(s.Phases, func(p ondisk.PhaseState) bool { return p.Status == ondisk.PhaseFailed })
			if s.Result != ondisk.ResultFailed || i < 0 {
				t.Fatalf("result %s, phases %+v\n%s", s.Result, s.Phases, strings.Join(w.Console, "\n"))
			}
			p := s.Phases[i]
			if p.Name != tc.phase || !strings.Contains(p.Error, tc.words) || !strings.Contains(p.Fix, tc.fix) {
				t.Errorf("%s: %s; fix: %s", p.Name, p.Error, p.Fix)
			}
			if !w.ConsoleHas("FAILED "+tc.phase) || !w.ConsoleHas("to fix: ") {
				t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
			}
			if bytes.Contains(w.Log.Bytes(), []byte(worldtest.TestSecret)) {
				t.Error("the log contains the token")
			}
			c, err := slot.Read(w.Slots[worldtest.SlotDevice])
			if err != nil || !strings.Contains(string(c.Report.Text), "result:  failed") || !strings.Contains(string(c.Report.Text), tc.fix) {
				t.Errorf("the report on the slot, %v: %s", err, c.Report.Text)
			}
		})
	}
}
