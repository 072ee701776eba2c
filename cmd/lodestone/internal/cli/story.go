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

// explainer is an explain command of one kind of thing.
type explainer struct {
	use, short, long, example string
	// explain returns the story of the argument, which may not be there.
	explain func(o *cluster.Objects, name string) (explain.Story, error)
	// needs is what has to be read for it; none: everything.
	needs []string
	// names are what the argument may be.
	names func(o *cluster.Objects) []string
}

// exits ends the help of every explainer.
const exits = `

Who announces what is decided by the speakers' own code ("by the plan"); a speaker
counts as alive if its pod is ready.

Exits with 0 when all is well with it, 2 when somebody should look at it, and 3
when there is no such thing or the cluster could not be read.`

func (e explainer) command(s Streams) *cobra.Command {
	cmd := &cobra.Command{Use: e.use, Short: e.short, Long: e.long + exits, Example: e.example, Args: cobra.ExactArgs(1)}
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.ValidArgsFunction = t.complete(e.names)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o, err := t.readWhole(cmd.Context(), e.needs...)
		if err != nil {
			return err
		}
		story, err := e.explain(o, args[0])
		if err != nil {
			return err
		}
		return a.give(cmd, story, nil, story.Troubled())
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
	return explainer{
		use:   "vip ADDRESS",
		short: "Explain who announces an address and why, and why each other node does not",
		long: `Explain who announces an address and why, and why each other node does not; which
Services have it, of which pool it is, what is announced to routers, what would help
if nobody announces it, and the keys that this depends on. If no Service has the
address, explain why.`,
		example: `  lodestone explain vip 203.0.113.7`,
		names:   vipNames,
		explain: func(o *cluster.Objects, name string) (explain.Story, error) {
			addr, err := address(name)
			if err != nil {
				return nil, err
			}
			return explain.OfVIP(o, addr), nil
		},
	}.command(s)
}

func explainNode(s Streams) *cobra.Command {
	return explainer{
		use:   "node NAME",
		short: "Explain what a node announces, and what keeps it from the rest",
		long: `Explain what a node announces, what keeps it from owning the other VIPs and the keys
that this depends on, how its BGP sessions are, and what its speaker reports of its
network.`,
		example: `  lodestone explain node n1`,
		needs:   cluster.ForVIPs,
		names:   nodeNames,
		explain: func(o *cluster.Objects, name string) (explain.Story, error) {
			if err := among("node", name, nodeNames(o)); err != nil {
				return nil, err
			}
			return explain.OfNode(o, name), nil
		},
	}.command(s)
}

func explainPool(s Streams) *cobra.Command {
	return explainer{
		use:   "pool NAME",
		short: "Explain how full a pool is, who may draw from it, and what comes before it",
		long: `Explain how full a pool is, who may draw from it, which pools a Service without a
wish is given addresses of before, what announces it, and what of it makes no
sense in this cluster.`,
		example: `  lodestone explain pool lan`,
		needs:   cluster.ForAddresses,
		names:   poolNames,
		explain: func(o *cluster.Objects, name string) (explain.Story, error) {
			names := poolNames(o)
			if err := among("pool", name, names); err != nil {
				return nil, err
			}
			return explain.OfPool(o, &o.Config.Pools[slices.Index(names, name)]), nil
		},
	}.command(s)
}

func explainPeer(s Streams) *cobra.Command {
	return explainer{
		use:   "peer NAME",
		short: "Explain how the BGP sessions with a peer are, and what is announced to it",
		long: `Explain which nodes have a BGP session with a peer, how the sessions are and the
keys that this depends on, how soon the loss of the peer is noticed, and what is
announced to it.`,
		example: `  lodestone explain peer tor-a`,
		needs:   cluster.ForVIPs,
		names:   func(o *cluster.Objects) []string { return peerNames(o.Network()) },
		explain: func(o *cluster.Objects, name string) (explain.Story, error) {
			names := peerNames(o.Network())
			if err := among("BGP peer", name, names); err != nil {
				return nil, err
			}
			return explain.OfPeer(o, &o.Config.Peers[slices.Index(names, name)]), nil
		},
	}.command(s)
}
