package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func newCluster(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "cluster",
		Short: "Make a cluster's keys and tokens, and work on a living cluster",
		Long: `Cluster works on a whole cluster. new and sites need no network: they make the
keys of a cluster that does not exist yet, and the Site of each of its nodes. The
others take a kubeconfig and work on any living cluster of kubeadm's.`,
		Example: `  edgebake cluster new cluster.yaml --output shops
  edgebake cluster sites shops`,
		Args: subcommand,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newClusterNew(s), newClusterSites(s), newClusterToken(s),
		newClusterPrepare(s), newClusterVerify(s), newClusterRevert(s), newClusterStatus(s), newClusterListen(s), newClusterRemove(s))
	return c
}

func newClusterNew(s streams) *cobra.Command {
	var out string
	var encryptTo []string
	c := &cobra.Command{
		Use:               "new CLUSTER --output DIR",
		ValidArgsFunction: completeFiles(documentEndings),
		Short:             "Mint the keys and tokens of a cluster, offline",
		Long: `New makes what a cluster is known by, before any machine of it is switched on,
and writes it to DIR:

  pki/            the CAs of the cluster, of etcd and of the front proxy, and the
                  key of the service accounts, as kubeadm takes them
  tokens/         a bootstrap token for each node, as Secrets
  admin.conf      an administrator's kubeconfig, with a context for each master
  mint.json       what the directory says of itself; no secret
  cluster.yaml    the document

Whoever has DIR has the cluster: it is readable by you alone, and with
--encrypt-to its secrets are encrypted. Keep a copy.

The same command again changes nothing. Nodes that the document has since got
receive a token; those it lost have theirs removed from DIR (edgebake cluster
token revoke removes it from the living cluster). A change in what the keys or
the machines already say is an error: name, endpoint, VIP, port, networks, DNS
domain, masters, or a lower version of Kubernetes.`,
		Example: `  edgebake cluster new cluster.yaml --output shops
  edgebake cluster new cluster.yaml --output sealed --encrypt-to team.pub`,
		Args: args(1, 1, "one Cluster document"),
		RunE: func(c *cobra.Command, a []string) error {
			if out == "" {
				return usageError{errors.New("edgebake cluster new wants a directory: --output DIR; see edgebake cluster new --help")}
			}
			data, err := readInput(s, a[0])
			if err != nil {
				return err
			}
			doc, err := configs.ParseCluster(a[0], data)
			if err != nil {
				return err
			}
			printWarnings(s, doc)
			if err := checkManifests(a[0], data, doc); err != nil {
				return err
			}
			change, err := mint.New(out, data, mint.Options{File: a[0], Now: time.Now(), EncryptTo: encryptTo})
			if err != nil {
				return err
			}
			printMint(s, out, change)
			return nil
		},
	}
	f := c.Flags()
	f.StringVarP(&out, "output", "o", "", "directory to write to; it must be new, empty or this cluster's")
	_ = c.MarkFlagDirname("output")
	f.SetNormalizeFunc(outIsOutput)
	f.StringArrayVar(&encryptTo, "encrypt-to", nil, "encrypt the secrets to this age or ssh public key, or to those of this file (can be repeated)")
	return c
}

// outIsOutput keeps the former name of --output.
func outIsOutput(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	if name == "out" {
		name = "output"
	}
	return pflag.NormalizedName(name)
}

func printWarnings(s streams, doc *configs.ClusterFile) {
	for _, w := range doc.Warnings {
		fmt.Fprintf(s.Err, "%s (warning)\n", w)
	}
}

func printMint(s streams, dir string, change *mint.Change) {
	r := change.Record
	switch {
	case change.Nothing():
		s.note("%s: nothing changed: cluster %s, %s\n", dir, r.Fixed.Name, r.CAHash)
		return
	case change.Minted:
		s.note("minted cluster %s into %s: %s, %d masters, %d tokens\n", r.Fixed.Name, dir, r.CAHash, len(r.Fixed.Masters), len(r.Tokens))
		if len(r.Recipients) == 0 {
			s.note("The keys in %s are not encrypted: keep it as you would keep the masters themselves.\n", dir)
		}
	default:
		s.note("updated %s: cluster %s\n", dir, r.Fixed.Name)
	}
	apply, sites := "kubectl apply -f %s", "edgebake cluster sites %s"
	if len(r.Recipients) > 0 {
		apply, sites = "age --decrypt --identity KEY %s.age | kubectl apply -f -", sites+" --identity KEY --output DIR"
	}
	for _, n := range change.Added {
		s.note("  token for %s; if the cluster lives already, it must learn of it: "+apply+"\n", n, filepath.Join(dir, "tokens", n+".yaml"))
	}
	for _, n := range change.Removed {
		s.note("  %s is gone; if the cluster lives already, its token must be revoked there\n", n)
	}
	s.note("Next: "+sites+"\n", dir)
}

func newClusterSites(s streams) *cobra.Command {
	var out, inventory, identity string
	var birth time.Duration
	var words mint.Words
	var snapshot string
	var force bool
	c := &cobra.Command{
		Use:   "sites DIR",
		Short: "Write the Sites of a minted cluster's machines",
		Long: `Sites writes the Site of each machine of a cluster that edgebake cluster new
minted into DIR, to DIR/sites or to --output. A worker's Site holds its own token,
the hash of the CA, the masters and the VIP, and no key. A control-plane node's
holds the cluster's keys and the tokens, which the first of them publishes.

With --inventory all workers' Sites go into one Inventory instead, each with its
match. Control-plane nodes are never part of it: whoever has a copy of it must
not have the keys.

A cluster may be born as long as its tokens are valid after minting (tokenTTL).
Control-plane nodes whose Sites are written later, or that are flashed anew
then, only take a seat in a cluster that lives. --birth TIME says that etcd may
begin with nothing until then: for a cluster that was never switched on in time,
or whose data is given up. What was said is recorded in DIR/mint.json.

Two words are for control-plane nodes that are lost. --absent NAME: it is dead on
arrival, and the cluster is born without it. --continue-from NAME: more than half
of etcd's members are lost for good, and the cluster goes on with what NAME has;
all others join it anew; with --restore FILE it begins with that snapshot of etcd
instead, which it finds in its /var/lib/edgebake/snapshots or, named
etcd-snapshot.db, on a stick named EDGEBAKE. Stamp the Sites onto all of them, restart them, and once
the cluster lives stamp Sites without the words.`,
		Example: `  edgebake cluster sites shops
  edgebake cluster sites shops --inventory inventory.yaml
  edgebake cluster sites shops --identity key.txt --output sites
  edgebake cluster sites shops --birth 48h
  edgebake cluster sites shops --continue-from m1 --output lost`,
		Args: args(1, 1, "the directory of a minted cluster"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(c *cobra.Command, a []string) error {
			if out != "" && inventory != "" {
				return usageError{errors.New("--output and --inventory exclude each other: Sites, or one Inventory")}
			}
			if c.Flags().Changed("birth") && (birth <= 0 || birth > maxBirth) {
				return usageError{fmt.Errorf("--birth %s: give the time from now until the cluster must be born, at most %s, e.g. 48h", birth, maxBirth)}
			}
			for _, flag := range []string{"birth", "absent", "continue-from", "restore"} {
				if c.Flags().Changed(flag) && inventory != "" {
					return usageError{fmt.Errorf("--%s and --inventory exclude each other: an Inventory has no control-plane nodes", flag)}
				}
			}
			var id sealed.Identity
			var err error
			if identity != "" {
				if id, err = sealed.ReadIdentity(identity); err != nil {
					return err
				}
			}
			record, err := mint.Load(a[0])
			if err != nil {
				return err
			}
			now := time.Now()
			sites, nodeErr := mint.Sites(a[0], id, now)
			if nodeErr != nil && inventory != "" {
				return nodeErr
			}
			if out == "" && inventory == "" && len(record.Recipients) > 0 {
				return usageError{fmt.Errorf("the secrets in %s are encrypted, and Sites hold tokens and keys in clear: say where to write with --output", a[0])}
			}
			if inventory != "" {
				return writeInventory(s, inventory, sites, force)
			}
			if birth > 0 {
				if record, err = mint.AllowBirth(a[0], now, now.Add(birth)); err != nil {
					return err
				}
			}
			masters, err := mint.MasterSites(a[0], id, now)
			if err != nil {
				return err
			}
			if snapshot != "" {
				if words.Restore, err = sumOf(snapshot); err != nil {
					return err
				}
			}
			if err := words.Say(masters); err != nil {
				return err
			}
			sites = append(masters, sites...)
			if out == "" {
				out = filepath.Join(a[0], "sites")
			}
			// A token that has expired keeps no control-plane node from its Site.
			return errors.Join(writeSites(s, out, record.Fixed.Name, sites, force), nodeErr)
		},
	}
	f := c.Flags()
	f.StringVarP(&out, "output", "o", "", "directory to write to (default DIR/sites)")
	_ = c.MarkFlagDirname("output")
	f.SetNormalizeFunc(outIsOutput)
	f.StringVar(&inventory, "inventory", "", "write one Inventory to this file instead")
	_ = c.MarkFlagFilename("inventory", documentEndings...)
	f.StringVar(&identity, "identity", "", "file of the secret key that opens an encrypted DIR")
	_ = c.MarkFlagFilename("identity")
	f.DurationVar(&birth, "birth", 0, "let etcd begin with nothing until this long from now, e.g. 48h")
	f.StringSliceVar(&words.Absent, "absent", nil, "control-plane node that is dead on arrival; the cluster is born without it")
	f.StringVar(&words.ContinueFrom, "continue-from", "", "control-plane node whose data is kept where etcd's quorum is lost for good")
	f.StringVar(&snapshot, "restore", "", "snapshot of etcd that the node of --continue-from begins with")
	_ = c.MarkFlagFilename("restore", "db")
	f.BoolVarP(&force, "force", "f", false, "replace files that are there")
	return c
}

// sumOf is the SHA-256 of a file.
func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("reading the snapshot: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("reading the snapshot %s: %w", path, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// maxBirth bounds --birth: the shorter it is, the sooner masters that are
// flashed anew can lose nothing.
const maxBirth = 31 * 24 * time.Hour

func writeInventory(s streams, file string, sites []mint.NodeSite, force bool) error {
	text, err := mint.Inventory(sites)
	if err != nil {
		return err
	}
	if err := builder.CheckFile(file, force); err != nil {
		return err
	}
	if err := builder.WriteFile(file, text, 0o600); err != nil {
		return err
	}
	s.note("wrote %s: %d nodes\n", file, len(sites))
	return nil
}

// writeNew writes a secret file, whole. Without force it replaces none, also
// where one comes to be meanwhile.
func writeNew(path string, text []byte, force bool) error {
	f, err := disk.Create(path, 0o600, force)
	if err != nil {
		return err
	}
	defer f.Discard()
	if _, err := f.Write(text); err != nil {
		return fmt.Errorf("writing %s: %w", path, disk.Explain(err, filepath.Dir(path)))
	}
	return f.Commit()
}

func writeSites(s streams, dir, cluster string, sites []mint.NodeSite, force bool) error {
	var errs []error
	texts := map[string][]byte{}
	for _, site := range sites {
		text, err := configs.EncodeSlot(site.Site)
		if err != nil {
			return err
		}
		p := filepath.Join(dir, site.Name+".yaml")
		texts[p] = append([]byte(site.Header(cluster)), text...)
		old, err := os.ReadFile(p)
		switch {
		case err == nil && string(old) == string(texts[p]):
			delete(texts, p) // it is there
		case err == nil && !force:
			errs = append(errs, fmt.Errorf("%s exists and differs; --force replaces it", p))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("writing Sites: %w", err)
	}
	names := make([]string, len(sites))
	for i, site := range sites {
		p := filepath.Join(dir, site.Name+".yaml")
		names[i] = site.Name
		if text, ok := texts[p]; ok {
			if err := writeNew(p, text, force); err != nil {
				return err
			}
		}
	}
	s.note("wrote %d Sites to %s: %s\n", len(sites), dir, strings.Join(names, ", "))
	if until := sites[0].Expires; until.IsZero() {
		s.note("The cluster can no longer be born with them: control-plane nodes only take a seat in one that lives (--birth).\n")
	} else {
		s.note("Those of control-plane nodes hold the cluster's keys. Until %s the cluster may be born with them.\n", until.Format(time.RFC3339))
	}
	return nil
}
