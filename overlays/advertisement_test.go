package overlays

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/test/desk"
)

// TestAPodsRouterAdvertisement checks that a pod cannot add routes to the node by sending router
// advertisements. Some network plugins leave the node's side of the veth pair accepting them.
func TestAPodsRouterAdvertisement(t *testing.T) {
	t.Parallel()
	desk.NeedProgram(t, "ip", "iproute2")
	desk.NeedRoot(t, "it makes networks")
	conf, err := os.ReadFile("files/base/usr/lib/sysctl.d/80-edgebake.conf")
	if err != nil {
		t.Fatal(err)
	}
	var settings string // the IPv6 sysctls, which apply to one network namespace
	for line := range strings.Lines(string(conf)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " = "); ok && strings.HasPrefix(name, "net.ipv6.") {
			settings += fmt.Sprintf("echo %s >/proc/sys/%s\n", value, strings.ReplaceAll(name, ".", "/"))
		}
	}
	type result struct {
		received int
		route    bool
		err      error
	}
	try := func(settings string, enough int) result {
		done := make(chan result)
		go func() {
			var r result
			r.received, r.route, r.err = advertise(settings, enough)
			done <- r
		}()
		return <-done
	}
	// An advertisement that arrives too early sets no route, so count how many are needed.
	accepted := try(settings+"echo 2 >/proc/sys/net/ipv6/conf/default/accept_ra\n", 1<<30)
	if accepted.err != nil || !accepted.route {
		t.Fatalf("accepted: %+v", accepted)
	}
	if r := try(settings, accepted.received+5); r.err != nil || r.route {
		t.Errorf("with the image's settings: %+v", r)
	}
}

// advertise connects a node's and a pod's network namespace by a veth pair. The pod sends router
// advertisements until the node has a default route or has received enough of them.
func advertise(settings string, enough int) (received int, route bool, err error) {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return 0, false, err
	}
	pod, connected, sent := make(chan string), make(chan bool), make(chan error, 1)
	stop := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		pod <- fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		if <-connected && err == nil {
			err = sendAdvertisements(stop)
		}
		sent <- err
	}()
	_, err = shell(settings + "ip link add pod0 type veth peer name eth0\nip link set eth0 netns " + <-pod + "\nip link set pod0 up\nip addr add fe80::1/64 dev pod0 nodad")
	connected <- err == nil
	for end := time.Now().Add(time.Minute); err == nil && !route && received < enough; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			break
		}
		if received, err = advertisements(); err == nil {
			var routes string
			routes, err = shell("ip -6 route")
			route = strings.Contains(routes, "default via")
		}
	}
	close(stop)
	if err = errors.Join(err, <-sent); err == nil && !route && received < enough && enough < 1<<30 {
		err = errors.New("too few arrived within a minute")
	}
	return received, route, err
}

// advertisements counts the advertisements that this thread's network namespace has received.
func advertisements() (int, error) {
	counters, err := os.ReadFile("/proc/thread-self/net/snmp6")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(counters)) {
		if f := strings.Fields(line); f[0] == "Icmp6InRouterAdvertisements" {
			return strconv.Atoi(f[1])
		}
	}
	return 0, errors.New("the kernel counts no router advertisements")
}

// sendAdvertisements sends several advertisements each second until stop is closed.
func sendAdvertisements(stop <-chan struct{}) error {
	if _, err := shell("ip link set eth0 up\nip addr add fe80::2/64 dev eth0 nodad"); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255),
		unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "eth0"))
	if err != nil {
		return err
	}
	message := []byte{134, 0, 0, 0, 64, 0} // type, code, checksum by the kernel, hop limit
	message = binary.BigEndian.AppendUint16(message, 1800)
	message = append(message, make([]byte, 8)...)
	for {
		if err := unix.Sendto(fd, message, 0, &unix.SockaddrInet6{Addr: netip.MustParseAddr("ff02::1").As16()}); err != nil {
			return err
		}
		select {
		case <-stop:
			return nil
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func shell(script string) (string, error) {
	out, err := exec.Command("sh", "-euc", script).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s: %s", err, script, out)
	}
	return string(out), nil
}
