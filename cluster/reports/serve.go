package reports

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
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// maxMachines limits the number of connections. One more connection closes the one that has
	// been silent for longest.
	maxMachines = 256
	// maxFromOne limits the connections from one address, which may be the router of a site.
	maxFromOne = 32
)

// Serve receives reports on one listener and serves the page on another until ctx ends. page may be
// nil.
func (s *Store) Serve(ctx context.Context, id *Identity, receiver, page net.Listener) error {
	g, gctx := errgroup.WithContext(ctx)
	serve := func(ln net.Listener, handler http.Handler) {
		server := &http.Server{
			Handler: handler, MaxHeaderBytes: 16 << 10,
			ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute,
			// Errors are not logged, because port scanners would cause too many messages.
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
	limited := LimitTotal(LimitPerSender(receiver, maxFromOne), maxMachines)
	serve(tls.NewListener(limited, &tls.Config{Certificates: []tls.Certificate{id.Certificate}, MinVersion: tls.VersionTLS12}), s.Receiver(id, time.Now))
	if page != nil {
		serve(page, s.Page(time.Now))
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return ctx.Err()
}

// Lines returns the lines of YAML that make machines report to the receiver at addr: cluster is the
// Cluster's field report; site is the url that replaces url and key in Sites written by hand.
func (id *Identity) Lines(addr net.Addr) (cluster, site string) {
	_, port, _ := net.SplitHostPort(addr.String())
	url := "https://" + net.JoinHostPort(Names(id)[0], port)
	var b strings.Builder
	fmt.Fprintf(&b, "report:\n  url: %s\n  key: %s\n  caCert: |\n", url, id.Key.Reveal())
	for l := range strings.Lines(id.PEM) {
		b.WriteString("    " + l)
	}
	return b.String(), fmt.Sprintf("  url: %s%s\n", url, id.Path)
}

// Line returns the summary as one line of text.
func (t *Summary) Line() string {
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
