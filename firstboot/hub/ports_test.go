package hub

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/test/desk"
)

func TestRegisterFlags(t *testing.T) {
	t.Parallel()
	edge := openyurt.Labels("shanghai", false)
	const both = openyurt.LabelNodePool + "=shanghai," + openyurt.LabelEdgeWorker + "=true"
	for _, tc := range []struct {
		args   string
		labels map[string]string
		want   string
	}{
		{"", edge, " --node-labels=" + both},
		{"--a=b ", edge, "--a=b --node-labels=" + both},
		{"--a=b --node-labels=zone=north --c=d", edge, "--a=b --node-labels=zone=north," + both + " --c=d"},
		{"--node-labels=" + both + ",zone=north --c=d", edge, "--node-labels=" + both + ",zone=north --c=d"},
		{"--node-labels=" + openyurt.LabelNodePool + "=beijing,zone=north", edge, "--node-labels=zone=north," + both},
		{"--a=b --node-labels=" + both + " --c=d", nil, "--a=b --c=d"},
		{"--node-labels=zone=north," + both, nil, "--node-labels=zone=north"},
		{"--node-labels=zone=north --a=b --node-labels=rack=7", edge, "--node-labels=zone=north,rack=7," + both + " --a=b"},
		{"--node-labels=" + openyurt.LabelNodePool + "=shanghai," + openyurt.LabelNodePool + "=shanghai", edge, "--node-labels=" + both},
		{"--a=b --node-labels=" + openyurt.LabelNodePool + "=shanghai --node-labels=" + openyurt.LabelEdgeWorker + "=true --c=d", nil, "--a=b --c=d"},
		{"--a=b --node-labels=zone=north", nil, "--a=b --node-labels=zone=north"},
		{"--a=b", nil, "--a=b"},
	} {
		if got := registerFlags(tc.args, tc.labels); got != tc.want {
			t.Errorf("%q, %v: %q, want %q", tc.args, tc.labels, got, tc.want)
		}
	}
}

// FuzzKubeadmFlags checks that editing kubelet's flags again changes nothing.
func FuzzKubeadmFlags(f *testing.F) {
	f.Add([]byte(`KUBELET_KUBEADM_ARGS="--node-ip=192.0.2.1 --node-labels=a=b"` + "\n"))
	f.Add([]byte(`KUBELET_KUBEADM_ARGS="--node-labels=,=,==, --node-labels="` + "\nX=1"))
	labels := map[string]string{openyurt.LabelEdgeWorker: "true"}
	f.Fuzz(func(t *testing.T, env []byte) {
		once, err := redirectFlags(env, "", labels)
		if err != nil {
			return
		}
		twice, err := redirectFlags(once, "", labels)
		if err != nil || string(once) != string(twice) {
			t.Errorf("once %q, twice %q (%v)", once, twice, err)
		}
		withRegistration(directFlags(once), nil) // must return
	})
}

// TestPortUnitsAreValid checks that systemd-analyze accepts the units that maintain the rules.
func TestPortUnitsAreValid(t *testing.T) {
	t.Parallel()
	desk.NeedProgram(t, "systemd-analyze", "systemd")
	dir := t.TempDir()
	files := portFiles(PortAccess{})
	for _, p := range []string{portsUnitFile, portsTimerFile} {
		text := strings.ReplaceAll(string(files[p]), "/usr/sbin/nft", "/bin/true")
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(p)), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", filepath.Join(dir, PortsUnit), filepath.Join(dir, PortsTimer)).CombinedOutput()
	if err != nil || strings.Contains(string(out), dir) {
		t.Errorf("%v: %s", err, out)
	}
}

// TestRemovedRulesAreMentioned checks that the timer's service reports rules that were removed, but
// not at boot, before they are loaded.
func TestRemovedRulesAreMentioned(t *testing.T) {
	t.Parallel()
	desk.NeedProgram(t, "nft", "nftables")
	desk.NeedProgram(t, "unshare", "util-linux")
	desk.NeedRoot(t, "it makes a network")
	unit := string(portFiles(PortAccess{})[portsUnitFile])
	_, look, _ := strings.Cut(unit, "ExecStart=/bin/sh -c '")
	look, _, found := strings.Cut(look, "'\n")
	if !found {
		t.Fatalf("the unit does not check the rules:\n%s", unit)
	}
	rules := filepath.Join(t.TempDir(), "nft")
	if err := os.WriteFile(rules, PortRules(PortAccess{}), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		trigger, before string
		said            bool
	}{
		"at a boot":         {"", "true", false},
		"by the timer":      {"TRIGGER_UNIT=" + PortsTimer, "nft -f " + rules, false},
		"they were removed": {"TRIGGER_UNIT=" + PortsTimer, "true", true},
	} {
		cmd := exec.Command("unshare", "-n", "sh", "-c", c.before+" && "+look)
		cmd.Env = append(os.Environ(), c.trigger)
		out, err := cmd.CombinedOutput()
		if err != nil || (len(out) > 0) != c.said || c.said && !strings.HasPrefix(string(out), "<4>") {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

// neighbours makes the networks of a node, a pod, and two other machines: one on a network card,
// one on a card in the node's bridge. macvlan devices, which no rule names, simulate the cards.
const neighbours = `
set -eu
ip link set lo up
sysctl -qw net.ipv4.conf.all.route_localnet=1 || true
ip link add pod0 type veth peer name eth0
ip link add wire0 type veth peer name wire1
ip link add wire2 type veth peer name wire3
for n in pod card bridged; do
	unshare -n sleep 600 & eval "$n=$!"
done
trap 'kill $pod $card $bridged' EXIT
for n in $pod $card $bridged; do
	while [ $(readlink /proc/$n/ns/net) = $(readlink /proc/$$/ns/net) ]; do sleep 0.05; done
done
ip link set eth0 netns $pod; ip link set wire1 netns $card; ip link set wire3 netns $bridged
ip link add link wire0 name card0 type macvlan mode passthru
ip link add link wire2 name card1 type macvlan mode passthru
ip link add br0 type bridge
ip link set card1 master br0
for d in pod0 wire0 wire2 card0 card1 br0; do ip link set $d up; done
ip addr add 10.1.0.1/24 dev pod0; ip addr add 10.2.0.1/24 dev card0; ip addr add 10.3.0.1/24 dev br0
ip -6 addr add fd00:1::1/64 dev pod0 nodad; ip -6 addr add fd00:2::1/64 dev card0 nodad; ip -6 addr add fd00:3::1/64 dev br0 nodad
# The address at which pods find yurthub, with a route to it for the others.
ip addr add 169.254.2.1/32 dev lo
there() { # PID DEVICE N
	nsenter -n -t $1 sh -c "ip link set lo up; ip link set $2 up; ip addr add 10.$3.0.2/24 dev $2; ip -6 addr add fd00:$3::2/64 dev $2 nodad; ip route add 169.254.2.1 via 10.$3.0.1"
}
there $pod eth0 1; there $card wire1 2; there $bridged wire3 3
rm -f "$LISTENING"
"$SERVE" -test.run '^TestPortsAsServer$' >/dev/null & server=$!
trap 'kill $pod $card $bridged $server' EXIT
until [ -e "$LISTENING" ]; do kill -0 $server; sleep 0.05; done
all() { # at the same time, in this order
	reach= tries=
	for who in "pod $pod 1 0" "card $card 2 0" "bridged $bridged 3 0" "node $$ 1 0" "client $$ 1 1234" "user $$ 1 65534"; do
		set -- $who
		out="$OUT/$1"
		reach="$reach $out"
		WHO=$1 SUBNET=$3 USER_ID=$4 OUT="$out" nsenter -n -t $2 "$SERVE" -test.run '^TestPortsAsClient$' >/dev/null & tries="$tries $!"
	done
	wait $tries
	cat $reach
}
if [ "$OPEN" = before ]; then all; exit; fi
nft -f "$RULES"
nft -f "$RULES"
all
`

// TestPortsAsServer listens on yurthub's ports and kubelet's. It is skipped unless TestPortRules
// starts it.
func TestPortsAsServer(t *testing.T) {
	if os.Getenv("RULES") == "" {
		t.Skip("SKIPPED: only TestPortRules starts this test")
	}
	as(t, "LISTENER")
	defer as(t, "")
	for _, port := range []string{"10250", "10261", "10267", "10268", "10269"} {
		l, err := net.Listen("tcp", ":"+port)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}()
	}
	as(t, "")
	if err := os.WriteFile(os.Getenv("LISTENING"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	time.Sleep(10 * time.Minute) // until it is killed
}

// as changes to the user whose ID is in an environment variable, or to root if it is not set.
func as(t *testing.T, variable string) {
	uid, _ := strconv.Atoi(os.Getenv(variable))
	if err := syscall.Setresuid(-1, uid, -1); err != nil {
		t.Fatal(err)
	}
}

// TestPortsAsClient connects to the ports of TestPortsAsServer as one of TestPortRules' clients.
func TestPortsAsClient(t *testing.T) {
	who, subnet := os.Getenv("WHO"), os.Getenv("SUBNET")
	if who == "" {
		t.Skip("SKIPPED: only TestPortRules starts this test")
	}
	as(t, "USER_ID")
	var reached [15]string
	var tries sync.WaitGroup
	for i := range reached {
		port := []string{"10250", "10261", "10267", "10268", "10269"}[i/3]
		to := []string{"10." + subnet + ".0.1", "fd00:" + subnet + "::1", "169.254.2.1"}[i%3]
		tries.Go(func() {
			ok, err := letIn(net.JoinHostPort(to, port))
			if err != nil {
				t.Error(err)
			}
			if ok {
				reached[i] = who + " " + to + " " + port + "\n"
			}
		})
	}
	tries.Wait()
	as(t, "")
	if err := os.WriteFile(os.Getenv("OUT"), []byte(strings.Join(reached[:], "")), 0o600); err != nil {
		t.Fatal(err)
	}
}

// letIn reports whether a connection succeeds within two seconds: the kernel accepts or rejects it
// at once, or never answers. At the end it checks once more, because the machine may have been
// busy.
func letIn(addr string) (bool, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return false, err
	}
	family, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()})
	if to.Addr().Is4() {
		family, sa = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return false, err
	}
	if err := unix.Connect(fd, sa); err != unix.EINPROGRESS {
		return err == nil, nil
	}
	for end := time.Now().Add(2 * time.Second); ; {
		left := max(time.Until(end), 0)
		if n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, int(left.Milliseconds())); n > 0 {
			failed, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			return failed == 0, err
		}
		if left == 0 {
			return false, nil
		}
	}
}

// TestPortRules loads the rules into the kernel, and checks which client reaches which port, over
// IPv4 and IPv6 and as which user, and which clients reach a user's listener.
func TestPortRules(t *testing.T) {
	t.Parallel()
	for program, pkg := range map[string]string{"nft": "nftables", "ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"} {
		desk.NeedProgram(t, program, pkg)
	}
	desk.NeedRoot(t, "it makes networks")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	rules := filepath.Join(dir, "nft")
	reach := func(when string, p PortAccess, listener string) []string {
		t.Helper()
		if err := os.WriteFile(rules, PortRules(p), 0o644); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("unshare", "-n", "bash", "-c", neighbours)
		cmd.Env = append(os.Environ(), "SERVE="+self, "RULES="+rules, "OPEN="+when, "LISTENER="+listener, "OUT="+dir, "LISTENING="+filepath.Join(dir, "listening"))
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %s%s", err, out, stderr.String())
		}
		return strings.Split(strings.TrimSpace(string(out)), "\n")
	}
	// want lists the connections that must succeed: all to kubelet's port 10250, and those for
	// which ok returns true.
	want := func(ok func(who, port string) bool) []string {
		var out []string
		for n, who := range []string{"pod", "card", "bridged", "node", "client", "user"} {
			subnet := []string{"1", "2", "3", "1", "1", "1"}[n]
			for _, port := range []string{"10250", "10261", "10267", "10268", "10269"} {
				for _, to := range []string{"10." + subnet + ".0.1", "fd00:" + subnet + "::1", "169.254.2.1"} {
					if port == "10250" || ok(who, port) {
						out = append(out, who+" "+to+" "+port)
					}
				}
			}
		}
		return out
	}
	closed := func(who, port string) bool {
		return who == "node" || who == "pod" && (port == "10261" || port == "10268")
	}
	for _, c := range []struct {
		name, when, listener string
		ports                PortAccess
		want                 func(who, port string) bool
	}{
		{"no rules", "before", "0", PortAccess{}, func(string, string) bool { return true }},
		{"closed", "after", "0", PortAccess{}, closed},
		{"the pool's port open", "after", "0", PortAccess{Open: true}, func(who, port string) bool {
			return closed(who, port) || port == "10269" && who != "client" && who != "user"
		}},
		{"open to a user", "after", "0", PortAccess{Clients: []int{7, 1234}}, func(who, port string) bool { return closed(who, port) || who == "client" }},
		{"a user listens, no rules", "before", "65534", PortAccess{}, func(string, string) bool { return true }},
		{"a user listens", "after", "65534", PortAccess{Open: true, Clients: []int{1234, 65534}}, func(string, string) bool { return false }},
	} {
		want := want(c.want)
		got := reach(c.when, c.ports, c.listener)
		for try := 1; try < 3 && len(got) < len(want); try++ { // a busy machine may need more than letIn's two seconds
			got = reach(c.when, c.ports, c.listener)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: reached\n%s\nwant\n%s", c.name, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

// TestNoUserAnswersWithCookies checks that nobody can connect to a user's listener with a full
// queue. The kernel then answers with SYN cookies, which belong to no user.
func TestNoUserAnswersWithCookies(t *testing.T) {
	t.Parallel()
	desk.NeedProgram(t, "nft", "nftables")
	desk.NeedProgram(t, "ip", "iproute2")
	desk.NeedRoot(t, "it makes a network")
	rules := filepath.Join(t.TempDir(), "nft")
	if err := os.WriteFile(rules, PortRules(PortAccess{}), 0o644); err != nil {
		t.Fatal(err)
	}
	const tries = 4
	for _, c := range []struct {
		name      string
		user      int
		rules     bool
		connected int
	}{
		// The kernel queues one more connection than the backlog of 0.
		{"a user, no rules", 65534, false, 1},
		{"root", 0, true, 1},
		{"a user", 65534, true, 0},
	} {
		got := make(chan int, 1)
		go func() {
			defer close(got)
			runtime.LockOSThread() // not unlocked: the thread keeps its network namespace, and ends with the goroutine
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				t.Error(err)
				return
			}
			setUp := "ip link set lo up"
			if c.rules {
				setUp += " && nft -f " + rules
			}
			if out, err := exec.Command("sh", "-c", setUp).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
				return
			}
			to := unix.SockaddrInet4{Port: 10261, Addr: [4]byte{127, 0, 0, 1}}
			unix.Setfsuid(c.user) // changes only this thread
			l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			unix.Setfsuid(0)
			if err != nil {
				t.Error(err)
				return
			}
			defer unix.Close(l)
			if err := errors.Join(unix.Bind(l, &to), unix.Listen(l, 0)); err != nil {
				t.Error(err)
				return
			}
			var fds []unix.PollFd
			for range tries {
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
				if err != nil {
					t.Error(err)
					return
				}
				defer unix.Close(fd)
				if err := unix.Connect(fd, &to); err != nil && err != unix.EINPROGRESS {
					t.Error(err)
					return
				}
				fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT})
			}
			time.Sleep(200 * time.Millisecond)
			if _, err := unix.Poll(fds, 0); err != nil {
				t.Error(err)
			}
			n := 0
			for _, fd := range fds {
				if fd.Revents&unix.POLLOUT != 0 && fd.Revents&(unix.POLLERR|unix.POLLHUP) == 0 {
					n++
				}
			}
			got <- n
		}()
		if n := <-got; n < c.connected || c.connected == 0 && n > 0 {
			t.Errorf("%s: %d of %d connections, want %d", c.name, n, tries, c.connected)
		}
	}
}
