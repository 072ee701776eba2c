package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/servicelb"
	"github.com/lodestone-lb/lodestone/pkg/simulation"
)

func explain(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Tell why something is as it is",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(explainService(s), explainVIP(s), explainNode(s), explainPool(s), explainPeer(s))
	return cmd
}

func explainService(s Streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "service [NAMESPACE/]NAME",
		Short: "Tell what a Service asked for, what it got, and what each pool says to it",
		Long: `Tell what a Service asked for, what it got, who announces it, what each pool
says to it, and what would help.

Which nodes announce an address depends on their speakers and on the Service's
endpoints, too, which the command does not ask: it names the nodes that may.

The command reads the cluster and decides by the code of the controller and of
the speakers. It changes nothing and needs neither of them to run.

Exits with 0 when the Service has what it asks for, 2 when it has not, and 3
when the cluster could not be read.`,
		Example: `  lodestone explain service web
  lodestone explain service shop/web --context fra1`,
		Args: cobra.ExactArgs(1),
	}
	t := targetFlags(cmd, s)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		client, namespace, err := t.connect()
		if err != nil {
			return err
		}
		name := args[0]
		if !strings.Contains(name, "/") {
			name = namespace + "/" + name
		}
		c, err := t.read(ctx, client)
		if err != nil {
			return err
		}
		svc := find(c, name)
		if svc == nil {
			return fmt.Errorf("there is no Service %s", name)
		}
		story := c.Explain(svc)
		if err := printStory(cmd.OutOrStdout(), story); err != nil {
			return err
		}
		if len(story.Advice) > 0 {
			return errFound
		}
		return nil
	}
	return cmd
}

// find returns the Service by "namespace/name", nil if there is none.
func find(c *simulation.Cluster, name string) *corev1.Service {
	for _, svc := range c.Services {
		if servicelb.NameOf(svc) == name {
			return svc
		}
	}
	return nil
}

func printStory(out io.Writer, s simulation.Story) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(label, text string) { fmt.Fprintf(w, "%s\t%s\n", label, text) }
	row("Service:", s.Service)
	if s.Foreign != "" {
		row("Served:", "no: "+s.Foreign)
		return w.Flush()
	}
	for i, text := range s.Asks {
		row(first(i, "Asks for:"), text)
	}
	for i, text := range s.Has {
		row(first(i, "Has:"), text)
	}
	for i, text := range s.Announced {
		row(first(i, "Announced:"), text)
	}
	if r := s.Verdict.Refusal; r != nil {
		row("Refused:", r.Error())
	}
	for i, text := range s.Advice {
		row(first(i, "What helps:"), text)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return printConsidered(out, s.Considered)
}

// first is the label of the first of several rows.
func first(i int, label string) string {
	if i == 0 {
		return label
	}
	return ""
}

func printConsidered(out io.Writer, considered []ipam.Consideration) error {
	if len(considered) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "\nWhat the pools would say to a new Service like it:\nPOOL\tFAMILY\tFREE\tANSWER\n")
	for _, c := range considered {
		answer := "yes"
		if c.Reason != "" {
			answer = string(c.Reason) + ": " + c.Message
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", c.Pool, c.Family, number(c.Free), answer)
	}
	return w.Flush()
}
