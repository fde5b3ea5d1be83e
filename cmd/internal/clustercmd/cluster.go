// Package clustercmd defines `edgebake cluster` and its subcommands, and `edgebake preflight`. It
// has only flags and output; package cluster does the work.
package clustercmd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// New returns `edgebake cluster`.
func New(s console.Streams) *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:   "cluster",
		Short: "Make a cluster's keys and tokens, and work on a running cluster",
		Long: `Cluster works on a whole cluster. new and sites need no network: they make the
keys of a cluster that does not exist yet, and the Site of each of its nodes. The
other commands take a kubeconfig and work on any running kubeadm cluster.`,
		Example: `  edgebake cluster new cluster.yaml --output shops
  edgebake cluster sites shops`,
	}, newClusterNew(s), newClusterSites(s), newClusterToken(s),
		newClusterPrepare(s), newClusterVerify(s), newClusterRevert(s), newClusterStatus(s), newClusterListen(s), newClusterUpdate(s), newClusterRemove(s))
}

func newClusterNew(s console.Streams) *cobra.Command {
	var out, identity string
	var encryptTo []string
	c := &cobra.Command{
		Use:               "new CLUSTER --output DIR",
		ValidArgsFunction: cli.CompleteFiles(documents.Extensions),
		Short:             "Make the keys and tokens of a new cluster, offline",
		Long: `New makes the keys and tokens of a cluster before any of its machines is switched
on, and writes them to DIR:

  pki/            the CAs of the cluster, of etcd and of the front proxy, and the
                  key of the service accounts, in kubeadm's layout
  tokens/         a bootstrap token for each node, as Secrets
  manifests/      copies of the Cluster's manifests
  admin.conf      an administrator's kubeconfig, with a context for each API server (master)
  mint.json       edgebake's record of this directory; contains no secret
  cluster.yaml    the document

Whoever has DIR controls the cluster. Only you can read it, and --encrypt-to
encrypts its secrets. Keep a copy.

Run again, the command renews only certificates that expire soon: admin.conf in the
last six months of its year, and each CA in the last two of its ten years. The CAs
keep their keys. If the secrets are encrypted, renewing needs --identity.
Nodes that were added to the document get a token. The tokens of removed nodes are
deleted from DIR (edgebake cluster token revoke deletes them from the running
cluster). A change of the name, endpoint, VIP, port, networks, DNS domain or
masters, or a lower version of Kubernetes, is an error: the keys and the machines
already depend on them.`,
		Example: `  edgebake cluster new cluster.yaml --output shops
  edgebake cluster new cluster.yaml --output sealed --encrypt-to team.pub`,
		Args: cli.Args(1, 1, "one Cluster document"),
		RunE: func(c *cobra.Command, a []string) error {
			if out == "" {
				return cli.Usage(errors.New("edgebake cluster new requires a directory: --output DIR; see edgebake cluster new --help"))
			}
			doc, manifests, err := (&cli.DocumentFlags{}).Reader(s).Cluster(a[0])
			if err != nil {
				return err
			}
			o := mint.Options{Now: time.Now(), EncryptTo: encryptTo, Manifests: manifests}
			if identity != "" {
				if o.Identity, err = sealed.ReadIdentity(identity); err != nil {
					return err
				}
			}
			change, err := mint.New(out, doc, o)
			if err != nil {
				return err
			}
			printMint(s, out, change)
			return nil
		},
	}
	f := c.Flags()
	cli.DirFlag(c, &out, "output", "", "directory to write to: a new or empty one, or the directory of this cluster")
	f.SetNormalizeFunc(formerFlags)
	cli.FileFlag(c, &identity, "identity", "file of the secret key that opens an encrypted DIR, to renew certificates in it")
	f.StringArrayVar(&encryptTo, "encrypt-to", nil, "encrypt the secrets to this age or ssh public `key`, or to those of this file (can be repeated)")
	cli.TakesDocument(s, c, 0, nil)
	return c
}

// formerFlags accepts --out and --birth, the earlier names of --output and --bootstrap.
func formerFlags(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	switch name {
	case "out":
		name = "output"
	case "birth":
		name = "bootstrap"
	}
	return pflag.NormalizedName(name)
}

func printMint(s console.Streams, dir string, change *mint.Change) {
	r := change.Record
	for _, e := range change.Expiring {
		s.Warn("%s\n  run the command again with --identity KEY to renew it", expiryText(dir, e))
	}
	apply, sites := "kubectl apply -f %s", "edgebake cluster sites %s"
	if len(r.Recipients) > 0 {
		apply, sites = "age --decrypt --identity KEY %s.age | kubectl apply -f -", sites+" --identity KEY --output DIR"
	}
	switch {
	case change.Nothing():
		s.Note("%s: nothing changed: cluster %s, %s\n", dir, r.Fixed.Name, r.CAHash)
	case change.Minted:
		s.Note("made the keys and tokens of cluster %s in %s: %s, %s, %s\n", r.Fixed.Name, dir, r.CAHash, configs.Count(len(r.Fixed.Masters), "control-plane node"), configs.Count(len(r.Tokens), "token"))
		if len(r.Recipients) == 0 {
			s.Note("The keys in %s are not encrypted: anyone who can read the directory controls the cluster. Keep it as safe as the machines, or encrypt it with --encrypt-to.\n", dir)
		}
	default:
		s.Note("updated %s: cluster %s\n", dir, r.Fixed.Name)
	}
	for _, f := range change.Renewed {
		s.Note("  renewed %s\n", f)
	}
	if len(change.Renewed) > 1 {
		s.Note("  The CAs keep their keys, so no machine needs to join again. Stamp new Sites onto the control-plane nodes and restart them one by one; workers get the renewed CA from them.\n")
	}
	for _, n := range change.Added {
		s.Note("  made a token for %s; if the cluster already exists, add the token to it: "+apply+"\n", n, filepath.Join(dir, "tokens", n+".yaml"))
	}
	for _, n := range change.Removed {
		s.Note("  deleted the token of %s; if the cluster already exists, revoke the token there too\n", n)
	}
	s.Note("Next: "+sites+"\n", dir)
}

// expiryText describes a certificate of dir that expires soon or has expired.
func expiryText(dir string, e mint.ExpiringCertificate) string {
	return fmt.Sprintf("%s is valid until %s", filepath.Join(dir, filepath.FromSlash(e.File)), e.End.UTC().Format(time.DateOnly))
}

func newClusterSites(s console.Streams) *cobra.Command {
	var o mint.SitesOptions
	var identity string
	c := &cobra.Command{
		Use:   "sites DIR",
		Short: "Write the Sites of a new cluster's machines",
		Long: `Sites writes the Site of each machine to DIR/sites or to --output. DIR is a
directory that edgebake cluster new wrote. A worker's Site holds its own token,
the hash of the CA, the API servers (masters) and the VIP, and no key. The Site of a
control-plane node holds the cluster's keys, and the tokens and manifests, which the
first of these nodes publishes.

With --inventory, all workers' Sites go into one Inventory instead, each with its
match. An Inventory never has control-plane nodes, since anyone with a copy of it
would have the cluster's keys.

A new cluster may start with an empty etcd as long as its tokens are valid
(tokenTTL). Control-plane nodes whose Sites are written later, or that are flashed
again later, only join a running cluster. --bootstrap TIME lets etcd start empty for
that time from now: for a cluster that was not switched on in time, or whose data is
lost. Workers whose tokens have expired get new ones. DIR/mint.json records this.

Two flags are for lost control-plane nodes:

  --absent NAME         the node never started; the cluster starts without it
  --continue-from NAME  more than half of etcd's members are lost; the cluster
                        continues with the data of NAME, and all other nodes
                        join it again

With --restore FILE, NAME starts with that snapshot of etcd instead. The node looks
for it in its /var/lib/edgebake/snapshots and, as etcd-snapshot.db, on a stick
labelled EDGEBAKE. Stamp the Sites onto all control-plane nodes and restart them.
Once the cluster runs, stamp Sites that were written without these flags.`,
		Example: `  edgebake cluster sites shops
  edgebake cluster sites shops --inventory inventory.yaml
  edgebake cluster sites shops --identity key.txt --output sites
  edgebake cluster sites shops --bootstrap 48h
  edgebake cluster sites shops --continue-from m1 --output lost`,
		Args: cli.Args(1, 1, "a directory that edgebake cluster new wrote"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(c *cobra.Command, a []string) error {
			if err := checkSites(c, a[0], o); err != nil {
				return err
			}
			if identity != "" {
				var err error
				if o.Identity, err = sealed.ReadIdentity(identity); err != nil {
					return err
				}
			}
			o.Now = time.Now()
			w, err := mint.WriteSites(a[0], o)
			printSites(s, a[0], w, o)
			return err
		},
	}
	f := c.Flags()
	cli.DirFlag(c, &o.Output, "output", "", "directory to write to (default DIR/sites)")
	f.SetNormalizeFunc(formerFlags)
	cli.FileFlag(c, &o.Inventory, "inventory", "write one Inventory to this file instead", documents.Extensions...)
	cli.FileFlag(c, &identity, "identity", "file of the secret key that opens an encrypted DIR")
	f.Var((*cli.Span)(&o.Bootstrap), "bootstrap", "allow etcd to start empty from now until this time has passed, e.g. 48h")
	f.StringSliceVar(&o.Requests.Absent, "absent", nil, "control-plane `node` that never started; the cluster starts without it")
	f.StringVar(&o.Requests.ContinueFrom, "continue-from", "", "control-plane node whose data the cluster keeps after etcd has lost its quorum")
	cli.FileFlag(c, &o.Snapshot, "restore", "snapshot of etcd that the node named by --continue-from starts with", "db")
	f.BoolVar(&o.Force, "force", false, "replace existing files")
	return c
}

// checkSites checks the flags of cluster sites.
func checkSites(c *cobra.Command, dir string, o mint.SitesOptions) error {
	var errs []error
	if c.Flags().Changed("bootstrap") && (o.Bootstrap <= 0 || o.Bootstrap > maxBootstrap) {
		errs = append(errs, cli.Usage(fmt.Errorf("--bootstrap %s: want a time of at most %d days, e.g. 48h, in which the cluster may be initialized", (*cli.Span)(&o.Bootstrap), maxBootstrap/(24*time.Hour))))
	}
	if o.Inventory != "" {
		return errors.Join(append(errs, cli.RejectUnused(c,
			cli.Unused{Flags: []string{"output"}, Purpose: "single Sites, but --inventory writes one Inventory to the file that it names: choose one"},
			cli.Unused{Flags: []string{"bootstrap", "absent", "continue-from", "restore"}, Purpose: "control-plane nodes, and an Inventory has none: leave --inventory out"}))...)
	}
	if record, err := mint.Load(dir); err == nil && len(record.Recipients) > 0 && o.Output == "" {
		errs = append(errs, cli.Usage(fmt.Errorf("the secrets in %s are encrypted, but Sites contain tokens and keys unencrypted: name a directory for them with --output", dir)))
	}
	return errors.Join(errs...)
}

// maxBootstrap is the upper limit of --bootstrap. Until that time has passed, a control-plane node
// that is flashed again could start a new, empty cluster.
const maxBootstrap = 31 * 24 * time.Hour

const kubeconfigUsage = "kubeconfig of the cluster (default $KUBECONFIG, else ~/.kube/config)"

// onCluster declares the flags of a command for a running cluster, and makes f the command's
// function.
func onCluster(c *cobra.Command, f func(ctx context.Context, client *cluster.Client, args []string) error) *cobra.Command {
	return onClusterIf(c, func(*cobra.Command, []string) error { return nil }, f)
}

// onClusterIf is like onCluster, but first runs check. The errors of check, --kubeconfig, --context
// and the flags that c has already are reported together.
func onClusterIf(c *cobra.Command, check func(c *cobra.Command, args []string) error, f func(ctx context.Context, client *cluster.Client, args []string) error) *cobra.Command {
	k := new(cli.ClusterFlags)
	k.Declare(c, kubeconfigUsage)
	if c.Args == nil {
		c.Args = cli.NoArgs
	}
	flagErrors := cli.Together(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		wrong := errors.Join(flagErrors(), check(c, args))
		if wrong != nil && !c.Flags().Changed("kubeconfig") && !c.Flags().Changed("context") {
			return wrong
		}
		client, err := k.Open()
		if err := errors.Join(wrong, err); err != nil {
			return err
		}
		return f(c.Context(), client, args)
	}
	return c
}

// imageToStamp returns the image that is built from the Image in the current directory. If that
// image does not exist, first is the command that must run before stamping.
func imageToStamp() (image, first string) {
	image = "IMAGE"
	if text, err := os.ReadFile(cli.DefaultImage); err == nil {
		if all, err := configs.ParseImages(cli.DefaultImage, text); err == nil && len(all) == 1 {
			image = all[0].Name + ".raw"
		}
	}
	if _, err := os.Stat(image); err != nil {
		first = "edgebake build, then "
	}
	return image, first
}

func printSites(s console.Streams, dir string, w *mint.WrittenSites, o mint.SitesOptions) {
	for _, e := range w.Expiring {
		s.Warn("%s: run `edgebake cluster new` with the Cluster document and --output %s to renew it", expiryText(dir, e), dir)
	}
	if len(w.Renewed) > 0 {
		s.Note("made new tokens for %s whose tokens had expired: stamp their new Sites\n", configs.Count(len(w.Renewed), "node"))
	}
	if w.ForeignSnapshot {
		s.Warn("snapshot %s does not contain the CA of %s, so it may be of another cluster (ignore this if the cluster encrypts its ConfigMaps)", o.Snapshot, dir)
	}
	switch {
	case len(w.Sites) == 0:
		return
	case o.Inventory != "":
		s.Note("wrote %s: %s\n", o.Inventory, configs.Count(len(w.Sites), "node"))
		image, first := imageToStamp()
		s.Note("Next: %sedgebake stamp %s %s --output workers.raw (one image for all of them)\n", first, image, o.Inventory)
		return
	}
	names := make([]string, len(w.Sites))
	for i, site := range w.Sites {
		names[i] = site.Name
	}
	const most = 10
	if more := len(names) - most; more > 0 {
		names = append(names[:most], fmt.Sprintf("and %d more", more))
	}
	s.Note("wrote %s to %s: %s\n", configs.Count(len(w.Sites), "Site"), w.Dir, strings.Join(names, ", "))
	if c := w.Sites[0].Site.ControlPlane; c != nil && c.ContinueFrom != "" {
		with := "the data on its disk"
		if c.Restore != "" {
			with = "the snapshot with the SHA-256 " + c.Restore
		}
		s.Note("The Sites of control-plane nodes contain the cluster's keys. With these Sites, %s continues with %s, and all other nodes join it.\n", c.ContinueFrom, with)
	} else if until := w.Sites[0].Expires; until.IsZero() {
		s.Note("The cluster can no longer be initialized with these Sites: control-plane nodes only join an existing cluster. --bootstrap TIME allows it again.\n")
	} else {
		s.Note("The Sites of control-plane nodes contain the cluster's keys. The cluster can be initialized with them until %s.\n", until.Format(time.RFC3339))
	}
	for _, f := range w.Former {
		s.Note("%s is the Site of %s, which is no longer in the Cluster document: delete the file. `edgebake cluster remove %s` removes the node and its token from the running cluster.\n", f.File, f.Node, f.Node)
	}
	image, first := imageToStamp()
	s.Note("Next: %sfor each machine: edgebake stamp %s %s --output %s.raw\n", first, image, filepath.Join(w.Dir, w.Sites[0].Name+".yaml"), w.Sites[0].Name)
}
