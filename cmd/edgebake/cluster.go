package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/cluster/mint"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/slot"
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
	var out, identity string
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
  manifests/      the Cluster's manifests, as they are now
  admin.conf      an administrator's kubeconfig, with a context for each API server (master)
  mint.json       what the directory says of itself; no secret
  cluster.yaml    the document

Whoever has DIR has the cluster: it is readable by you alone, and with
--encrypt-to its secrets are encrypted. Keep a copy.

The same command again changes nothing, unless a certificate ends soon: admin.conf
is made anew in the second half of its year, and each CA is issued again, with its
own key, in the last two of its ten years. Where the secrets are encrypted, that
needs --identity. Nodes that the document has since got
receive a token; those it lost have theirs removed from DIR (edgebake cluster
token revoke removes it from the living cluster). A change in what the keys or
the machines already say is an error: name, endpoint, VIP, port, networks, DNS
domain, masters, or a lower version of Kubernetes.`,
		Example: `  edgebake cluster new cluster.yaml --output shops
  edgebake cluster new cluster.yaml --output sealed --encrypt-to team.pub`,
		Args: args(1, 1, "one Cluster document"),
		RunE: func(c *cobra.Command, a []string) error {
			if out == "" {
				return usageError{errors.New("edgebake cluster new requires a directory: --output DIR; see edgebake cluster new --help")}
			}
			data, err := readInput(s, a[0])
			if err != nil {
				return err
			}
			read, err := configs.Read(a[0], data)
			if err != nil {
				return err
			}
			doc, manifests, err := readCluster(read)
			if err != nil {
				return err
			}
			printWarnings(s, doc)
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
	f.StringVarP(&out, "output", "o", "", "directory to write to; it must be new, empty or this cluster's")
	_ = c.MarkFlagDirname("output")
	f.SetNormalizeFunc(outIsOutput)
	f.StringVar(&identity, "identity", "", "file of the secret key that opens an encrypted DIR, to renew certificates in it")
	_ = c.MarkFlagFilename("identity")
	f.StringArrayVar(&encryptTo, "encrypt-to", nil, "encrypt the secrets to this age or ssh public `key`, or to those of this file (can be repeated)")
	takesDocument(s, c, 0, false)
	return c
}

// outIsOutput keeps the former name of --output.
func outIsOutput(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	if name == "out" {
		name = "output"
	}
	return pflag.NormalizedName(name)
}

func printWarnings(s streams, doc *clusterdoc.File) {
	s.warn(doc.Warnings)
}

func printMint(s streams, dir string, change *mint.Change) {
	r := change.Record
	for _, e := range change.Ending {
		fmt.Fprintf(s.Err, "WARNING: %s\n", endingText(dir, e))
		fmt.Fprintf(s.Err, "  run the command again with --identity KEY to renew it\n")
	}
	switch {
	case change.Nothing():
		s.note("%s: nothing changed: cluster %s, %s\n", dir, r.Fixed.Name, r.CAHash)
		return
	case change.Minted:
		s.note("minted cluster %s into %s: %s, %s, %s\n", r.Fixed.Name, dir, r.CAHash, configs.Count(len(r.Fixed.Masters), "control-plane node"), configs.Count(len(r.Tokens), "token"))
		if len(r.Recipients) == 0 {
			s.note("The keys in %s are not encrypted: whoever reads it has the cluster. Keep it as safe as the machines (--encrypt-to encrypts it).\n", dir)
		}
	default:
		s.note("updated %s: cluster %s\n", dir, r.Fixed.Name)
	}
	apply, sites := "kubectl apply -f %s", "edgebake cluster sites %s"
	if len(r.Recipients) > 0 {
		apply, sites = "age --decrypt --identity KEY %s.age | kubectl apply -f -", sites+" --identity KEY --output DIR"
	}
	for _, f := range change.Renewed {
		s.note("  renewed %s\n", f)
	}
	if len(change.Renewed) > 1 {
		s.note("  The CAs have their former keys: no machine needs to join again. Stamp the Sites of the control-plane nodes and restart these one by one; workers learn the CA of them.\n")
	}
	for _, n := range change.Added {
		s.note("  token for %s; if the cluster lives already, it must learn of it: "+apply+"\n", n, filepath.Join(dir, "tokens", n+".yaml"))
	}
	for _, n := range change.Removed {
		s.note("  %s is gone; if the cluster lives already, its token must be revoked there\n", n)
	}
	s.note("Next: "+sites+"\n", dir)
}

// endingText says that a certificate of dir ends, or has ended.
func endingText(dir string, e mint.Ending) string {
	return fmt.Sprintf("%s is valid until %s", filepath.Join(dir, filepath.FromSlash(e.File)), e.End.UTC().Format(time.DateOnly))
}

func newClusterSites(s streams) *cobra.Command {
	var o sitesOptions
	c := &cobra.Command{
		Use:   "sites DIR",
		Short: "Write the Sites of a minted cluster's machines",
		Long: `Sites writes the Site of each machine of a cluster that edgebake cluster new
minted into DIR, to DIR/sites or to --output. A worker's Site holds its own token,
the hash of the CA, the API servers (masters) and the VIP, and no key. A control-plane node's
holds the cluster's keys, and the tokens and manifests, which the first of them
publishes.

With --inventory all workers' Sites go into one Inventory instead, each with its
match. Control-plane nodes are never part of it: whoever has a copy of it must
not have the keys.

A cluster may be born as long as its tokens are valid after minting (tokenTTL).
Control-plane nodes whose Sites are written later, or that are flashed again
then, only take a seat in a cluster that lives. --birth TIME says that etcd may
begin with nothing until then: for a cluster that was never switched on in time,
or whose data is given up. Workers whose tokens have expired get new ones. What was
said is recorded in DIR/mint.json.

Two words are for control-plane nodes that are lost. --absent NAME: it is dead on
arrival, and the cluster is born without it. --continue-from NAME: more than half
of etcd's members are lost for good, and the cluster continues with what NAME has;
all others join it again; with --restore FILE it begins with that snapshot of etcd
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
			if err := o.check(c); err != nil {
				return err
			}
			return o.write(s, a[0], time.Now())
		},
	}
	f := c.Flags()
	f.StringVarP(&o.out, "output", "o", "", "directory to write to (default DIR/sites)")
	_ = c.MarkFlagDirname("output")
	f.SetNormalizeFunc(outIsOutput)
	f.StringVar(&o.inventory, "inventory", "", "write one Inventory to this file instead")
	_ = c.MarkFlagFilename("inventory", documentEndings...)
	f.StringVar(&o.identity, "identity", "", "file of the secret key that opens an encrypted DIR")
	_ = c.MarkFlagFilename("identity")
	f.Var((*span)(&o.birth), "birth", "let etcd begin with nothing until this long from now, e.g. 48h")
	f.StringSliceVar(&o.words.Absent, "absent", nil, "control-plane `node` that is dead on arrival; the cluster is born without it")
	f.StringVar(&o.words.ContinueFrom, "continue-from", "", "control-plane node whose data is kept where etcd's quorum is lost for good")
	f.StringVar(&o.snapshot, "restore", "", "snapshot of etcd that the node of --continue-from begins with")
	_ = c.MarkFlagFilename("restore", "db")
	f.BoolVar(&o.force, "force", false, "replace files that are there")
	return c
}

// sitesOptions say which Sites of a minted cluster are written, and where.
type sitesOptions struct {
	out, inventory string // a directory of Sites, or one Inventory
	identity       string
	birth          time.Duration
	words          mint.Words
	snapshot       string
	force          bool
}

// check says all that is wrong with the flags.
func (o *sitesOptions) check(c *cobra.Command) error {
	var errs []error
	if c.Flags().Changed("birth") && (o.birth <= 0 || o.birth > maxBirth) {
		errs = append(errs, usageError{fmt.Errorf("--birth %s: give the time from now until the cluster must be born, at most %d days, e.g. 48h", (*span)(&o.birth), maxBirth/(24*time.Hour))})
	}
	if o.inventory != "" {
		errs = append(errs, rejectIdle(c,
			idle{flags: []string{"output"}, purpose: "Sites, and --inventory writes one Inventory to the file that it names: choose one"},
			idle{flags: []string{"birth", "absent", "continue-from", "restore"}, purpose: "control-plane nodes, and an Inventory has none: leave --inventory out"}))
	}
	return errors.Join(errs...)
}

// write writes the Sites of the cluster in dir, or the Inventory.
func (o *sitesOptions) write(s streams, dir string, now time.Time) error {
	var id sealed.Identity
	var err error
	if o.identity != "" {
		if id, err = sealed.ReadIdentity(o.identity); err != nil {
			return err
		}
	}
	record, err := mint.Load(dir)
	if err != nil {
		return err
	}
	if err := judgeWords(o.words, o.snapshot, record.Fixed.Masters); err != nil {
		return err
	}
	endings, err := mint.Endings(dir, now)
	if err != nil {
		return err
	}
	for _, e := range endings {
		fmt.Fprintf(s.Err, "WARNING: %s: `edgebake cluster new` with the Cluster's document and --output %s renews it\n", endingText(dir, e), dir)
	}
	if o.birth > 0 {
		renewed, err := mint.RenewTokens(dir, id, now)
		if err != nil {
			return err
		}
		if len(renewed) > 0 {
			s.note("made new tokens for %s, whose tokens had expired: write their Sites to them again\n", configs.Count(len(renewed), "node"))
		}
	}
	workers, nodeErr := mint.Sites(dir, id, now)
	if o.inventory != "" {
		if nodeErr != nil {
			return nodeErr
		}
		return writeInventory(s, o.inventory, workers, o.force)
	}
	if o.out == "" && len(record.Recipients) > 0 {
		return usageError{fmt.Errorf("the secrets in %s are encrypted, and Sites hold tokens and keys in clear: say where to write with --output", dir)}
	}
	masters, err := o.masters(s, dir, id, now, record.WordTime(now))
	if err != nil {
		return err
	}
	sites, out := append(masters, workers...), cmp.Or(o.out, filepath.Join(dir, "sites"))
	files, err := judgeSites(out, record.Fixed.Name, sites, o.force)
	if err != nil {
		return err
	}
	noted := func() error {
		if o.words.ContinueFrom != "" {
			if err := mint.NoteWord(dir, o.words.Said); err != nil {
				return err
			}
		}
		if o.birth == 0 {
			return nil
		}
		_, err := mint.AllowBirth(dir, now, o.words.Birth)
		return err
	}
	if err := writeSites(s, out, sites, files, o.force, noted); err != nil {
		return errors.Join(err, nodeErr)
	}
	sayFormer(s, out, record)
	// A token that has expired keeps no control-plane node from its Site.
	return nodeErr
}

// sayFormer names the Sites of nodes that the cluster has lost since they were written:
// each holds a token still.
func sayFormer(s streams, dir string, record *mint.Record) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return // a directory's name that cannot be a pattern
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // it is not one that edgebake wrote
		}
		if node := mint.HeaderNode(text, record.Fixed.Name); node != "" && !slices.ContainsFunc(record.Tokens, func(t mint.Token) bool { return t.Node == node }) {
			s.note("%s is the Site of %s, which the cluster no longer has: remove it; on the living cluster, `edgebake cluster remove %s` removes the node and its token\n", f, node, node)
		}
	}
}

// masters are the Sites of the control-plane nodes, with the words for them.
func (o *sitesOptions) masters(s streams, dir string, id sealed.Identity, now, said time.Time) ([]mint.NodeSite, error) {
	masters, err := mint.ControlPlaneSites(dir, id, now)
	if err != nil {
		return nil, err
	}
	if o.snapshot != "" {
		snapshot, err := mint.ReadSnapshot(dir, o.snapshot)
		if err != nil {
			return nil, err
		}
		if !snapshot.Ours {
			fmt.Fprintf(s.Err, "WARNING: the CA of %s is not found in %s: unless the cluster encrypts its ConfigMaps, it is a snapshot of another cluster\n", dir, o.snapshot)
		}
		o.words.Restore = snapshot.SHA256
	}
	if o.birth > 0 {
		o.words.Birth = now.Add(o.birth)
	}
	o.words.Said = said
	return masters, o.words.Say(masters)
}

// judgeWords reports names that no control-plane node has, in the words of the command
// line: each Site would say it again, in its own.
func judgeWords(w mint.Words, snapshot string, masters []mint.ControlPlaneNode) error {
	var names []string
	for _, m := range masters {
		names = append(names, m.Name)
	}
	var errs []error
	known := func(flag, name string) {
		if name != "" && !slices.Contains(names, name) {
			errs = append(errs, fmt.Errorf("--%s %s: the cluster has no such control-plane node; it has %s", flag, name, strings.Join(names, ", ")))
		}
	}
	for _, name := range w.Absent {
		known("absent", name)
	}
	known("continue-from", w.ContinueFrom)
	if !slices.ContainsFunc(names, func(n string) bool { return !slices.Contains(w.Absent, n) }) {
		errs = append(errs, errors.New("--absent names every control-plane node: one must be left for the cluster to be born on"))
	}
	if snapshot != "" && w.ContinueFrom == "" {
		errs = append(errs, errors.New("--restore needs --continue-from: the control-plane node that begins with the snapshot"))
	}
	return errors.Join(errs...)
}

// maxBirth bounds --birth: the shorter it is, the sooner control-plane nodes
// that are flashed again can lose nothing.
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
	s.note("wrote %s: %s\n", file, configs.Count(len(sites), "node"))
	return nil
}

// begin writes a secret file but for its name. Without force it replaces none,
// also where one comes to be meanwhile.
func begin(site siteFile, force bool) (*disk.Output, error) {
	f, err := disk.Create(site.path, 0o600, force)
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(site.text); err != nil {
		f.Discard()
		return nil, fmt.Errorf("writing %s: %w", site.path, disk.Explain(err, filepath.Dir(site.path)))
	}
	return f, nil
}

// hasRoom says what to do about manifests that a Site has no room for.
func hasRoom(site mint.NodeSite, size int) error {
	limit := int(slot.SizeLimit(ondisk.SlotSite))
	if size <= limit {
		return nil
	}
	fix := "give the machine fewer settings"
	if keys := site.Site.Credentials.Keys; keys != nil {
		fix = fmt.Sprintf("%d KiB are the Cluster's manifests, packed, and %d its nodes' tokens: take large manifests out of the Cluster, and `kubectl apply` them once it lives",
			len(keys.Manifests.Reveal())>>10, len(keys.Objects.Reveal())>>10)
	}
	return fmt.Errorf("writing the Site of %s: it has %d KiB, and a slot has room for %d: %s", site.Name, size>>10, limit>>10, fix)
}

// siteFile is a Site's text, and where it goes.
type siteFile struct {
	path string
	text []byte
	// birth: it says until when the cluster may be born.
	birth bool
}

// judgeSites returns the files that are to be written to the directory: those that
// differ from what is there.
func judgeSites(dir, cluster string, sites []mint.NodeSite, force bool) ([]siteFile, error) {
	var files []siteFile
	var errs []error
	for _, site := range sites {
		text, err := configs.EncodeSlot(site.Site)
		if err != nil {
			return nil, err
		}
		f := siteFile{filepath.Join(dir, site.Name+".yaml"), append([]byte(site.Header(cluster)), text...), site.Site.NodeType == configs.NodeControlPlane}
		errs = append(errs, hasRoom(site, len(f.text)))
		old, err := os.ReadFile(f.path)
		switch {
		case err == nil && bytes.Equal(old, f.text):
			continue
		case err == nil && !force:
			errs = append(errs, fmt.Errorf("%s exists and differs; --force replaces it", f.path))
		case err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR): // that is said of the directory
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w: remove it, or name another directory with --output", site.Name, err))
		}
		files = append(files, f)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return files, nil
}

// writeSites calls noted once nothing can be rejected any more, and before a file
// has its name that says until when the cluster may be born.
func writeSites(s streams, dir string, sites []mint.NodeSite, files []siteFile, force bool, noted func() error) error {
	undo, err := file.MakeDir(dir, 0o700)
	if err != nil {
		return fmt.Errorf("writing Sites: %w", err)
	}
	defer undo()
	var born []*disk.Output
	defer func() {
		for _, f := range born {
			f.Discard()
		}
	}()
	for _, f := range files {
		if !f.birth {
			continue
		}
		begun, err := begin(f, force)
		if err != nil {
			return err
		}
		born = append(born, begun)
	}
	if err := noted(); err != nil {
		return err
	}
	for _, f := range born {
		if err := f.Commit(); err != nil {
			return err
		}
	}
	for _, f := range files {
		if f.birth {
			continue
		}
		begun, err := begin(f, force)
		if err == nil {
			err = begun.Commit()
		}
		if err != nil {
			return err
		}
	}
	names := make([]string, len(sites))
	for i, site := range sites {
		names[i] = site.Name
	}
	const most = 10
	if more := len(names) - most; more > 0 {
		names = append(names[:most], fmt.Sprintf("and %d more", more))
	}
	s.note("wrote %s to %s: %s\n", configs.Count(len(sites), "Site"), dir, strings.Join(names, ", "))
	if c := sites[0].Site.ControlPlane; c != nil && c.ContinueFrom != "" {
		with := "its own data"
		if c.Restore != "" {
			with = "the snapshot with the SHA-256 " + c.Restore
		}
		s.note("Those of control-plane nodes hold the cluster's keys. With them %s continues with %s, and all others join it.\n", c.ContinueFrom, with)
	} else if until := sites[0].Expires; until.IsZero() {
		s.note("The cluster can no longer be born with them: control-plane nodes only take a seat in one that lives (--birth).\n")
	} else {
		s.note("Those of control-plane nodes hold the cluster's keys. Until %s the cluster may be born with them.\n", until.Format(time.RFC3339))
	}
	return nil
}
