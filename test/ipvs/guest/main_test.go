//go:build linux

// Package guest runs inside the test VM: its init, the masters, and the tests of ipvscare with a
// real kernel. On any other machine it does nothing. Package test/ipvs boots the VM.
package guest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	switch {
	case filepath.Base(os.Args[0]) == "modprobe":
		os.Exit(modprobe(os.Args[1:]))
	case os.Getpid() == 1:
		boot()
	case os.Getenv("GUEST_ROLE") == "master":
		masterMain()
	case os.Getenv("GUEST_ROLE") == "confined":
		confinedMain()
	case os.Getenv("GUEST") == "":
		fmt.Println("not inside the guest: nothing is tested here, see test/ipvs")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// boot is the VM's init. It never returns.
func boot() {
	for _, m := range [][3]string{{"proc", "/proc", "proc"}, {"sys", "/sys", "sysfs"}, {"dev", "/dev", "devtmpfs"}, {"run", "/run", "tmpfs"}} {
		if err := unix.Mount(m[0], m[1], m[2], 0, ""); err != nil {
			fmt.Println("mounting", m[1], err)
		}
	}
	os.WriteFile("/etc/hosts", []byte("127.0.0.1 localhost\n"), 0o644)
	os.WriteFile("/etc/passwd", []byte("root:x:0:0:root:/:/bin/false\n"), 0o644)
	os.WriteFile("/etc/group", []byte("root:x:0:\n"), 0o644)
	os.WriteFile("/etc/protocols", []byte("tcp 6 TCP\nudp 17 UDP\nsctp 132 SCTP\n"), 0o644)
	modprobe(nil)
	env := []string{"GUEST=1", "PATH=/bin:/sbin", "HOME=/"}
	run, skip := ".", ""
	cmdline, _ := os.ReadFile("/proc/cmdline")
	for _, word := range strings.Fields(string(cmdline)) {
		if v, ok := strings.CutPrefix(word, "guest.run="); ok {
			run = v
		} else if v, ok := strings.CutPrefix(word, "guest.skip="); ok {
			skip = v
		} else if strings.HasPrefix(word, "GUEST_") {
			env = append(env, word)
		}
	}
	argv := []string{"-test.v", "-test.run", run, "-test.skip", skip, "-test.timeout", "24h"}
	for _, kv := range env {
		if n, ok := strings.CutPrefix(kv, "GUEST_COUNT="); ok {
			argv = append(argv, "-test.count", n)
		}
	}
	cmd := exec.Command("/init", argv...)
	cmd.Env = env
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stdout
	if err := cmd.Start(); err != nil {
		fmt.Println("starting the tests:", err)
	}
	code := -1 // the tests did not run, or a signal ended them
	for {      // init reaps all processes
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			fmt.Println("waiting for the tests:", err)
			break
		}
		if pid == cmd.Process.Pid {
			code = status.ExitStatus()
			break
		}
	}
	fmt.Println("GUEST-DONE", code)
	time.Sleep(100 * time.Millisecond) // the serial line is slow
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// noModprobe is a file that makes modprobe fail.
const noModprobe = "/run/no-modprobe"

// modprobe loads the named modules, or all modules if none is named. /modules/order lists
// dependencies first.
func modprobe(args []string) int {
	if _, err := os.Stat(noModprobe); err == nil {
		return 1
	}
	order, err := os.ReadFile("/modules/order")
	if err != nil {
		return 1
	}
	all := strings.Fields(string(order))
	last := len(all) - 1
	for _, a := range args {
		if strings.HasPrefix(a, "-") {
			continue
		}
		a = strings.ReplaceAll(a, "-", "_")
		last = -1
		for i, name := range all {
			if name == a {
				last = i
			}
		}
	}
	for _, name := range all[:last+1] {
		if len(args) > 0 && !strings.HasPrefix(name, "ip_vs") {
			continue // it was loaded at boot and stays loaded
		}
		if len(args) > 0 && strings.HasPrefix(name, "ip_vs_") && name != all[last] {
			continue
		}
		f, err := os.Open("/modules/" + name + ".ko")
		if err != nil {
			fmt.Println(err)
			return 1
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && err != unix.EEXIST {
			fmt.Println("loading", name, err)
		}
	}
	if last < 0 {
		return 1
	}
	return 0
}
