// Package host makes the machine.Env of the running system. First boot changes the machine only
// through it. The package makes no decisions.
package host

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/firstboot/console"
	"github.com/edgebake/edgebake/firstboot/efivar"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// New returns the Env of this machine. It logs to log, which systemd passes to the journal.
func New(log io.Writer) *machine.Env {
	dialer := &net.Dialer{Timeout: 10 * time.Second}
	f := Files{Root: "/"}
	return &machine.Env{
		Root: "/",
		Log:  slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{ReplaceAttr: withoutTime})),
		Clock: machine.Clock{
			Now:         time.Now,
			Sleep:       Sleep,
			SetClock:    setClock,
			ClockSynced: clockSynced,
		},
		Randomness: machine.Randomness{Rand: mrand.Float64, Random: random},
		Files: machine.Files{
			WriteFile: f.WriteFile,
			Stream:    f.Stream,
			Rename:    f.Rename,
			Symlink:   f.Symlink,
			Link:      f.Link,
			Mkdir:     f.Mkdir,
			Remove:    f.Remove,
			RemoveAll: f.RemoveAll,
			WriteTree: f.WriteTree,
			Sync:      f.Sync,
			Lock:      f.Lock,
		},
		Programs: machine.Programs{
			Run:       run,
			Unit:      unit,
			UnitState: unitState,
			UnitSince: unitSince,
			BootClock: bootClock,
		},
		Platform: machine.Platform{
			SetHostname:    func(name string) error { return unix.Sethostname([]byte(name)) },
			SetFirmwareVar: efivar.Write,
		},
		Network: machine.Network{
			Dial:     dialer.DialContext,
			Sessions: new(kubeapi.Sessions),
			Listen: func(ctx context.Context, addr string) (net.Listener, error) {
				return new(net.ListenConfig).Listen(ctx, "tcp", addr)
			},
			Source:    source,
			Addresses: addresses,
			Resolve: func(ctx context.Context, host string) ([]netip.Addr, error) {
				return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
			},
			Post: func(ctx context.Context, url, ca string, body []byte, proxy []string) error {
				t := through(proxy)
				t.DisableKeepAlives = true // reports are rare
				if err := trust(t, ca); err != nil {
					return fmt.Errorf("sending to %s: %w", withoutSecrets(url), err)
				}
				return post(ctx, http.Client{Transport: t}, url, body)
			},
			Get:       new(downloads).get,
			GetRemote: (&downloads{remote: true}).get,
		},
		Slots: machine.Slots{
			SlotLabel:  slotLabel,
			ReadSlot:   readSlot,
			SlotFile:   slotFile,
			WriteSlot:  writeSlot,
			ReadClaims: readClaims,
			WriteClaim: writeClaim,
			ScrubSlot:  scrubSlot,
			ReportSlot: reportSlot,
		},
		FileSystems: machine.FileSystems{FSUUID: fsUUID, FSSize: fsSize, FSFree: fsFree, OpenDevice: openDevice},
		Output: machine.Output{
			Console: func(line string) { console.Say(console.Active, "/dev", line) },
			Notify: func(state string) {
				// Without systemd there is no service manager to notify. That is no error.
				_, _ = daemon.SdNotify(false, state)
			},
		},
	}
}

// withoutTime drops the time, because the journal adds it.
func withoutTime(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}

// Sleep waits for d or the end of ctx.
func Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails (Go 1.24)
	return b
}

// run runs a program. If first boot is stopped, systemd also stops the program, and first boot's
// next run repeats the step.
func run(ctx context.Context, c machine.Cmd) error {
	cmd := exec.CommandContext(ctx, c.Args[0], c.Args[1:]...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Stdin = c.Stdin
	cmd.WaitDelay = 5 * time.Second
	var kept bytes.Buffer
	if c.Output != nil {
		cmd.Stdout, cmd.Stderr = c.Output, c.Output
	} else {
		cmd.Stdout, cmd.Stderr = &kept, &kept
	}
	err := cmd.Run()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = errors.Join(err, ctx.Err())
	}
	out := strings.TrimSpace(kept.String())
	if len(out) > 1000 {
		out = "…" + out[len(out)-1000:]
	}
	if out != "" {
		return fmt.Errorf("running %s: %w: %s", strings.Join(c.Args, " "), err, out)
	}
	return fmt.Errorf("running %s: %w", strings.Join(c.Args, " "), err)
}

func setClock(t time.Time) error {
	tv := unix.NsecToTimeval(t.UnixNano())
	return unix.Settimeofday(&tv)
}

// clockSynced reads the state of the clock from the kernel, to which every time client reports it.
func clockSynced(context.Context) (bool, error) {
	var tx unix.Timex
	state, err := unix.Adjtimex(&tx)
	if err != nil {
		return false, fmt.Errorf("reading the state of the clock: %w", err)
	}
	return state != unix.TIME_ERROR, nil
}

// addresses lists the addresses of all interfaces that are up.
func addresses() ([]machine.InterfaceAddr, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var out []machine.InterfaceAddr
	for _, i := range interfaces {
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			return nil, err
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				out = append(out, machine.InterfaceAddr{Interface: i.Name, Addr: p.Addr().Unmap()})
			}
		}
	}
	return out, nil
}

// source returns the address from which the kernel would send packets to addr. Nothing is sent.
func source(ctx context.Context, addr string) (netip.Addr, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "udp", addr)
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	ap, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil {
		return netip.Addr{}, err
	}
	return ap.Addr().Unmap().WithZone(""), nil
}
