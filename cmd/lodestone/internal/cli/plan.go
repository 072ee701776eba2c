package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/story"
	"github.com/lodestone-lb/lodestone/pkg/cluster"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/config/change"
	"github.com/lodestone-lb/lodestone/pkg/simulation"
)

func plan(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "plan --config FILE|-",
		Short: "Show what an edit of the configuration would do to the cluster's Services",
		Long: `Show what an edit of the configuration would do to the cluster's Services:
which keep their addresses, which keep them stranded (outside of every pool),
which lose them (because they are leased and the pool goes), which get what they
wait for, and which are refused what they ask for.

The command reads the cluster and decides by the code of the controller. It
changes nothing and does not need the controller to run.

Exits with 0 when no Service would lose its address or be stranded, 1 when the
new configuration is invalid, 2 when a Service would, and 3 when the file or the
cluster could not be read.`,
		Example: `  lodestone plan --config new.yaml`,
		Args:    cobra.NoArgs,
	}
	file := cmd.Flags().String("config", "", `The new configuration, or manifests with the ConfigMap that has it; "-" is the standard input.`)
	all := cmd.Flags().Bool("all", false, "List also the Services that nothing changes for.")
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
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		client, _, err := t.connect()
		if err != nil {
			return err
		}
		c, err := t.read(ctx, client)
		if err != nil {
			return err
		}
		return printPlan(cmd.OutOrStdout(), c, next, *all)
	}
	return cmd
}

// changes are the outcomes in the order of how much they matter, with what
// they are called.
var changes = []struct {
	change simulation.Change
	said   string
}{
	{simulation.Lost, "without their leased address"},
	{simulation.Stranded, "stranded"},
	{simulation.Refused, "refused what they ask for"},
	{simulation.Pending, "still waiting"},
	{simulation.Satisfied, "newly satisfied"},
	{simulation.Settled, "not stranded any more"},
	{simulation.Kept, "unchanged"},
}

// printPlan prints what the configuration does, the worst first. The error is
// errFound when a Service loses its address or is stranded.
func printPlan(out io.Writer, cluster *simulation.Cluster, next *config.Config, all bool) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, c := range change.Diff(cluster.Config, next) {
		fmt.Fprintf(w, "edit\t%s\n", c.Message)
	}
	for _, warning := range clusterfacts.Warnings(next, cluster.Facts) {
		fmt.Fprintf(w, "warning\t%s\n", warning)
	}
	by := map[simulation.Change][]simulation.Outcome{}
	for _, o := range cluster.Plan(next) {
		by[o.Change] = append(by[o.Change], o)
	}
	var counts []string
	for _, c := range changes {
		if n := len(by[c.change]); n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, c.said))
		}
		if c.change == simulation.Kept && !all {
			continue
		}
		for _, o := range by[c.change] {
			fmt.Fprintf(w, "%s\t%s\t%s\n", o.Change, o.Service, o.After)
		}
	}
	if len(counts) == 0 {
		counts = []string{"none"}
	}
	fmt.Fprintf(w, "Services: %s\n", strings.Join(counts, ", "))
	if err := w.Flush(); err != nil {
		return err
	}
	if len(by[simulation.Lost])+len(by[simulation.Stranded]) > 0 {
		return errFound
	}
	return nil
}

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
