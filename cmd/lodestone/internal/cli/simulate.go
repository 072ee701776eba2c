package cli

import (
	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/cluster"
	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/story"
	"github.com/lodestone-lb/lodestone/pkg/simulation"
)

func simulate(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Show what would become of the VIPs if a node left",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		remove(s, simulation.Drain, "Show what becomes of the VIPs if a node is taken out and drained",
			`Show what becomes of the VIPs if a node is taken out of load balancing by its
label, and then drained: which move where, which nobody would announce, and which
nodes would still announce its BGP routes.`),
		remove(s, simulation.Lose, "Show what becomes of the VIPs if a node fails",
			`Show what becomes of the VIPs if a node fails: which move where, which nobody
would announce, which nodes would still announce its BGP routes, and how soon its
routers notice.`),
	)
	return cmd
}

func remove(s Streams, how simulation.Removal, short, long string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   string(how) + " NODE",
		Short: short,
		Long: long + `

It is what the speakers' own code says of the cluster as it is, but for the node
and its pods; pods that start elsewhere in their place are not foreseen. Nothing
is changed.

Exits with 0 when somebody would announce every VIP that somebody announces now,
2 when not, and 3 when there is no such node or the cluster could not be read.`,
		Example: "  lodestone simulate " + string(how) + " n1",
		Args:    cobra.ExactArgs(1),
	}
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o, err := t.readWhole(cmd.Context(), cluster.ForVIPs...)
		if err != nil {
			return err
		}
		if err := known(o.Network(), args[0], ""); err != nil {
			return err
		}
		told := story.OfRemoval(o, args[0], how)
		if err := a.print(cmd.OutOrStdout(), told); err != nil {
			return err
		}
		if told.Troubled() {
			return errFound
		}
		return nil
	}
	return cmd
}
