package cli

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

func bgpCommand(s Streams) *cobra.Command {
	return group("bgp", "Show the BGP sessions and what is announced to routers", bgpPeers(s), bgpRoutes(s))
}

func bgpPeers(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "peers",
		Short: "Show the BGP session of each node with each peer, and why one is not there",
		Long: `Show the BGP session of each node with each peer, and why one is not there.

Which sessions there should be is decided by the speakers' own code; how they are,
the speakers report on their Leases within some seconds. The states:

- established: routes are exchanged
- down: they are not, and the message has the reason
- unknown: there should be a session, and no speaker that is ready reports it
- impossible: the peer selects the node, which lacks something for a session
- leftover: the speaker reports a session that should not be

Exits with 0 when all sessions are established and nothing is wrong with them, 2
when not, and 3 when the cluster could not be read.`,
		Example: `  lodestone bgp peers
  lodestone bgp peers --node n1 -o json`,
		Args: usage.Args(0, 0),
	}
	node := cmd.Flags().String("node", "", "Only the sessions of this node.")
	peer := cmd.Flags().String("peer", "", "Only the sessions with this peer.")
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o, err := t.readWhole(cmd.Context(), cluster.ForSessions...)
		if err != nil {
			return err
		}
		n := o.Network()
		if err := known(n, *node, *peer); err != nil {
			return err
		}
		sessions := bgp.Peers(n, o.Now, *node, *peer)
		return a.give(cmd, sessions, nil, !sessions.Healthy())
	}
	return cmd
}

func bgpRoutes(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "routes [VIP|PREFIX]",
		Short: "Show what each node announces to each peer, and which VIPs no router hears of",
		Long: `Show what each node announces to each peer by the plan, with the attributes that
it sends, and which VIPs no router hears of, and why.

With an address, the routes that contain it; with a prefix, also those within it.
The next hop is always the node. What a router makes of the routes, it alone
knows; whether there is a session to send them by, lodestone bgp peers shows.

Exits with 0 when every VIP that is to be announced by BGP is, 2 when not, and 3
when the cluster could not be read.`,
		Example: `  lodestone bgp routes
  lodestone bgp routes 203.0.113.7 --peer tor-a
  lodestone bgp routes 203.0.113.0/24 --node n1 -o yaml`,
		Args: usage.Args(0, 1),
	}
	var f bgp.Filter
	cmd.Flags().StringVar(&f.Node, "node", "", "Only what this node announces.")
	cmd.Flags().StringVar(&f.Peer, "peer", "", "Only what is announced to this peer.")
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.RunE = func(cmd *cobra.Command, args []string) (err error) {
		if len(args) > 0 {
			if f.Within, err = prefix(args[0]); err != nil {
				return err
			}
		}
		o, err := t.readWhole(cmd.Context(), cluster.ForVIPs...)
		if err != nil {
			return err
		}
		n := o.Network()
		if err := known(n, f.Node, f.Peer); err != nil {
			return err
		}
		routes := bgp.RoutesOf(n, f)
		return a.give(cmd, routes, nil, len(routes.Unrouted) > 0)
	}
	return cmd
}

// prefix reads an address or a prefix.
func prefix(text string) (netip.Prefix, error) {
	if p, err := netip.ParsePrefix(text); err == nil && !p.Addr().Is4In6() {
		return p.Masked(), nil
	}
	a, err := address(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not an address or a prefix, such as 203.0.113.7 or 203.0.113.0/24", text)
	}
	return netip.PrefixFrom(a, a.BitLen()), nil
}

// address reads an address.
func address(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is not an address, such as 203.0.113.7", text)
	}
	return a.Unmap(), nil
}

// known refuses names that are not there. An empty name asks for all.
func known(n *simulation.Network, node, peer string) error {
	if node != "" {
		if err := among("node", node, slices.Sorted(maps.Keys(n.Nodes))); err != nil {
			return err
		}
	}
	if peer == "" {
		return nil
	}
	return among("BGP peer", peer, peerNames(n))
}

func peerNames(n *simulation.Network) []string {
	var names []string
	if n.Config != nil {
		for i := range n.Config.Peers {
			names = append(names, n.Config.Peers[i].Name)
		}
	}
	return names
}

// named is how many names an error lists: a cluster may have thousands of nodes.
const named = 20

// among refuses a name that is not one of those that there are.
func among(what, name string, names []string) error {
	switch {
	case slices.Contains(names, name):
		return nil
	case len(names) == 0:
		return fmt.Errorf("there is no %s %q, nor any other", what, name)
	}
	return fmt.Errorf("there is no %s %q; there are: %s", what, name, output.List(names, named))
}
