//go:build linux

package guest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// If GUEST_BENCH has a number of runs, the benchmarks run. They print lines that begin with RESULT,
// of which test/bench/ipvs makes a table.

// tool is one of the compared programs, on its own node.
type tool struct {
	name  string
	start func(n *machine)
	n     *machine
	// probes is the number of requests per day to each master by the tool's configuration, or 0 if
	// they are counted.
	probes int
}

// care and metered start ipvscare with its profiles.
func care(n *machine) {
	n.configure(n.l.virtual())
	n.care()
}

func metered(n *machine) {
	v := n.l.virtual()
	v.Profile = "metered"
	n.configure(v)
	n.care()
}

// rivals returns the tools named in GUEST_RIVALS.
func rivals() []tool {
	var chosen []tool
	for _, r := range []tool{
		{name: "keepalived-1s", start: func(n *machine) { n.keepalived(1, 1, "retry 1\n      delay_before_retry 0.5") }, probes: 86400},
		{name: "keepalived-5s-10s", start: func(n *machine) { n.keepalived(5, 10, "retry 0") }, probes: 86400 / 5},
		{name: "lvscare-1s", start: func(n *machine) { n.lvscare("1s", "1s") }, probes: 86400},
		{name: "lvscare-5s-10s", start: func(n *machine) { n.lvscare("5s", "10s") }, probes: 86400 / 5},
	} {
		if slices.Contains(strings.Split(os.Getenv("GUEST_RIVALS"), ","), r.name) {
			chosen = append(chosen, r)
		}
	}
	return chosen
}

// settings makes the kernel settings that the other tools expect.
func (n *machine) settings() {
	n.in(func() { check(os.WriteFile("/proc/sys/net/ipv4/vs/expire_nodest_conn", []byte("1"), 0)) })
}

// lvscare starts lvscare in route mode, its default. As in clusters of sealos, from which lvscare
// comes, it gets the node's own address.
func (n *machine) lvscare(interval, timeout string) {
	n.l.t.Helper()
	n.settings()
	argv := []string{"/bin/lvscare", "care", "--vs", vip, "--mode", "route", "--ip", n.addr.String(), "--interval", interval, "--health-timeout", timeout}
	for _, m := range n.l.masters {
		argv = append(argv, "--rs", m.addr.String()+":6443")
	}
	n.journalled(n.command(argv...))
	n.expect("m1 m2 m3")
}

// keepalived starts keepalived with the same local route as ipvscare, and waits until all masters
// serve.
func (n *machine) keepalived(delay, timeout int, retry string) {
	n.l.t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "global_defs {\n  lvs_flush\n}\nvirtual_server 10.103.97.2 6443 {\n  delay_loop %d\n  lvs_sched rr\n  lvs_method NAT\n  protocol TCP\n", delay)
	for _, m := range n.l.masters {
		fmt.Fprintf(&b, `  real_server %s 6443 {
    weight 1
    SSL_GET {
      connect_timeout %d
      %s
      url {
        path /readyz
        status_code 200
      }
    }
  }
`, m.addr, timeout, retry)
	}
	b.WriteString("}\n")
	conf := n.dir + "/keepalived.conf"
	check(os.WriteFile(conf, []byte(b.String()), 0o644))
	n.must("/bin/ip", "route", "add", "local", "10.103.97.2", "dev", "lo", "table", "local", "src", n.addr.String())
	n.settings()
	n.journalled(n.command("/bin/keepalived", "-C", "-n", "-l", "-f", conf, "-p", n.dir+"/k.pid", "-c", n.dir+"/kc.pid"))
	n.expect("m1 m2 m3")
}

// family returns a process and its children.
func family(pid int) []int {
	pids := []int{pid}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, s := range stats {
		b, _ := os.ReadFile(s)
		_, rest, _ := strings.Cut(string(b), ") ")
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(pid) {
			child, _ := strconv.Atoi(filepath.Base(filepath.Dir(s)))
			pids = append(pids, child)
		}
	}
	return pids
}

// cpu returns the processor time of processes.
func cpu(pids []int) (total time.Duration) {
	for _, pid := range pids {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		for _, t := range tasks {
			b, _ := os.ReadFile(t)
			if f := strings.Fields(string(b)); len(f) > 0 {
				ns, _ := strconv.ParseInt(f[0], 10, 64)
				total += time.Duration(ns)
			}
		}
	}
	return total
}

// rss returns the resident memory of processes in kB. anon is the part that is not mapped from
// files.
func rss(pids []int) (total, anon int) {
	for _, pid := range pids {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 2 {
				continue
			}
			kb, _ := strconv.Atoi(f[1])
			switch f[0] {
			case "VmRSS:":
				total += kb
			case "RssAnon:":
				anon += kb
			}
		}
	}
	return total, anon
}

// leastRSS returns the minimum memory of a process within two seconds, in kB. A single value may
// include garbage that is about to be collected, more so at 120 requests per second on a busy
// computer.
func leastRSS(pid int) (total, anon int) {
	total, anon = rss([]int{pid})
	for range 20 {
		time.Sleep(100 * time.Millisecond)
		t, a := rss([]int{pid})
		total, anon = min(total, t), min(anon, a)
	}
	return total, anon
}

// wire returns the number of bytes sent and received by the node.
func (n *machine) wire() (bytes uint64) {
	n.in(func() {
		link, err := netlink.LinkByName("eth0")
		check(err)
		s := link.Attrs().Statistics
		bytes = s.RxBytes + s.TxBytes
	})
	return bytes
}

func (n *machine) metric(name string) (v int64) {
	n.l.t.Helper()
	eventually(n.l.t, "there is a metric "+name, func() (ok bool) {
		v, ok = n.tryMetric(name)
		return ok
	})
	return v
}

func (n *machine) tryMetric(name string) (int64, bool) {
	c, err := n.dial("127.0.0.1:10271", 30*time.Second)
	if err != nil {
		return 0, false
	}
	defer c.Close()
	fmt.Fprint(c, "GET /metrics HTTP/1.1\r\n\r\n")
	var b strings.Builder
	buf := make([]byte, 4096)
	for {
		k, err := c.Read(buf)
		b.Write(buf[:k])
		if err != nil {
			break
		}
	}
	for line := range strings.Lines(b.String()) {
		if v, ok := strings.CutPrefix(line, "ipvscare_"+name+" "); ok {
			x, err := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
			return x, err == nil
		}
	}
	return 0, false
}

// compared starts each tool on its own node.
func (l *lab) compared(tools []tool) {
	for i := range tools {
		tools[i].n = l.nodes[i]
		tools[i].start(tools[i].n)
	}
	for _, t := range tools {
		t.n.expect("m1 m2 m3")
	}
}

// TestBench compares the tools under the same fault at the same time.
func TestBench(t *testing.T) {
	runs := number(t, "GUEST_BENCH", 0)
	if runs == 0 {
		t.Skip("GUEST_BENCH is not set")
	}
	tools := append([]tool{{name: "ipvscare", start: care}}, rivals()...)
	l := newLab(t, 3, len(tools))
	l.compared(tools)
	sets := []string{"m2 m3", "m1 m3", "m1 m2"}
	for run := range runs {
		for _, fault := range []string{"kill", "stop", "drop"} {
			k := rand.IntN(3)
			m := l.masters[k]
			// Start the fault at a random phase of each tool's period, which is at most five
			// seconds.
			time.Sleep(time.Duration(rand.Int64N(int64(5 * time.Second))))
			var hammers []*hammer
			watches := make([][]*watch, len(tools))
			for i, tool := range tools {
				for range 4 {
					watches[i] = append(watches[i], tool.n.watch())
				}
				hammers = append(hammers, tool.n.hammer(40*time.Millisecond, 3*time.Second))
			}
			time.Sleep(300 * time.Millisecond)
			at := time.Now()
			switch fault {
			case "kill":
				m.kill()
			case "stop":
				m.signal(syscall.SIGSTOP)
			case "drop":
				m.netem(100, 0)
			}
			var wg sync.WaitGroup
			for i, tool := range tools {
				wg.Go(func() {
					for end := at.Add(patience); tool.n.serving() != sets[k] && time.Now().Before(end); {
						time.Sleep(10 * time.Millisecond)
					}
					removed := time.Since(at)
					time.Sleep(time.Second)
					last, failed, ok := hammers[i].end(at)
					wrong, broke := 0, -time.Millisecond // never
					for _, w := range watches[i] {
						switch b := w.brokenAt(); {
						case w.master != m.name && !b.IsZero():
							wrong++
						case w.master == m.name && !b.IsZero():
							broke = max(broke, b.Sub(at))
						}
						w.close()
					}
					t.Logf("RESULT fault run=%d tool=%s fault=%s removed_ms=%d last_ms=%d failed=%d ok=%d watch_ms=%d wrong=%d",
						run, tool.name, fault, removed.Milliseconds(), last.Milliseconds(), failed, ok, broke.Milliseconds(), wrong)
				})
			}
			wg.Wait()
			switch fault {
			case "kill":
				m.serve()
				m.awaitServing()
			case "stop":
				m.signal(syscall.SIGCONT)
			case "drop":
				m.netem(0, 0)
			}
			for _, tool := range tools {
				tool.n.expect("m1 m2 m3")
			}
		}
	}
}

// TestCost compares the processor time, memory and traffic of the tools, which run at the same time
// without faults.
func TestCost(t *testing.T) {
	secs := number(t, "GUEST_COST", 0)
	if secs == 0 {
		t.Skip("GUEST_COST is not set")
	}
	tools := append([]tool{{name: "ipvscare-lan", start: care}, {name: "ipvscare-metered", start: metered}}, rivals()...)
	l := newLab(t, 3, len(tools))
	l.compared(tools)
	time.Sleep(20 * time.Second)
	type sample struct {
		wire                   uint64
		cpu                    time.Duration
		at                     time.Time
		asked, pinged, dialled int64
	}
	take := func(tool tool) (s sample) {
		if tool.probes == 0 {
			s.asked, s.pinged, s.dialled = tool.n.metric("requests_total"), tool.n.metric("pings_total"), tool.n.metric("dials_total")
		}
		s.wire, s.cpu, s.at = tool.n.wire(), cpu(family(tool.n.cmd.Process.Pid)), time.Now()
		return s
	}
	var before []sample
	for _, tool := range tools {
		before = append(before, take(tool))
	}
	time.Sleep(time.Duration(secs) * time.Second)
	for i, tool := range tools {
		b, a := before[i], take(tool)
		took := a.at.Sub(b.at)
		perDay := func(x float64) int64 {
			return int64(x / float64(len(l.masters)) * float64(24*time.Hour) / float64(took))
		}
		requests := int64(tool.probes)
		if requests == 0 {
			requests = perDay(float64(a.asked - b.asked))
		}
		resident, _ := rss(family(tool.n.cmd.Process.Pid))
		t.Logf("RESULT cost tool=%s seconds=%.0f cpu_ppm=%d rss_kb=%d bytes_day=%d requests_day=%d pings_day=%d dials=%d",
			tool.name, took.Seconds(), (a.cpu-b.cpu).Microseconds()*1000000/took.Microseconds(), resident, perDay(float64(a.wire-b.wire)),
			requests, perDay(float64(a.pinged-b.pinged)), a.dialled-b.dialled)
	}
}

// TestMemory sends as many requests as in an hour, but faster. Memory must stay below 10 MB and not
// grow.
func TestMemory(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.nodes[0]
	l.virtual() // writes the CA
	// A tenth of a node's interval. With a shorter one, masters in an emulated VM would answer
	// late, and ipvscare would reconnect all the time.
	every := 100 * time.Millisecond
	n.journalled(n.command("/bin/ipvscare", "care", "--vs", vip, "--rs", "10.103.0.11:6443,10.103.0.12:6443,10.103.0.13:6443",
		"--ca-file", "/run/lab/ca.crt", "--interval", every.String(), "--run-dir", n.dir+"/run", "--metrics", "127.0.0.1:10271"))
	n.expect("m1 m2 m3")
	total := number(t, "GUEST_PINGS", 600) // requests to each master
	var sizes, anons []int
	for range 4 {
		// Without processor time, a VM sends fewer requests even in four times the time.
		began, until := n.metric("requests_total"), time.Now().Add(time.Duration(total)*every)
		for n.metric("requests_total")-began < int64(3*total/4) && time.Now().Before(until) {
			time.Sleep(time.Second)
		}
		size, anon := leastRSS(n.cmd.Process.Pid)
		sizes, anons = append(sizes, size), append(anons, anon)
	}
	t.Logf("RESULT memory requests=%d rss_kb=%s", n.metric("requests_total"), strings.ReplaceAll(strings.Trim(fmt.Sprint(sizes), "[]"), " ", ","))
	t.Logf("of them not the program's own pages, in kB: %v; it dialled %d times", anons, n.metric("dials_total"))
	if kb := sizes[len(sizes)-1]; kb > 10<<10 {
		t.Errorf("%d kB resident in the end, more than 10 MB: %v", kb, sizes)
	}
	// The program's own pages are loaded on use, so only other memory counts as growth.
	if grown := anons[3] - anons[1]; grown > 512 {
		t.Errorf("it grew by %d kB: %v", grown, anons)
	}
}
