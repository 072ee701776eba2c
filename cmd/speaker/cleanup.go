package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/pkg/usage"
	"github.com/lodestone-lb/lodestone/speaker/podroutes"
)

// cleanup returns the command that removes what speakers leave on a node.
func cleanup() *cobra.Command {
	return &cobra.Command{
		Use:   "cleanup",
		Short: "Remove from this node the routes to pods, which outlive the speaker",
		Args:  usage.Args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			removed, err := podroutes.Clear(nil)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "removed %d routes with protocol %d\n", removed, podroutes.Protocol)
			return err
		},
	}
}
