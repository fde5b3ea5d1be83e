// Command recording makes the picture of a terminal in the README, docs/demo.svg, from a real run:
// an image is built and stamped, and a machine boots from it in QEMU and joins a small real
// cluster. docs/demo.json has the output with its times. Run the command from the root of the
// repository, after `make demo`:
//
//	go run ./test/recording          # record and draw
//	go run ./test/recording -draw    # draw docs/demo.json again
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/test/lab"
)

const (
	dir     = "build/recording"
	session = "docs/demo.json"
	picture = "docs/demo.svg"
	node    = "shop-17"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	draw := flag.Bool("draw", false, "draw the last recording again")
	flag.Parse()
	if err := run(ctx, *draw); err != nil {
		fmt.Fprintln(os.Stderr, "recording:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, draw bool) error {
	var events []event
	if draw {
		b, err := os.ReadFile(session)
		if err == nil {
			err = json.Unmarshal(b, &events)
		}
		if err != nil {
			return fmt.Errorf("reading the recording: %w", err)
		}
	} else {
		r := &recorder{start: time.Now()}
		if err := r.record(ctx); err != nil {
			return err
		}
		events = r.events
		b, err := json.MarshalIndent(events, "", " ")
		if err == nil {
			err = os.WriteFile(session, append(b, '\n'), 0o644)
		}
		if err != nil {
			return fmt.Errorf("writing the recording: %w", err)
		}
	}
	return os.WriteFile(picture, render(events), 0o644)
}

// event is a line that the terminal shows.
type event struct {
	Seconds float64 `json:"seconds"` // time since the first command
	Kind    kind    `json:"kind"`
	Text    string  `json:"text"`
}

type kind string

const (
	command kind = "command"
	output  kind = "output"
	console kind = "console" // a line of the machine
	remark  kind = "remark"  // a line of this program
)

// recorder collects the events. Access is locked, because commands and the machine may print at the
// same time.
type recorder struct {
	mu     sync.Mutex
	start  time.Time
	events []event
}

func (r *recorder) show(k kind, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := time.Since(r.start).Round(10 * time.Millisecond).Seconds()
	r.events = append(r.events, event{at, k, text})
	fmt.Println(text)
}

// run runs a command and shows its lines as they arrive.
func (r *recorder) run(ctx context.Context, args ...string) error {
	r.show(command, strings.Join(args, " "))
	program, err := filepath.Abs(filepath.Join("bin", args[0]))
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program, args[1:]...)
	cmd.Dir = dir
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		r.show(output, lines.Text())
	}
	if err := errors.Join(lines.Err(), cmd.Wait()); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(args, " "), err)
	}
	return nil
}

// record records how a document becomes a Ready node.
func (r *recorder) record(ctx context.Context) (err error) {
	document, err := os.ReadFile("configs/examples/quickstart.yaml")
	if err != nil {
		return errors.New("run this from the root of the repository")
	}
	if _, err := os.Stat("build/images/index.json"); err != nil {
		return errors.New("there are no container images in build/images: run `make demo` first")
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	progs, err := lab.CachedPrograms(ctx, lab.KubernetesVersion, io.Discard)
	if err != nil {
		return err
	}
	l, err := lab.New(dir, io.Discard)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	cluster, network, err := l.StartLocalCluster(ctx, progs)
	if err != nil {
		return err
	}
	site, err := lab.Site{Cluster: cluster, NodeName: node}.YAML()
	err = errors.Join(err, os.WriteFile(filepath.Join(dir, "image.yaml"), document, 0o644), os.WriteFile(filepath.Join(dir, "site.yaml"), []byte(site), 0o600))
	if err != nil {
		return err
	}

	r.start = time.Now()
	for _, args := range [][]string{
		{"edgebake", "build"},
		{"edgebake", "stamp", "quickstart.raw", "site.yaml", "--output", node + ".raw"},
	} {
		if err := r.run(ctx, args...); err != nil {
			return err
		}
	}
	r.show(remark, "The machine is switched on. Nobody logs in.")
	vm, err := l.StartVM(ctx, lab.VMConfig{Name: node, Image: filepath.Join(dir, node+".raw"), Arch: "amd64", Disk: 8 << 30, Net: network,
		Accel: cmp.Or(os.Getenv("EDGEBAKE_ACCEL"), qemu.TCG), EachLine: func(line lab.Line) {
			if _, text, ok := strings.Cut(line.Text, "edgebake: "); ok {
				r.show(console, fmt.Sprintf("%5.0f s  %s", line.At.Seconds(), text))
			}
		}})
	if err != nil {
		return err
	}
	if _, err := cluster.WaitNode(ctx, vm, node, lab.Ready); err != nil {
		return err
	}
	if _, _, err := vm.Serial.Expect(ctx, 0, lab.FirstBootDone); err != nil {
		return err
	}
	nodes, err := cluster.Kubectl(ctx, "get", "nodes")
	if err != nil {
		return err
	}
	r.show(command, "kubectl get nodes")
	for line := range strings.Lines(nodes) {
		r.show(output, strings.TrimRight(line, "\n"))
	}
	return nil
}
