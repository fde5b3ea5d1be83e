package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/cluster/reports"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
)

// maxMachines report at the same time; for another one, the connection that has been
// silent for longest is closed.
const maxMachines = 256

// maxOfOne of them come from one address, as those of a site behind its router do.
const maxOfOne = 32

// receiver is what `cluster listen` was told.
type receiver struct {
	dir, listen, page string
	names             []string
}

func newClusterListen(s streams) *cobra.Command {
	var r receiver
	c := &cobra.Command{
		Use:   "listen",
		Short: "Receive what machines say of their first boot, and show it in a browser",
		Long: `Listen receives the reports of first boot (report.url of a Site) by HTTPS, keeps
the last one of each machine as a file, prints what is new, and shows all machines
on a page of this computer: which phase each is in, why it waits, and the fix.

The first time it makes a certificate of its own for the names that machines reach
this computer by, a key, and a URL that nobody guesses; they stay in --dir. It
prints the lines for the Cluster: ` + "`edgebake cluster sites`" + ` derives a URL for each
machine from the key. Sites that you write yourself share the common URL; whoever
knows that one can report in any machine's name, so it has a bounded share.

Reports hold no token and no key of the cluster. The page shows what machines say;
the cluster's own word is ` + "`edgebake cluster status`" + `.`,
		Example: `  edgebake cluster listen --name reports.example.com --dir reports
  edgebake cluster listen --name 192.168.7.5 --listen 192.168.7.5:443`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error { return r.run(c.Context(), s) },
	}
	f := c.Flags()
	f.StringVar(&r.dir, "dir", "reports", "directory of the reports, the certificate and the keys")
	_ = c.MarkFlagDirname("dir")
	f.StringSliceVar(&r.names, "name", nil, "`names` or IP addresses that machines reach this computer by; required the first time")
	f.StringVar(&r.listen, "listen", ":8443", "address that machines report to")
	f.StringVar(&r.page, "page", "127.0.0.1:8444", "address of the page, which asks nobody who they are; empty: none")
	return c
}

func (r *receiver) run(ctx context.Context, s streams) error {
	for _, name := range r.names { // it stays forever
		if err := forms.CheckHost(name); err != nil {
			return usageError{fmt.Errorf("--name: %w; give it without scheme, port and path", err)}
		}
	}
	id, err := reports.LoadIdentity(r.dir, r.names, time.Now())
	if err != nil {
		return err
	}
	store, err := reports.Open(r.dir)
	if err != nil {
		return err
	}
	var printing sync.Mutex
	store.News = func(t reports.Told) {
		printing.Lock()
		defer printing.Unlock()
		fmt.Fprintln(s.Out, line(t))
	}
	in, err := net.Listen("tcp", r.listen)
	if err != nil {
		return fmt.Errorf("listening for reports: %w: name another address with --listen", err)
	}
	defer in.Close()
	secure := tls.NewListener(reports.Crowd(reports.Share(in, maxOfOne), maxMachines), &tls.Config{Certificates: []tls.Certificate{id.Certificate}, MinVersion: tls.VersionTLS12})
	serving := map[net.Listener]http.Handler{secure: store.Receiver(id, time.Now)}
	fmt.Fprint(s.Out, snippet(id, in.Addr()))
	if r.page != "" {
		web, err := net.Listen("tcp", r.page)
		if err != nil {
			return fmt.Errorf("listening for browsers: %w: name another address with --page", err)
		}
		defer web.Close()
		serving[web] = store.Page(time.Now)
		s.note("The page: http://%s/\n", web.Addr())
	}
	s.note("Listening on %s until Ctrl-C. Reports of %s are in %s.\n", in.Addr(), configs.Count(len(store.All()), "machine"), r.dir)
	return serve(ctx, serving)
}

// serve serves each listener until the context ends.
func serve(ctx context.Context, serving map[net.Listener]http.Handler) error {
	g, gctx := errgroup.WithContext(ctx)
	for ln, handler := range serving {
		server := &http.Server{
			Handler: handler, MaxHeaderBytes: 16 << 10,
			ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute,
			// Scanners of ports would fill the terminal.
			ErrorLog: log.New(io.Discard, "", 0),
		}
		g.Go(func() error {
			if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		})
		g.Go(func() error {
			<-gctx.Done()
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			defer cancel()
			if server.Shutdown(end) != nil {
				return server.Close()
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return ctx.Err()
}

// snippet has the lines with which machines report here.
func snippet(id *reports.Identity, addr net.Addr) string {
	_, port, _ := net.SplitHostPort(addr.String())
	url := "https://" + net.JoinHostPort(reports.Names(id)[0], port)
	var b strings.Builder
	fmt.Fprintf(&b, "For the Cluster; `edgebake cluster sites` gives each machine its own URL:\n\nreport:\n  url: %s\n  key: %s\n  caCert: |\n", url, id.Key.Reveal())
	for l := range strings.Lines(id.PEM) {
		b.WriteString("    " + l)
	}
	fmt.Fprintf(&b, "\nFor Sites that you write yourself: the same without key, and with the common URL:\n\n  url: %s%s\n\n", url, id.Path)
	return b.String()
}

// line is a report in one line.
func line(t reports.Told) string {
	text := fmt.Sprintf("%s %s: %s", t.Received.Local().Format(time.TimeOnly), t.Node, t.Result)
	if t.Phase != "" {
		text += fmt.Sprintf(", %d/%d %s", t.Step, t.Steps, t.Phase)
	}
	if t.Reason != "" {
		text += ": " + t.Reason
	}
	if t.Fix != "" {
		text += " (to fix: " + t.Fix + ")"
	}
	return text
}
