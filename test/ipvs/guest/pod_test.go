//go:build linux

package guest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// confinedMain runs a program with the restrictions of the static pod: NET_ADMIN as the only
// capability, no way to gain others, a read-only /proc/sys, and the node's network settings mounted
// elsewhere.
func confinedMain() {
	runtime.LockOSThread() // all of this applies to the thread, and exec keeps it
	check(unix.Unshare(unix.CLONE_NEWNS))
	check(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	settings := os.Getenv("GUEST_SETTINGS")
	check(os.MkdirAll(settings, 0o755))
	check(unix.Mount("/proc/sys/net", settings, "", unix.MS_BIND, ""))
	check(unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""))
	check(unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if c == unix.CAP_NET_ADMIN {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != unix.EINVAL { // not known to the kernel
			check(err)
		}
	}
	check(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	argv := strings.Split(os.Getenv("GUEST_ARGV"), " ")
	fmt.Println("confined:", argv)
	check(syscall.Exec(argv[0], argv, []string{"PATH=/bin:/sbin", "HOME=/"}))
}

// TestStaticPod checks that the static pod's permissions suffice for all of ipvscare's work.
func TestStaticPod(t *testing.T) {
	l := newLab(t, 2, 1)
	n := l.nodes[0]
	l.virtual() // writes the CA
	check(os.MkdirAll(n.dir+"/etc", 0o755))
	check(os.WriteFile(n.dir+"/etc/hosts", []byte("127.0.0.1 localhost\n"), 0o644))
	n.set("ipv4/vs/conntrack", "0")
	cmd := n.command("/init")
	cmd.Env = append(cmd.Env, "GUEST_ROLE=confined", "GUEST_SETTINGS="+n.dir+"/settings",
		"GUEST_ARGV=/bin/ipvscare care --vs "+vip+" --rs 10.103.0.11:6443,10.103.0.12:6443 --ca-file /run/lab/ca.crt --host apiserver.cluster.local"+
			" --hosts "+n.dir+"/etc/hosts --sysctls "+n.dir+"/settings --run-dir "+n.dir+"/run")
	n.journalled(cmd)
	n.expect("m1 m2")
	if got := n.setting("ipv4/vs/conntrack"); got != "1" {
		t.Errorf("net.ipv4.vs.conntrack is %s", got)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.cmd.Process.Pid))
	check(err)
	if !strings.Contains(string(b), "CapEff:\t0000000000001000\n") {
		t.Errorf("the process has other capabilities than NET_ADMIN:\n%s", b)
	}
	// Another program replaces the hosts file.
	check(os.WriteFile(n.dir+"/etc/new", []byte("127.0.0.1 localhost\n10.1.1.1 printer\n"), 0o644))
	check(os.Rename(n.dir+"/etc/new", n.dir+"/etc/hosts"))
	eventually(t, "the line is in the new file", func() bool {
		b, _ := os.ReadFile(n.dir + "/etc/hosts")
		return strings.Contains(string(b), "10.1.1.1 printer\n10.103.97.2 apiserver.cluster.local # ipvscare\n")
	})
	w := n.watch()
	for w.master != "m1" {
		w.close()
		w = n.watch()
	}
	defer w.close()
	l.masters[0].signal(syscall.SIGSTOP)
	n.expect("m2")
	n.breaks(w)
	if out := n.log.String(); strings.Contains(out, "permitted") || strings.Contains(out, "read-only") {
		t.Errorf("the process lacked a permission:\n%s", out)
	}
}

// TestMetered checks that a silent master is removed long before the next request is due, because
// the node's own connection to it gets no answer.
func TestMetered(t *testing.T) {
	l := newLab(t, 2, 1)
	n := l.nodes[0]
	metered(n)
	n.expect("m1 m2")
	time.Sleep(3 * time.Second) // all requests are answered; the next ones are due in 75 s
	w := n.watch()
	m := l.masters[0]
	if w.master == "m2" {
		m = l.masters[1]
	}
	other := map[string]string{"m1": "m2", "m2": "m1"}[w.master]
	m.netem(100, 0)
	at := time.Now()
	_, err := w.conn.Write([]byte("x")) // as kubelet does when it renews its lease
	check(err)
	n.expect(other)
	took := time.Since(at)
	t.Logf("RESULT metered stuck_ms=%d", took.Milliseconds())
	if took > 50*time.Second {
		t.Errorf("it took %s", took)
	}
	n.breaks(w)
	w.close()
}
