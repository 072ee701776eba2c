// Command lab brings a Kubernetes cluster up on this machine, breaks it on
// request, and takes it down.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := root().ExecuteContext(ctx); err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			os.Exit(exit.ExitCode())
		}
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "lab: "+format+"\n", args...)
}

func root() *cobra.Command {
	cmd := &cobra.Command{Use: "lab", SilenceUsage: true, SilenceErrors: true}
	cmd.AddCommand(up(), down(), kubectl())
	return cmd
}

func up() *cobra.Command {
	options := lab.Options{Progress: progress}
	cmd := &cobra.Command{
		Use: "up", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), 30*time.Minute)
			defer cancel()
			_, err := lab.Up(ctx, options)
			return err
		},
	}
	cmd.Flags().IntVar(&options.Nodes, "nodes", 3, "how many nodes")
	cmd.Flags().StringVar(&options.ProxyMode, "proxy-mode", lab.NFTables, "kube-proxy mode: nftables or iptables")
	cmd.Flags().BoolVar(&options.DualStack, "dual-stack", false, "IPv4 and IPv6")
	cmd.Flags().BoolVar(&options.NoLodestone, "no-lodestone", false, "leave Lodestone out")
	return cmd
}

func down() *cobra.Command {
	return &cobra.Command{Use: "down", RunE: func(cmd *cobra.Command, _ []string) error {
		return lab.Down(cmd.Context(), "")
	}}
}
func kubectl() *cobra.Command {
	return &cobra.Command{Use: "kubectl", DisableFlagParsing: true, RunE: func(cmd *cobra.Command, args []string) error {
		c, err := lab.Open("")
		if err != nil {
			return err
		}
		k := c.Command(cmd.Context(), lab.ControlPlane, append([]string{"kubectl"}, args...)...)
		k.Stdin, k.Stdout, k.Stderr = os.Stdin, os.Stdout, os.Stderr
		return k.Run()
	}}
}
