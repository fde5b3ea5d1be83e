package e2e

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/edgebake/edgebake/test/lab"
	"github.com/edgebake/edgebake/test/pace"
)

// TestAnotherRoot writes the system of another Image by hand as an update would: into the unused
// root partition, with a boot entry of three tries. It must boot as the same node and be marked as
// good. Two bad systems must be left automatically: one that does not boot, after its third try,
// and one that does not become Ready, after its time limit.
func TestAnotherRoot(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	if err := w.c.LetLogsBeRead(t.Context()); err != nil {
		t.Fatal(err)
	}
	images := map[string]string{}
	for _, name := range []string{"first", "second", "third"} {
		images[name] = filepath.Join(w.lab.Dir, name+".raw")
		w.must(w.bin, "build", "test/e2e/testdata/"+name+".yaml", "--output", images[name], "--lock", filepath.Join(w.lab.Dir, name+".lock"))
	}
	const name = "edge1"
	stamped := filepath.Join(w.lab.Dir, name+".raw")
	w.must(w.bin, "stamp", images["first"], w.site(0, lab.Site{NodeName: name}, "users: [{name: ops, groups: [sudo]}]"), "--output", stamped)
	vm := w.start(lab.VMConfig{Name: name, Image: stamped})
	node := w.ready(vm, nil)
	w.makePod(vm, "hello")
	was := w.aboutNode(vm)
	was.want(t, map[string]string{"partition": "ROOT-A", "system": "first", "bless": "inactive", "entries": "edgebake-a.conf", "packages": "root"})
	w.off(vm)

	disk := w.disk(vm)
	w.checkDisk(disk)
	w.install(disk, images["second"], ondisk.LabelRootB, "edgebake-b+3.conf", 2)
	vm = w.start(lab.VMConfig{Name: name, Image: disk})
	again := w.ready(vm, node)
	if again.Metadata.UID != node.Metadata.UID {
		t.Error("on its other root the machine joined again")
	}
	w.podRuns(vm, "hello")
	is := w.aboutNode(vm)
	is.want(t, map[string]string{"partition": "ROOT-B", "system": "second", "bless": "active", "entries": "edgebake-a.conf edgebake-b.conf", "packages": "root"})
	for _, fact := range []string{"machine-id", "hostkey", "hostname", "user"} {
		if was[fact] == "" || is[fact] != was[fact] {
			t.Errorf("%s was %q, is %q", fact, was[fact], is[fact])
		}
	}
	w.off(vm)

	// The former root is used for the next system, whose file system is then destroyed.
	disk = w.disk(vm)
	w.checkDisk(disk)
	w.install(disk, images["first"], ondisk.LabelRootA, "edgebake-a+3.conf", 3)
	w.wipe(disk, ondisk.LabelRootA)
	vm = w.start(lab.VMConfig{Name: name, Image: disk})
	w.goesBack(vm, 0, again, 3, onSecond)
	w.off(vm)

	disk = w.disk(vm)
	w.install(disk, images["third"], ondisk.LabelRootA, "edgebake-a+1.conf", 4)
	vm = w.start(lab.VMConfig{Name: name, Image: disk})
	w.goesBack(vm, 0, again, 1, onSecond)
	w.off(vm)
	w.checkDisk(w.disk(vm))
}

// toUpdate returns a machine that is Ready with the image of the document first, and the URL of a
// web server with the images of the others.
func (w *world) toUpdate(first string, others ...string) (vm *lab.VM, node *lab.Object, url string) {
	w.t.Helper()
	return w.toUpdateWith("", first, others...)
}

// toUpdateWith is like toUpdate, for a machine with this bus for sticks, or "" for none.
func (w *world) toUpdateWith(sticks, first string, others ...string) (vm *lab.VM, node *lab.Object, url string) {
	w.t.Helper()
	if err := w.c.LetLogsBeRead(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	www := filepath.Join(w.lab.Dir, "www")
	if err := os.MkdirAll(www, 0o755); err != nil {
		w.t.Fatal(err)
	}
	build := func(doc, dir, ending string) string {
		name := strings.TrimSuffix(filepath.Base(doc), ".yaml")
		path := filepath.Join(dir, name+ending)
		args := []string{w.bin, "build", doc, "--output", path, "--lock", filepath.Join(w.lab.Dir, name+".lock")}
		if w.key != "" {
			args = append(args, "--sign", w.key)
		}
		w.must(args...)
		return path
	}
	golden := build(first, w.lab.Dir, ".raw")
	for _, doc := range others {
		w.t.Log(w.must(w.bin, "update", "cost", golden, build(doc, www, ".raw.zst")))
	}
	url, err := w.lab.ServeNetBoot(w.t.Context(), w.net, www, "none", nil)
	if err != nil {
		w.t.Fatal(err)
	}
	const name = "edge1"
	stamped := filepath.Join(w.lab.Dir, name+".raw")
	w.must(w.bin, "stamp", golden, w.site(0, lab.Site{NodeName: name}, "users: [{name: ops, groups: [sudo]}]"), "--output", stamped)
	vm = w.start(lab.VMConfig{Name: name, Image: stamped, Sticks: sticks})
	return vm, w.ready(vm, nil), url
}

// TestUpdate updates a machine from a web server. First the cluster orders an update to a good image
// with another container image, which the machine must keep. Then a command updates it to a bad
// image, from which it must return automatically.
func TestUpdate(t *testing.T) {
	pace.Takes(t, 800*time.Second)
	w := newWorld(t, 1)
	first := w.signs(w.variant("first"), 1)
	vm, node, url := w.toUpdate(first, w.signs(w.withNewHello("second"), 2), w.signs(w.withNewHello("third"), 2))
	w.makePod(vm, "hello")
	was := w.aboutNode(vm)

	again := w.ordered(vm, node, url, "second")
	if again.Metadata.UID != node.Metadata.UID {
		t.Error("on its other root the machine joined again")
	}
	w.podRuns(vm, "hello")
	is := w.aboutNode(vm)
	is.want(t, map[string]string{"partition": "ROOT-B", "system": "second", "bless": "active", "entries": "edgebake-a.conf edgebake-b.conf", "packages": "root"})
	for _, fact := range []string{"machine-id", "hostkey", "hostname", "user"} {
		if was[fact] == "" || is[fact] != was[fact] {
			t.Errorf("%s was %q, is %q", fact, was[fact], is[fact])
		}
	}
	// There is no registry: the container image came with the update. The former one still exists,
	// but kubelet may now remove it.
	if err := w.c.Pod(t.Context(), "new-hello", newHello, vm.Node); err != nil {
		t.Fatal(err)
	}
	w.podRuns(vm, "new-hello")
	w.finished(vm, "second")
	w.pinned(vm, newHello)
	mark := w.startUpdate(vm, url+"/third.raw.zst")
	w.goesBack(vm, mark, again, 3, onSecond)
	w.finished(vm, "second")
	w.saysOnNode(vm, "firstboot status", "update: the new system on ROOT-A failed to start")
	w.off(vm)
	w.checkDisk(w.disk(vm))
}

// newHello is a container image that is not in the image with which the machine was flashed.
const newHello = "edgebake.test/hello:2"

// withNewHello writes the document of an Image that has newHello instead of helloImage.
func (w *world) withNewHello(name string) string {
	w.t.Helper()
	program := filepath.Join(w.lab.Dir, "hello")
	w.must("env", "CGO_ENABLED=0", "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./test/images/hello")
	b, err := os.ReadFile(program)
	if err != nil {
		w.t.Fatal(err)
	}
	layout := filepath.Join(w.lab.Dir, name+"-layout")
	if _, err := imagetest.WriteLayout(layout, imagetest.Image{Ref: newHello, Config: map[string]any{"Entrypoint": []string{"/hello"}, "User": "65534:65534"}, Layers: []imagetest.Layer{
		imagetest.Script(imagetest.File("hello", 0o755, 0, 0, string(b)), imagetest.Dir("old", 0o755, 0, 0), imagetest.File("old/file", 0o644, 0, 0, "old")),
		imagetest.Script(imagetest.Whiteout("old/file"), imagetest.File("new", 0o644, 3, 4, "new")),
	}}); err != nil {
		w.t.Fatal(err)
	}
	return w.variant(name, "  - ref: "+helloImage+"\n    layout: ../../../build/images\n", "  - ref: "+newHello+"\n    layout: "+layout+"\n")
}

// variant writes a copy of the document with this name, with parts of its text replaced.
func (w *world) variant(name string, oldNew ...string) string {
	w.t.Helper()
	b, err := os.ReadFile(filepath.Join(w.root, "test/e2e/testdata", name+".yaml"))
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i < len(oldNew); i += 2 {
		if !strings.Contains(string(b), oldNew[i]) {
			w.t.Fatalf("%s.yaml does not have %q", name, oldNew[i])
		}
	}
	text := strings.NewReplacer(oldNew...).Replace(string(b))
	text = strings.ReplaceAll(text, "../../../build/images", filepath.Join(w.root, "build/images"))
	file := filepath.Join(w.lab.Dir, name+".yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return file
}

// pinned checks that only one of the two hello images is pinned.
func (w *world) pinned(vm *lab.VM, want string) {
	w.t.Helper()
	out := w.mustOnNode(vm, `ctr -n k8s.io images ls -q 'labels."io.cri-containerd.pinned"==pinned'`)
	for _, name := range []string{helloImage, newHello} {
		if pinned := slices.Contains(strings.Fields(out), name); pinned != (name == want) {
			w.t.Errorf("container image %s is pinned: %v, want %v\n%s", name, pinned, name == want, out)
		}
	}
}

// finished checks that the last update is complete: downloaded files are removed, and the EFI
// system partition describes the system with this name.
func (w *world) finished(vm *lab.VM, name string) {
	w.t.Helper()
	w.saysOnNode(vm, "for i in $(seq 90) ; do [ -e /var/lib/edgebake/update/esp ] || break ; sleep 1 ; done ; systemctl is-failed edgebake-update-finish ; ls /var/lib/edgebake/update ; cat /efi/edgebake/image.json",
		`"name": "`+name+`"`)
	w.saysOnNode(vm, "[ -e /var/lib/edgebake/update/esp ] || echo removed", "removed")
}

// TestUpdateMinor updates a machine to the next minor version of Kubernetes: first to a bad image,
// after which kubelet must have its own files again, then to a good one. A Deployment's pod must be
// evicted before each restart and come back; a pod without a controller must stay.
func TestUpdateMinor(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	const older = "v1.36.5"
	spoil := `files:
  - path: /etc/systemd/system/edgebake-healthy.service.d/spoil.conf
    contents: |
      [Unit]
      After=edgebake-certificates.service
      [Service]
      ExecStartPre=/bin/sh -c 'echo spoilt >/var/lib/kubelet/cpu_manager_state; echo spoilt: true >>/var/lib/kubelet/config.yaml'
`
	vm, node, url := w.toUpdate(w.variant("first", lab.KubernetesVersion, older), w.variant("second"), w.variant("third", "files:\n", spoil))
	if got := node.Status.NodeInfo.KubeletVersion; got != older {
		t.Fatalf("kubelet is %s, want %s", got, older)
	}
	w.makePod(vm, "hello")
	err := w.c.Create(t.Context(), "/apis/apps/v1/namespaces/default/deployments", map[string]any{
		"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": "web"},
		"spec": map[string]any{
			"selector": map[string]any{"matchLabels": map[string]any{"app": "web"}},
			"template": map[string]any{"metadata": map[string]any{"labels": map[string]any{"app": "web"}}, "spec": map[string]any{
				"terminationGracePeriodSeconds": 1, "tolerations": lab.Stays(),
				"containers": []any{map[string]any{"name": "web", "image": helloImage, "imagePullPolicy": "Never"}},
			}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	web := w.webRuns(vm, "")
	const files = "cd /var/lib/kubelet && sha256sum config.yaml kubeadm-flags.env cpu_manager_state && cat config.yaml"
	was := w.mustOnNode(vm, files)

	mark := w.updateAtOnce(vm, url+"/third.raw.zst")
	node = w.goesBack(vm, mark, node, 3, map[string]string{"partition": "ROOT-A", "system": "first"})
	w.expect(vm, mark, `restored kubelet's settings and state of v1.36`)
	if is := w.mustOnNode(vm, files); is != was {
		t.Errorf("kubelet's files were\n%s\nand are\n%s", was, is)
	}
	w.podRuns(vm, "hello")
	web = w.webRuns(vm, web)

	mark = w.updateAtOnce(vm, url+"/second.raw.zst")
	mark = w.expect(vm, mark, `BdsDxe: starting Boot`)
	node = w.readyAgain(vm, mark, node)
	w.expect(vm, mark, `kubeadm to write kubelet's settings for v1.37`)
	if got := node.Status.NodeInfo.KubeletVersion; got != lab.KubernetesVersion {
		t.Errorf("kubelet is %s, want %s", got, lab.KubernetesVersion)
	}
	w.podRuns(vm, "hello")
	w.webRuns(vm, web)
	w.finished(vm, "second")
	t.Logf("kubelet's files were\n%s\nand are\n%s", was, w.mustOnNode(vm, files))
	w.off(vm)
	w.checkDisk(w.disk(vm))
}

// TestUpdateChain updates one machine three times: to an image with another package, to the next minor
// version of Kubernetes, and to a patch release. After each update the node must be Ready, and the
// pod must run again.
func TestUpdateChain(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	steps := []struct{ name, kubernetes string }{{"package", "v1.36.5"}, {"minor", "v1.37.1"}, {"patch", lab.KubernetesVersion}}
	var docs []string
	for _, s := range steps {
		doc := w.variant("second", "name: second\n", "name: "+s.name+"\n", lab.KubernetesVersion, s.kubernetes, "[openssh-server]", "[openssh-server, nano]")
		docs = append(docs, strings.Replace(doc, "second.yaml", s.name+".yaml", 1))
		if err := os.Rename(doc, docs[len(docs)-1]); err != nil {
			t.Fatal(err)
		}
	}
	vm, node, url := w.toUpdate(w.variant("first", lab.KubernetesVersion, "v1.36.5"), docs...)
	w.makePod(vm, "hello")
	for n, s := range steps {
		mark := w.updateAtOnce(vm, url+"/"+s.name+".raw.zst")
		mark = w.expect(vm, mark, `BdsDxe: starting Boot`)
		node = w.readyAgain(vm, mark, node)
		if got := node.Status.NodeInfo.KubeletVersion; got != s.kubernetes {
			t.Errorf("%s: kubelet is %s, want %s", s.name, got, s.kubernetes)
		}
		w.aboutNode(vm).want(t, map[string]string{"partition": []string{"ROOT-B", "ROOT-A"}[n%2], "system": s.name, "bless": "active"})
		w.saysOnNode(vm, "command -v nano", "nano")
		w.podRuns(vm, "hello")
		w.finished(vm, s.name)
	}
	w.off(vm)
	w.checkDisk(w.disk(vm))
}

// updateAtOnce updates the machine, which then restarts. It returns the console's mark before the
// update.
func (w *world) updateAtOnce(vm *lab.VM, url string) (mark int) {
	w.t.Helper()
	mark = vm.Serial.Mark()
	w.t.Log(w.mustOnNode(vm, "systemd-run -p StandardOutput=journal+console firstboot update --unsigned "+url))
	return mark
}

// webRuns waits until the Deployment has another ready pod than before, and returns the pod's name.
func (w *world) webRuns(vm *lab.VM, before string) (name string) {
	w.t.Helper()
	for range 90 {
		out, err := w.c.Kubectl(w.t.Context(), "get", "pods", "-l", "app=web", "-o", `jsonpath={range .items[?(@.status.phase=="Running")]}{.metadata.name}{"\n"}{end}`)
		if name = strings.TrimSpace(out); err == nil && name != "" && name != before && !strings.Contains(name, "\n") {
			w.podRuns(vm, name)
			return name
		}
		time.Sleep(2 * time.Second)
	}
	out, err := w.c.Kubectl(w.t.Context(), "describe", "pods,nodes")
	w.t.Fatalf("the pod of the Deployment does not run (%v):\n%s", err, out)
	return ""
}

// TestTrialWithoutAPIServer stops the API server before a new system boots on trial. The machine
// must wait beyond the trial's limit, and keep the system once an API server is back.
func TestTrialWithoutAPIServer(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	vm, node, url := w.toUpdate("test/e2e/testdata/first.yaml", w.withNewHello("second"))
	// Shorten the trial from fifteen minutes to four.
	mark := w.startUpdate(vm, url+"/second.raw.zst", "mount PARTLABEL=ROOT-B /mnt", "mkdir -p /mnt/etc/systemd/system/edgebake-healthy.service.d",
		"printf '[Service]\nTimeoutStartSec=4min\n' >/mnt/etc/systemd/system/edgebake-healthy.service.d/soon.conf", "umount /mnt")
	w.c.APIServers[0].Kill()
	mark = w.expect(vm, mark, `BdsDxe: starting Boot`)
	w.expect(vm, mark, `cannot be checked now; the current settings stay`)
	time.Sleep(6 * time.Minute)
	for _, l := range vm.Serial.Lines(mark) {
		if strings.Contains(l.Text, "BdsDxe: starting Boot") {
			t.Fatalf("%6.1f s from power-on: the machine has restarted", l.At.Seconds())
		}
	}
	if err := w.c.StartAPIServer(0); err != nil {
		t.Fatal(err)
	}
	if err := w.c.WaitAPIServer(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	w.readyAfter(vm, node)
	w.aboutNode(vm).want(t, map[string]string{"partition": "ROOT-B", "system": "second", "bless": "active", "entries": "edgebake-a.conf edgebake-b.conf"})
	w.finished(vm, "second")
	w.off(vm)

	// A Site that is stamped now must apply to the new system.
	disk := w.disk(vm)
	w.checkDisk(disk)
	w.must(w.bin, "stamp", disk, w.site(0, lab.Site{NodeName: "edge2"}), "--in-place")
	i, err := media.Inspect(disk)
	if err != nil {
		t.Fatal(err)
	}
	if i.Image.Name != "second" || i.Slot.Site == nil || i.Slot.Site.NodeName != "edge2" {
		t.Errorf("the disk has image %s, and %+v", i.Image.Name, i.Slot)
	}
}

// startUpdate updates the machine, runs the commands in then, and restarts. It returns the console's
// mark before the update.
func (w *world) startUpdate(vm *lab.VM, url string, then ...string) (mark int) {
	w.t.Helper()
	mark = vm.Serial.Mark()
	// Sample the peak memory of the update until it ends, and print it.
	update := "{ firstboot update --unsigned --no-reboot " + url + " & p=$! ; while m=$(grep -s VmHWM /proc/$p/status) ; do peak=$m ; sleep 0.2 ; done ; wait $p ; r=$? ; echo peak memory: $peak ; [ $r = 0 ] ; }"
	commands := append([]string{update, "ls -l /efi/loader/entries"}, then...)
	w.t.Log(w.mustOnNode(vm, strings.Join(append(commands, "systemd-run --on-active=20 systemctl reboot"), " && ")))
	return mark
}

// signs adds a serial and a public key to the document of an Image. Images that are built later are
// signed with the secret key.
func (w *world) signs(doc string, serial int) string {
	w.t.Helper()
	public, secret, err := minisign.GenerateKey(rand.NewChaCha8([32]byte{1}))
	if err != nil {
		w.t.Fatal(err)
	}
	text, err := secret.MarshalText()
	if err != nil {
		w.t.Fatal(err)
	}
	w.key = filepath.Join(w.lab.Dir, "office.key")
	if err := os.WriteFile(w.key, text, 0o600); err != nil {
		w.t.Fatal(err)
	}
	b, err := os.ReadFile(doc)
	if err != nil {
		w.t.Fatal(err)
	}
	b = fmt.Appendf(b, "updates: {serial: %d, keys: [%s]}\n", serial, public)
	if err := os.WriteFile(doc, b, 0o600); err != nil {
		w.t.Fatal(err)
	}
	return doc
}

// ordered writes an order to update to an image of the web server to the Node, and waits until the
// machine is Ready again and has answered that the order is done. It starts the service itself,
// because the timer may take 15 minutes.
func (w *world) ordered(vm *lab.VM, before *lab.Object, url, image string) *lab.Object {
	w.t.Helper()
	target, err := media.ReadUpdate(media.ImageSource{Name: filepath.Join(w.lab.Dir, "www", image+".raw.zst")})
	if err != nil {
		w.t.Fatal(err)
	}
	if out, err := w.c.Kubectl(w.t.Context(), "annotate", "node", vm.Node, order.AnnotationOrder+"="+url+"/"+image+".raw.zst@sha256:"+target.Golden+" no-drain"); err != nil {
		w.t.Fatal(out, err)
	}
	mark := vm.Serial.Mark()
	w.mustOnNode(vm, "systemctl start --no-block "+ondisk.UnitOrders)
	mark = w.expect(vm, mark, `BdsDxe: starting Boot`)
	node := w.readyAgain(vm, mark, before)
	var answer order.Answer
	for range 90 {
		out, err := w.c.Kubectl(w.t.Context(), "get", "node", vm.Node, "-o", `jsonpath={.metadata.annotations.edgebake\.io/update-status}`)
		if answer = order.ParseAnswer(out); err == nil && answer.State == order.StateDone {
			break
		}
		time.Sleep(2 * time.Second)
	}
	if answer.State != order.StateDone || answer.Image != image {
		w.t.Errorf("the machine answers %s, want state %s of image %s", answer, order.StateDone, image)
	}
	return node
}

// TestStick plugs a USB stick with a signed image of a higher serial into a machine, which must
// update itself. Afterwards the stick, still plugged in, must have no effect.
func TestStick(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	generic := func(name string) string {
		return w.variant(name, "name: "+name+"\n", "name: "+name+"\nhardware: generic\n")
	}
	vm, node, _ := w.toUpdateWith(qemu.USB, w.signs(generic("first"), 1), w.signs(generic("second"), 2))
	image, err := os.ReadFile(filepath.Join(w.lab.Dir, "www", "second.raw.zst"))
	if err != nil {
		t.Fatal(err)
	}
	mark := vm.Serial.Mark()
	if err := vm.Plug(t.Context(), w.stickOf(int64(len(image))+64<<20, "OFFICE", "second.raw.zst", image)); err != nil {
		t.Fatal(err)
	}
	mark = w.expect(vm, mark, `edgebake: update from the stick: retire done`)
	mark = w.expect(vm, mark, `edgebake: the system of second \(serial 2, .*\) is installed: remove the stick`)
	mark = w.expect(vm, mark, `BdsDxe: starting Boot`)
	w.readyAgain(vm, mark, node)
	w.aboutNode(vm).want(t, map[string]string{"partition": "ROOT-B", "system": "second", "bless": "active", "entries": "edgebake-a.conf edgebake-b.conf"})
	w.finished(vm, "second")
	for _, l := range vm.Serial.Lines(mark) {
		if strings.Contains(l.Text, "update from the stick") {
			t.Errorf("the stick is used again: %s", l.Text)
		}
	}
	w.off(vm)
	w.checkDisk(w.disk(vm))
}

// onSecond describes a machine that has returned to the image second.
var onSecond = map[string]string{"partition": "ROOT-B", "system": "second"}

// goesBack waits until the machine, which starts a bad system at the mark, has returned to the
// former system and is the same node as before.
func (w *world) goesBack(vm *lab.VM, mark int, before *lab.Object, tries int, want map[string]string) *lab.Object {
	w.t.Helper()
	var back lab.Line
	for range tries + 1 {
		back, mark = w.hear(vm, mark, `BdsDxe: starting Boot`)
		w.t.Logf("%6.1f s from power-on: %s", back.At.Seconds(), back.Text)
	}
	node := w.readyAgain(vm, mark, before)
	w.t.Logf("%.1f s from the last failed try to Ready", (vm.Serial.Note("").At - back.At).Seconds())
	entries := fmt.Sprintf("edgebake-a+0-%d.conf edgebake-b.conf", tries)
	if want["partition"] == ondisk.LabelRootA {
		entries = fmt.Sprintf("edgebake-a.conf edgebake-b+0-%d.conf", tries)
	}
	about := w.aboutNode(vm)
	about.want(w.t, want)
	about.want(w.t, map[string]string{"entries": entries})
	return node
}

// install writes an image's system into a root partition of a disk, with a boot entry for it.
func (w *world) install(disk, image, root, entry string, version int) {
	w.t.Helper()
	from, err := media.Inspect(image)
	if err != nil {
		w.t.Fatal(err)
	}
	to, err := media.Inspect(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	source, target := partitionOf(w.t, from, ondisk.LabelRootA), partitionOf(w.t, to, root)
	var size int64
	for _, p := range from.Image.Partitions {
		if p.Label == ondisk.LabelRootA {
			size = p.FSSize
		}
	}
	if size == 0 || size > target.Size {
		w.t.Fatalf("a file system of %d bytes does not fit into %+v", size, target)
	}
	w.copyBytes(image, source.Start, disk, target.Start, size)

	// Install the image's boot entry, changed for the partitions of this disk.
	esp := func(path string, i *media.Info) string {
		return fmt.Sprintf("%s@@%d", path, partitionOf(w.t, i, ondisk.LabelESP).Start)
	}
	dir := filepath.Join(w.lab.Dir, "esp")
	if err := os.RemoveAll(dir); err != nil {
		w.t.Fatal(err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		w.t.Fatal(err)
	}
	system := ondisk.ESPSystemDir(from.Image.Plan)
	w.must("mcopy", "-s", "-i", esp(image, from), "::"+system, "::"+ondisk.ESPEntryA, dir)
	file := filepath.Join(dir, filepath.Base(ondisk.ESPEntryA))
	b, err := os.ReadFile(file)
	if err != nil {
		w.t.Fatal(err)
	}
	text := strings.Replace(string(b), fmt.Sprintf("version %d\n", ondisk.ESPFirstVersion), fmt.Sprintf("version %d\n", version), 1)
	text = strings.ReplaceAll(text, source.GUID, target.GUID)
	for _, label := range []string{ondisk.LabelESP, ondisk.LabelData} {
		text = strings.ReplaceAll(text, partitionOf(w.t, from, label).GUID, partitionOf(w.t, to, label).GUID)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	// Remove the root's former entry, because each root has only one.
	old := regexp.MustCompile(`^edgebake-[ab]`).FindString(entry) + "*"
	if _, err := w.output("mdel", "-i", esp(disk, to), "::loader/entries/"+old); err != nil {
		w.t.Logf("no former entry of %s: %v", root, err)
	}
	w.must("mcopy", "-s", "-o", "-i", esp(disk, to), filepath.Join(dir, filepath.Base(system)), "::edgebake/")
	w.must("mcopy", "-o", "-i", esp(disk, to), file, "::loader/entries/"+entry)
	w.fsckESP(disk)
}

// wipe zeroes the beginning of a partition, so that its file system cannot be mounted.
func (w *world) wipe(disk, label string) {
	w.t.Helper()
	f, err := os.OpenFile(disk, os.O_WRONLY, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	_, err = f.WriteAt(make([]byte, 1<<20), w.partition(disk, label))
	if err := errors.Join(err, f.Close()); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) copyBytes(from string, at int64, to string, off, size int64) {
	w.t.Helper()
	src, err := os.Open(from)
	if err != nil {
		w.t.Fatal(err)
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	defer dst.Close()
	if _, err := io.Copy(io.NewOffsetWriter(dst, off), io.NewSectionReader(src, at, size)); err != nil {
		w.t.Fatal(err)
	}
}

// fsckESP checks the ESP with fsck.fat, which needs it in a separate file.
func (w *world) fsckESP(disk string) {
	w.t.Helper()
	i, err := media.Inspect(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	p := partitionOf(w.t, i, ondisk.LabelESP)
	file := filepath.Join(w.lab.Dir, "esp.fat")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		w.t.Fatal(err)
	}
	defer os.Remove(file)
	w.copyBytes(disk, p.Start, file, 0, p.Size)
	w.oracle("", "fsck.fat", "-n", file)
}

func partitionOf(t *testing.T, i *media.Info, label string) media.Partition {
	t.Helper()
	for _, p := range i.Partitions {
		if p.Label == label {
			return p
		}
	}
	t.Fatalf("%s has no partition %s", i.Path, label)
	return media.Partition{}
}

// about contains facts that aboutNode reads on a node, by name.
type about map[string]string

func (a about) want(t *testing.T, want map[string]string) {
	t.Helper()
	for k, v := range want {
		if a[k] != v {
			t.Errorf("%s is %q, want %q", k, a[k], v)
		}
	}
	// Partitions that the boot entry mounts are checked and grown, as those in an fstab.
	for k, v := range map[string]string{"checked": "active", "grown": "active", "efi": "active"} {
		if a[k] != v {
			t.Errorf("%s is %q, want %q", k, a[k], v)
		}
	}
	// journald must use the machine ID with which systemd started.
	if a["journals"] != a["machine-id"] {
		t.Errorf("the machine ID is %s, but the journals are of %s", a["machine-id"], a["journals"])
	}
	if a["failed"] != "" {
		t.Errorf("units failed: %s", a["failed"])
	}
	if t.Failed() {
		t.Logf("the node's facts: %q", a)
	}
}

func (w *world) aboutNode(vm *lab.VM) about {
	w.t.Helper()
	out := w.mustOnNode(vm, `
for i in $(seq 60) ; do
	[ -e /sys/firmware/efi/efivars/LoaderBootCountPath-* ] || break
	[ "$(systemctl is-active systemd-bless-boot.service)" = active ] && break
	sleep 1
done
echo "partition: $(lsblk -no PARTLABEL $(findmnt -no SOURCE /))"
echo "system: $(sed -n 's/^  "name": "\(.*\)",/\1/p' /usr/share/edgebake/image.json)"
echo "bless: $(systemctl is-active systemd-bless-boot.service)"
echo "entries: $(echo $(ls /efi/loader/entries))"
echo "packages: $(dpkg-query -W systemd-boot >/dev/null && stat -c %d / /var/lib/dpkg/status | uniq | wc -l | sed 's/^1$/root/')"
echo "machine-id: $(cat /etc/machine-id)"
echo "journals: $(echo $(ls /var/log/journal))"
echo "hostkey: $(cat /etc/ssh/ssh_host_ed25519_key.pub)"
echo "hostname: $(hostname)"
echo "user: $(id ops)"
echo "failed: $(echo $(systemctl --failed --plain --no-legend))"
var=$(sed -n 's/.*mount-extra=PARTUUID=\([^:]*\):\/var:.*/\1/p' /proc/cmdline)
echo "checked: $(systemctl is-active "$(systemd-escape -p --template=systemd-fsck@.service "/dev/disk/by-partuuid/$var")")"
echo "grown: $(systemctl is-active systemd-growfs@var.service)"
echo "efi: $(systemctl is-active efi.automount)"
echo "mounts: $(echo $(findmnt -rno TARGET,OPTIONS / /var ; findmnt -rno TARGET,OPTIONS /var))"
`)
	a := about{}
	for line := range strings.Lines(out) {
		if k, v, ok := strings.Cut(line, ": "); ok {
			a[k] = strings.TrimSpace(v)
		}
	}
	w.t.Logf("%s on %s: %s", vm.Node, a["partition"], a["mounts"])
	return a
}
