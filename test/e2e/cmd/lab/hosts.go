package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

func execute() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "exec HOST -- COMMAND...",
		Short:   "Run a command in the network of cp, client, n1, n2, ...",
		Example: "  lab exec client -- ping -c 1 198.18.0.11",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := open()
			if err != nil {
				return err
			}
			host, command := args[0], args[1:]
			if command[0] == "--" {
				command = command[1:]
			}
			return run(cmd.Context(), c, host, command...)
		},
	}
	cmd.Flags().SetInterspersed(false) // flags after HOST are the command's
	return cmd
}

func kubectl() *cobra.Command { return passThrough("kubectl") }

func helm() *cobra.Command { return passThrough("helm") }

func passThrough(program string) *cobra.Command {
	return &cobra.Command{
		Use:                program + " ...",
		Short:              "Run " + program + " as the lab's administrator",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := open()
			if err != nil {
				return err
			}
			return run(cmd.Context(), c, lab.ControlPlane, append([]string{program}, args...)...)
		},
	}
}

// run runs a command in a host's network, on this terminal.
func run(ctx context.Context, c *lab.Cluster, host string, args ...string) error {
	cmd := c.Command(ctx, host, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}

func fault() *cobra.Command {
	cmd := &cobra.Command{Use: "fault", Short: "Break the lab's network, and mend it"}
	cmd.AddCommand(
		onWire("node-loss NODE", "Cut the power of a node, as others see it", cobra.ExactArgs(1),
			func(c *lab.Cluster, args []string) error { return c.NodeLoss(args[0]) }),
		onWire("partition HOST...", "Cut these hosts off from all other nodes", cobra.MinimumNArgs(1),
			func(c *lab.Cluster, args []string) error { return c.Partition(args) }),
		onWire("block-gossip", "Stop the packets between speakers, and nothing else", cobra.NoArgs,
			func(c *lab.Cluster, _ []string) error { return c.BlockGossip() }),
		onWire("heal [NODE]", "Bring a lost node back; without an argument, mend everything", cobra.MaximumNArgs(1),
			func(c *lab.Cluster, args []string) error {
				if len(args) == 1 {
					return c.HealNode(args[0])
				}
				return c.Heal()
			}),
	)
	return cmd
}

// onWire is a subcommand that does something to the running lab.
func onWire(use, short string, arguments cobra.PositionalArgs, do func(*lab.Cluster, []string) error) *cobra.Command {
	return &cobra.Command{
		Use:   use,
		Short: short,
		Args:  arguments,
		RunE: func(_ *cobra.Command, args []string) error {
			c, err := open()
			if err != nil {
				return err
			}
			return do(c, args)
		},
	}
}
