package lab

import (
	"io"
	"regexp"
	"strings"
	"testing"
)

// TestStaleTranslation checks that a boot that failed because of the emulator is distinguished from
// one that failed because of the disk.
func TestStaleTranslation(t *testing.T) {
	// From a console of QEMU 7.2 with two processors, shortened. The first two lines were lost;
	// these are Linux 6.12's.
	const stale = `[   14.552114] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI
[   14.558710] CPU: 1 UID: 0 PID: 0 Comm: swapper/1 Not tainted 6.12.117+deb13-cloud-amd64 #1  Debian 6.12.117-1
[   14.564530] Hardware name: QEMU Standard PC (Q35 + ICH9, 2009), BIOS 0.0.0 02/06/2015
[   14.564671] RIP: 0010:sched_clock_tick+0x5/0xd0
[   14.568261] Code: cc cc cc e8 dd fc ff ff 31 c0 c3 cc cc cc cc 66 0f 1f 44 00 00 90 90 90 90 90 90 90 90 90 90 90 90 90 90 90 90 66 0f 1f 00 66 <90> c3 cc cc cc cc 0f 1f 44 00 00 55 53 65 48 8b 2d 9e
[   14.571217] Call Trace:
[   14.575123]  <IRQ>
[   14.575492]  sched_tick+0x3a/0x250
[   14.578359] RIP: 0010:pv_native_safe_halt+0xf/0x20
[   14.578470] Code: 09 c3 cc cc cc cc 0f 1f 44 00 00 90 90 90 90 90 90 90 90 90 90 90 90 90 90 90 90 f3 0f 1e fa eb 07 0f 00 2d 75 e8 34 00 fb f4 <c3> cc cc cc cc 66 66 2e 0f 1f 84 00 00 00 00 00
[   14.580769] ---[ end trace 0000000000000000 ]---
[   14.581198] Kernel panic - not syncing: Fatal exception in interrupt
`
	for name, tt := range map[string]struct{ console, want string }{
		"stale":                    {stale, "it ran an int3 in sched_clock_tick+0x5/0xd0 where memory has 66"},
		"older kernels":            {strings.Replace(stale, "Oops: int3", "int3", 1), "it ran an int3 in sched_clock_tick+0x5/0xd0 where memory has 66"},
		"an int3 that is there":    {strings.Replace(stale, "00 66 <90>", "00 cc <90>", 1), ""},
		"cut off before the bytes": {stale[:strings.Index(stale, "[   14.568261]")], ""},
		"another oops came first":  {"[    9.1] Oops: general protection fault, probably for non-canonical address 0xdead: 0000 [#1] PREEMPT SMP NOPTI\n" + strings.Replace(stale, "[#1]", "[#2]", 1), ""},
		"a page fault":             {strings.Replace(stale, "int3: 0000", "0002", 1), ""},
		"the disk": {`[   12.101001] EXT4-fs error (device vda5): ext4_lookup:1816: inode #2: comm systemd: iget: checksum invalid
[   12.101100] Kernel panic - not syncing: EXT4-fs (device vda5): panic forced after error
`, ""},
		"no root": {"[    3.3] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)\n", ""},
		"no init": {"[    3.3] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00007f00\n", ""},
		"well":    {"edgebake: node cut is Ready\n", ""},
	} {
		s := newSerial(io.Discard, nil)
		io.WriteString(s, tt.console)
		if got := s.EmulatorsFault(); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
		err := s.Broken()
		if strings.Contains(tt.console, "Kernel panic") != (err != nil) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && strings.Contains(err.Error(), "the emulator failed") != (tt.want != "") {
			t.Errorf("%s: blamed wrongly: %v", name, err)
		}
	}
}

// TestEmulatorsPanicIsNoEnd checks that a wait continues after a panic caused by the emulator,
// because the image's kernel then restarts the machine. A panic in the next boot must end the wait.
func TestEmulatorsPanicIsNoEnd(t *testing.T) {
	const (
		boot  = "BdsDxe: starting Boot0001 \"UEFI Misc Device\" from PciRoot(0x0)/Pci(0x1,0x0)\n"
		stale = "[    5.0] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI\n[    5.0] RIP: 0010:sched_clock_tick+0x5/0xd0\n[    5.0] Code: 90 66 0f 1f 00 66 <90> c3\n[    5.1] Kernel panic - not syncing: Fatal exception in interrupt\n"
		root  = "[    3.3] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)\n"
		ready = "edgebake: node edge1 is Ready\n"
	)
	for name, tt := range map[string]struct {
		console string
		lives   bool
	}{
		"goes on":                    {boot + stale + boot + ready, true},
		"no firmware":                {stale + ready, false},
		"a panic of the next boot":   {boot + stale + boot + root + boot + ready, false},
		"two of them":                {boot + stale + boot + stale + boot + ready, true},
		"a panic of the disk":        {boot + root + boot + ready, false},
		"a boot before was the disk": {boot + root + boot + stale + boot + ready, false},
	} {
		s := newSerial(io.Discard, nil)
		io.WriteString(s, tt.console)
		_, _, err := s.Expect(t.Context(), 0, regexp.MustCompile("is Ready"))
		if (err == nil) != tt.lives {
			t.Errorf("%s: %v", name, err)
		}
		if broken := s.Broken(); (broken == nil) != tt.lives {
			t.Errorf("%s: Broken: %v", name, broken)
		}
	}
}
