//go:build linux

package guest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// The measurements print lines that begin with RESULT; test/bench/ipvs makes
// a table of them. They run when GUEST_BENCH names how many runs.

// keepalived starts the rival on the node, with the same local route, and
// returns when all masters serve. The values of the checker are lvscare's
// defaults or tuned to one second.
func (n *machine) keepalived(tuned bool) {
	n.l.t.Helper()
	delay, timeout, retry := 5, 10, "retry 0"
	if tuned {
		delay, timeout, retry = 1, 1, "retry 1\n      delay_before_retry 0.5"
	}
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
	n.in(func() { check(os.WriteFile("/proc/sys/net/ipv4/vs/expire_nodest_conn", []byte("1"), 0)) })
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

// cpu is the time that processes spent on a processor.
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

// rss is the resident memory of processes in kB, anon that part of it which is
// not the program itself.
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

// wire counts the bytes that went in and out of the node.
func (n *machine) wire() (bytes uint64) {
	n.in(func() {
		link, err := netlink.LinkByName("eth0")
		check(err)
		s := link.Attrs().Statistics
		bytes = s.RxBytes + s.TxBytes
	})
	return bytes
}

func (n *machine) metric(name string) int64 {
	c, err := n.dial("127.0.0.1:10271", 30*time.Second)
	if err != nil {
		n.l.t.Fatal(err)
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
			x, _ := strconv.ParseInt(strings.TrimSpace(v), 10, 64)
			return x
		}
	}
	n.l.t.Fatalf("no metric %s in %s", name, b.String())
	return 0
}

// TestBench: the rivals side by side under the same fault.
func TestBench(t *testing.T) {
	runs := number(t, "GUEST_BENCH", 0)
	if runs == 0 {
		t.Skip("GUEST_BENCH is not set")
	}
	l := newLab(t, 3, 2)
	n, rival := l.nodes[0], l.nodes[1]
	n.configure(l.virtual())
	n.care()
	n.expect("m1 m2 m3")
	tuned := os.Getenv("GUEST_RIVAL") != "defaults"
	name := "keepalived-1s"
	if !tuned {
		name = "keepalived-5s-10s"
	}
	rival.keepalived(tuned)
	settle := 5 * time.Second
	if !tuned {
		settle = 12 * time.Second
	}
	sets := []string{"m2 m3", "m1 m3", "m1 m2"}
	tools := []struct {
		name string
		n    *machine
	}{{"ipvscare", n}, {name, rival}}
	for run := range runs {
		for _, fault := range []string{"kill", "stop", "drop"} {
			k := rand.IntN(3)
			m := l.masters[k]
			time.Sleep(time.Duration(rand.Int64N(int64(settle) / 2)))
			var hammers []*hammer
			watches := make([][]*watch, len(tools))
			for i, tool := range tools {
				for range 4 {
					watches[i] = append(watches[i], tool.n.watch())
				}
				hammers = append(hammers, tool.n.hammer(40*time.Millisecond))
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
			eventually(t, "both took the master out", func() bool {
				return n.serving() == sets[k] && rival.serving() == sets[k]
			})
			time.Sleep(time.Second)
			for i, tool := range tools {
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
				t.Logf("RESULT fault run=%d tool=%s fault=%s last_ms=%d failed=%d ok=%d watch_ms=%d wrong=%d",
					run, tool.name, fault, last.Milliseconds(), failed, ok, broke.Milliseconds(), wrong)
			}
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

// TestCost: what peace costs, side by side: processor, memory, wire.
func TestCost(t *testing.T) {
	secs := number(t, "GUEST_COST", 0)
	if secs == 0 {
		t.Skip("GUEST_COST is not set")
	}
	d := time.Duration(secs) * time.Second
	l := newLab(t, 3, 3)
	lan, metered, rival := l.nodes[0], l.nodes[1], l.nodes[2]
	lan.configure(l.virtual())
	lan.care()
	v := l.virtual()
	v.Profile = "metered"
	metered.configure(v)
	metered.care()
	rival.keepalived(true)
	time.Sleep(10 * time.Second)
	for _, tool := range []struct {
		name string
		n    *machine
	}{{"ipvscare-lan", lan}, {"ipvscare-metered", metered}, {"keepalived-1s", rival}} {
		pids := family(tool.n.cmd.Process.Pid)
		care := strings.HasPrefix(tool.name, "ipvscare")
		var asked, pinged, dialled int64
		if care {
			asked, pinged, dialled = tool.n.metric("requests_total"), tool.n.metric("pings_total"), tool.n.metric("dials_total")
		}
		w0, c0, began := tool.n.wire(), cpu(pids), time.Now()
		time.Sleep(d)
		took := time.Since(began)
		w, c := tool.n.wire()-w0, cpu(pids)-c0
		if care {
			asked, pinged, dialled = tool.n.metric("requests_total")-asked, tool.n.metric("pings_total")-pinged, tool.n.metric("dials_total")-dialled
		}
		resident, _ := rss(pids)
		perDay := func(x float64) int64 { return int64(x / 3 * float64(24*time.Hour) / float64(took)) }
		t.Logf("RESULT cost tool=%s seconds=%.0f cpu_ppm=%d rss_kb=%d bytes_day=%d requests_day=%d pings_day=%d dials=%d",
			tool.name, took.Seconds(), c.Microseconds()*1000000/took.Microseconds(), resident, perDay(float64(w)), perDay(float64(asked)), perDay(float64(pinged)), dialled)
	}
}

// TestMemory: an hour's worth of sensing, sped up, stays within 10 MB and
// does not grow.
func TestMemory(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.nodes[0]
	l.virtual() // writes the CA
	every := 25 * time.Millisecond
	n.journalled(n.command("/bin/ipvscare", "care", "--vs", vip, "--rs", "10.103.0.11:6443,10.103.0.12:6443,10.103.0.13:6443",
		"--ca-file", "/run/lab/ca.crt", "--interval", every.String(), "--run-dir", n.dir+"/run", "--metrics", "127.0.0.1:10271"))
	n.expect("m1 m2 m3")
	total := number(t, "GUEST_PINGS", 1200) // requests of each master
	var sizes, anons []int
	for range 4 {
		began := n.metric("requests_total")
		for n.metric("requests_total")-began < int64(3*total/4) {
			time.Sleep(200 * time.Millisecond)
		}
		size, anon := rss([]int{n.cmd.Process.Pid})
		sizes, anons = append(sizes, size), append(anons, anon)
	}
	t.Logf("RESULT memory requests=%d rss_kb=%s", n.metric("requests_total"), strings.ReplaceAll(strings.Trim(fmt.Sprint(sizes), "[]"), " ", ","))
	for _, kb := range sizes {
		if kb > 10<<10 {
			t.Errorf("%d kB resident, more than 10 MB", kb)
		}
	}
	// The program's own pages come in as they are used; growth is of the rest.
	if grown := anons[3] - anons[1]; grown > 512 {
		t.Errorf("it grew by %d kB: %v", grown, anons)
	}
}
