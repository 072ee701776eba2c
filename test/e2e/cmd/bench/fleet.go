package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/fleet"
	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// fleetPool has the addresses that a fleet's VIPs may have.
const fleetPool = `
pools:
  - {name: wide, addresses: [198.18.0.0/17]}
`

// withFleet runs f with that many nodes and VIPs, once all VIPs are announced
// and nothing happens any more. The first VIP answers datagrams to port 80.
func withFleet(ctx context.Context, nodes, vips int, body string, f func(ctx context.Context, fleet *fleet.Fleet) error) error {
	return withFleetOf(ctx, fleet.Options{Nodes: nodes, Document: lodestone.Document(body)}, vips,
		func(ctx context.Context, all *fleet.Fleet) error {
			if err := steady(ctx, all); err != nil {
				return err
			}
			return f(ctx, all)
		})
}

// withFleetOf runs f with that many VIPs as soon as the speakers run.
func withFleetOf(ctx context.Context, o fleet.Options, vips int, f func(ctx context.Context, fleet *fleet.Fleet) error) (err error) {
	root, err := lab.Root()
	if err != nil {
		return err
	}
	bin, err := program.Builder{Root: root, Progress: progress}.Lodestone(ctx)
	if err != nil {
		return err
	}
	o.Speaker = filepath.Join(bin, "lodestone-speaker")
	for vip := firstVIP; len(o.VIPs) < vips; vip = vip.Next() {
		o.VIPs = append(o.VIPs, vip)
	}
	o.Served = o.VIPs[:1]
	all, err := fleet.Start(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, all.Stop()) }()
	return f(ctx, all)
}

var firstVIP = netip.MustParseAddr("198.18.1.0")

func steady(ctx context.Context, all *fleet.Fleet) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return all.Steady(ctx)
}

// fleetNodeLoss is nodeLoss with ten nodes.
func fleetNodeLoss(ctx context.Context, _ *lodestone.Installation) error {
	const nodes, trials = 10, 20
	return withFleet(ctx, nodes, 1, fleetPool, func(ctx context.Context, all *fleet.Fleet) error {
		var outages []time.Duration
		for range trials {
			outage, err := loseFleetOwner(ctx, all, firstVIP)
			if err != nil {
				return err
			}
			outages = append(outages, outage)
		}
		reportNodeLoss(nodes, outages)
		return nil
	})
}

// loseFleetOwner cuts the owner of the VIP off until a client has answers again,
// and returns how long it had none, once the owner has the VIP back.
func loseFleetOwner(ctx context.Context, all *fleet.Fleet, vip netip.Addr) (time.Duration, error) {
	owner := all.Owners()[vip]
	asking := probe.UDP(ctx, probe.Options{Namespace: all.Client, Target: netip.AddrPortFrom(vip, 80)})
	err := whileAnswered(ctx, asking, func() error { return all.Unplug(owner) })
	record, stopped := asking.Stop()
	fmt.Fprintf(os.Stderr, "%s lost: %s\n", owner, record.Outage())
	if err := errors.Join(err, stopped, all.PlugIn(owner)); err != nil {
		return 0, err
	}
	return record.Outage().Duration(), steady(ctx, all)
}

// whileAnswered does what is to be measured when the client has had answers for
// a while, and waits for as many after it.
func whileAnswered(ctx context.Context, asking *probe.Probe, do func() error) error {
	const answers = 100 // half a second's
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := asking.WaitAnswers(ctx, answers); err != nil {
		return err
	}
	asking.Begin()
	if err := do(); err != nil {
		return err
	}
	return asking.WaitAnswers(ctx, answers)
}

// takeover measures how long it takes until all VIPs of a node that has lost
// its power are announced by others, and how many frames that takes.
func takeover(ctx context.Context, _ *lodestone.Installation) error {
	const vips, trials = 1000, 5
	preferring := fleetPool + `
advertisements:
  - name: gateway
    layer2: {preferredNodes: [{weight: 1, nodeSelector: {matchLabels: {node: n1}}}]}
`
	return withFleet(ctx, 3, vips, preferring, func(ctx context.Context, all *fleet.Fleet) error {
		for range trials {
			start := time.Now()
			if err := errors.Join(all.Unplug("n1"), owned(ctx, all, false), pause(ctx, repetitions)); err != nil {
				return err
			}
			last, frames, peak := taken(all.Claims(start), start)
			result("l2_takeover", "vips=%d ms=%.0f packets=%d peak_packets_per_s=%d", vips, ms(last), frames, peak)
			if err := errors.Join(all.PlugIn("n1"), owned(ctx, all, true), steady(ctx, all)); err != nil {
				return err
			}
		}
		return nil
	})
}

// repetitions is how long a VIP is announced again and again after it moved.
// The segment is not quiet then: speakers are lost.
const repetitions = 5 * time.Second

// owned waits until n1 has announced all VIPs last, or others have.
func owned(ctx context.Context, all *fleet.Fleet, byFirst bool) error {
	return lodestone.Wait(ctx, "all VIPs have moved", func() error {
		for vip, owner := range all.Owners() {
			if (owner == "n1") != byFirst {
				return fmt.Errorf("%s has %s", owner, vip)
			}
		}
		return nil
	})
}

// taken returns how long after the start others than n1 had announced the last
// VIP for the first time, with how many frames in the end, and how many of them
// one node sent at most in 100 ms, per second.
func taken(claims []fleet.Claim, start time.Time) (last time.Duration, frames, peak int) {
	const window = 100 * time.Millisecond
	seen, recent := map[netip.Addr]bool{}, map[string][]time.Time{}
	for _, c := range claims {
		if c.Node == "n1" {
			continue
		}
		frames++
		if !seen[c.VIP] {
			seen[c.VIP], last = true, c.At.Sub(start)
		}
		sent := append(recent[c.Node], c.At)
		for c.At.Sub(sent[0]) > window {
			sent = sent[1:]
		}
		recent[c.Node], peak = sent, max(peak, len(sent)*int(time.Second/window))
	}
	return last, frames, peak
}

// idle measures what 1,000 VIPs cost three speakers while nothing happens.
func idle(ctx context.Context, _ *lodestone.Installation) error {
	const nodes, vips, minutes = 3, 1000, 3
	return withFleet(ctx, nodes, vips, fleetPool, func(ctx context.Context, all *fleet.Fleet) error {
		cpu, err := all.CPU()
		if err != nil {
			return err
		}
		traffic, writes, moves := all.Traffic(), all.API.Writes(), all.Moves()
		if err := pause(ctx, minutes*time.Minute); err != nil {
			return err
		}
		used, err := all.CPU()
		if err != nil {
			return err
		}
		now := all.Traffic()
		result("l2_idle", "nodes=%d vips=%d packets_per_minute=%.1f membership_packets_per_minute=%d api_writes_per_minute=%.1f "+
			"cpu_percent=%.2f moves=%d",
			nodes, vips, float64(now.VIPs-traffic.VIPs)/minutes, (now.Membership-traffic.Membership)/minutes,
			float64(all.API.Writes()-writes)/minutes, 100*(used-cpu).Minutes()/minutes/nodes, all.Moves()-moves)
		return nil
	})
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// falseFailover counts how often a VIP moves although nobody is lost, while
// other processes want twice the CPUs that there are.
func falseFailover(ctx context.Context, _ *lodestone.Installation) error {
	const nodes, vips = 3, 30
	return withFleet(ctx, nodes, vips, fleetPool, func(ctx context.Context, all *fleet.Fleet) error {
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		for range 2 * runtime.NumCPU() {
			busy := exec.CommandContext(ctx, "sh", "-c", "while :; do :; done")
			busy.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
			if err := busy.Start(); err != nil {
				return err
			}
			defer busy.Wait() //nolint:errcheck // killed
		}
		defer stop()
		before := all.Moves()
		lasts := cmp.Or(*minutes, 10)
		if err := pause(ctx, time.Duration(lasts)*time.Minute); err != nil {
			return err
		}
		result("l2_false_failover", "minutes=%d nodes=%d vips=%d count=%d", lasts, nodes, vips, all.Moves()-before)
		return nil
	})
}

// loss counts how often a VIP moves although nobody is lost, while some of all
// frames are.
func loss(ctx context.Context, _ *lodestone.Installation) error {
	const nodes, vips = 3, 30
	lasts := cmp.Or(*minutes, 1)
	for _, failover := range []string{"normal", "fast"} {
		err := withFleet(ctx, nodes, vips, "failover: "+failover+fleetPool, func(ctx context.Context, all *fleet.Fleet) error {
			for _, percent := range []int{1, 10} {
				before := all.Moves()
				if err := errors.Join(all.Lose(percent), pause(ctx, time.Duration(lasts)*time.Minute)); err != nil {
					return err
				}
				result("l2_loss", "percent=%d failover=%s minutes=%d nodes=%d vips=%d count=%d", percent, failover, lasts, nodes, vips,
					all.Moves()-before)
				if err := errors.Join(all.Heal(), steady(ctx, all)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
