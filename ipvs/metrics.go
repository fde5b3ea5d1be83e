package ipvs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"time"
)

// stats are the counters of one daemon.
type stats struct {
	repairs, routes, severed, transitions, reloads atomic.Int64
	wire                                           [counters]atomic.Int64
}

// Metrics returns the state in Prometheus' text format. The client library is not used, because it
// is larger than all of ipvscare.
func (d *Daemon) Metrics() []byte {
	var b bytes.Buffer
	counter := func(name, help string, v int64) {
		fmt.Fprintf(&b, "# HELP ipvscare_%s %s\n# TYPE ipvscare_%s counter\nipvscare_%s %d\n", name, help, name, name, v)
	}
	s := d.Status()
	fmt.Fprintf(&b, "# HELP ipvscare_ipvs Whether the kernel has IP_VS.\n# TYPE ipvscare_ipvs gauge\nipvscare_ipvs %d\n", bit(s.IPVS))
	fmt.Fprintf(&b, "# HELP ipvscare_problems Number of problems that ipvscare status shows.\n# TYPE ipvscare_problems gauge\nipvscare_problems %d\n", len(s.Problems))
	b.WriteString("# HELP ipvscare_master_state State of an API server: 1 for the current state.\n# TYPE ipvscare_master_state gauge\n")
	for _, v := range s.Servers {
		for _, m := range v.Masters {
			for st := Unknown; st <= Alien; st++ {
				fmt.Fprintf(&b, "ipvscare_master_state{vip=%q,master=%q,state=%q} %d\n", v.VIP, m.Addr, st, bit(m.State == st.String()))
			}
		}
	}
	b.WriteString("# HELP ipvscare_real_server Whether the API server gets new connections.\n# TYPE ipvscare_real_server gauge\n")
	for _, v := range s.Servers {
		for _, m := range v.Masters {
			fmt.Fprintf(&b, "ipvscare_real_server{vip=%q,master=%q} %d\n", v.VIP, m.Addr, bit(m.Serving))
		}
	}
	b.WriteString("# HELP ipvscare_master_falls_total How often an API server went down.\n# TYPE ipvscare_master_falls_total counter\n")
	for _, v := range s.Servers {
		for _, m := range v.Masters {
			fmt.Fprintf(&b, "ipvscare_master_falls_total{vip=%q,master=%q} %d\n", v.VIP, m.Addr, m.Falls)
		}
	}
	st := &d.stats
	counter("transitions_total", "Changes of an API server's state.", st.transitions.Load())
	counter("repairs_total", "Changes by other programs that were reverted.", st.repairs.Load())
	counter("routes_total", "Local routes made or changed.", st.routes.Load())
	counter("severed_total", "Sockets closed because their API server or virtual server is gone.", st.severed.Load())
	counter("reloads_total", "Reloads of a changed configuration.", st.reloads.Load())
	counter("dials_total", "Connection attempts to API servers.", st.wire[countDial].Load())
	counter("pings_total", "PINGs sent to API servers.", st.wire[countPing].Load())
	counter("requests_total", "Requests sent to API servers.", st.wire[countRequest].Load())
	return b.Bytes()
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// serveMetrics serves GET /metrics until the context ends. The address must be
// a loopback address, because there is neither TLS nor authentication.
func (d *Daemon) serveMetrics(ctx context.Context, addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); err == nil && (ip == nil || !ip.IsLoopback()) {
		err = errors.New("it is not a loopback address")
	}
	if err != nil {
		return fmt.Errorf("listening for metrics on %s: %w", addr, err)
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("listening for metrics: %w; give another address with --metrics", err)
	}
	context.AfterFunc(ctx, func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.SetDeadline(time.Now().Add(5 * time.Second))
			d.answer(c)
			c.Close()
		}
	}()
	return nil
}

// answer reads one request and writes the response.
func (d *Daemon) answer(c io.ReadWriter) {
	var head []byte
	buf := make([]byte, 1024)
	for !bytes.Contains(head, []byte("\r\n\r\n")) {
		n, err := c.Read(buf)
		if head = append(head, buf[:n]...); err != nil || len(head) > 8<<10 {
			return
		}
	}
	line, _, _ := strings.Cut(string(head), "\r\n")
	status, body := "404 Not Found", []byte("only GET /metrics is supported\n")
	if f := strings.Fields(line); len(f) == 3 && f[0] == "GET" && strings.HasPrefix(f[1]+"?", "/metrics?") {
		status, body = "200 OK", d.Metrics()
	}
	// One write, so that a scraper gets the whole response or nothing.
	c.Write(fmt.Appendf(nil, "HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status, len(body), body))
}
