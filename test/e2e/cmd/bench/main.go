// Command bench measures Lodestone in the lab and prints one line for each
// benchmark: `bench NAME key=value ...`. It compares nothing with a limit.
//
//	bench [-keep] [-minutes N] [-cases PATTERN] [NAME ...]
//
// services.go is the load of Services that most benchmarks share; inprocess.go needs no cluster. controller.go and
// scale.go measure many Services, layer2.go and bgp.go what clients lose, bgpscale.go many routes, direct.go direct
// forwarding, fleet.go many speakers, hostile.go the worst objects, and metallb.go MetalLB and Lodestone by turns.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// benchmark is one measurement. It reports by result.
type benchmark struct {
	name string
	// run gets a lab with Lodestone, or nil when it needs none.
	run      func(context.Context, *lodestone.Installation) error
	needsLab bool
}

var benchmarks = []benchmark{
	{name: "ipam_allocate", run: ipamAllocate},
	{name: "config_edit", run: configEdit},
	{name: "config_worst", run: configWorst},
	{name: "ledger", run: ledger},
	{name: "dashboard_load", run: dashboardLoad},
	{name: "cli_status", run: cliStatus},
	{name: "explain", run: explain},
	{name: "l2_election", run: election},
	{name: "l2_arp_latency", run: arpLatency},
	{name: "l2_node_loss_10", run: fleetNodeLoss},
	{name: "l2_takeover", run: takeover},
	{name: "l2_idle", run: idle},
	{name: "l2_false_failover", run: falseFailover},
	{name: "l2_membership", run: membership},
	{name: "l2_loss", run: loss},
	{name: "bfd_timing", run: bfdTiming},
	{name: "bgp_scale", run: routerScale},
	{name: "direct_forwarding", run: directInKernel},
	{name: "hostile_cluster", run: hostileCluster},
	{name: "l2_node_loss", run: nodeLoss, needsLab: true},
	{name: "l2_planned_move", run: plannedMove, needsLab: true},
	{name: "direct_move", run: directMove, needsLab: true},
	{name: "direct_members", run: directMembers, needsLab: true},
	{name: "direct_speed", run: directSpeed, needsLab: true},
	{name: "l2_speaker_kill9", run: speakerKill, needsLab: true},
	{name: "bgp_node_loss", run: routerLoss, needsLab: true},
	{name: "bgp_upgrade", run: routerMoves, needsLab: true},
	{name: "bgp_announce", run: routerHears, needsLab: true},
	{name: "controller_burst", run: controllerBurst, needsLab: true},
	{name: "controller_backlog", run: controllerBacklog, needsLab: true},
	{name: "metallb", run: besideMetalLB, needsLab: true},
	// The first of these leaves its Services to the others.
	{name: "memory", run: memory, needsLab: true},
	{name: "controller_restart", run: controllerRestart, needsLab: true},
	{name: "controller_churn", run: controllerChurn, needsLab: true},
}

var (
	minutes = flag.Int("minutes", 0, "how long l2_false_failover takes, and each case of l2_loss and bfd_timing; 0: 10, 1 and 1")
	cases   = flag.String("cases", "", "which cases of bfd_timing, as go test -bench takes them: peer=frr///interval_ms=50; "+
		"of direct_move, direct_members, bgp_node_loss and metallb (traffic, idle, services), as a regular expression: "+
		"forwarding=direct.*partition")
)

// result prints one benchmark's line.
func result(name, format string, args ...any) {
	fmt.Printf("bench "+name+" "+format+"\n", args...)
}

func main() {
	keep := flag.Bool("keep", false, "use the lab that is up, if any, and leave it up")
	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "usage: bench [-keep] [-minutes N] [-cases PATTERN] [NAME ...]\nbenchmarks: %s\n",
			strings.Join(names(), " "))
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	if err := run(ctx, flag.Args(), *keep); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func names() []string {
	var all []string
	for _, b := range benchmarks {
		all = append(all, b.name)
	}
	return all
}

func run(ctx context.Context, wanted []string, keep bool) (err error) {
	for _, name := range wanted {
		if !slices.Contains(names(), name) {
			return fmt.Errorf("benchmark %q: want one of %s", name, strings.Join(names(), ", "))
		}
	}
	var installation *lodestone.Installation
	for _, b := range benchmarks {
		if len(wanted) > 0 && !slices.Contains(wanted, b.name) {
			continue
		}
		if b.needsLab && installation == nil {
			if installation, err = bringUp(ctx, keep); err != nil {
				return err
			}
			if !keep {
				defer func() { err = errors.Join(err, installation.Lab.Down(context.WithoutCancel(ctx))) }()
			}
		}
		if err := b.run(ctx, installation); err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
	}
	if keep && installation != nil {
		return empty(ctx, installation)
	}
	return nil
}

func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, "lab: "+format+"\n", args...) }

func bringUp(ctx context.Context, keep bool) (*lodestone.Installation, error) {
	cluster, err := lab.Open("")
	if err != nil || !keep {
		cluster, err = lab.Up(ctx, lab.Options{DualStack: true, Router: lab.RouterBoth, Place: 1, Progress: progress})
	}
	if err == nil {
		return lodestone.New(cluster)
	} else if cluster != nil && !keep {
		err = errors.Join(err, cluster.Down(context.WithoutCancel(ctx)))
	}
	return nil, err
}
