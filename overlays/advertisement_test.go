package overlays

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/test/desk"
)

// TestAPodsRouterAdvertisement: a pod may send router advertisements, and not every
// network add-on makes the node's end of its cable ignore them. They must not give the
// node a route.
func TestAPodsRouterAdvertisement(t *testing.T) {
	t.Parallel()
	desk.NeedProgram(t, "ip", "iproute2")
	desk.NeedRoot(t, "it makes networks")
	conf, err := os.ReadFile("files/base/usr/lib/sysctl.d/80-edgebake.conf")
	if err != nil {
		t.Fatal(err)
	}
	var settings string // of a network; the others are the whole machine's
	for line := range strings.Lines(string(conf)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " = "); ok && strings.HasPrefix(name, "net.ipv6.") {
			settings += fmt.Sprintf("echo %s >/proc/sys/%s\n", value, strings.ReplaceAll(name, ".", "/"))
		}
	}
	for _, c := range []struct {
		name, settings string
		route          bool
	}{
		{"accepted", settings + "echo 2 >/proc/sys/net/ipv6/conf/default/accept_ra\n", true},
		{"with the image's settings", settings, false},
	} {
		type result struct {
			routes string
			err    error
		}
		done := make(chan result)
		go func() {
			routes, err := advertise(c.settings)
			done <- result{routes, err}
		}()
		if r := <-done; r.err != nil || strings.Contains(r.routes, "default via") != c.route {
			t.Errorf("%s: the node has the routes\n%s%v", c.name, r.routes, r.err)
		}
	}
}

// advertise makes a node's network and a pod's, connected by a cable, has the pod
// advertise itself as a router, and returns the node's routes. Each network is that of a
// thread, which ends with its goroutine.
func advertise(settings string) (routes string, err error) {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return "", err
	}
	pod, connected, sent := make(chan string), make(chan bool), make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		pod <- fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		if <-connected && err == nil {
			err = sendAdvertisements()
		}
		sent <- err
	}()
	_, err = shell(settings + "ip link add pod0 type veth peer name eth0\nip link set eth0 netns " + <-pod + "\nip link set pod0 up\nip addr add fe80::1/64 dev pod0 nodad")
	connected <- err == nil
	if err = errors.Join(err, <-sent); err != nil {
		return "", err
	}
	return shell("ip -6 route")
}

func sendAdvertisements() error {
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
	for range 3 {
		if err := unix.Sendto(fd, message, 0, &unix.SockaddrInet6{Addr: netip.MustParseAddr("ff02::1").As16()}); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil
}

func shell(script string) (string, error) {
	out, err := exec.Command("sh", "-euc", script).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s: %s", err, script, out)
	}
	return string(out), nil
}
