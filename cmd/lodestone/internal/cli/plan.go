package cli

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/explain"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

func planCommand(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan --config FILE|-",
		Short: "Show what an edit of the configuration would do to the cluster's Services",
		Long: `Show what an edit of the configuration would do to the cluster's Services and
VIPs. Which Services keep their addresses, which keep them stranded (outside of
every pool), which lose them (because they are leased and the pool goes), which get
what they wait for, and which are refused what they ask for. And which VIPs other
nodes would announce than now, or nobody.

The command reads the cluster and decides by the code of the controller and of the
speakers. It changes nothing and needs neither of them to run.

Exits with 0 when no Service would lose its address or be stranded and somebody
would announce every VIP that somebody announces now, 1 when the new configuration
is invalid, 2 when not, and 3 when the file or the cluster, or what it takes to know
who announces a VIP, could not be read: then the rest is shown. While the cluster's
own configuration is invalid, or there is none, each address that Services have and
the new one has in no pool counts as stranded.`,
		Example: `  lodestone plan --config new.yaml
  lodestone plan --config new.yaml -o json | jq .moved`,
		Args: usage.Args(0, 0),
	}
	file := cmd.Flags().String("config", "", `The new configuration, or manifests with the ConfigMap that has it; "-" is the standard input.`)
	all := cmd.Flags().Bool("all", false, "List also the Services that nothing changes for.")
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *file == "" {
			return errors.New("which configuration? See --config in lodestone plan --help")
		}
		name, text, err := read(*file, cmd.InOrStdin())
		if err != nil {
			return err
		}
		next, err := config.ParseFile(name, text)
		if err != nil {
			return err
		}
		o, err := t.readAll(cmd.Context())
		if err != nil {
			return err
		}
		if err := o.Err(cluster.ForAddresses...); err != nil {
			return err
		}
		if unclear := o.Unclear(); unclear != nil {
			o.Omit(cluster.ConfigMaps, unclear)
		}
		story := explain.OfEdit(o, next, *all)
		return a.give(cmd, story, story.Unread, story.Troubled())
	}
	return cmd
}

func simulateCommand(s Streams) *cobra.Command {
	return group("simulate", "Show what would become of the VIPs if a node left",
		remove(s, simulation.Drain, "Show what becomes of the VIPs if a node is taken out and drained",
			`Show what becomes of the VIPs if a node is taken out of load balancing by its
label, and then drained: which move where, which nobody would announce, and which
nodes would still announce its BGP routes.`),
		remove(s, simulation.Lose, "Show what becomes of the VIPs if a node fails",
			`Show what becomes of the VIPs if a node fails: which move where, which nobody
would announce, which nodes would still announce its BGP routes, and how soon its
routers notice.`),
	)
}

func remove(s Streams, how simulation.Removal, short, long string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   string(how) + " NODE",
		Short: short,
		Long: long + `

It is what the speakers' own code decides for the cluster as it is, but for the node
and its pods; pods that start elsewhere in their place are not foreseen. Nothing
is changed.

Exits with 0 when somebody would announce every VIP that somebody announces now,
2 when not, and 3 when there is no such node or the cluster could not be read.`,
		Example: "  lodestone simulate " + string(how) + " n1",
		Args:    usage.Args(1, 1),
	}
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.ValidArgsFunction = t.complete(nodeNames)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o, err := t.readWhole(cmd.Context(), cluster.ForVIPs...)
		if err != nil {
			return err
		}
		if err := among("node", args[0], nodeNames(o)); err != nil {
			return err
		}
		story := explain.OfRemoval(o, args[0], how)
		return a.give(cmd, story, nil, story.Troubled())
	}
	return cmd
}
