package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/openyurt"
)

// printStep prints the result of a step.
func printStep(w io.Writer) func(run.Step) {
	return func(s run.Step) {
		if s.Detail != "" {
			fmt.Fprintf(w, "%-16s %s: %s\n", s.Name, s.Status, s.Detail)
			return
		}
		fmt.Fprintf(w, "%-16s %s\n", s.Name, s.Status)
	}
}

func newConvert(m target, log io.Writer) *cobra.Command {
	var o hub.ConvertOptions
	var nodeType string
	cmd := &cobra.Command{
		Use: "convert", Short: "Turn this running native node into an OpenYurt node", Args: noArgs,
		Long: `convert puts yurthub between kubelet and the API servers and labels the Node.
Pods keep running; pods that use the API server connect to yurthub once they are
recreated. Every step is checked. If a step fails, the earlier ones are undone. A
record of the change is in /var/log/edgebake. convert works on any node that was
joined with kubeadm and has yurthub's program at ` + openyurt.Program + `.`,
		Example: "  firstboot convert --nodepool-name shanghai\n  firstboot convert --nodepool-name core --node-type cloud --server-addr https://api.example:6443",
		RunE: func(cmd *cobra.Command, _ []string) error {
			var errs []error
			switch nodeType {
			case configs.NodeEdge, configs.NodeCloud:
				o.Cloud = nodeType == configs.NodeCloud
			default:
				errs = append(errs, fmt.Errorf("unknown node type %q: want edge or cloud", nodeType))
			}
			if o.NodePool == "" {
				errs = append(errs, errors.New("--nodepool-name is required: "+openyurt.Unpooled))
			}
			errs = append(errs, hub.CheckServers(o.Servers), configs.CheckHub(o.NodePool, o.Namespace, o.LBMode, o.LocalClients, o.Extra))
			if err := errors.Join(errs...); err != nil {
				return usageError{err}
			}
			if err := m.needRoot("convert", "changes this machine"); err != nil {
				return err
			}
			m.insist()
			err := hub.Convert(cmd.Context(), m.env(log), o, printStep(cmd.OutOrStdout()))
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "converted. If this machine has a Site, set nodeType: %s and nodePool: %s in it.\n", nodeType, o.NodePool)
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.NodePool, "nodepool-name", "", "node pool of the node")
	f.StringVar(&nodeType, "node-type", configs.NodeEdge, "edge (autonomous) or cloud (always online)")
	f.StringSliceVar(&o.Servers, "server-addr", nil, "API servers for yurthub, https://host:port; first the one whose address never changes (default: kubelet's current server, and the Site's masters)")
	f.StringVar(&o.Namespace, "namespace", openyurt.DefaultNamespace, "namespace of yurthub's settings in the cluster")
	f.StringVar(&o.LBMode, "lb-mode", openyurt.LBPriority, strings.Join(openyurt.LBModes(), " or "))
	f.BoolVar(&o.OpenPort, "open-port", false, "leave port "+openyurt.PoolPort+" reachable from outside the node")
	f.IntSliceVar(&o.LocalClients, "local-client", nil, "ID of a user other than root whose processes in the node's network may use yurthub (may be repeated)")
	f.StringArrayVar(&o.Extra, "yurthub-arg", nil, "further argument of yurthub, --name=value (may be repeated)")
	return cmd
}

func newRevert(m target, log io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "revert", Short: "Turn this OpenYurt node into a native node again", Args: noArgs,
		Example: "  firstboot revert",
		Long: `revert redirects kubelet to the API servers, stops yurthub, and removes yurthub's
settings and the Node's labels for OpenYurt. Pods keep running. Every step is
checked. If a step fails, the earlier ones are undone. A record of the change is in
/var/log/edgebake. A node whose yurthub is a static pod (before ` + openyurt.Release(openyurt.FirstUnit) + `) has no
certificate of its own and cannot be reverted: reset it and join it again.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := m.needRoot("revert", "changes this machine"); err != nil {
				return err
			}
			m.insist()
			err := hub.Revert(cmd.Context(), m.env(log), printStep(cmd.OutOrStdout()))
			if err == nil {
				fmt.Fprintln(cmd.OutOrStdout(), "reverted.")
			}
			return err
		},
	}
}

func newReset(m target, log io.Writer) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "reset", Short: "Take this machine out of its cluster", Args: noArgs,
		Example: "  firstboot reset --yes",
		Long: `reset undoes the join: it removes what kubeadm set up, yurthub, the IPVS rules and
first boot's own files. Every pod on the machine ends. The contents of the image and
the settings of the Site stay, so that the machine can still be reached. With a new
Site, stamped into the slot or on a stick, the machine joins again.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !yes {
				return usageError{errors.New("reset ends every pod on this machine; confirm with --yes")}
			}
			if err := m.needRoot("reset", "changes this machine"); err != nil {
				return err
			}
			m.insist()
			name, err := firstboot.Reset(cmd.Context(), m.env(log), printStep(cmd.OutOrStdout()))
			if err != nil {
				return err
			}
			if name == "" {
				fmt.Fprint(cmd.OutOrStdout(), "\nThis machine is not in a cluster.\n")
			} else {
				fmt.Fprintf(cmd.OutOrStdout(), `
This machine has left the cluster. It cannot delete its own Node object. Run:

  kubectl delete node %s
`, name)
			}
			fmt.Fprint(cmd.OutOrStdout(), `
To join again: put a Site with a new token into the slot or on a stick, and
restart the machine.
`)
			return nil
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "confirm the reset")
	return cmd
}
