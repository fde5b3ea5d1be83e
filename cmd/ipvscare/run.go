package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/pflag"

	"github.com/edgebake/edgebake/cmd/internal/flagvalue"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/ipvs"
	"github.com/edgebake/edgebake/ipvs/files"
	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ondisk"
)

// Defaults of flags.
const (
	hostsFile = "/etc/hosts"
	runDir    = ondisk.IPVSRunDir
	// metricsAddr has the first port after those of kubelet and yurthub.
	metricsAddr = "127.0.0.1:10271"
)

// usageError is a mistake in the command line.
type usageError struct{ error }

func exitCode(err error) int {
	var usage usageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}

// command is a subcommand. Its flags are parsed before run is called. There is no command
// framework, because one would use a tenth of the memory that ipvscare may use.
type command struct {
	name, short, long string
	flags             *pflag.FlagSet
	run               func(ctx context.Context) error
}

func commands(stdout, stderr io.Writer) []*command {
	return []*command{
		runCommand(stderr),
		statusCommand(stdout),
		cleanCommand(stderr),
		careCommand(stderr),
		staticPodCommand(stdout),
	}
}

// run is main without signal handling and os.Exit.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	// Messages may quote certificates of unverified peers, so remove control characters.
	stdout, stderr = printable.To(stdout), printable.To(stderr)
	all := commands(stdout, stderr)
	switch {
	case len(args) == 0 || slices.Contains([]string{"help", "-h", "--help"}, args[0]) && len(args) == 1:
		fmt.Fprint(stdout, overview(all))
		return nil
	case len(args) == 1 && slices.Contains([]string{"version", "--version"}, args[0]):
		fmt.Fprintln(stdout, "ipvscare", version.OfSource())
		return nil
	case slices.Contains([]string{"help", "-h", "--help"}, args[0]):
		if len(args) > 2 {
			return usageError{fmt.Errorf("unexpected argument %q: ipvscare help takes one command", args[2])}
		}
		args = []string{args[1], "--help"}
	}
	i := slices.IndexFunc(all, func(c *command) bool { return c.name == args[0] })
	if i < 0 {
		return usageError{fmt.Errorf("unknown command %q: see ipvscare --help", args[0])}
	}
	c := all[i]
	c.flags.SortFlags = false
	c.flags.Usage = func() {
		fmt.Fprintf(stdout, "%s\n\nUsage:\n  ipvscare %s [flags]\n\nFlags:\n%s", c.long, c.name, c.flags.FlagUsages())
	}
	err := c.flags.Parse(args[1:])
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return nil
	case err != nil:
		return usageError{fmt.Errorf("%w: see ipvscare %s --help", flagvalue.Explain(err), c.name)}
	case c.flags.NArg() > 0:
		return usageError{fmt.Errorf("unexpected argument %q: ipvscare %s takes flags only", c.flags.Arg(0), c.name)}
	}
	return c.run(ctx)
}

func overview(all []*command) string {
	var b strings.Builder
	b.WriteString(`ipvscare balances one virtual address to the kube-apiservers of a cluster,
by IPVS in this node's kernel. API servers that fail are removed within seconds,
and their connections are reset. Rules that other programs change are restored
within a second.

Usage:
  ipvscare COMMAND [flags]

Commands:
`)
	for _, c := range all {
		fmt.Fprintf(&b, "  %-11s %s\n", c.name, c.short)
	}
	fmt.Fprintf(&b, "  %-11s %s\n", "version", "Print the version")
	b.WriteString(`
Examples:
  ipvscare status
  ipvscare care --vs 10.103.97.2:6443 --rs 10.0.0.1:6443,10.0.0.2:6443
  ipvscare static-pod --image registry.example.com/ipvscare:1.0 --vs 10.103.97.2:6443 --rs 10.0.0.1:6443

See ipvscare COMMAND --help.
`)
	return b.String()
}

// newFlags returns a flag set that returns errors instead of printing them.
func newFlags(name string) *pflag.FlagSet {
	return pflag.NewFlagSet(name, pflag.ContinueOnError)
}

func runCommand(stderr io.Writer) *command {
	opt := ipvs.Options{}
	f := newFlags("run")
	f.StringVar(&opt.ConfigFile, "config", ondisk.IPVSConfig, "configuration file")
	f.StringVar(&opt.HostsFile, "hosts", hostsFile, "hosts file in which the endpoint's line is kept; empty: none")
	f.StringVar(&opt.StateDir, "state", ondisk.IPVSStateDir, "directory for the API servers learned from the cluster and from DNS")
	f.StringVar(&opt.RunDir, "run-dir", runDir, "directory of locks, sockets and the record of virtual servers created")
	f.StringVar(&opt.Metrics, "metrics", metricsAddr, "loopback address for Prometheus; empty: none")
	f.StringVar(&opt.ClientCert, "client-cert", "", "file with the client certificate and key for API servers (default: kubelet's file)")
	f.DurationVar(&opt.LearnEvery, "learn-every", 0, "interval at which the cluster's list of API servers is read (default: depends on the profile)")
	f.BoolVar(&opt.Once, "run-once", false, "set everything up once and exit")
	return &command{
		name:  "run",
		short: "Keep the virtual servers of the configuration file until stopped",
		long: `Keep the virtual servers of the configuration file until stopped. Changes of
the file are applied; SIGHUP rereads everything. SIGTERM leaves the rules in
place, so that a restart or an upgrade breaks no connection.`,
		flags: f,
		run: func(ctx context.Context) error {
			if !opt.Once && !awaitConfig(ctx, opt.ConfigFile, func(line string) { fmt.Fprintln(stderr, line) }) {
				return nil // stopped by its context: not an error
			}
			var err error
			if opt.Kernel, err = kernel.Open(kernel.ProcSysNet); err != nil { // before files are written: it needs root
				return err
			}
			if up, err := uptime(); err == nil {
				opt.Spread = bootSpread(opt.ConfigFile, opt.RunDir, up, rand.Float64())
			}
			return keep(ctx, opt, stderr)
		},
	}
}

// configLook is the interval at which an invalid configuration is read again.
const configLook = time.Second

// awaitConfig waits until the configuration is valid or missing, and logs each new error once. It
// returns false if ctx ends. It does not return errors, because systemd would then restart ipvscare
// every second.
func awaitConfig(ctx context.Context, file string, log func(string)) bool {
	lastError := ""
	for {
		_, err := ipvs.ReadConfig(file)
		if err == nil || errors.Is(err, os.ErrNotExist) {
			return true
		}
		if line := err.Error(); line != lastError {
			lastError = line
			log(line + "\nwaiting until the file is changed")
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(configLook):
		}
	}
}

// bootTime is the time after power-on during which a start counts as part of the boot.
const bootTime = 5 * time.Minute

// uptime returns the time since power-on. It does not depend on the wall clock.
func uptime() (time.Duration, error) {
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0, err
	}
	seconds, _, _ := strings.Cut(string(b), " ")
	return time.ParseDuration(seconds + "s")
}

// bootSpread returns the delay before the first requests to the API servers: the fraction r of the
// configuration's maximum if the machine is booting, and 0 after any later start. With a random r,
// machines that boot at the same time do not send requests at the same time.
func bootSpread(config, runDir string, up time.Duration, r float64) time.Duration {
	servers, err := ipvs.ReadConfig(config)
	if err != nil || !firstStart(runDir) || up > bootTime {
		return 0
	}
	most := time.Duration(ondisk.BootSpread)
	for _, s := range servers {
		most = max(most, s.BootSpread)
	}
	return time.Duration(r * float64(most))
}

// firstStart reports whether this is ipvscare's first start since power-on, and writes the file that
// marks it. First boot writes that file too when it writes the configuration, after its own delay.
func firstStart(runDir string) bool {
	if files.UseRunDir(runDir) != nil {
		return false // the daemon reports the error
	}
	f, err := os.OpenFile(filepath.Join(runDir, filepath.Base(ondisk.IPVSStarted)), os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// maxShown limits the length of a log line in characters. A line may quote a peer's certificate,
// which can have a thousand names.
const maxShown = 1000

// shown returns text as one line of at most maxShown characters.
func shown(text string) string {
	text = printable.Line(text)
	if r := []rune(text); len(r) > maxShown {
		return string(r[:maxShown]) + "…"
	}
	return text
}

// keep runs the daemon, under systemd or alone.
func keep(ctx context.Context, opt ipvs.Options, stderr io.Writer) error {
	tuneMemory()
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	defer signal.Stop(reload)
	lines := log.New(stderr, "", 0) // the journal adds the time
	opt.Log = func(line string) { lines.Print(shown(line)) }
	opt.Reload = reload
	opt.Ready = func() {
		notify(lines, daemon.SdNotifyReady)
		debug.FreeOSMemory() // free memory that was needed only for the start
	}
	opt.Alive = watchdog(lines)
	collecting, end := context.WithCancel(ctx)
	defer end()
	go collect(collecting)
	err := ipvs.NewDaemon(opt).Run(ctx)
	if errors.Is(err, ipvs.ErrRestart) {
		return restart(err)
	}
	if ctx.Err() != nil {
		notify(lines, daemon.SdNotifyStopping)
	}
	return err
}

// restart executes the program again in this process, with the same arguments.
func restart(why error) error {
	self, err := os.Executable()
	if err == nil {
		err = syscall.Exec(self, os.Args, os.Environ())
	}
	return fmt.Errorf("%w: %w", why, err)
}

// notify sends a state to systemd, if the daemon runs under systemd.
func notify(lines *log.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		lines.Printf("notifying systemd of %q: %v", state, err)
	}
}

// watchdog returns a function that notifies systemd's watchdog, or nil if there is none.
func watchdog(lines *log.Logger) func() {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		lines.Printf("reading the watchdog's period: %v", err)
	}
	if err != nil || every == 0 {
		return nil
	}
	last := time.Now()
	return func() {
		if time.Since(last) >= every/3 {
			last = time.Now()
			notify(lines, daemon.SdNotifyWatchdog)
		}
	}
}

// tuneMemory keeps the heap small, at the cost of some processor time. It sets no hard limit: with
// hundreds of API servers, garbage would be collected all the time. GOGC and GOMAXPROCS override
// it.
func tuneMemory() {
	smallPages()
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(25)
	}
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1) // the memory allocator has a cache for each processor
	}
}

// leastGarbage is the minimum amount of garbage, in bytes, that is worth collecting.
const leastGarbage = 256 << 10

// collect collects garbage and returns memory to the system. By itself, the Go runtime would first
// collect at one megabyte, which is three times ipvscare's heap. A large heap is collected once a
// quarter of it is garbage.
func collect(ctx context.Context) {
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	var m runtime.MemStats
	var collected uint64 // TotalAlloc at the last collection
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		runtime.ReadMemStats(&m)
		if m.TotalAlloc-collected >= max(leastGarbage, m.HeapAlloc/4) {
			collected = m.TotalAlloc
			debug.FreeOSMemory()
		}
	}
}

func cleanCommand(stderr io.Writer) *command {
	var config, hosts, run string
	f := newFlags("clean")
	f.StringVar(&config, "config", ondisk.IPVSConfig, "configuration file")
	f.StringVar(&hosts, "hosts", hostsFile, "file with the endpoint's line; empty: none")
	f.StringVar(&run, "run-dir", runDir, "directory of locks, sockets and the record of virtual servers created")
	return &command{
		name:  "clean",
		short: "Remove everything that ipvscare created, and nothing else",
		long: `Remove everything that ipvscare created, and nothing else: virtual servers,
routes, lines of the hosts file. Stop ipvscare first.`,
		flags: f,
		run: func(ctx context.Context) error {
			machine, err := kernel.Open("")
			if err != nil {
				return err
			}
			lines := func(line string) { fmt.Fprintln(stderr, line) }
			return ipvs.Clean(ctx, machine, leftovers(config, hosts, run, lines), lines)
		},
	}
}

// leftovers returns the servers that Clean removes: those in the configuration and those in
// ipvscare's record. The record has every server created since power-on, so an invalid
// configuration is only logged.
func leftovers(config, hosts, run string, log func(string)) ipvs.Leftovers {
	servers, err := ipvs.ReadConfig(config)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log(fmt.Sprintf("%v; removing the virtual servers in ipvscare's record", err))
	}
	return ipvs.Leftovers{Servers: servers, Noted: true, HostsFile: hosts, RunDir: run}
}
