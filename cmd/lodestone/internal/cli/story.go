package cli

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/explain"
)

// teller is an explain command.
type teller struct {
	use, short, long, example string
	// tell tells the story of the argument, which may not be there.
	tell func(o *cluster.Objects, name string) (explain.Story, error)
	// needs is what has to be read for it; none: everything.
	needs []string
	// names are what the argument may be.
	names func(o *cluster.Objects) []string
}

// exits ends the help of every teller.
const exits = `

Who announces what is what the speakers' own code says ("by the plan"); a speaker
counts as alive if its pod is ready.

Exits with 0 when all is well with it, 2 when somebody should look at it, and 3
when there is no such thing or the cluster could not be read.`

func (t teller) command(s Streams) *cobra.Command {
	cmd := &cobra.Command{Use: t.use, Short: t.short, Long: t.long + exits, Example: t.example, Args: cobra.ExactArgs(1)}
	a := answerFlags(cmd, s)
	target := targetFlags(cmd, s)
	cmd.ValidArgsFunction = target.complete(t.names)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o, err := target.readWhole(cmd.Context(), t.needs...)
		if err != nil {
			return err
		}
		told, err := t.tell(o, args[0])
		if err != nil {
			return err
		}
		return a.give(cmd, told, nil, told.Troubled())
	}
	return cmd
}

// completeTimeout bounds how long somebody who presses the tab key waits.
const completeTimeout = 3 * time.Second

// complete completes the one argument of a command by names in the cluster.
func (t *target) complete(names func(o *cluster.Objects) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
		defer cancel()
		o, err := t.readAll(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		all := slices.DeleteFunc(names(o), func(name string) bool { return !strings.HasPrefix(name, typed) })
		return all, cobra.ShellCompDirectiveNoFileComp
	}
}

func serviceNames(o *cluster.Objects) []string {
	var names []string
	for _, svc := range o.Services {
		if o.Scope.Serves(svc) {
			names = append(names, ledger.NameOf(svc))
		}
	}
	return names
}

func vipNames(o *cluster.Objects) []string {
	var names []string
	for _, vip := range slices.SortedFunc(maps.Keys(o.Network().ServicesByVIP()), netip.Addr.Compare) {
		names = append(names, vip.String())
	}
	return names
}

func nodeNames(o *cluster.Objects) []string { return slices.Sorted(maps.Keys(o.Network().Nodes)) }

func poolNames(o *cluster.Objects) []string {
	var names []string
	if o.Config != nil {
		for i := range o.Config.Pools {
			names = append(names, o.Config.Pools[i].Name)
		}
	}
	return names
}

func explainVIP(s Streams) *cobra.Command {
	return teller{
		use:   "vip ADDRESS",
		short: "Tell who announces an address and why, and why each other node does not",
		long: `Tell who announces an address and why, and why each other node does not; which
Services have it, of which pool it is, and what routers are told. Of an address
that no Service has, tell why.`,
		example: `  lodestone explain vip 203.0.113.7`,
		names:   vipNames,
		tell: func(o *cluster.Objects, name string) (explain.Story, error) {
			addr, err := address(name)
			if err != nil {
				return nil, err
			}
			return explain.OfVIP(o, addr), nil
		},
	}.command(s)
}

func explainNode(s Streams) *cobra.Command {
	return teller{
		use:   "node NAME",
		short: "Tell what a node announces, and what keeps it from the rest",
		long: `Tell what a node announces, what keeps it from owning the other VIPs, how its BGP
sessions are, and what its speaker tells of its network.`,
		example: `  lodestone explain node n1`,
		needs:   cluster.ForVIPs,
		names:   nodeNames,
		tell: func(o *cluster.Objects, name string) (explain.Story, error) {
			if err := among("node", name, nodeNames(o)); err != nil {
				return nil, err
			}
			return explain.OfNode(o, name), nil
		},
	}.command(s)
}

func explainPool(s Streams) *cobra.Command {
	return teller{
		use:   "pool NAME",
		short: "Tell how full a pool is, who may draw from it, and what comes before it",
		long: `Tell how full a pool is, who may draw from it, which pools a Service without a
wish is given addresses of before, what announces it, and what of it makes no
sense in this cluster.`,
		example: `  lodestone explain pool lan`,
		needs:   cluster.ForAddresses,
		names:   poolNames,
		tell: func(o *cluster.Objects, name string) (explain.Story, error) {
			names := poolNames(o)
			if err := among("pool", name, names); err != nil {
				return nil, err
			}
			return explain.OfPool(o, &o.Config.Pools[slices.Index(names, name)]), nil
		},
	}.command(s)
}

func explainPeer(s Streams) *cobra.Command {
	return teller{
		use:   "peer NAME",
		short: "Tell how the BGP sessions with a peer are, and what it is told",
		long: `Tell which nodes have a BGP session with a peer, how the sessions are, how soon
its loss is noticed, and what it is told.`,
		example: `  lodestone explain peer tor-a`,
		needs:   cluster.ForVIPs,
		names:   func(o *cluster.Objects) []string { return peerNames(o.Network()) },
		tell: func(o *cluster.Objects, name string) (explain.Story, error) {
			names := peerNames(o.Network())
			if err := among("BGP peer", name, names); err != nil {
				return nil, err
			}
			return explain.OfPeer(o, &o.Config.Peers[slices.Index(names, name)]), nil
		},
	}.command(s)
}
