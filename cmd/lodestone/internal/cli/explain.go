package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/explain"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

func explainCommand(s Streams) *cobra.Command {
	var commands []*cobra.Command
	for _, e := range []explainer{explainService, explainVIP, explainNode, explainPool, explainPeer} {
		commands = append(commands, e.command(s))
	}
	return group("explain", "Explain why something is as it is", commands...)
}

// explainer is an explain command of one kind of thing.
type explainer struct {
	use, short, long, example string
	// what the argument is called if it has to be among names. Empty: explain finds out.
	what string
	// names are what the argument may be.
	names func(o *cluster.Objects) []string
	// qualify returns the full name that the argument stands for. Nil: it is the full name.
	qualify func(t *target, name string) (string, error)
	// explain explains the argument. unread is what could not be read for that.
	explain func(o *cluster.Objects, name string) (story explain.Story, unread []string, err error)
	// needs is what has to be read for it; none: everything.
	needs []string
}

// exits ends the help of every explainer.
const exits = `

Who announces what is decided by the speakers' own code ("by the plan"); a speaker
counts as alive if its pod is ready.

Exits with 0 when all is well with it, 2 when somebody should look at it, and 3
when there is no such thing or the cluster could not be read.`

func (e explainer) command(s Streams) *cobra.Command {
	cmd := &cobra.Command{Use: e.use, Short: e.short, Long: e.long + exits, Example: e.example, Args: usage.Args(1, 1)}
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.ValidArgsFunction = t.complete(e.names)
	cmd.RunE = func(cmd *cobra.Command, args []string) (err error) {
		name := args[0]
		if e.qualify != nil {
			if name, err = e.qualify(t, name); err != nil {
				return err
			}
		}
		o, err := t.readWhole(cmd.Context(), e.needs...)
		if err != nil {
			return err
		}
		if e.what != "" {
			if err := among(e.what, name, e.names(o)); err != nil {
				return err
			}
		}
		story, unread, err := e.explain(o, name)
		if err != nil {
			return err
		}
		return a.give(cmd, story, unread, story.Troubled())
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

var explainService = explainer{
	use:   "service [NAMESPACE/]NAME",
	short: "Explain what a Service asked for, what it got, and what each pool answers",
	long: `Explain what a Service asked for, what it got, who announces it or why no node
does, what each pool answers, what would help, and the keys that this depends on. If
it cannot be read who announces it, the rest is shown, and the command exits with 3.

The command decides by the code of the controller and of the speakers. It changes
nothing and needs neither of them to run.`,
	example: `  lodestone explain service web
  lodestone explain service shop/web --context fra1
  lodestone explain service web -o json | jq .refusal`,
	needs:   cluster.ForAddresses,
	names:   serviceNames,
	qualify: (*target).qualified,
	explain: func(o *cluster.Objects, name string) (explain.Story, []string, error) {
		i := slices.IndexFunc(o.Services, func(svc *corev1.Service) bool { return ledger.NameOf(svc) == name })
		if i < 0 {
			return nil, nil, fmt.Errorf("there is no Service %s", name)
		}
		story := explain.OfService(o, o.Services[i])
		return story, story.Unread, nil
	},
}

// qualified returns the name of a Service with its namespace: that of the
// kubeconfig unless there is one.
func (t *target) qualified(name string) (string, error) {
	before, after, whole := strings.Cut(name, "/")
	if err := usage.Name("the Service", cmp.Or(after, before)); err != nil || whole && (before == "" || after == "") {
		return "", fmt.Errorf("%q is not a Service: write NAMESPACE/NAME, or NAME and its --namespace", name)
	}
	if given := t.overrides.Context.Namespace; whole && given != "" && given != before {
		return "", fmt.Errorf("the Service %s is not in --namespace %s: leave one of the two out", name, given)
	}
	if whole {
		return name, nil
	}
	_, namespace, err := t.connect()
	return namespace + "/" + name, err
}

var explainVIP = explainer{
	use:   "vip ADDRESS",
	short: "Explain who announces an address and why, and why each other node does not",
	long: `Explain who announces an address and why, and why each other node does not; which
Services have it, of which pool it is, what is announced to routers, what would help
if nobody announces it, and the keys that this depends on. If no Service has the
address, explain why.`,
	example: `  lodestone explain vip 203.0.113.7`,
	names:   vipNames,
	qualify: func(_ *target, name string) (string, error) {
		addr, err := address(name)
		return addr.String(), err
	},
	explain: func(o *cluster.Objects, name string) (explain.Story, []string, error) {
		return explain.OfVIP(o, netip.MustParseAddr(name)), nil, nil
	},
}

var explainNode = explainer{
	use:   "node NAME",
	short: "Explain what a node announces, and what keeps it from the rest",
	long: `Explain what a node announces, what keeps it from owning the other VIPs and the keys
that this depends on, how its BGP sessions are, and what its speaker reports of its
network.`,
	example: `  lodestone explain node n1`,
	needs:   cluster.ForVIPs,
	what:    "node",
	names:   nodeNames,
	explain: func(o *cluster.Objects, name string) (explain.Story, []string, error) {
		return explain.OfNode(o, name), nil, nil
	},
}

var explainPool = explainer{
	use:   "pool NAME",
	short: "Explain how full a pool is, who may draw from it, and what comes before it",
	long: `Explain how full a pool is, who may draw from it, which pools a Service without a
wish is given addresses of before, what announces it, and what of it makes no
sense in this cluster.`,
	example: `  lodestone explain pool lan`,
	needs:   cluster.ForAddresses,
	what:    "pool",
	names:   poolNames,
	explain: func(o *cluster.Objects, name string) (explain.Story, []string, error) {
		return explain.OfPool(o, &o.Config.Pools[slices.Index(poolNames(o), name)]), nil, nil
	},
}

var explainPeer = explainer{
	use:   "peer NAME",
	short: "Explain how the BGP sessions with a peer are, and what is announced to it",
	long: `Explain which nodes have a BGP session with a peer, how the sessions are and the
keys that this depends on, how soon the loss of the peer is noticed, and what is
announced to it.`,
	example: `  lodestone explain peer tor-a`,
	needs:   cluster.ForVIPs,
	what:    "BGP peer",
	names:   func(o *cluster.Objects) []string { return peerNames(o.Network()) },
	explain: func(o *cluster.Objects, name string) (explain.Story, []string, error) {
		return explain.OfPeer(o, &o.Config.Peers[slices.Index(peerNames(o.Network()), name)]), nil, nil
	},
}
