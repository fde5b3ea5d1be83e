package worldtest

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"math/big"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/tools/txtar"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// Boot runs first boot until it is done, or has waited longer than Patience.
func (w *World) Boot() error { return w.Run(w.start(w.Env())) }

// MustBoot is Boot, which must succeed.
func (w *World) MustBoot() {
	w.T.Helper()
	if err := w.Boot(); err != nil {
		w.T.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// Native returns a machine whose Site makes it a worker.
func Native(t *testing.T, start func(*machine.Env) *run.Runner, lines ...string) *World {
	w := New(t, start)
	w.Stamp(SlotDevice, w.Site(append([]string{WithToken}, lines...)...))
	return w
}

// Edge returns a machine whose Site makes it an OpenYurt node.
func Edge(t *testing.T, start func(*machine.Env) *run.Runner, lines ...string) *World {
	return Native(t, start, append([]string{"nodeType: edge", "nodePool: shanghai"}, lines...)...)
}

// Pod returns an OpenYurt node whose image runs yurthub as a static pod.
func Pod(t *testing.T, start func(*machine.Env) *run.Runner) *World {
	w := Edge(t, start)
	w.Put(ondisk.ImageInfoFile, strings.Replace(w.Get(ondisk.ImageInfoFile), `"version":"v1.7.0","form":"unit"`, `"version":"v1.6.1","form":"staticPod","image":"openyurt/yurthub:v1.6.1"`, 1))
	w.Put(ondisk.ImageInfoFile, strings.Replace(w.Get(ondisk.ImageInfoFile), "v1.36.3", "v1.30.3", 1))
	w.Cluster.NodePoolVersion = "v1beta1"
	return w
}

// Later prepares a run of first boot after d, while the machine stays on.
func (w *World) Later(d time.Duration) {
	w.T.Helper()
	if err := os.RemoveAll(filepath.Join(w.Root, ondisk.RunDir)); err != nil {
		w.T.Fatal(err)
	}
	w.Now = w.Now.Add(d)
	w.KubeletLastActive = w.Now
	w.EffectNames, w.Console = nil, nil
}

// YearsLater advances the clock. kubelet has renewed its certificate meanwhile.
func (w *World) YearsLater(years int) {
	w.T.Helper()
	w.Now = w.Now.AddDate(years, 0, 0)
	own, err := os.Readlink(filepath.Join(w.Root, member.ClientCert))
	if err != nil {
		w.T.Fatal(err)
	}
	w.Put(own, w.Cluster.Client(member.NodeUser+member.NodeName(w.Env()), w.ClusterTime().AddDate(1, 0, 0)))
	w.PowerOn()
}

// ExchangeRoot makes the machine boot the other root next: /etc is
// new from the image, /var stays.
func (w *World) ExchangeRoot() {
	w.T.Helper()
	// On a real machine /etc/kubernetes is a bind mount from DATA; here the test moves the directory.
	kept := filepath.Join(w.Root, "var/kubernetes")
	if w.Has("/etc/kubernetes") {
		if err := os.Rename(filepath.Join(w.Root, "etc/kubernetes"), kept); err != nil {
			w.T.Fatal(err)
		}
	}
	if err := os.RemoveAll(filepath.Join(w.Root, "etc")); err != nil {
		w.T.Fatal(err)
	}
	for _, f := range txtar.Parse(machineFiles).Files {
		if strings.HasPrefix(f.Name, "etc/") {
			w.Put(f.Name, string(f.Data))
		}
	}
	if _, err := os.Stat(kept); err == nil {
		if err := os.Rename(kept, filepath.Join(w.Root, "etc/kubernetes")); err != nil {
			w.T.Fatal(err)
		}
	}
	w.Put("/proc/self/mountinfo", strings.Replace(w.Get("/proc/self/mountinfo"), "254:3", "254:4", 1))
	part := "/sys/devices/virtio/block/vda/vda4"
	w.Put(part+"/partition", "4\n")
	w.Put(part+"/start", "5277696\n")
	w.Put(part+"/size", "3110912\n")
	w.Put(part+"/uevent", "PARTNAME=ROOT-B\n")
	if err := os.Symlink("../../devices/virtio/block/vda/vda4", filepath.Join(w.Root, "sys/dev/block/254:4")); err != nil {
		w.T.Fatal(err)
	}
}

// Rebuild replaces the machine's cluster with another one at the same addresses.
func (w *World) Rebuild() (former *Cluster) {
	former = w.Cluster
	w.Cluster = NewCluster(w.T)
	w.Cluster.NodePoolVersion = former.NodePoolVersion
	w.Cluster.Attach(w)
	return former
}

// RecreateCluster replaces the cluster by an empty one with the same keys. ipvscare
// then sends no traffic to its API servers.
func (w *World) RecreateCluster() {
	w.Cluster.Recreations++
	w.Cluster.Nodes = map[string]*kubeapi.Node{}
	w.Cluster.Down[Endpoint] = true
}

// SiteWithMasters returns the tests' Site with other API servers.
func (w *World) SiteWithMasters(masters string, lines ...string) string {
	return strings.Replace(w.Site(lines...), "192.0.2.11:6443, 192.0.2.12:6443, 192.0.2.13:6443", masters, 1)
}

// EffectCount returns how many effects contain these words.
func (w *World) EffectCount(words string) (n int) {
	for _, effect := range w.EffectNames {
		if strings.Contains(effect, words) {
			n++
		}
	}
	return n
}

// Reissue returns a new certificate of a CA, signed with key, which may
// be the CA's own key or another one.
func Reissue(t *testing.T, ca *x509.Certificate, key crypto.Signer, now time.Time) []byte {
	t.Helper()
	tmpl := *ca
	tmpl.SerialNumber, tmpl.NotBefore, tmpl.NotAfter = big.NewInt(7), now.Add(-time.Hour), now.AddDate(10, 0, 0)
	der, err := x509.CreateCertificate(rand.Reader, &tmpl, &tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// Golden compares got with a file in testdata, or rewrites the file.
func Golden(t *testing.T, rewrite bool, name, got string) {
	t.Helper()
	p := filepath.Join("testdata", name)
	if rewrite {
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

// Main runs the tests of a package. They boot thousands of machines, which spend most of their time
// waiting for API servers. Frequent garbage collections would cost more than the memory they free.
func Main(m *testing.M) {
	flag.Parse()
	if n, own := runtime.GOMAXPROCS(0), flag.Lookup("test.parallel"); own.Value.String() == strconv.Itoa(n) {
		if err := own.Value.Set(strconv.Itoa(3 * n)); err != nil {
			panic(err)
		}
	}
	debug.SetGCPercent(800)
	debug.SetMemoryLimit(1 << 30) // SetGCPercent has no limit of its own
	syscall.Umask(Umask)
	os.Exit(m.Run())
}
