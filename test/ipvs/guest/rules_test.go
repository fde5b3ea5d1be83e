//go:build linux

package guest

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestRepair checks that ipvscare restores its rules within a second after any change by another
// program, and that it does not change other programs' rules.
func TestRepair(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.settle()
	// Add another program's virtual server.
	n.must("/bin/ipvsadm", "-A", "-t", "10.96.0.10:53", "-s", "wrr")
	n.must("/bin/ipvsadm", "-a", "-t", "10.96.0.10:53", "-r", "10.244.0.5:53", "-m")
	foreign := n.rules()
	v := []string{"-t", vip}
	for _, tt := range []struct {
		name string
		argv []string
	}{
		{"weight changed", append([]string{"/bin/ipvsadm", "-e", "-r", "10.103.0.11:6443", "-m", "-w", "7"}, v...)},
		{"method changed", append([]string{"/bin/ipvsadm", "-e", "-r", "10.103.0.11:6443", "-g", "-w", "1"}, v...)},
		{"real server removed", append([]string{"/bin/ipvsadm", "-d", "-r", "10.103.0.12:6443"}, v...)},
		{"unknown real server", append([]string{"/bin/ipvsadm", "-a", "-r", "10.103.0.99:6443", "-m"}, v...)},
		{"scheduler changed", append([]string{"/bin/ipvsadm", "-E", "-s", "sh"}, v...)},
		{"made persistent", append([]string{"/bin/ipvsadm", "-E", "-s", "rr", "-p", "300"}, v...)},
		{"virtual server removed", append([]string{"/bin/ipvsadm", "-D"}, v...)},
		{"route deleted", []string{"/bin/ip", "route", "del", "local", "10.103.97.2", "table", "local"}},
		{"route replaced", []string{"/bin/ip", "route", "replace", "local", "10.103.97.2", "dev", "lo", "table", "local", "src", "127.0.0.1"}},
	} {
		l.run(tt.name, func(t *testing.T) {
			right := func() bool {
				return n.rules() == foreign && n.source("10.103.97.2") == "10.103.0.101"
			}
			if !right() {
				t.Fatalf("the rules were wrong before the change: %s", n.rules())
			}
			at := time.Now()
			n.must(tt.argv...)
			eventually(t, tt.name, right)
			t.Logf("RESULT repair what=%s ms=%d", strings.ReplaceAll(tt.name, " ", "-"), time.Since(at).Milliseconds())
		})
	}
	l.run("everything flushed", func(t *testing.T) {
		n.must("/bin/ipvsadm", "-C")
		at := time.Now()
		n.expect("m1 m2 m3")
		t.Logf("RESULT repair what=flushed ms=%d", time.Since(at).Milliseconds())
		if strings.Contains(n.rules(), "0A60000A") {
			t.Error("ipvscare made another program's virtual server again")
		}
	})
	l.run("sysctl", func(t *testing.T) {
		read := func() (s string) {
			n.in(func() {
				b, _ := os.ReadFile("/proc/sys/net/ipv4/vs/expire_nodest_conn")
				s = strings.TrimSpace(string(b))
			})
			return s
		}
		n.in(func() { check(os.WriteFile("/proc/sys/net/ipv4/vs/expire_nodest_conn", []byte("0"), 0)) })
		eventually(t, "expire_nodest_conn is 1 again", func() bool { return read() == "1" })
	})
	l.run("hosts", func(t *testing.T) {
		text := "127.0.0.1 localhost\n10.1.1.1 printer # mine\n"
		check(os.WriteFile(n.dir+"/hosts", []byte(text), 0o644))
		want := text + "10.103.97.2 apiserver.cluster.local # ipvscare\n"
		eventually(t, "the line is back", func() bool {
			b, _ := os.ReadFile(n.dir + "/hosts")
			return string(b) == want
		})
	})
	l.run("address changed", func(t *testing.T) {
		n.must("/bin/ip", "addr", "add", "10.103.0.202/24", "dev", "eth0")
		n.must("/bin/ip", "addr", "del", "10.103.0.101/24", "dev", "eth0")
		// If the second address was a secondary one, the kernel has removed both.
		n.output("/bin/ip", "addr", "add", "10.103.0.202/24", "dev", "eth0")
		eventually(t, "the route has the new source", func() bool {
			return n.source("10.103.97.2") == "10.103.0.202"
		})
		n.expect("m1 m2 m3")
		if _, _, err := n.ask(vip, time.Minute); err != nil {
			t.Error(err)
		}
	})
}

// TestLife checks a restart, a kill, an upgrade, clean, and a second instance.
func TestLife(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.settle()
	l.run("a second one is refused", func(t *testing.T) {
		before := n.rules()
		out, err := n.output("/bin/ipvscare", "run", "--config", n.dir+"/ipvs.json", "--hosts", n.dir+"/hosts", "--run-dir", n.dir+"/run")
		if err == nil || !strings.Contains(out, "already maintains 10.103.97.2:6443") {
			t.Errorf("%v: %s", err, out)
		}
		if n.rules() != before {
			t.Errorf("rules changed to %s", n.rules())
		}
	})
	l.run("somebody else than root is refused", func(t *testing.T) {
		before := n.rules()
		for _, argv := range [][]string{{"run", "--config", n.dir + "/ipvs.json"}, {"clean"},
			{"care", "--vs", "10.103.97.9:6443", "--rs", "10.103.0.11:6443"}} {
			cmd := n.command(append([]string{"/bin/ipvscare"}, argv...)...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			n.start(cmd)
			if err := cmd.Wait(); err == nil || !strings.Contains(out.String(), "must run as root") {
				t.Errorf("%v: %v: %s", argv, err, out.String())
			}
		}
		if n.rules() != before {
			t.Errorf("rules changed to %s", n.rules())
		}
	})
	l.run("a CA file that is none is refused by --run-once", func(t *testing.T) {
		before := n.rules()
		check(os.WriteFile("/run/lab/bad.crt", []byte("nonsense"), 0o644))
		out, err := n.output("/bin/ipvscare", "care", "--run-once", "--vs", "10.103.97.9:6443", "--rs", "10.103.0.11:6443", "--ca-file", "/run/lab/bad.crt")
		if err == nil || !strings.Contains(out, "contains no PEM certificate") {
			t.Errorf("%v: %s", err, out)
		}
		if n.rules() != before {
			t.Errorf("rules changed to %s", n.rules())
		}
	})
	l.run("status", func(t *testing.T) {
		eventually(t, "status says that three are up", func() bool {
			out, _ := n.output("/bin/ipvscare", "status", "--run-dir", n.dir+"/run")
			return strings.Count(out, " up ") == 3
		})
		eventually(t, "status says in JSON that three are up", func() bool {
			out, _ := n.output("/bin/ipvscare", "status", "--run-dir", n.dir+"/run", "-o", "json")
			return strings.Count(out, `"state": "up"`) == 3
		})
	})
	l.run("metrics", func(t *testing.T) {
		c, err := n.dial("127.0.0.1:10271", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprint(c, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
		var b strings.Builder
		buf := make([]byte, 4096)
		for {
			k, err := c.Read(buf)
			b.Write(buf[:k])
			if err != nil {
				break
			}
		}
		if !strings.Contains(b.String(), `ipvscare_real_server{vip="10.103.97.2:6443",master="10.103.0.11:6443"} 1`) && !n.heldUp() {
			t.Error(b.String())
		}
	})
	l.run("restarts lose no connection", func(t *testing.T) {
		var watches []*watch
		for range 6 {
			watches = append(watches, n.watch())
		}
		h := n.hammer(50*time.Millisecond, time.Minute)
		began := time.Now()
		for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			check(n.cmd.Process.Signal(s))
			n.cmd.Wait()
			if got := n.serving(); got != "m1 m2 m3" && !n.heldUp() {
				t.Errorf("after %s serving: %q", s, got)
			}
			n.care()
			time.Sleep(500 * time.Millisecond)
		}
		if _, failed, ok := h.end(began); failed > 0 && !n.heldUp() || ok == 0 {
			t.Errorf("%d connections failed, %d went well", failed, ok)
		}
		for _, w := range watches {
			n.unbroken(w)
			w.conn.Close()
		}
	})
	l.run("clean removes ours only", func(t *testing.T) {
		n.must("/bin/ipvsadm", "-A", "-t", "10.96.0.10:53", "-s", "wrr")
		clean := []string{"/bin/ipvscare", "clean", "--config", n.dir + "/ipvs.json", "--hosts", n.dir + "/hosts", "--run-dir", n.dir + "/run"}
		if out, err := n.output(clean...); err == nil {
			t.Errorf("clean succeeded while the daemon was running: %s", out)
		}
		n.stopProcess()
		n.must(clean...)
		if got, want := n.rules(), "TCP 0A60000A:0035 wrr"; got != want {
			t.Errorf("rules: %q, want %q", got, want)
		}
		if out, _ := n.output("/bin/ip", "route", "show", "table", "local", "10.103.97.2"); out != "" {
			t.Errorf("a route is left: %s", out)
		}
		if b, _ := os.ReadFile(n.dir + "/hosts"); string(b) != "127.0.0.1 localhost\n" {
			t.Errorf("hosts: %q", b)
		}
	})
	l.run("after a reboot", func(t *testing.T) { // only files are left
		n.care()
		n.expect("m1 m2 m3")
	})
	l.run("forgotten virtual servers go", func(t *testing.T) {
		v := l.virtual()
		v.VIP, v.Host = "10.103.97.3:6443", "other.cluster.local"
		n.configure(v)
		eventually(t, "the new one is there, the old one is not", func() bool {
			r := n.rules()
			return strings.Contains(r, "0A676103:192B") && !strings.Contains(r, "0A676102:192B") && strings.Count(r, "Masq 1") == 3
		})
		n.stopProcess()
		n.configure(l.virtual())
		n.care()
		n.expect("m1 m2 m3")
		if r := n.rules(); strings.Contains(r, "0A676103") {
			t.Errorf("the rules of the removed virtual server are left: %s", r)
		}
	})
}

// TestList checks that the masters follow the list in the configuration file.
func TestList(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.nodes[0]
	v := l.virtual()
	all := v.Masters
	v.Masters = all[:2]
	n.configure(v)
	n.care()
	n.expect("m1 m2")
	var watches []*watch
	for range 4 {
		watches = append(watches, n.watch())
	}
	v.Masters = all[1:]
	n.configure(v)
	n.expect("m2 m3")
	for _, w := range watches {
		if w.master == "m2" {
			n.unbroken(w)
		}
		w.conn.Close()
	}
	for name, text := range map[string]string{
		"half-written": `{"version":1,"servers":[{"vip":"10.103.97.2:6443","masters":["10.10`,
		"no master":    `{"version":1,"servers":[{"vip":"10.103.97.2:6443","masters":[]}]}`,
		"the VIP":      `{"version":1,"servers":[{"vip":"10.103.97.2:6443","masters":["10.103.97.2:6443"]}]}`,
		"no port":      `{"version":1,"servers":[{"vip":"10.103.97.2:6443","masters":["10.103.0.11"]}]}`,
	} {
		l.run(name+" changes nothing", func(t *testing.T) {
			said := n.log.count("keeping the previous configuration")
			check(os.WriteFile(n.dir+"/ipvs.json", []byte(text), 0o644))
			eventually(t, "it says so", func() bool { return n.log.count("keeping the previous configuration") > said })
			n.stays("m2 m3", 500*time.Millisecond)
		})
	}
	l.run("a list that cannot be read changes nothing", func(t *testing.T) {
		check(os.Remove(n.dir + "/ipvs.json"))
		eventually(t, "it says so", func() bool { return n.log.count("no such file") > 0 })
		check(os.Mkdir(n.dir+"/ipvs.json", 0o755))
		eventually(t, "it says so", func() bool { return n.log.count("is a directory") > 0 })
		n.stays("m2 m3", 500*time.Millisecond)
		check(os.Remove(n.dir + "/ipvs.json"))
	})
	v.Masters = all
	n.configure(v)
	n.signal(syscall.SIGHUP)
	n.expect("m1 m2 m3")
	l.run("a CA file that is none changes nothing", func(t *testing.T) {
		check(os.WriteFile(v.CAFile, []byte("nonsense"), 0o644))
		eventually(t, "it says so", func() bool { return n.log.count("keeping the previous CA certificates") > 0 })
		n.stays("m1 m2 m3", time.Second)
		l.virtual() // writes the file again
	})
	l.run("nobody listed is there: the old ones serve on", func(t *testing.T) {
		v.Masters = []string{"10.103.0.77:6443"}
		n.configure(v)
		eventually(t, "it tries the new one", func() bool {
			out, _ := n.output("/bin/ipvscare", "status", "--run-dir", n.dir+"/run") // fails, since no master is up
			return strings.Contains(out, "10.103.0.77:6443")
		})
		n.stays("m1 m2 m3", 4*time.Second)
		v.Masters = all
		n.configure(v)
		n.expect("m1 m2 m3")
	})
	l.run("the CA comes later", func(t *testing.T) {
		n.stopProcess()
		n.must("/bin/ipvsadm", "-C")
		check(os.Remove(v.CAFile))
		n.care()
		n.expect("m1 m2 m3")
		check(os.WriteFile(v.CAFile, newAuthority("not ours").pem, 0o644))
		n.expect("")
		check(os.WriteFile(v.CAFile, l.ca.pem, 0o644))
		n.expect("m1 m2 m3")
	})
}

// TestLearn checks that the cluster's own list replaces the configured one, and the safeguards
// against a wrong list.
func TestLearn(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.nodes[0]
	v := l.virtual()
	all := v.Masters
	v.LearnMasters = true
	v.Masters = all[:1]
	check(os.WriteFile(n.dir+"/client.pem", l.ca.issue(nil, epoch.Add(-time.Hour), epoch.AddDate(1, 0, 0)), 0o600))
	args := []string{"--client-cert", n.dir + "/client.pem", "--learn-every", "300ms"}
	list := func(masters ...string) {
		text := fmt.Sprintf(`{"kind":"ConfigMap","apiVersion":"v1","data":{"masters":%q}}`, strings.Join(masters, "\n"))
		check(os.WriteFile("/run/configmap.json.tmp", []byte(text), 0o644))
		check(os.Rename("/run/configmap.json.tmp", "/run/configmap.json"))
	}
	list(all...)
	n.configure(v)
	n.care(args...)
	n.expect("m1 m2 m3")
	said := n.log.count("keeping the list")
	list()
	eventually(t, "an empty list is refused", func() bool { return n.log.count("keeping the list") > said })
	list("10.103.0.88:6443")
	eventually(t, "a list of nobody is refused", func() bool { return n.log.count("is up; keeping") > 0 })
	n.stays("m1 m2 m3", time.Second)
	list(all[1:]...)
	n.expect("m2 m3")
	// The learned list survives a power cut at this moment, although the configuration has only m1.
	n.stopProcess()
	n.must("/bin/ipvsadm", "-C")
	os.Remove("/run/configmap.json")
	n.care(args...)
	n.expect("m2 m3")
	// If learning is disabled, the configured list applies at once.
	list(all[1:]...)
	v.LearnMasters = false
	n.configure(v)
	n.expect("m1")
	n.stays("m1", time.Second)
	v.LearnMasters = true
	n.configure(v)
	n.expect("m2 m3")
}

// TestModule unloads IP_VS and loads it again, and starts ipvscare without it.
func TestModule(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.settle()
	schedulers := []string{"ip_vs_rr", "ip_vs_wrr", "ip_vs_lc", "ip_vs_wlc", "ip_vs_sh", "ip_vs_dh", "ip_vs"}
	unload := func() {
		check(os.WriteFile(noModprobe, nil, 0o644))
		eventually(t, "ip_vs is unloaded", func() bool {
			n.signal(syscall.SIGSTOP) // otherwise it would restore its rules
			n.must("/bin/ipvsadm", "-C")
			for _, m := range schedulers {
				if err := unix.DeleteModule(m, unix.O_NONBLOCK); err != nil && err != unix.ENOENT {
					n.signal(syscall.SIGCONT) // ipvscare was stopped while it had the kernel's table open
					return false
				}
			}
			return true
		})
		n.signal(syscall.SIGCONT)
	}
	defer os.Remove(noModprobe)
	unload()
	master := func() string {
		b, _ := os.ReadFile(n.dir + "/hosts")
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 1 && f[1] == "apiserver.cluster.local" {
				return f[0]
			}
		}
		return ""
	}
	byAddr := func(a string) *machine {
		for _, m := range l.masters {
			if m.addr.String() == a {
				return m
			}
		}
		return nil
	}
	eventually(t, "the hosts file names a master", func() bool { return byAddr(master()) != nil })
	first := byAddr(master())
	c, err := n.dial(first.addr.String()+":6443", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	broke := make(chan struct{})
	go func() { var b [1]byte; c.Read(b[:]); close(broke) }()
	first.signal(syscall.SIGSTOP)
	eventually(t, "the hosts file names another master", func() bool {
		m := byAddr(master())
		return m != nil && m != first
	})
	select {
	case <-broke:
	case <-time.After(patience):
		t.Error("the connection to the dead master stays")
	}
	first.signal(syscall.SIGCONT)
	if out, err := n.output("/bin/ipvscare", "care", "--run-once", "--vs", "10.103.97.9:6443", "--rs", "10.103.0.11:6443"); err == nil || !strings.Contains(out, "has no IP_VS") {
		t.Errorf("--run-once without IP_VS: %v: %s", err, out)
	}
	if out, _ := n.output("/bin/ipvscare", "status", "--run-dir", n.dir+"/run"); !strings.Contains(out, "no IP_VS") {
		t.Error(out)
	}
	check(os.Remove(noModprobe))
	modprobe([]string{"ip_vs"})
	n.expect("m1 m2 m3")
	eventually(t, "the hosts file names the VIP again", func() bool { return master() == "10.103.97.2" })
	for _, m := range schedulers {
		modprobe([]string{m})
	}
}

// TestMany checks 200 real servers and 1,000 open connections.
func TestMany(t *testing.T) {
	l := newLab(t, 3, 1)
	m := l.masters[2]
	var addrs []string
	m.in(func() {
		link, err := netlink.LinkByName("eth0")
		check(err)
		for i := range 198 {
			a := netip.AddrFrom4([4]byte{10, 103, 1, byte(i + 1)})
			check(netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)}}))
			addrs = append(addrs, a.String()+":6443")
		}
	})
	n := l.nodes[0]
	n.must("/bin/ip", "route", "add", "10.103.1.0/24", "dev", "eth0")
	addrs = append(addrs, l.virtual().Masters[:2]...)
	began := time.Now()
	// Use no TLS, because the time of two hundred handshakes would depend on the emulator.
	n.journalled(n.command("/bin/ipvscare", "care", "--vs", vip, "--rs", strings.Join(addrs, ","), "--health-schem", "http", "--profile", "metered", "--run-dir", n.dir+"/run"))
	eventually(t, "200 real servers serve", func() bool { return strings.Count(n.rules(), "Masq 1") == 200 })
	t.Logf("200 real servers after %s", time.Since(began))
	n.must("/bin/ipvsadm", "-C")
	at := time.Now()
	eventually(t, "200 real servers are back", func() bool { return strings.Count(n.rules(), "Masq 1") == 200 })
	t.Logf("back after a flush in %s", time.Since(at))
	n.stopProcess()
	n.must("/bin/ipvsadm", "-C")

	n.configure(l.virtual())
	n.care()
	n.expect("m1 m2 m3")
	var watches []*watch
	for range 1000 {
		w, err := n.tryWatch()
		if err != nil { // one of many may fail; a client tries again once
			t.Logf("opening a watch, tried again: %v", err)
			w = n.watch()
		}
		watches = append(watches, w)
	}
	at = time.Now()
	l.masters[0].signal(syscall.SIGSTOP)
	n.expect("m2 m3")
	removed := time.Now()
	eventually(t, "all watches on the dead master break", func() bool {
		return !slices.ContainsFunc(watches, func(w *watch) bool { return w.master == "m1" && w.brokenAt().IsZero() })
	})
	time.Sleep(200 * time.Millisecond)
	var worst time.Duration
	moved := 0
	for _, w := range watches {
		if w.master == "m1" {
			moved++
			worst = max(worst, w.brokenAt().Sub(removed))
		} else {
			n.unbroken(w)
		}
		w.conn.Close()
	}
	t.Logf("of 1000 watches %d broke, the last %s after the removal, which came after %s", moved, worst, removed.Sub(at))
}

// TestIPv6 checks the rules and the faults over IPv6.
func TestIPv6(t *testing.T) {
	l := newLab(t, 2, 1)
	n := l.nodes[0]
	for i, m := range append(l.masters, n) {
		m.must("/bin/ip", "addr", "add", fmt.Sprintf("fd00::%d/64", i+1), "dev", "eth0", "nodad")
	}
	v := l.virtual()
	v.VIP, v.Masters = "[fd00:97::2]:6443", []string{"[fd00::1]:6443", "[fd00::2]:6443"}
	n.configure(v)
	n.care()
	eventually(t, "both serve", func() bool { return strings.Count(n.rules(), "Masq 1") == 2 })
	var watches []*watch
	for range 4 {
		c, who, err := n.ask(v.VIP, time.Minute)
		if err != nil {
			t.Fatalf("%v\n%s\n%s", err, n.rules(), n.must("/bin/ip", "-6", "route", "get", "fd00:97::2"))
		}
		w := &watch{master: who, conn: c}
		go w.await(c)
		watches = append(watches, w)
	}
	l.masters[0].signal(syscall.SIGSTOP)
	eventually(t, "one serves", func() bool { return strings.Count(n.rules(), "Masq 1") == 1 })
	for _, w := range watches {
		if w.master == "m1" {
			n.breaks(w)
		}
	}
	for _, w := range watches {
		if w.master != "m1" && !w.brokenAt().IsZero() {
			t.Errorf("a watch on the live master %s broke", w.master)
		}
		w.conn.Close()
	}
	n.must("/bin/ip", "-6", "route", "del", "local", "fd00:97::2", "table", "local")
	eventually(t, "the route is back", func() bool {
		return n.source("fd00:97::2") == "fd00::3"
	})
}

// TestCare checks lvscare's flags.
func TestCare(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.nodes[0]
	l.virtual() // writes the CA
	cmd := n.command("/bin/ipvscare", "care", "--vs", vip, "--rs", "10.103.0.11:6443", "--rs", "10.103.0.12:6443",
		"--health-path", "/readyz", "--health-schem", "https", "--mode", "route", "--run-dir", n.dir+"/run")
	cmd.Env = append(cmd.Env, "CARE_CA_FILE=/run/lab/ca.crt", "CARE_SCHEDULER=lc")
	n.journalled(cmd)
	n.expect("m1 m2")
	if r := n.rules(); !strings.Contains(r, "TCP 0A676102:192B lc") {
		t.Error(r)
	}
	l.masters[0].kill()
	n.expect("m2")
	n.stopProcess()
	n.must("/bin/ipvscare", "care", "--clean", "--vs", vip, "--rs", "10.103.0.11:6443", "--run-dir", n.dir+"/run")
	if r := n.rules(); r != "" {
		t.Errorf("left: %s", r)
	}
	n.must("/bin/ipvscare", "care", "--run-once", "--vs", vip, "--rs", "10.103.0.12:6443", "--ca-file", "/run/lab/ca.crt", "--run-dir", n.dir+"/run")
	if got := n.serving(); got != "m2" {
		t.Errorf("after --run-once serving %q", got)
	}
}
