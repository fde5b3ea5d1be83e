package main

import (
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/configs"
	"github.com/spf13/cobra"
)

// way is how a command finds a living cluster.
type way struct{ kubeconfig, context string }

func (w *way) flags(c *cobra.Command) {
	c.Flags().StringVar(&w.kubeconfig, "kubeconfig", "", "kubeconfig of the cluster (default $KUBECONFIG, else ~/.kube/config)")
	_ = c.MarkFlagFilename("kubeconfig")
	c.Flags().StringVar(&w.context, "context", "", "context of the kubeconfig (default its current one)")
}

func (w *way) open() (*cluster.Client, error) { return cluster.Open(w.kubeconfig, w.context) }

func newClusterToken(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "token",
		Short: "Make, list, check and revoke join tokens of a living cluster",
		Long: `Token works on the bootstrap tokens of a living cluster, whoever made it: those
that Sites carry as credentials.token.`,
		Example: `  edgebake cluster token mint --node shop-7 > site.yaml
  edgebake cluster token list`,
		Args: subcommand,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newTokenMint(s), newTokenList(s), newTokenCheck(s), newTokenRevoke(s))
	return c
}

func newTokenMint(s streams) *cobra.Command {
	var w way
	var node, vip string
	var ttl time.Duration
	c := &cobra.Command{
		Use:   "mint",
		Short: "Make a token and print the Site that joins with it",
		Long: `Mint makes a bootstrap token and prints a Site with it: masters, endpoint, the
hash of the CA and the token, as the cluster itself has them. Add what is the
machine's: network, users, node type. The output holds the token: keep it secret.`,
		Example: `  edgebake cluster token mint --node shop-7 > site.yaml
  edgebake cluster token mint --ttl 72h --vip 10.103.97.2`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			if ttl < time.Minute || ttl > 365*24*time.Hour {
				return usageError{fmt.Errorf("--ttl %s: must be from 1m to 8760h", ttl)}
			}
			if node != "" {
				if err := configs.CheckNodeName(node); err != nil {
					return usageError{fmt.Errorf("--node: %w", err)}
				}
			}
			client, err := w.open()
			if err != nil {
				return err
			}
			m, err := client.MintToken(c.Context(), cluster.MintOptions{Node: node, TTL: ttl, Now: time.Now(), VIP: vip})
			if err != nil {
				return err
			}
			text, err := configs.EncodeSlot(m.Site)
			if err != nil {
				return err
			}
			fmt.Fprintf(s.Err, "minted token %s, valid until %s\n", m.ID, m.Expires.Format(time.RFC3339))
			_, err = s.Out.Write(text)
			return err
		},
	}
	w.flags(c)
	f := c.Flags()
	f.StringVar(&node, "node", "", "name of the node that the token is for; it becomes the Site's nodeName")
	f.DurationVar(&ttl, "ttl", 24*time.Hour, "how long the token is valid")
	f.StringVar(&vip, "vip", "", "VIP to write into the Site (default: the Site's own, 10.103.97.2)")
	return c
}

func newTokenList(s streams) *cobra.Command {
	var w way
	var output string
	c := &cobra.Command{
		Use:   "list",
		Short: "List the tokens, without their secrets",
		Example: `  edgebake cluster token list
  edgebake cluster token list -o json`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := w.open()
			if err != nil {
				return err
			}
			all, err := client.Tokens(c.Context(), time.Now())
			if err != nil {
				return err
			}
			return printAs(s, output, all, func() {
				t := tabwriter.NewWriter(s.Out, 0, 0, 2, ' ', 0)
				fmt.Fprintln(t, "ID\tEXPIRES\tUSAGES\tDESCRIPTION\tPROBLEMS")
				for _, token := range all {
					expires := "never"
					if !token.Expires.IsZero() {
						expires = token.Expires.Format(time.RFC3339)
					}
					fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", token.ID, expires, strings.Join(token.Usages, ","), token.Description, strings.Join(token.Problems, "; "))
				}
				t.Flush()
			})
		},
	}
	w.flags(c)
	outputFlag(c, &output)
	return c
}

func newTokenCheck(s streams) *cobra.Command {
	var w way
	c := &cobra.Command{
		Use:   "check TOKEN",
		Short: "Say whether a node could join with a token",
		Long: `Check says why no node could join with a token: it is not there, expired, lacks
a usage or the group, has another secret, does not sign cluster-info, or is not
let in by the API server, whose rights for it are asked for in its own name.
TOKEN is the whole token or its id.`,
		Example: `  edgebake cluster token check abcdef`,
		Args:    args(1, 1, "a token or its id"),
		RunE: func(c *cobra.Command, a []string) error {
			client, err := w.open()
			if err != nil {
				return err
			}
			t, err := client.CheckToken(c.Context(), a[0], time.Now())
			if err != nil {
				return err
			}
			var errs []error
			for _, p := range t.Problems {
				errs = append(errs, fmt.Errorf("checking token %s: %s", t.ID, p))
			}
			if err := errors.Join(errs...); err != nil {
				return err
			}
			until := "for ever"
			if !t.Expires.IsZero() {
				until = "until " + t.Expires.Format(time.RFC3339)
			}
			fmt.Fprintf(s.Out, "%s: ok, valid %s\n", t.ID, until)
			return nil
		},
	}
	w.flags(c)
	return c
}

func newTokenRevoke(s streams) *cobra.Command {
	var w way
	c := &cobra.Command{
		Use:   "revoke TOKEN...",
		Short: "Remove tokens, so that nobody joins with them",
		Long: `Revoke removes tokens, each given whole or by its id. Nodes that have joined
with them stay.`,
		Example: `  edgebake cluster token revoke abcdef`,
		Args:    args(1, -1, "at least one token or its id"),
		RunE: func(c *cobra.Command, a []string) error {
			client, err := w.open()
			if err != nil {
				return err
			}
			var errs []error
			for _, token := range a {
				if err := client.RevokeToken(c.Context(), token); err != nil {
					errs = append(errs, err)
					continue
				}
				id, _, _ := strings.Cut(token, ".")
				fmt.Fprintf(s.Out, "revoked %s\n", id)
			}
			return errors.Join(errs...)
		},
	}
	w.flags(c)
	return c
}
