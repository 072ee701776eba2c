package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/lodestone-lb/lodestone/test/e2e/demo"
	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "lab: "+format+"\n", args...)
}

// open finds the running lab and prints its progress.
func open() (*lab.Cluster, error) {
	c, err := lab.Open("")
	if err == nil {
		c.Progress = progress
	}
	return c, err
}

// addOptions adds the flags for the options of a lab.
func addOptions(cmd *cobra.Command) *lab.Options {
	options := &lab.Options{Place: 1, Progress: progress}
	flags := cmd.Flags()
	flags.IntVar(&options.Nodes, "nodes", 3, "number of nodes")
	flags.StringVar(&options.ProxyMode, "proxy-mode", lab.NFTables, "kube-proxy mode: nftables or iptables")
	flags.BoolVar(&options.DualStack, "dual-stack", false, "IPv4 and IPv6")
	flags.IntVar(&options.APIServers, "api-servers", 1, "how many API servers, each on a host of its own: 1 to 3")
	flags.BoolVar(&options.OwnPodRoutes, "own-pod-routes", false, "no static routes to pods: Lodestone makes them")
	flags.StringVar(&options.Router, "router", lab.RouterNone, "routers on the LAN: none, frr, bird or both")
	return options
}

func up() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Bring the lab up, in place of the one there is, if any",
		Args:  cobra.NoArgs,
	}
	options := addOptions(cmd)
	cmd.Flags().BoolVar(&options.NoLodestone, "no-lodestone", false, "leave Lodestone out: nodes stay uninitialized")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, err := lab.Up(cmd.Context(), *options)
		return err
	}
	return cmd
}

func down() *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Take the machine's labs down, in whatever state they are",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return lab.Down(cmd.Context(), "")
		},
	}
}

func load() *cobra.Command {
	return &cobra.Command{
		Use:   "load",
		Short: "Build Lodestone again and restart it in the running lab",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open()
			if err != nil {
				return err
			}
			return c.Load(cmd.Context())
		},
	}
}

func status() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show the lab's programs, nodes and pods",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open()
			if err != nil {
				return err
			}
			if err := printProcesses(c); err != nil {
				return err
			}
			return run(cmd.Context(), c, lab.ControlPlane, "kubectl", "get", "nodes,pods,services", "--all-namespaces", "-o", "wide")
		},
	}
}

func printProcesses(c *lab.Cluster) error {
	names, err := c.Processes()
	if err != nil {
		return err
	}
	for _, name := range names {
		p, err := c.Process(name)
		if err != nil {
			return err
		}
		state := "runs"
		if !p.Alive() {
			state = "has ended"
		}
		fmt.Printf("%-26s %-9s pid %-7d %s\n", name, state, p.PID, p.LogFile())
	}
	return nil
}

func tour() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Bring the lab up, give a Service an address, and cut the power of the node that owns it",
		Args:  cobra.NoArgs,
	}
	options := addOptions(cmd)
	keep := cmd.Flags().Bool("keep", false, "leave the lab up afterwards")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		started := time.Now()
		err := demo.Run(cmd.Context(), *options, *keep, func(format string, args ...any) {
			fmt.Printf("demo: "+format+"\n", args...)
		})
		if err == nil {
			progress("demo took %s", time.Since(started).Round(time.Second))
		}
		return err
	}
	return cmd
}
