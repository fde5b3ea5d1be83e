package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ipvs"
	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/ondisk"
)

// careFlags are the flags of lvscare, so that ipvscare can replace lvscare in scripts and static
// pods.
type careFlags struct {
	vs, scheduler, iface, logger, mode, ip, mark string
	rs                                           []string
	runOnce, clean                               bool
	interval, timeout                            time.Duration
	path, scheme, method, body                   string
	headers                                      map[string]string
	status                                       []int
	insecure                                     bool
	// Flags that lvscare does not have:
	caFile, host, hosts, run, metrics, profile, sysctls string
}

// careEnv is the prefix of environment variables that set flags.
const careEnv = "CARE_"

func (c *careFlags) register(f *pflag.FlagSet) {
	f.StringVar(&c.vs, "vs", "", "virtual server, e.g. "+ipvs.DefaultVIP)
	f.StringArrayVar(&c.rs, "rs", nil, "real server, host:port; several with commas, or by repeating the flag")
	f.StringVar(&c.scheduler, "scheduler", ipvs.DefaultScheduler, "one of "+strings.Join(ipvs.Schedulers(), " "))
	f.StringVarP(&c.iface, "iface", "i", "lvscare", "ignored: no interface is created")
	f.StringVar(&c.logger, "logger", "INFO", "ignored: one line is logged for each change")
	f.StringVar(&c.mode, "mode", "route", "route or link; both give a local route")
	f.BoolVar(&c.runOnce, "run-once", false, "set everything up once and exit")
	f.BoolVarP(&c.clean, "clean", "C", false, "remove the virtual server and exit")
	f.Var((*seconds)(&c.interval), "interval", "pause between health requests, such as 5s; a bare number is seconds (default: depends on --profile)")
	f.StringVar(&c.ip, "ip", "", "source address of the local route (default: the address from which this node reaches the API servers)")
	f.StringVar(&c.mark, "masqueradebit", "0", "ignored: nothing is masqueraded")
	f.StringVar(&c.path, "health-path", ipvs.DefaultPath, "path of the health request")
	f.StringVar(&c.scheme, "health-schem", "https", "https or http")
	f.StringVar(&c.method, "health-req-method", "GET", "method of the health request")
	f.StringToStringVar(&c.headers, "health-req-headers", nil, "headers of the health request")
	f.StringVar(&c.body, "health-req-body", "", "body of the health request")
	f.IntSliceVar(&c.status, "health-status", nil, "more statuses that count as healthy, in addition to those below 400 and 401, 403, 429")
	f.BoolVar(&c.insecure, "health-insecure-skip-verify", false, "unsafe: send traffic to API servers whose certificate is not verified")
	f.DurationVar(&c.timeout, "health-timeout", 0, "timeout of a health request (default: depends on --profile)")
	f.StringVar(&c.caFile, "ca-file", ondisk.KubeCA, "the cluster's CA; until it exists API servers are not verified")
	f.StringVar(&c.host, "host", "", "domain name to keep in the hosts file for the virtual server")
	f.StringVar(&c.hosts, "hosts", hostsFile, "the hosts file")
	f.StringVar(&c.run, "run-dir", runDir, "directory of locks, sockets and the record of virtual servers created")
	f.StringVar(&c.metrics, "metrics", "", "loopback address for Prometheus; empty: none")
	f.StringVar(&c.sysctls, "sysctls", kernel.ProcSysNet, "directory of the kernel's network settings; in a container, a mount of the node's")
	f.StringVar(&c.profile, "profile", "lan", "lan or metered")
}

// seconds is a duration. A bare number means seconds, as in lvscare.
type seconds time.Duration

func (s *seconds) Set(text string) error {
	if n, err := strconv.Atoi(text); err == nil {
		*s = seconds(time.Duration(n) * time.Second)
		return nil
	}
	d, err := time.ParseDuration(text)
	*s = seconds(d)
	return err
}

func (s *seconds) String() string {
	if *s == 0 {
		return "" // then help shows no default
	}
	return time.Duration(*s).String()
}

func (*seconds) Type() string { return "duration" }

// check returns the problems of the flags that ipvs.FromVirtual does not check.
func (c *careFlags) check() (errs []error) {
	if c.vs == "" {
		errs = append(errs, errors.New("--vs is missing: name the virtual server, e.g. "+ipvs.DefaultVIP))
	}
	if len(c.rs) == 0 && !c.clean {
		errs = append(errs, errors.New("--rs is missing: name at least one real server"))
	}
	if c.mode != "route" && c.mode != "link" {
		errs = append(errs, fmt.Errorf("--mode %s: want route or link", c.mode))
	}
	if c.scheme != "https" && c.scheme != "http" {
		errs = append(errs, fmt.Errorf("--health-schem %s: want https or http", c.scheme))
	}
	if c.interval < 0 || c.timeout < 0 {
		errs = append(errs, errors.New("--interval and --health-timeout cannot be negative"))
	}
	return errs
}

// server returns the virtual server that the flags describe, or an error with all problems.
func (c *careFlags) server(changed func(string) bool) (ipvs.Server, error) {
	errs := c.check()
	var source netip.Addr
	if c.ip != "" {
		var err error
		if source, err = netip.ParseAddr(c.ip); err != nil {
			errs = append(errs, fmt.Errorf("--ip %s: invalid address", c.ip))
		}
	}
	var masters []string
	for _, rs := range c.rs {
		masters = append(masters, strings.FieldsFunc(rs, func(r rune) bool { return r == ',' || r == ' ' })...)
	}
	none := len(c.rs) == 0 // check has reported this, or --clean allows it
	if none {
		masters = []string{"none:1"}
	}
	s, err := ipvs.FromVirtual(ondisk.IPVSVirtual{
		VIP: c.vs, Masters: masters, Host: c.host, Scheduler: c.scheduler, CAFile: c.caFile, ProbePath: c.path, Profile: c.profile,
	})
	if err != nil {
		errs = append(errs, byFlag(err))
	}
	if len(errs) > 0 {
		return ipvs.Server{}, errors.Join(errs...)
	}
	if none {
		s.Masters = nil
	}
	s.Source = source
	s.Probe.Unsafe = c.insecure
	s.Probe.Plain = c.scheme == "http"
	s.Probe.Method, s.Probe.Body, s.Probe.Headers, s.Probe.Status = c.method, c.body, c.headers, c.status
	if changed("interval") && c.interval > 0 {
		s.Profile.Ready = c.interval
		s.Profile.Ping = min(s.Profile.Ping, c.interval)
		s.Profile.Retry = c.interval
	}
	if changed("health-timeout") && c.timeout > 0 {
		s.Profile.ReadyTimeout = c.timeout
	}
	return s, nil
}

// byFlag names the flags instead of the fields in the errors of ipvs.FromVirtual.
func byFlag(err error) error {
	flags := map[string]string{"vip": "vs", "masters": "rs", "scheduler": "scheduler", "host": "host", "probePath": "health-path", "profile": "profile"}
	return joined.Each(err, func(err error) error {
		var wrong *ipvs.FieldError
		if !errors.As(err, &wrong) {
			return err
		}
		field, _, _ := strings.Cut(wrong.Field, "[")
		return fmt.Errorf("--%s: %w", flags[field], wrong.Err)
	})
}

func careCommand(stderr io.Writer) *command {
	c := &careFlags{}
	f := newFlags("care")
	c.register(f)
	return &command{
		name:  "care",
		short: "Keep one virtual server, by lvscare's flags and environment",
		long: `Keep one virtual server, by lvscare's flags and environment (CARE_VS,
CARE_RS, CARE_HEALTH_PATH and so on). Unlike lvscare it verifies certificates,
requests /readyz, keeps the last real server, removes unknown ones, and restores
rules that other programs change. docs/ipvscare.md lists the differences.`,
		flags: f,
		run: func(ctx context.Context) error {
			if err := fromEnvironment(f, os.LookupEnv); err != nil {
				return usageError{err}
			}
			s, err := c.server(f.Changed)
			if err != nil {
				return usageError{err}
			}
			machine, err := kernel.Open(c.sysctls)
			if err != nil {
				return err
			}
			if c.clean {
				return ipvs.Clean(ctx, machine, ipvs.Leftovers{Servers: []ipvs.Server{s}, HostsFile: c.hosts, RunDir: c.run}, func(line string) { fmt.Fprintln(stderr, line) })
			}
			hosts := c.hosts
			if c.host == "" {
				hosts = ""
			}
			return keep(ctx, ipvs.Options{Kernel: machine, Servers: []ipvs.Server{s}, HostsFile: hosts, RunDir: c.run,
				Metrics: c.metrics, Once: c.runOnce}, stderr)
		},
	}
}

// fromEnvironment sets each flag that is not on the command line from its environment variable, if
// that is set. For example, CARE_HEALTH_PATH sets --health-path.
func fromEnvironment(f *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var errs []error
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Changed || flag.Name == "help" {
			return
		}
		name := careEnv + strings.ToUpper(strings.ReplaceAll(flag.Name, "-", "_"))
		if v, ok := lookup(name); ok && v != "" {
			if err := f.Set(flag.Name, v); err != nil {
				errs = append(errs, fmt.Errorf("%s=%s: %w", name, v, err))
			}
		}
	})
	return errors.Join(errs...)
}
