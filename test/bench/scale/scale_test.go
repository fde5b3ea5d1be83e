// Package scale measures many simultaneous first boots against one control plane: kube-apiserver,
// kube-controller-manager and etcd are real processes. Each machine runs first boot's own phases
// and ipvscare's own daemon on a fake machine; its kernel, kubeadm and kubelet are simulated.
// Everything runs in a separate network namespace. Results go to test/bench/results/scale.md.
//
// Each size is measured with all processors and with few, and with one and with three API servers.
// When all machines have joined, the control plane is limited to a tenth of a processor for a
// minute. Then it gets all processors again, and the time until every node is healthy is measured.
package scale

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/test/bench"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/lab"
)

var (
	sizes   = flag.String("scale.nodes", "", "numbers of machines; 50 if not set, and 50,200,1000 with EDGEBAKE_NIGHTLY")
	servers = flag.String("scale.servers", "1,3", "numbers of API servers")
	only    = flag.String("scale.only", "", "measure with these processors alone: all or few")
	out     = flag.String("scale.o", "../results/scale.md", "file to write")
	keep    = flag.String("scale.keep", "", "write what each row counted to this file too")
)

const (
	// perNode is the time between switching on two machines: 1,000 in a minute.
	perNode = 60 * time.Millisecond
	// leastWithin is the minimum time over which machines are switched on.
	leastWithin = 10 * time.Second
	// limit is the maximum time of a machine's first boot.
	limit = 15 * time.Minute
	// few is the number of processors of a restricted control plane. overload is the number that a
	// control plane has for a minute after all machines have joined.
	few, overload = 0.7, 0.1
)

// auditPolicy makes the API servers log the requests of nodes.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  userGroups: ["system:nodes", "system:bootstrappers", "system:unauthenticated"]
- level: None
`

// row is one measurement.
type row struct {
	nodes, servers int
	condition      string // all or few
	joined
	requests  map[string]int // by user agent
	cpu       float64        // seconds of all API servers
	peak      int64          // of the largest API server, bytes
	recovered float64        // seconds
	load      string
}

func BenchmarkScale(b *testing.B) {
	if b.N > 1 {
		return
	}
	desk.NeedRoot(b, "it makes a network namespace and a cgroup")
	desk.NeedProgram(b, "ip", "iproute2")
	count := *sizes
	if count == "" && os.Getenv("EDGEBAKE_NIGHTLY") != "" {
		count = "50,200,1000"
	}
	var rows []*row
	for _, nodes := range numbers(b, cmp.Or(count, "50")) {
		for _, n := range numbers(b, *servers) {
			for _, condition := range []string{"all", "few"} {
				if *only != "" && *only != condition {
					continue
				}
				r := &row{nodes: nodes, servers: n, condition: condition}
				r.measure(b)
				b.Log(r.line())
				for _, detail := range r.details() {
					b.Log(detail)
				}
				rows = append(rows, r)
				if err := write(rows); err != nil { // after each row, because the next may fail
					b.Fatal(err)
				}
			}
		}
	}
}

func numbers(b *testing.B, list string) []int {
	var out []int
	for word := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 {
			b.Fatalf("%q: want numbers of at least 1, with commas between them", list)
		}
		out = append(out, n)
	}
	return out
}

// measure measures one row.
func (r *row) measure(b *testing.B) {
	dir := b.TempDir()
	l, err := lab.New(dir, b.Output())
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatalf("%v\n%s", err, l.Evidence())
		}
	}
	programs, err := lab.CachedPrograms(b.Context(), lab.KubernetesVersion, b.Output())
	must(err)
	ns, err := l.NewNamespace(b.Context())
	must(err)
	c, err := l.StartTunedCluster(b.Context(), programs, ns, r.servers, lab.Tuning{Pods: "10.112.0.0/12", Durable: true, AuditPolicy: auditPolicy,
		ControllerManager: []string{fmt.Sprintf("--kube-api-qps=%d", clusterdoc.ManagerQPS), fmt.Sprintf("--kube-api-burst=%d", 2*clusterdoc.ManagerQPS)}})
	must(err)
	plane, err := newShare(fmt.Sprintf("edgebake-scale-%d", os.Getpid()))
	must(err)
	defer func() {
		l.Close() // end its processes first
		must(plane.remove())
	}()
	for _, p := range c.Processes() {
		must(plane.add(p.Pid()))
	}
	if r.condition == "few" {
		must(plane.set(few))
	}
	o := order{Nodes: r.nodes, Within: max(leastWithin, time.Duration(r.nodes)*perNode), Limit: limit, Masters: c.Masters,
		Token: c.Token, Pin: c.CAHash, Endpoint: lab.Endpoint, VIP: c.VIP()}
	text, err := json.Marshal(o)
	must(err)
	path := filepath.Join(dir, "order.json")
	must(os.WriteFile(path, text, 0o600))
	self, err := os.Executable()
	must(err)
	argv := ns.Wrap([]string{self, "-test.run=^TestMachines$", "-test.timeout=2h"})
	cmd := exec.CommandContext(b.Context(), argv[0], argv[1:]...)
	cmd.Env, cmd.Stderr = append(os.Environ(), orderFile+"="+path), os.Stderr
	in, err := cmd.StdinPipe()
	must(err)
	stdout, err := cmd.StdoutPipe()
	must(err)
	before := loadNow()
	spent := r.spent(c)
	must(cmd.Start())
	said := bufio.NewScanner(stdout)
	said.Buffer(nil, 16<<20)
	hear := func(word string, v any) {
		b.Helper()
		for said.Scan() {
			if text, ok := strings.CutPrefix(said.Text(), word); ok {
				must(json.Unmarshal([]byte(text), v))
				return
			}
			b.Log(said.Text())
		}
		b.Fatalf("the machines ended: %v\n%s", errors.Join(said.Err(), cmd.Wait()), l.Evidence())
	}
	hear(wordJoined, &r.joined)
	r.load = before + " / " + loadNow()
	r.cpu = r.spent(c) - spent
	must(r.count(c))
	must(plane.set(overload))
	time.Sleep(time.Minute)
	must(plane.set(0))
	_, err = fmt.Fprintln(in, wordEased)
	must(err)
	hear(wordRecovered, &r.recovered)
	must(in.Close())
	must(cmd.Wait())
}

// spent returns the processor time of the API servers and records their peak memory.
func (r *row) spent(c *lab.Cluster) (seconds float64) {
	for _, p := range c.APIServers {
		proc := fmt.Sprintf("/proc/%d/", p.Pid())
		stat, err := os.ReadFile(proc + "stat")
		if err != nil {
			continue // it has ended, and the machines report that
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		if f := strings.Fields(rest); len(f) > 12 {
			user, _ := strconv.ParseFloat(f[11], 64)
			system, _ := strconv.ParseFloat(f[12], 64)
			seconds += (user + system) / 100
		}
		status, _ := os.ReadFile(proc + "status")
		_, after, _ := strings.Cut(string(status), "VmHWM:")
		if f := strings.Fields(after); len(f) > 0 {
			kB, _ := strconv.ParseInt(f[0], 10, 64)
			r.peak = max(r.peak, kB<<10)
		}
	}
	return seconds
}

// count reads each program's number of requests from the audit logs.
func (r *row) count(c *lab.Cluster) error {
	r.requests = map[string]int{}
	for n := range c.APIServers {
		f, err := os.Open(c.AuditLog(n))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		defer f.Close()
		seen := map[string]bool{}
		for dec := json.NewDecoder(f); ; {
			var e struct{ AuditID, UserAgent, Stage string }
			if err := dec.Decode(&e); err != nil {
				break // the last line may be incomplete
			}
			if !seen[e.AuditID] { // a watch has two stages
				seen[e.AuditID] = true
				agent, _, _ := strings.Cut(e.UserAgent, "/")
				r.requests[cmp.Or(agent, "none")]++
			}
		}
	}
	return nil
}

func (r *row) key() string { return fmt.Sprintf("| %d | %d | %s |", r.nodes, r.servers, r.condition) }

// each returns n divided by the number of machines.
func (r *row) each(n int64) float64 { return float64(n) / float64(r.nodes) }

func (r *row) line() string {
	var requests int64
	for _, n := range r.requests {
		requests += int64(n)
	}
	return fmt.Sprintf("%s %d | %.1f / %.1f | %d | %d | %.0f | %.1f | %.3f | %d | %.0f | %s |", r.key(), len(r.Finished), quantile(r.Ready, 0.5), quantile(r.Ready, 0.99),
		r.Repeated, r.TooMany, r.each(requests), r.each(r.Opened), r.each(int64(1000*r.cpu))/1000, r.peak>>20, r.recovered, r.load)
}

// details returns the figures that do not fit in the table.
func (r *row) details() []string {
	var lines []string
	for _, agent := range slices.Sorted(maps.Keys(r.requests)) {
		lines = append(lines, fmt.Sprintf("%.2f requests of %s a machine", r.each(int64(r.requests[agent])), agent))
	}
	others := r.Opened
	for _, who := range slices.Sorted(maps.Keys(r.Dials)) {
		others -= r.Dials[who]
		lines = append(lines, fmt.Sprintf("%.2f connections of %s a machine", r.each(r.Dials[who]), who))
	}
	lines = append(lines, fmt.Sprintf("%.2f connections of the control plane itself a machine", r.each(others)))
	for _, fault := range slices.Sorted(maps.Keys(r.Faults)) {
		lines = append(lines, fmt.Sprintf("%d times: %s", r.Faults[fault], fault))
	}
	for _, line := range slices.Sorted(maps.Keys(r.Said)) {
		lines = append(lines, fmt.Sprintf("%d consoles: %s", r.Said[line], line))
	}
	return lines
}

func quantile(x []float64, q float64) float64 {
	if len(x) == 0 {
		return 0
	}
	x = slices.Sorted(slices.Values(x))
	return x[min(len(x)-1, int(q*float64(len(x))))]
}

func loadNow() string {
	now, _, _ := strings.Cut(bench.Load(), " ")
	return now
}

const head = `# Many first boots at once

Made by ` + "`go test -run '^$' -bench Scale ./test/bench/scale`" + `. kube-apiserver and
kube-controller-manager %s and etcd, which syncs, are real. So are first boot's phases and
ipvscare's daemon, on fake machines with kernels in memory. **kubeadm and kubelet are
stand-ins**: they send the requests that the audit log of one real node has, without pods.
Machines and control plane share %d processors, with whatever else ran meanwhile: the load
average over a minute is that before and after the joins.

- Machines are switched on evenly over a minute for each 1,000, at least 10 s.
- *few*: the control plane has %.1f processors (a cgroup).
- *joined*: first boot ended within %s. *repeated*: kubeadm join ran more than once.
- *requests*: of nodes, by the audit log. *connections*: all that the network opened.
- *recovered*: all nodes have joined, and the control plane has %.1f processors for a
  minute. From then on it has all of them: the seconds until each node has renewed its
  lease, which is due every 10 s.

| nodes | API servers | processors | joined | Ready p50 / p99, s | repeated | 429 | requests a join | connections a join | API servers' CPU s a join | peak MB | recovered, s | load |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
`

// write adds the rows to the table, in place of those of the same kind.
func write(rows []*row) error {
	all := map[string]string{}
	text, err := os.ReadFile(*out)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	keyOf := func(line string) (string, []int) {
		f := strings.Split(line, "|")
		if len(f) < 5 {
			return "", nil
		}
		nodes, err1 := strconv.Atoi(strings.TrimSpace(f[1]))
		n, err2 := strconv.Atoi(strings.TrimSpace(f[2]))
		if err1 != nil || err2 != nil {
			return "", nil
		}
		return strings.Join(f[:4], "|") + "|", []int{nodes, n}
	}
	for line := range strings.Lines(string(text)) {
		if key, _ := keyOf(line); key != "" {
			all[key] = strings.TrimSpace(line)
		}
	}
	for _, r := range rows {
		all[r.key()] = r.line()
	}
	next := fmt.Sprintf(head, lab.KubernetesVersion, runtime.NumCPU(), few, limit, overload)
	for _, key := range slices.SortedFunc(maps.Keys(all), func(a, b string) int {
		_, x := keyOf(a + "|")
		_, y := keyOf(b + "|")
		return cmp.Or(slices.Compare(x, y), cmp.Compare(a, b))
	}) {
		next += all[key] + "\n"
	}
	if *keep != "" {
		var lines []string
		for _, r := range rows {
			lines = append(append(lines, r.line()), r.details()...)
		}
		if err := os.WriteFile(*keep, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(*out, []byte(next), 0o644)
}
