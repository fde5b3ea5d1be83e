package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/coreos/go-systemd/v22/dbus"
	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/ondisk"
)

// Boot describes how long this machine has been up and, as far as known, how long the parts of the
// boot took: "up for 24.1 s (kernel 4.0, initrd 2.1, system 18.0)".
func Boot(ctx context.Context) string {
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return ""
	}
	up, _, _ := strings.Cut(string(b), " ")
	total, err := strconv.ParseFloat(up, 64)
	if err != nil {
		return ""
	}
	c, err := bootClock(ctx)
	if err != nil {
		return boot(total, 0, 0)
	}
	return boot(total, float64(c.InitRD)/1e6, float64(c.Userspace)/1e6)
}

// boot formats the seconds since the kernel started: until now, until the initrd ran, and until
// systemd started; 0 means unknown.
func boot(total, initrd, system float64) string {
	if initrd <= 0 || system < initrd || total < system {
		return fmt.Sprintf("up for %.1f s", total)
	}
	return fmt.Sprintf("up for %.1f s (kernel %.1f, initrd %.1f, system %.1f)", total, initrd, system-initrd, total-system)
}

// kernelReady returns the seconds until the kernel ran its first program, or 0 if the kernel's log
// does not contain that record any more.
func kernelReady(kmsg string) float64 {
	// Do not use os.Open: Go's poller would wait for the next record.
	fd, err := unix.Open(kmsg, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	record := make([]byte, 8192)
	for {
		n, err := unix.Read(fd, record)
		switch {
		case errors.Is(err, unix.EPIPE):
			// The next record was overwritten.
		case err != nil || n == 0:
			return 0
		default:
			if at := initRecord(string(record[:n])); at > 0 {
				return at
			}
		}
	}
}

// initRecord returns the seconds in the record of the first program, such as "6,339,5140900,-;Run
// /init as init process", or 0 for another record.
func initRecord(record string) float64 {
	head, text, _ := strings.Cut(record, ";")
	fields := strings.Split(head, ",")
	if len(fields) < 3 || !strings.HasPrefix(text, "Run /") || !strings.Contains(text, " as init process") {
		return 0
	}
	us, err := strconv.ParseFloat(fields[2], 64)
	if err != nil {
		return 0
	}
	return us / 1e6
}

// bootClock asks systemd when the parts of this boot began. It reads the start of an initrd without
// systemd from the kernel's log.
func bootClock(ctx context.Context) (ondisk.BootClock, error) {
	var c ondisk.BootClock
	conn, err := dbus.NewSystemdConnectionContext(ctx)
	if err != nil {
		return c, err
	}
	defer conn.Close()
	if err := readClock(conn.GetManagerProperty, &c); err != nil {
		return c, err
	}
	if c.InitRD == 0 {
		c.InitRD = uint64(kernelReady("/dev/kmsg") * 1e6)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return c, err
	}
	c.FirstBoot = uint64(now.Nano() / 1000)
	return c, nil
}

// readClock reads the manager's timestamps, which look like "@t 5140900" (microseconds).
func readClock(property func(string) (string, error), c *ondisk.BootClock) error {
	for name, to := range map[string]*uint64{
		"FirmwareTimestampMonotonic":  &c.Firmware,
		"LoaderTimestampMonotonic":    &c.Loader,
		"KernelTimestamp":             &c.Kernel,
		"InitRDTimestampMonotonic":    &c.InitRD,
		"UserspaceTimestampMonotonic": &c.Userspace,
		"FinishTimestampMonotonic":    &c.Finish,
	} {
		v, err := property(name)
		if err != nil {
			return fmt.Errorf("asking systemd for %s: %w", name, err)
		}
		if *to, err = strconv.ParseUint(strings.TrimPrefix(v, "@t "), 10, 64); err != nil {
			return fmt.Errorf("asking systemd for %s: unexpected answer %q", name, v)
		}
	}
	return nil
}
