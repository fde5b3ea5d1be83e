package clustercmd

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/edgebake/edgebake/cluster/reports"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/spf13/cobra"
)

// listenFlags are the flags of cluster listen.
type listenFlags struct {
	dir, listen, page string
	names             []string
}

func newClusterListen(s console.Streams) *cobra.Command {
	var l listenFlags
	c := &cobra.Command{
		Use:   "listen",
		Short: "Receive reports of first boot, and show them in a browser",
		Long: `Listen receives the reports of first boot (report.url of a Site) by HTTPS, keeps
the last one of each machine as a file, prints new ones, and shows all machines on
a web page: the phase of each machine, why it waits, and the fix.

At the first start it makes a certificate for the names by which machines reach this
computer, a key, and a secret URL, and keeps them in --dir. It prints the lines for
the Cluster: ` + "`edgebake cluster sites`" + ` derives a URL for each machine from the key.
Sites that you write yourself share a common URL. Whoever knows that URL can report
in the name of any machine, so the space for its reports is limited.

Reports hold no token and no key of the cluster. The page shows reports of machines;
` + "`edgebake cluster status`" + ` shows the state of the cluster itself.`,
		Example: `  edgebake cluster listen --name reports.example.com --dir reports
  edgebake cluster listen --name 192.168.7.5 --listen 192.168.7.5:443`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return l.run(c.Context(), s) },
	}
	cli.DirFlag(c, &l.dir, "dir", "reports", "directory of the reports, the certificate and the keys")
	f := c.Flags()
	f.StringSliceVar(&l.names, "name", nil, "`names` or IP addresses by which machines reach this computer; required the first time")
	f.StringVar(&l.listen, "listen", ":8443", "address that machines report to")
	f.StringVar(&l.page, "page", "127.0.0.1:8444", "address of the web page, which has no login; empty: no page")
	return c
}

func (l *listenFlags) run(ctx context.Context, s console.Streams) error {
	for _, name := range l.names { // a name cannot be removed from the certificate
		if err := forms.CheckHost(name); err != nil {
			return cli.Usage(fmt.Errorf("--name: %w; give it without scheme, port and path", err))
		}
	}
	id, err := reports.LoadIdentity(l.dir, l.names, time.Now())
	if err != nil {
		return err
	}
	store, err := reports.Open(l.dir)
	if err != nil {
		return err
	}
	var printing sync.Mutex
	store.News = func(t reports.Summary) {
		printing.Lock()
		defer printing.Unlock()
		fmt.Fprintln(s.Out, t.Line())
	}
	receiver, err := net.Listen("tcp", l.listen)
	if err != nil {
		return fmt.Errorf("listening for reports: %w: name another address with --listen", err)
	}
	defer receiver.Close()
	cluster, site := id.Lines(receiver.Addr())
	fmt.Fprintf(s.Out, "For the Cluster document (`edgebake cluster sites` gives each machine its own URL):\n\n%s\nFor Sites that you write yourself (all share this URL, and have no key):\n\n%s\n", cluster, site)
	var page net.Listener
	if l.page != "" {
		if page, err = net.Listen("tcp", l.page); err != nil {
			return fmt.Errorf("listening for browsers: %w: name another address with --page", err)
		}
		defer page.Close()
		s.Note("The page: http://%s/\n", page.Addr())
	}
	s.Note("Listening on %s until Ctrl-C. Reports of %s are in %s.\n", receiver.Addr(), configs.Count(len(store.All()), "machine"), l.dir)
	return store.Serve(ctx, id, receiver, page)
}
