package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/explain"
)

func explainCommand(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Explain why something is as it is",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(explainService(s), explainVIP(s), explainNode(s), explainPool(s), explainPeer(s))
	return cmd
}

func explainService(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "service [NAMESPACE/]NAME",
		Short: "Explain what a Service asked for, what it got, and what each pool answers",
		Long: `Explain what a Service asked for, what it got, who announces it or why no node
does, what each pool answers, what would help, and the keys that this depends on.

The command reads the cluster and decides by the code of the controller and of
the speakers. It changes nothing and needs neither of them to run. A speaker
counts as alive if its pod is ready.

Exits with 0 when the Service has what it asks for and somebody announces it, 2
when not, and 3 when the cluster, or what it takes to know who announces it, could
not be read: then the rest is shown.`,
		Example: `  lodestone explain service web
  lodestone explain service shop/web --context fra1
  lodestone explain service web -o json | jq .refusal`,
		Args: cobra.ExactArgs(1),
	}
	a := answerFlags(cmd, s)
	t := targetFlags(cmd, s)
	cmd.ValidArgsFunction = t.complete(serviceNames)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		name, err := t.qualified(args[0])
		if err != nil {
			return err
		}
		o, err := t.readWhole(cmd.Context(), cluster.ForAddresses...)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(o.Services, func(svc *corev1.Service) bool { return ledger.NameOf(svc) == name })
		if i < 0 {
			return fmt.Errorf("there is no Service %s", name)
		}
		story := explain.OfService(o, o.Services[i])
		return a.give(cmd, story, story.Unread, story.Troubled())
	}
	return cmd
}

// qualified returns the name of a Service with its namespace: that of the
// kubeconfig unless there is one.
func (t *target) qualified(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	_, namespace, err := t.connect()
	return namespace + "/" + name, err
}
