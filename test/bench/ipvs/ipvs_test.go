// Package ipvs_test compares ipvscare with other programs under the same faults, in one VM. It
// writes the table of test/bench/results/ipvs.md.
//
// The other programs are Debian's keepalived, tuned to one second and with lvscare's periods (5 s,
// 10 s), and lvscare with both periods. The project cannot build lvscare, because the module proxy
// does not have it: EDGEBAKE_LVSCARE names its static binary. Without it, the table has the numbers
// of an earlier study, from one run each.
package ipvs_test

import (
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/ipvs/vm"
)

var (
	runs     = flag.Int("bench.runs", 20, "runs of each fault")
	cost     = flag.Int("bench.cost", 600, "seconds for which peace is measured")
	pings    = flag.Int("bench.pings", 1800, "requests to each master before the memory is measured")
	defaults = flag.Bool("bench.defaults", true, "compare with keepalived at lvscare's periods too")
	only     = flag.String("bench.only", "", "tests of the guest to run instead of all")
	raw      = flag.String("bench.raw", "", "make the table of this file of RESULT lines, without measuring")
	keep     = flag.String("bench.keep", "", "write what the guest says to this file too")
	out      = flag.String("bench.o", "../results/ipvs.md", "file to write")
)

// nightly enables the long runs: 1,000 failovers, and ten minutes of packet loss.
const nightly = "EDGEBAKE_NIGHTLY"

func BenchmarkIPVS(b *testing.B) {
	var lines []string
	switch {
	case *raw != "":
		text, err := os.ReadFile(*raw)
		if err != nil {
			b.Fatal(err)
		}
		lines = strings.Split(string(text), "\n")
	default:
		if err := vm.Missing(); err != nil {
			desk.Lacks(b, "ipvscare is not measured: %v", err)
		}
		env := []string{fmt.Sprintf("GUEST_BENCH=%d", *runs), fmt.Sprintf("GUEST_PINGS=%d", *pings), fmt.Sprintf("GUEST_COST=%d", *cost)}
		rivals, programs := []string{"keepalived-1s"}, map[string]string{}
		if *defaults {
			rivals = append(rivals, "keepalived-5s-10s")
		}
		if lvscare := os.Getenv("EDGEBAKE_LVSCARE"); lvscare != "" {
			programs["lvscare"] = lvscare
			rivals = append(rivals, "lvscare-5s-10s", "lvscare-1s")
		}
		env = append(env, "GUEST_RIVALS="+strings.Join(rivals, ","))
		tests := "^Test(Bench|Memory|Cost|Failovers|Loss|Repair|HTTP2Watches)$"
		if *only != "" {
			tests = *only
		}
		if os.Getenv(nightly) != "" {
			env = append(env, "GUEST_FAILOVERS=1000", "GUEST_LOSS=10m")
		}
		var log io.Writer
		if *keep != "" {
			f, err := os.Create(*keep)
			if err != nil {
				b.Fatal(err)
			}
			defer f.Close()
			log = f
		}
		dir := b.TempDir()
		for b.Loop() {
			if len(lines) > 0 {
				break // one run takes long enough
			}
			err := vm.Run(b.Context(), vm.Options{Run: tests, Env: env, Timeout: 7 * time.Hour, Dir: dir, Extra: programs, Log: log}, func(line string) {
				lines = append(lines, line)
				if strings.Contains(line, "RESULT ") { // how busy the machine was during the run
					load, _ := os.ReadFile("/proc/loadavg")
					first, _, _ := strings.Cut(string(load), " ")
					busy := "RESULT host load=" + first
					lines = append(lines, busy)
					if log != nil {
						fmt.Fprintln(log, busy)
					}
				}
				if strings.Contains(line, "RESULT") {
					b.Log(strings.TrimSpace(line))
				}
			})
			if err != nil {
				b.Fatalf("%v\n%s", err, strings.Join(lines, "\n"))
			}
		}
	}
	all := parse(lines)
	if len(all) == 0 {
		b.Fatal("nothing was measured")
	}
	for _, tool := range tools(all, "fault") {
		for _, fault := range []string{"kill", "stop", "drop"} {
			median, worst := spread(values(all, tool, fault, "last_ms"))
			b.ReportMetric(median/1000, tool+"-"+fault+"-median-s")
			b.ReportMetric(worst/1000, tool+"-"+fault+"-worst-s")
		}
	}
	if err := os.WriteFile(*out, []byte(table(all)), 0o644); err != nil {
		b.Fatal(err)
	}
}

// processorRatios compares the processor time of the lan profile with that of other programs that
// check once a second.
func processorRatios(all []record) string {
	spent := map[string]float64{}
	for _, r := range all {
		if r.kind == "cost" {
			spent[r.fields["tool"]] = r.number("cpu_ppm")
		}
	}
	var ratios []string
	for _, rival := range []string{"lvscare-1s", "keepalived-1s"} {
		if spent[rival] > 0 && spent["ipvscare-lan"] > 0 {
			ratios = append(ratios, fmt.Sprintf("%.2f × that of %s", spent["ipvscare-lan"]/spent[rival], rival))
		}
	}
	return strings.Join(ratios, ", ")
}

// values returns the figure key of all runs of a tool under a fault.
func values(all []record, tool, fault, key string) []float64 {
	var v []float64
	for _, r := range all {
		if r.kind == "fault" && r.fields["tool"] == tool && r.fields["fault"] == fault {
			v = append(v, r.number(key))
		}
	}
	return v
}

// record is one RESULT line of the VM.
type record struct {
	kind   string
	fields map[string]string
}

func (r record) number(key string) float64 {
	f, _ := strconv.ParseFloat(r.fields[key], 64)
	return f
}

func parse(lines []string) []record {
	var all []record
	for _, line := range lines {
		_, rest, ok := strings.Cut(line, "RESULT ")
		if !ok {
			continue
		}
		words := strings.Fields(rest)
		r := record{kind: words[0], fields: make(map[string]string)}
		for _, w := range words[1:] {
			k, v, _ := strings.Cut(w, "=")
			r.fields[k] = v
		}
		all = append(all, r)
	}
	return all
}

// spread returns the median and the worst value.
func spread(v []float64) (median, worst float64) {
	if len(v) == 0 {
		return 0, 0
	}
	slices.Sort(v)
	return v[len(v)/2], v[len(v)-1]
}

// tools returns the tools that have records, in the order of the table.
func tools(all []record, kind string) []string {
	var names []string
	for _, r := range all {
		if name := r.fields["tool"]; r.kind == kind && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if kind == "fault" { // these are reported in the order in which they end
		slices.Sort(names)
	}
	return names
}

// column returns one field of all records of a kind.
func column(all []record, kind, key string) []float64 {
	var v []float64
	for _, r := range all {
		if r.kind == kind {
			v = append(v, r.number(key))
		}
	}
	return v
}

func table(all []record) string {
	var b strings.Builder
	b.WriteString(`# ipvscare beside its rivals

Made by ` + "`go test -bench . ./test/bench/ipvs`" + `. One guest (Debian's kernel, two
emulated processors, no KVM), each tool in a network namespace of its own, the
same fault for all at a random phase. Emulation and a busy machine make
everything slower than it is on hardware; the ratios count. What does not
depend on the machine is tested in virtual time (` + "`TestFailureDetection`" + `): ipvscare
notices a stopped or silent master within 2.2 s at any phase, a killed one at
once. The names say what was asked of the rivals: checks every 1 s with a
timeout of 1 s, or every 5 s with 10 s as lvscare does by default.
`)
	if load := column(all, "host", "load"); len(load) > 0 {
		fmt.Fprintf(&b, "\nThe machine's load (of two processors) was %.0f to %.0f meanwhile.\n", slices.Min(load), slices.Max(load))
	}
	b.WriteString(`
## Faults

Seconds from the fault to the beginning of the last new connection that failed
(one is begun every 40 ms and given 3 s), until the master was taken out, and
until idle connections on it broke.

| fault | tool | runs | failing, median | worst | taken out, median | worst | watch broke, median | worst | unbroken on the dead master | broken on live ones |
|---|---|---|---|---|---|---|---|---|---|---|
`)
	names := map[string]string{"kill": "kill -9", "stop": "SIGSTOP", "drop": "silent drop"}
	for _, fault := range []string{"kill", "stop", "drop"} {
		for _, tool := range tools(all, "fault") {
			var last, out, watch []float64
			wrong, unbroken := 0.0, 0
			for _, r := range all {
				if r.kind != "fault" || r.fields["tool"] != tool || r.fields["fault"] != fault {
					continue
				}
				last = append(last, r.number("last_ms")/1000)
				out = append(out, r.number("removed_ms")/1000)
				wrong += r.number("wrong")
				if w := r.number("watch_ms"); w >= 0 {
					watch = append(watch, w/1000)
				} else {
					unbroken++
				}
			}
			lm, lw := spread(last)
			om, ow := spread(out)
			cells := fmt.Sprintf("| %s | %s | %d | %.2f | %.2f | %.2f | %.2f |", names[fault], tool, len(last), lm, lw, om, ow)
			if wm, ww := spread(watch); len(watch) > 0 {
				cells += fmt.Sprintf(" %.2f | %.2f |", wm, ww)
			} else {
				cells += " – | – |"
			}
			fmt.Fprintf(&b, "%s %d of %d runs | %.0f |\n", cells, unbroken, len(last), wrong)
		}
	}
	b.WriteString(`
"Unbroken" counts runs in which no watch on the dead master broke until a
second after the tool had taken it out. After a kill the master's own kernel
resets its connections, so no tool can take credit for that. Behind a silent
network a connection that is being opened is let through by its next SYN, once
the master is out. Watches that broke after 15 s did so by the TCP keepalive of
their client, whose first probe comes then.
`)
	if !slices.ContainsFunc(tools(all, "fault"), func(name string) bool { return strings.HasPrefix(name, "lvscare") }) {
		b.WriteString(`
From the study before the project (one run each, Debian 6.1, so orders of
magnitude), for lvscare, which was not at hand here:

| | kill -9 | SIGSTOP | silent drop |
|---|---|---|---|
| lvscare, defaults, route mode | 1.4 | 13.2 | 10.5 |
| keepalived 1 s | 0.3 | 2.7 | 2.1 |
`)
	}
	if moved := column(all, "watch", "after_ms"); len(moved) > 0 {
		median, worst := spread(moved)
		fmt.Fprintf(&b, "\nIdle watches over TLS and HTTP/2 on a stopped master, with and without PINGs of the\nclient's own (%d of them): broke %.3f s after its removal (median), %.3f s at worst.\n", len(moved), median/1000, worst/1000)
	}
	if put := column(all, "repair", "ms"); len(put) > 0 {
		median, worst := spread(put)
		fmt.Fprintf(&b, "\nWhat somebody else changed (%d times: weights, methods, servers, routes, all rules\nflushed) was right again after %.2f s (median), %.2f s at worst.\n", len(put), median/1000, worst/1000)
	}
	b.WriteString(`
## Cost of peace

| tool | seconds | processor, parts per million | resident, MB | bytes a day for each node and master | requests a day | PINGs a day | new connections while measured |
|---|---|---|---|---|---|---|---|
`)
	ours := func(r record) bool { return strings.HasPrefix(r.fields["tool"], "ipvscare") }
	for _, r := range all {
		if r.kind != "cost" {
			continue
		}
		pinged, dials := r.fields["pings_day"], r.fields["dials"]
		if !ours(r) {
			pinged, dials = "–", "not counted"
		}
		fmt.Fprintf(&b, "| %s | %s | %.0f | %.1f | %.0f | %s | %s | %s |\n", r.fields["tool"], r.fields["seconds"], r.number("cpu_ppm"),
			r.number("rss_kb")/1024, r.number("bytes_day"), r.fields["requests_day"], pinged, dials)
	}
	if ratios := processorRatios(all); ratios != "" {
		fmt.Fprintf(&b, "\nProcessor time of ipvscare-lan: %s.\n", ratios)
	}
	b.WriteString(`
All at the same time. Bytes are those on the wire, with Ethernet, TCP and ACKs.
The processor's time is of the emulated machine. Requests of the rivals are
those that their configuration asks for.

What 4,000 nodes mean for one API server, extrapolated:

| tool | PINGs a second | requests a second | Mbit/s |
|---|---|---|---|
`)
	for _, r := range all {
		if r.kind != "cost" {
			continue
		}
		pings := "–"
		if ours(r) {
			pings = fmt.Sprintf("%.0f", r.number("pings_day")*4000/86400)
		}
		fmt.Fprintf(&b, "| %s | %s | %.0f | %.2f |\n", r.fields["tool"], pings, r.number("requests_day")*4000/86400, r.number("bytes_day")*4000*8/86400/1e6)
	}
	b.WriteString(`
ipvscare holds one connection to each master, 4,000 of them here; keepalived
makes a new one, with its TLS handshake, for every request.
`)
	for _, r := range all {
		switch r.kind {
		case "memory":
			fmt.Fprintf(&b, "\n## Memory\n\nResident after a quarter, half, three quarters and all of %s requests (with as many PINGs), in kB: %s.\n", r.fields["requests"], r.fields["rss_kb"])
		case "failovers":
			fmt.Fprintf(&b, `
## Failovers

%.0f failovers (%s faults of a master, each seen by %s nodes), %s requests.
Clients that try once more after half a second: %s did so, %s requests lost.
Clients that try once more at once: %s did so, %s requests lost.
`, r.number("faults")*r.number("nodes"), r.fields["faults"], r.fields["nodes"], r.fields["requests"],
				r.fields["retried"], r.fields["lost"], r.fields["hasty_retried"], r.fields["hasty_lost"])
		case "loss20":
			fmt.Fprintf(&b, "\n## Loss\n\n%s minutes at 20 %% loss each way and 20 ms delay: %s false removals (%s more at the same moment on a\nnode with a good network beside it, which was the machine).\n", r.fields["minutes"], r.fields["removed"], r.fields["held_up"])
		}
	}
	return b.String()
}
