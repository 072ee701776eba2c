package cli

import (
	"slices"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/cmd/lodestone/internal/story"
	"github.com/lodestone-lb/lodestone/pkg/cluster"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// teller is an explain command.
type teller struct {
	use, short, long, example string
	// tell tells the story of the argument, which may not be there.
	tell func(o *cluster.Objects, name string) (story.Story, error)
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
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o, err := target.readWhole(cmd.Context())
		if err != nil {
			return err
		}
		told, err := t.tell(o, args[0])
		if err != nil {
			return err
		}
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

func explainVIP(s Streams) *cobra.Command {
	return teller{
		use:   "vip ADDRESS",
		short: "Tell who announces an address and why, and why each other node does not",
		long: `Tell who announces an address and why, and why each other node does not; which
Services have it, of which pool it is, and what routers are told. Of an address
that no Service has, tell why.`,
		example: `  lodestone explain vip 203.0.113.7`,
		tell: func(o *cluster.Objects, name string) (story.Story, error) {
			addr, err := address(name)
			if err != nil {
				return nil, err
			}
			return story.OfVIP(o, addr), nil
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
		tell: func(o *cluster.Objects, name string) (story.Story, error) {
			if err := known(o.Network(), name, ""); err != nil {
				return nil, err
			}
			return story.OfNode(o, name), nil
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
		tell: func(o *cluster.Objects, name string) (story.Story, error) {
			var names []string
			if o.Config != nil {
				for i := range o.Config.Pools {
					names = append(names, o.Config.Pools[i].Name)
				}
			}
			if err := among("pool", name, names); err != nil {
				return nil, err
			}
			return story.OfPool(o, &o.Config.Pools[slices.Index(names, name)]), nil
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
		tell: func(o *cluster.Objects, name string) (story.Story, error) {
			if err := known(o.Network(), "", name); err != nil {
				return nil, err
			}
			i := slices.IndexFunc(o.Config.Peers, func(p config.Peer) bool { return p.Name == name })
			return story.OfPeer(o, &o.Config.Peers[i]), nil
		},
	}.command(s)
}
