package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/edgebake/edgebake/ondisk/seekable"
	format "github.com/edgebake/edgebake/ondisk/update"
	"github.com/edgebake/edgebake/test/fleettest"
	"github.com/edgebake/edgebake/test/mediatest"
	"github.com/google/go-containerregistry/pkg/registry"
)

// reindex copies an image with another index, as a server could send it.
func reindex(t *testing.T, from, to string, change func(*chunk.Index)) {
	t.Helper()
	file, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	i, err := format.Open(bytes.NewReader(file), int64(len(file)))
	if err = errors.Join(err, i.Decode()); err != nil {
		t.Fatal(err)
	}
	change(i.Index)
	index, err := i.Index.Seal(func([]byte) (string, error) { return "signature", nil })
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.LastIndex(file, binary.LittleEndian.AppendUint32(nil, chunk.Magic))
	table := file[at+8+int(binary.LittleEndian.Uint32(file[at+4:])):]
	if err := os.WriteFile(to, slices.Concat(seekable.Skippable(file[:at:at], chunk.Magic, index), table), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestClusterUpdate checks the command line of rollouts: rejected input, the table and the result.
func TestClusterUpdate(t *testing.T) {
	c := newCLI(t)
	image := filepath.Join(c.dir, "update.raw.zst")
	mediatest.Make(t, image, mediatest.Image{ID: "fedcba9876543210fedcba9876543210", Data: 1 << 20, Initrd: []byte("initrd"), ESP: 48 << 20, Info: func(i *ondisk.ImageInfo) { i.UpdateSerial = 1 },
		SignIndex: func([]byte) (string, error) { return "signature", nil }})
	mediatest.Make(t, filepath.Join(c.dir, "unsigned.raw.zst"), mediatest.Image{ID: "fedcba9876543210fedcba9876543211", Data: 1 << 20})
	target, err := media.ReadUpdate(media.ImageSource{Name: image})
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(http.FileServer(http.Dir(c.dir)))
	t.Cleanup(web.Close)
	api := fleettest.New()
	t.Cleanup(api.Close)
	c.file("admin.conf", fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
clusters: [{name: a, cluster: {server: %q}}], users: [{name: a, user: {}}]}`, api.URL))
	api.Version = target.Info.Kubernetes
	update := func(code int, args ...string) {
		t.Helper()
		c.run(code, append([]string{"cluster", "update", "--kubeconfig", "admin.conf"}, args...)...)
	}
	url := web.URL + "/update.raw.zst"

	update(2)
	c.want(c.err, "requires an image")
	update(2, "--pause", "--stop")
	c.want(c.err, "exclude each other")
	update(2, "--status", url, "--budget", "3")
	c.want(c.err, "omit http", "--budget applies only to the start of an update")
	update(2, "my-edge.raw.zst", "--rings", "ring", "--max-bytes", "many", "--soak", "1h", "--from", "x.raw")
	c.want(c.err, "not a URL", "--rings: ", "--max-bytes: ", "--soak is the time between rings", "--from has an effect only with --dry-run")
	update(2, url+"@sha256:abcd", "--budget", "0", "--parallel", "none", "--soak", "-1h", "--window", "noon", "--image", "none.raw.zst", "--kubeconfig", "none.conf", "-o", "xml")
	c.want(c.err, "@sha256:abcd is not a golden digest, which has 64 hexadecimal digits", `"0" for "--budget"`, `"none" for "--parallel"`, `"-1h" for "--soak" flag: must not be negative`, `"noon" for "--window"`, "none.raw.zst", "none.conf", `"xml" for "--output"`)
	c.run(2, "cluster", "verify", "--kubeconfig", "none.conf", "--vip", "x", "--nodepool", "shops")
	c.want(c.err, `"x" for "--vip" flag: not an IP address`, `"shops" for "--nodepool" flag: want NAME=Edge`, "none.conf")
	update(1, web.URL+"/nowhere.raw.zst")
	c.want(c.err, "404", "--image")
	update(1, url+"@sha256:"+strings.Repeat("ab", 32))
	c.want(c.err, "is not the image of this update")
	reg := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(reg.Close)
	oci := reg.Listener.Addr().String() + "/edge/image:1"
	update(1, "oci://"+oci)
	c.want(c.err, "answered 404", "--image")
	c.run(0, "push", image, oci)
	update(1, "oci://"+oci)
	c.want(c.err, "match none of the cluster's 0 nodes")
	update(1, "oci://"+oci+"@sha256:"+strings.Repeat("ab", 32))
	c.want(c.err, "is not the image of this update")
	update(2, "oci://"+strings.TrimSuffix(oci, ":1")+"@sha256:"+target.Golden)
	c.want(c.err, "has no tag")
	update(1, web.URL+"/unsigned.raw.zst")
	c.want(c.err, "is not signed, and machines reject unsigned images")
	update(1, url)
	c.want(c.err, "match none of the cluster's 0 nodes")

	const plan = "0123456789abcdef"
	machines := map[string]*fleettest.Machine{}
	for _, name := range []string{"shop-1", "shop-2", "shop-10"} {
		machines[name] = fleettest.NewMachine(name, fleettest.Works, plan, target.Info.Plan)
		api.Node(name, map[string]string{"ring": "shops"}, map[string]string{order.AnnotationAnswer: order.Answer{Plan: plan, Image: "old"}.String()})
	}
	update(0, url, "--dry-run")
	c.want(c.out, "NODE     RING  STATE    IMAGE  PLAN          FETCH  DETAIL\nshop-1         pending  old    0123456789ab  unknown\nshop-2 ")
	update(0, url, "--dry-run", "-o", "json")
	var rows []map[string]any
	if err := json.Unmarshal([]byte(c.out), &rows); err != nil || len(rows) != 3 || rows[2]["node"] != "shop-10" || rows[0]["fetch"] != nil {
		t.Errorf("%v: %s", err, c.out)
	}
	mediatest.Make(t, filepath.Join(c.dir, "other-key.raw"), mediatest.Image{ID: plan + plan, Data: 1 << 20, Info: func(i *ondisk.ImageInfo) {
		i.UpdateKeys = []string{"RWRFREdFQkFLRQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4"}
	}})
	update(1, url, "--dry-run", "--from", "other-key.raw")
	c.want(c.err, "machines with image other-key.raw reject image "+url+": the chunk index's signature is damaged")
	update(1, url, "--dry-run", "--from", "admin.conf", "--from", "other-key.raw")
	c.want(c.err, "admin.conf: not an edgebake image", "machines with image other-key.raw reject")
	reindex(t, image, filepath.Join(c.dir, "odd.raw.zst"), func(x *chunk.Index) { x.Golden = "odd" })
	update(1, web.URL+"/odd.raw.zst")
	c.want(c.err, "cannot be ordered", "want URL@sha256:GOLDEN")
	update(0, "--stop")
	c.want(c.out, "stopped the updates of 3 nodes")
	update(1, url)
	c.want(c.err, "--resume allows them again")
	update(0, "--resume")
	c.want(c.out, "resumed the updates of 3 nodes")

	end := make(chan struct{})
	go func() { // simulates the machines
		for {
			select {
			case <-end:
				return
			case <-time.After(5 * time.Millisecond):
			}
			for name, m := range machines {
				ready := m.Ready
				answer := m.Step(api.Annotation(name, order.AnnotationOrder), false).String()
				if answer != api.Annotation(name, order.AnnotationAnswer) {
					api.Annotate(name, fleettest.Object{order.AnnotationAnswer: answer})
				}
				if ready != m.Ready {
					api.Ready(name, m.Ready)
				}
			}
		}
	}()
	update(0, url, "--rings", "ring=shops", "--parallel", "100%", "--budget", "3", "--no-drain")
	close(end)
	c.want(c.out, "updating 3 nodes to ", "shop-10: done", "all 3 nodes run the image")
	update(0, "--status")
	c.want(c.out, "NODE     STATE  SINCE", "shop-10  done ")
}
