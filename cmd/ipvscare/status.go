package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/ipvs"
)

func statusCommand(stdout io.Writer) *command {
	var output, run string
	f := newFlags("status")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	f.StringVar(&run, "run-dir", runDir, "directory of the running ipvscare")
	return &command{
		name:  "status",
		short: "Show virtual servers and the health of API servers",
		long: `Show virtual servers and the health of API servers (masters). The exit code
is 1 if ipvscare is not running, or if a virtual server has no API server that
is up.`,
		flags: f,
		run: func(context.Context) error {
			if output != "json" && output != "text" {
				return usageError{fmt.Errorf("-o %s: want text or json", output)}
			}
			all, err := ipvs.ReadStatus(run)
			if err != nil {
				return err
			}
			if output == "json" {
				enc := json.NewEncoder(printable.JSON(stdout))
				enc.SetIndent("", "  ")
				err = enc.Encode(all)
			} else {
				err = printStatus(stdout, all, time.Now())
			}
			if err != nil {
				return err
			}
			return verdict(all)
		},
	}
}

// verdict returns an error if a virtual server has no API server that is up.
func verdict(all []ipvs.Status) error {
	for _, s := range all {
		for _, v := range s.Servers {
			up := 0
			for _, m := range v.Masters {
				if m.State == ipvs.Up.String() {
					up++
				}
			}
			if up == 0 {
				return fmt.Errorf("no API server behind %s is up", v.VIP)
			}
		}
	}
	return nil
}

func printStatus(out io.Writer, all []ipvs.Status, now time.Time) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	for _, s := range all {
		for _, v := range s.Servers {
			fmt.Fprintf(w, "%s", v.VIP)
			if v.Host != "" {
				fmt.Fprintf(w, " %s", v.Host)
			}
			fmt.Fprintf(w, " (%s, %s", v.Scheduler, v.Profile)
			switch {
			case s.IPVS:
			case v.HostAddr == "":
				fmt.Fprint(w, ", no IP_VS in this kernel, and no API server to put into the hosts file")
			default:
				fmt.Fprintf(w, ", no IP_VS in this kernel: the hosts file points to %s", v.HostAddr)
			}
			if !v.Verified {
				fmt.Fprint(w, ", API servers are not verified")
			}
			if v.Learned {
				fmt.Fprint(w, ", list learned from the cluster")
			}
			fmt.Fprint(w, ")\n  API SERVER\tSTATE\tSINCE\tSERVES\tLAST PROBE\n")
			for _, m := range v.Masters {
				addr, last, serves := m.Addr, m.Last, "no"
				if m.Name != "" {
					addr += " " + m.Name
				}
				if m.Error != "" {
					last += ": " + m.Error
				}
				if m.Serving {
					serves = "yes"
				}
				since := "-"
				if !m.Since.IsZero() {
					since = now.Sub(m.Since).Truncate(time.Second).String()
				}
				fmt.Fprintf(w, "  %s\t%s\t%s\t%s\t%s\n", shown(addr), m.State, since, serves, shown(last))
			}
		}
		for _, p := range s.Problems {
			fmt.Fprintf(w, "problem: %s\n", shown(p))
		}
	}
	return w.Flush()
}
