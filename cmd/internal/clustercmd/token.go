package clustercmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/spf13/cobra"
)

func newClusterToken(s console.Streams) *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:   "token",
		Short: "Make, list, check and revoke join tokens of a running cluster",
		Long: `Token works on the bootstrap tokens of any running kubeadm cluster. A Site
contains its token in credentials.token.`,
		Example: `  edgebake cluster token mint --node shop-7 --output site.yaml
  edgebake cluster token list`,
	}, newTokenMint(s), newTokenList(s), newTokenCheck(s), newTokenRevoke(s))
}

// tokenMint are the flags of token mint.
type tokenMint struct {
	cluster   cli.ClusterFlags
	node, vip string
	ttl       time.Duration
	output    string
	force     bool
}

func newTokenMint(s console.Streams) *cobra.Command {
	m := tokenMint{ttl: 24 * time.Hour}
	c := &cobra.Command{
		Use:   "mint",
		Short: "Make a token and print the Site that joins with it",
		Long: `Mint makes a bootstrap token and prints a Site with the token, and with the API
servers (masters), the endpoint and the hash of the CA from the cluster. Add the
fields of the machine: network, users, node type. The output holds the token; with
--output it goes to a file that only you can read.`,
		Example: `  edgebake cluster token mint --node shop-7 --output site.yaml
  edgebake cluster token mint --ttl 72h --vip 10.103.97.2`,
		Args: cli.Args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			if err := m.check(); err != nil {
				return err
			}
			return m.run(c.Context(), s)
		},
	}
	m.cluster.Declare(c, kubeconfigUsage)
	f := c.Flags()
	cli.FileFlag(c, &m.output, "output", "write the Site to this file, with mode 0600 (default: standard output)", documents.Extensions...)
	f.BoolVar(&m.force, "force", false, "replace an existing file")
	f.StringVar(&m.node, "node", "", "name of the node that the token is for; it becomes the Site's nodeName")
	f.Var((*cli.Span)(&m.ttl), "ttl", "how long the token is valid, e.g. 12h or 30d")
	f.StringVar(&m.vip, "vip", "", "VIP to write into the Site (default: 10.103.97.2, the default of Sites)")
	return c
}

func (m *tokenMint) check() error {
	if m.ttl < time.Minute || m.ttl > 365*24*time.Hour {
		return cli.Usage(fmt.Errorf("--ttl %s: must be from 1m to 8760h", m.ttl))
	}
	if m.node != "" {
		if err := forms.CheckNodeName(m.node); err != nil {
			return cli.Usage(fmt.Errorf("--node: %w", err))
		}
	}
	if m.output == "-" {
		m.output = ""
	}
	if m.output == "" {
		return nil
	}
	return file.NotInput("--output", m.output, "the kubeconfig", m.cluster.Kubeconfig)
}

// run creates the token only after it has prepared the file, so that no token is created that
// cannot be stored.
func (m *tokenMint) run(ctx context.Context, s console.Streams) error {
	client, err := m.cluster.Open()
	if err != nil {
		return err
	}
	to := s.Bytes()
	var out *file.Output
	if m.output != "" {
		if out, err = file.Create(m.output, 0o600, m.force); err != nil {
			return err
		}
		defer out.Discard()
		to = out
	}
	minted, err := client.MintToken(ctx, cluster.MintOptions{Node: m.node, TTL: m.ttl, Now: time.Now(), VIP: m.vip})
	if err != nil {
		return err
	}
	text, err := configs.EncodeSlot(minted.Site)
	if err != nil {
		return err
	}
	s.Hint("made token %s, valid until %s\n", minted.ID, minted.Expires.Format(time.RFC3339))
	if _, err := to.Write(text); err != nil {
		return fmt.Errorf("writing the Site: %w\n  token %s already exists; to remove it, run edgebake cluster token revoke %[2]s", err, minted.ID)
	}
	if out != nil {
		return out.Commit()
	}
	if s.ReadByOthers() {
		s.Warn("the output contains the token, and other users can read its file: run chmod 600 on it, or use --output FILE")
	}
	return nil
}

func newTokenList(s console.Streams) *cobra.Command {
	var output console.Form
	c := onCluster(&cobra.Command{
		Use:   "list",
		Short: "List the tokens, without their secrets",
		Example: `  edgebake cluster token list
  edgebake cluster token list -o json`,
	}, func(ctx context.Context, client *cluster.Client, _ []string) error {
		all, err := client.Tokens(ctx, time.Now())
		if err != nil {
			return err
		}
		return output.Print(s, all, func() {
			rows := [][]string{{"ID", "EXPIRES", "USAGES", "DESCRIPTION", "PROBLEMS"}}
			for _, t := range all {
				var problems []string
				for _, p := range t.Problems {
					problems = append(problems, p.Error())
				}
				rows = append(rows, []string{t.ID, cmp.Or(timeText(t.Expires), "never"), strings.Join(t.Usages, ","), strings.Join(strings.Fields(t.Description), " "), strings.Join(problems, "; ")})
			}
			console.Table(s.Out, rows...)
		})
	})
	output.Flag(c)
	return c
}

func newTokenCheck(s console.Streams) *cobra.Command {
	var tokenFile string
	c := onCluster(&cobra.Command{
		Use:   "check [TOKEN]",
		Short: "Check whether a node could join with a token",
		Long: `Check reports why no node could join with a token: it does not exist, has expired,
lacks a usage or the group, has another secret, does not sign cluster-info, or the API
server rejects a request that check makes with it.
TOKEN is the whole token or its ID. Every user of this computer can read command
lines: pass a whole token with --token-file.`,
		Example: `  edgebake cluster token check abcdef
  edgebake cluster token check --token-file token`,
		Args: func(c *cobra.Command, a []string) error {
			if len(a) < 2 && len(a) > 0 == (tokenFile != "") {
				return cli.Usage(errors.New("name one token: TOKEN, or the file that contains it (--token-file, - for standard input)"))
			}
			return cli.Args(0, 1, "a token or its id")(c, a)
		},
	}, func(ctx context.Context, client *cluster.Client, a []string) error {
		if tokenFile != "" {
			text, err := (&cli.DocumentFlags{}).Reader(s).ReadSecret(tokenFile)
			if err != nil {
				return fmt.Errorf("reading the token: %w", err)
			}
			a = []string{text}
		}
		t, err := client.CheckToken(ctx, a[0], time.Now())
		if err != nil {
			return err
		}
		var errs []error
		for _, p := range t.Problems {
			errs = append(errs, fmt.Errorf("checking token %s: %w", t.ID, p))
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
		until := "forever"
		if !t.Expires.IsZero() {
			until = "until " + timeText(t.Expires)
		}
		s.Note("%s: ok, valid %s\n", t.ID, until)
		return nil
	})
	cli.FileFlag(c, &tokenFile, "token-file", "read the token from this file, - for standard input")
	return c
}

func newTokenRevoke(s console.Streams) *cobra.Command {
	c := onCluster(&cobra.Command{
		Use:   "revoke TOKEN...",
		Short: "Remove tokens, so that nobody joins with them",
		Long: `Revoke removes tokens, each given whole or by its ID. Nodes that have joined
with them stay.`,
		Example: `  edgebake cluster token revoke abcdef`,
		Args:    cli.Args(1, -1, "at least one token or its id"),
	}, func(ctx context.Context, client *cluster.Client, a []string) error {
		var errs []error
		for _, token := range a {
			if err := client.RevokeToken(ctx, token); err != nil {
				errs = append(errs, err)
				continue
			}
			id, _, _ := strings.Cut(token, ".")
			s.Note("revoked %s\n", id)
		}
		return errors.Join(errs...)
	})
	return c
}
