package oracle

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// versions returns one release of each series in KnownContainerd. If EDGEBAKE_CONTAINERD names a
// directory with programs, for example a distribution's, it returns only that directory.
func versions() []string {
	if dir := os.Getenv("EDGEBAKE_CONTAINERD"); dir != "" {
		return []string{dir}
	}
	if os.Getenv("EDGEBAKE_MATRIX") == "all" {
		return []string{"1.7.35", "2.0.14", "2.1.9", "2.2.9", "2.3.7", "2.4.2"}
	}
	return []string{"1.7.35", configs.ExampleContainerd}
}

// programs compiles a release of containerd, and returns a directory with its programs and a runc.
func programs(t *testing.T, version string) string {
	t.Helper()
	bin := t.TempDir()
	copyProgram(t, runc(t), filepath.Join(bin, "runc"))
	if filepath.IsAbs(version) {
		for _, p := range []string{"containerd", "containerd-shim-runc-v2", "ctr"} {
			copyProgram(t, filepath.Join(version, p), filepath.Join(bin, p))
		}
		return bin
	}
	dir, err := fetch.DefaultDir()
	if err != nil {
		t.Fatal(err)
	}
	c, err := fetch.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	module := "github.com/containerd/containerd"
	if !strings.HasPrefix(version, "1.") {
		module += "/v2"
	}
	r := fetch.GoRecipe{Module: module, Version: "v" + version, Arch: runtime.GOARCH,
		LDFlags: "-s -w -X " + module + "/version.Version=v" + version}
	for _, p := range []string{"containerd", "containerd-shim-runc-v2", "ctr"} {
		r.Packages = append(r.Packages, module+"/cmd/"+p)
	}
	blobs, err := fetch.GoBuild(t.Context(), c, r, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for pkg, sha := range blobs {
		copyProgram(t, c.BlobPath(sha), filepath.Join(bin, filepath.Base(pkg)))
	}
	return bin
}

func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	desk.WriteProgram(t, to, string(b))
}

// runc compiles the runc in this module's go.mod.
func runc(t *testing.T) string {
	t.Helper()
	return goBuild(t, "github.com/opencontainers/runc", "CGO_ENABLED=1")
}

// hello compiles the program of the test images and returns its bytes.
func hello(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(goBuild(t, "./testdata/hello", "CGO_ENABLED=0"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func goBuild(t *testing.T, pkg, env string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "program")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), env)
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, msg)
	}
	return out
}

// daemon is a running containerd.
type daemon struct {
	t   *testing.T
	bin string
	dir string // contains var/lib/containerd
	// group is the directory of the cgroup for containerd; empty for none.
	group string
	pods  []string
	cmd   *exec.Cmd
	conn  *grpc.ClientConn
	img   cri.ImageServiceClient
	rt    cri.RuntimeServiceClient
}

// start runs containerd on the store below dir.
func start(t *testing.T, bin, dir string) *daemon {
	t.Helper()
	d := &daemon{t: t, bin: bin, dir: dir}
	d.start()
	t.Cleanup(d.stop)
	return d
}

func (d *daemon) start() {
	d.t.Helper()
	// The state is not below t.TempDir, because paths of Unix sockets must be short.
	state, err := os.MkdirTemp("/run", "edgebake-oracle-")
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { os.RemoveAll(state) })
	config := fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing"]
[grpc]
  address = %q
[ttrpc]
  address = %q
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "edgebake.test/pause:1"
  # Lowering it takes a capability that not every root has.
  restrict_oom_score_adj = true
`, filepath.Join(d.dir, store.Root), state, state+"/c.sock", state+"/t.sock")
	if err := os.WriteFile(state+"/config.toml", []byte(config), 0o644); err != nil {
		d.t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(d.dir, fmt.Sprintf("containerd-%d.log", time.Now().UnixNano())))
	if err != nil {
		d.t.Fatal(err)
	}
	defer log.Close()
	d.cmd = exec.Command(filepath.Join(d.bin, "containerd"), "-c", state+"/config.toml")
	if d.group != "" {
		d.cmd = exec.Command("sh", "-c", `echo $$ >"$1/cgroup.procs"; shift; exec "$@"`, "sh", d.group,
			filepath.Join(d.bin, "containerd"), "-c", state+"/config.toml")
	}
	d.cmd.Env = append(os.Environ(), "PATH="+d.bin+":"+os.Getenv("PATH"))
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	// Retry soon. By default, a client that connects before the socket exists waits a second, which
	// would dominate the measured time.
	soon := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.2, MaxDelay: 100 * time.Millisecond}, MinConnectTimeout: 5 * time.Second}
	d.conn, err = grpc.NewClient("unix://"+state+"/c.sock", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon))
	if err != nil {
		d.t.Fatal(err)
	}
	d.img, d.rt = cri.NewImageServiceClient(d.conn), cri.NewRuntimeServiceClient(d.conn)
	deadline := time.Now().Add(5 * time.Minute)
	for {
		ctx, cancel := context.WithTimeout(d.t.Context(), 5*time.Second)
		_, err := d.rt.Status(ctx, &cri.StatusRequest{}, grpc.WaitForReady(true))
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			text, _ := os.ReadFile(log.Name())
			d.t.Fatalf("containerd does not answer: %v\n%s", err, text)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// stop ends containerd and leaves the store unchanged.
func (d *daemon) stop() {
	if d.cmd == nil {
		return
	}
	d.conn.Close()
	d.cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan struct{})
	go func() { d.cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		d.cmd.Process.Kill()
		<-done
	}
	d.cmd = nil
}

func (d *daemon) call() context.Context {
	ctx, cancel := context.WithTimeout(d.t.Context(), 5*time.Minute)
	d.t.Cleanup(cancel)
	return ctx
}

// ctr runs the release's own client.
func (d *daemon) ctr(args ...string) string {
	d.t.Helper()
	address := strings.TrimPrefix(d.conn.Target(), "unix://")
	args = append([]string{filepath.Join(d.bin, "ctr"), "-a", address, "-n", store.Namespace}, args...)
	if d.group != "" {
		args = append([]string{"sh", "-c", `echo $$ >"$1/cgroup.procs"; shift; exec "$@"`, "sh", d.group}, args...)
	}
	cmd := exec.CommandContext(d.t.Context(), args[0], args[1:]...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		d.t.Fatalf("ctr %q: %v\n%s%s", args, err, out, stderr.String())
	}
	return string(out)
}

// images lists the images that kubelet would see. Its values report whether an image is pinned.
func (d *daemon) images() map[string]bool {
	d.t.Helper()
	r, err := d.img.ListImages(d.call(), &cri.ListImagesRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	m := map[string]bool{}
	for _, i := range r.Images {
		if i.Pinned && len(i.RepoDigests) == 0 {
			d.t.Errorf("image %v has no digest", i.RepoTags)
		}
		for _, tag := range i.RepoTags {
			m[tag] = i.Pinned
		}
	}
	return m
}

// waitImage waits until the CRI plugin has the image. It learns of imported images by an event.
func (d *daemon) waitImage(image string) {
	d.t.Helper()
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		status, err := d.img.ImageStatus(d.call(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: image}})
		if err != nil {
			d.t.Fatal(err)
		}
		if status.Image != nil {
			return
		}
		if time.Now().After(end) {
			d.t.Fatalf("%s is not there", image)
		}
	}
}

// startPod starts a pod of one container and returns both IDs.
func (d *daemon) startPod(image, logs string, args ...string) (pod, container string) {
	d.t.Helper()
	d.waitImage(image)
	uid := fmt.Sprint(time.Now().UnixNano())
	node := &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER, Ipc: cri.NamespaceMode_POD}
	config := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: "p" + uid, Uid: uid, Namespace: "default"},
		LogDirectory: logs,
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/edgebake-oracle",
			SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: node}},
	}
	sandbox, err := d.rt.RunPodSandbox(d.call(), &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		d.t.Fatalf("running the sandbox: %v", err)
	}
	d.pods = append(d.pods, sandbox.PodSandboxId)
	c, err := d.rt.CreateContainer(d.call(), &cri.CreateContainerRequest{PodSandboxId: sandbox.PodSandboxId, SandboxConfig: config, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "c"}, Image: &cri.ImageSpec{Image: image}, Args: args, LogPath: "c.log",
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: node}},
	}})
	if err != nil {
		d.t.Fatalf("creating a container of %s: %v", image, err)
	}
	if _, err := d.rt.StartContainer(d.call(), &cri.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
		d.t.Fatalf("starting a container of %s: %v", image, err)
	}
	return sandbox.PodSandboxId, c.ContainerId
}

// removePods removes all pods.
func (d *daemon) removePods() {
	d.t.Helper()
	for _, id := range d.pods {
		if _, err := d.rt.StopPodSandbox(d.call(), &cri.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
			d.t.Errorf("stopping the sandbox: %v", err)
		}
		if _, err := d.rt.RemovePodSandbox(d.call(), &cri.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
			d.t.Errorf("removing the sandbox: %v", err)
		}
	}
	d.pods = nil
}

// timeToStart starts a container and returns the time since begun.
func (d *daemon) timeToStart(begun time.Time, image string) time.Duration {
	d.t.Helper()
	d.startPod(image, d.t.TempDir())
	return time.Since(begun)
}

// run starts a pod of one container, waits for its end and returns its log.
func (d *daemon) run(image string, args ...string) string {
	d.t.Helper()
	logs := d.t.TempDir()
	_, container := d.startPod(image, logs, args...)
	defer d.removePods()
	for {
		s, err := d.rt.ContainerStatus(d.call(), &cri.ContainerStatusRequest{ContainerId: container})
		if err != nil {
			d.t.Fatal(err)
		}
		if s.Status.State == cri.ContainerState_CONTAINER_EXITED {
			log, err := os.ReadFile(filepath.Join(logs, "c.log"))
			if err != nil {
				d.t.Fatal(err)
			}
			if s.Status.ExitCode != 0 {
				d.t.Fatalf("%s %q: exit %d\n%s", image, args, s.Status.ExitCode, log)
			}
			return string(log)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (d *daemon) runsHello(image string) {
	d.t.Helper()
	if log := d.run(image); !strings.Contains(log, "hello from a baked image") {
		d.t.Errorf("%s says %q", image, log)
	}
}

// snapshotDirs lists the snapshot directories on disk.
func (d *daemon) snapshotDirs() []string {
	d.t.Helper()
	names, err := store.DirFiles(d.dir).ReadDir(filepath.Join(store.Root, store.SnapshotterDir, "snapshots"))
	if err != nil {
		d.t.Fatal(err)
	}
	return names
}

// snapshotsOf lists the numbers of an image's snapshots, the topmost first.
func snapshotsOf(t *testing.T, s *store.State, ref string) []uint64 {
	t.Helper()
	digest := map[string]string{}
	for _, i := range s.Images {
		digest[i.Name] = i.Digest
	}
	chain := ""
	for _, b := range s.Blobs {
		if digest[ref] != "" && digest[b.Digest] == digest[ref] { // this record is named by the config's digest
			chain = b.Labels[store.LabelGCSnapshot]
		}
	}
	var ids []uint64
	for chain != "" {
		sn, ok := byKey(s)[chain]
		if !ok {
			t.Fatalf("%s: snapshot %s is missing", ref, chain)
		}
		ids, chain = append(ids, sn.ID), sn.Parent
	}
	return ids
}

// TestContainerdRunsBakedStore starts real containerds on baked stores, and makes the requests that
// a kubelet makes over months.
func TestContainerdRunsBakedStore(t *testing.T) {
	needRoot(t)
	imgs := testImages(hello(t))
	layout := filepath.Join(t.TempDir(), "layout")
	if _, err := imagetest.WriteLayout(layout, imgs...); err != nil {
		t.Fatal(err)
	}
	var refs []string
	for _, i := range imgs {
		refs = append(refs, i.Ref)
	}
	for _, version := range versions() {
		t.Run(version, func(t *testing.T) {
			bin := programs(t, version)
			dir := t.TempDir()
			r := bake(t, dir, layout, options(), refs...)
			baked := readState(t, filepath.Join(dir, store.Root))
			d := start(t, bin, dir)

			t.Log("every image is there, pinned")
			have := d.images()
			for _, ref := range refs {
				if pinned, ok := have[ref]; !ok || !pinned {
					t.Errorf("%s: there %v, pinned %v", ref, ok, pinned)
				}
			}
			if len(have) != len(refs) {
				t.Errorf("%d images, baked %d", len(have), len(refs))
			}

			t.Log("containers run, and see the layers merged")
			d.runsHello("edgebake.test/hello:1")
			d.runsHello("edgebake.test/docker:1")
			listing := d.run("edgebake.test/nasty:1", "list", "/opt")
			for want, present := range map[string]bool{
				"/opt/opq/newer": true, "/opt/opq/new\n": false, "/opt/opq/old1": false,
				"/opt/a/gone": false, "/opt/a/b/deep": true, "/opt/swap": true, "/opt/swap/now": false, "/opt/todel": true,
			} {
				if strings.Contains(listing+"\n", want) != present {
					t.Errorf("in /opt of the nasty image: %q there = %v", want, !present)
				}
			}

			t.Log("removing one image removes its own layers and no others")
			many := snapshotsOf(t, baked, "edgebake.test/many:1")
			if len(many) != 2 {
				t.Fatalf("%d snapshots of the image", len(many))
			}
			if _, err := d.img.RemoveImage(d.call(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "edgebake.test/many:1"}}); err != nil {
				t.Fatal(err)
			}
			left := map[string]bool{}
			for _, s := range baked.Snapshots {
				left[fmt.Sprint(s.ID)] = !slices.Contains(many, s.ID)
			}
			collected := func() bool {
				dirs := d.snapshotDirs()
				return !slices.ContainsFunc(baked.Snapshots, func(s store.Snapshot) bool {
					return slices.Contains(dirs, fmt.Sprint(s.ID)) != left[fmt.Sprint(s.ID)]
				})
			}
			eventually(t, "its two layers are collected, and no others", collected)
			if _, ok := d.images()["edgebake.test/many:1"]; ok {
				t.Error("the removed image is still listed")
			}
			d.runsHello("edgebake.test/hello:1")

			t.Log("a restart changes nothing")
			d.stop()
			d.start()
			if n := len(d.images()); n != len(refs)-1 {
				t.Errorf("%d images after a restart, expected %d", n, len(refs)-1)
			}
			if !collected() {
				t.Errorf("snapshots after a restart: %q", d.snapshotDirs())
			}
			d.runsHello("edgebake.test/nasty:1")

			t.Log("an image imported later shares the baked layers")
			newer := filepath.Join(t.TempDir(), "newer")
			base := imgs[0].Layers
			if _, err := imagetest.WriteLayout(newer, imagetest.Image{Ref: "edgebake.test/hello:2", Config: imgs[0].Config,
				Layers: append(slices.Clone(base), imagetest.Script(imagetest.File("new", 0o644, 0, 0, "new")))}); err != nil {
				t.Fatal(err)
			}
			n := strings.Count(d.ctr("snapshots", "list"), "Committed")
			d.ctr("images", "import", tarOf(t, newer))
			if got := strings.Count(d.ctr("snapshots", "list"), "Committed"); got != n+1 {
				t.Errorf("the import made %d snapshots, only its third layer is new", got-n)
			}
			d.runsHello("edgebake.test/hello:2")

			d.stop()
			verifyDir(t, dir)
			if len(r.Images) != len(refs) {
				t.Errorf("the report lists %d images", len(r.Images))
			}
		})
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Minute); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("waited five minutes: %s", what)
			return
		}
	}
}

// tarOf packs a layout into an archive.
func tarOf(t *testing.T, dir string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "image.tar")
	if msg, err := exec.CommandContext(t.Context(), "tar", "-C", dir, "-cf", out, ".").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, msg)
	}
	return out
}

// verifyDir verifies a store that containerd has changed.
func verifyDir(t *testing.T, dir string) {
	t.Helper()
	f := store.DirFiles(dir)
	f.InUse = true
	if _, err := store.Verify(f, store.Root); err != nil {
		t.Error(err)
	}
}
