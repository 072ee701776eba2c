package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/fleet"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// routedFleet announces all VIPs of a fleet to its router.
const routedFleet = fleetPool + `
advertisements:
  - {name: all, bgp: {}}
peers:
  - {name: tor, address: 198.18.255.252, localASN: 64512, peerASN: 64513}
`

// routerScale measures from the start of a speaker to the last of 10,000 VIPs in
// the router's table, and of that from when the speaker is ready, which is when it
// has a plan and opens its session; what the process has resident then; and one
// more VIP.
func routerScale(ctx context.Context, _ *lodestone.Installation) error {
	const vips, trials = manyServices, 5
	o := fleet.Options{Nodes: 2, Router: true, Document: lodestone.Document(routedFleet)}
	return withFleetOf(ctx, o, vips, func(ctx context.Context, all *fleet.Fleet) error {
		last := firstVIP
		for range vips {
			last = last.Next()
		}
		var took, announced, memory, peak float64
		for range trials {
			s, err := restartAtScale(ctx, all, vips)
			if err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "the router had all after %.2f s, %.2f s of that from ready on; %.0f MB, at most %.0f\n", s.took, s.announced,
				s.memory, s.peak)
			took, announced, memory, peak = max(took, s.took), max(announced, s.announced), max(memory, s.memory), max(peak, s.peak)
		}
		before, err := all.Router.Session(ctx, "n1")
		if err != nil {
			return err
		}
		began := time.Now()
		if err := errors.Join(all.AddService(last), routerHas(ctx, all, vips+1)); err != nil {
			return err
		}
		one := time.Since(began)
		after, err := all.Router.Session(ctx, "n1")
		if err != nil {
			return err
		}
		result("bgp_scale", "prefixes=%d trials=%d seconds=%.2f announce_seconds=%.2f speaker_mb=%.0f peak_mb=%.0f one_more_ms=%.0f "+
			"one_more_updates=%d",
			vips, trials, took, announced, memory, peak, ms(one), after.Stats.Updates-before.Stats.Updates)
		return nil
	})
}

// scaled is one start of a speaker, in seconds and MB.
type scaled struct{ took, announced, memory, peak float64 }

// restartAtScale replaces the speaker of n1, whose routes the router does not
// keep.
func restartAtScale(ctx context.Context, all *fleet.Fleet, vips int) (s scaled, err error) {
	err = errors.Join(routerHas(ctx, all, vips), all.EndSpeaker("n1", unix.SIGTERM), routerHas(ctx, all, 0))
	if err != nil {
		return s, err
	}
	began := time.Now()
	if err := errors.Join(all.StartSpeaker("n1"), routerHas(ctx, all, vips)); err != nil {
		return s, err
	}
	has := time.Now()
	ready, err := readyAt(all.Log("n1"))
	if err != nil {
		return s, err
	}
	s.took, s.announced = has.Sub(began).Seconds(), has.Sub(ready).Seconds()
	s.memory, s.peak, err = memoryOf(all.Speaker("n1"))
	return s, err
}

// routerHas waits until the router has so many prefixes of n1.
func routerHas(ctx context.Context, all *fleet.Fleet, prefixes int) error {
	return lodestone.Wait(ctx, fmt.Sprintf("the router has %d prefixes of n1", prefixes), func() error {
		s, err := all.Router.Session(ctx, "n1")
		if err == nil && s.Prefixes() != prefixes {
			err = fmt.Errorf("it has %d, in state %q", s.Prefixes(), s.State)
		}
		return err
	})
}

// readyAt returns when the speaker that wrote the log last was ready.
func readyAt(log string) (time.Time, error) {
	text, err := os.ReadFile(log)
	if err != nil {
		return time.Time{}, err
	}
	all := regexp.MustCompile(`(?m)^time=(\S+) level=INFO msg="ready to own VIPs"`).FindAllSubmatch(text, -1)
	if all == nil {
		return time.Time{}, fmt.Errorf("%s does not have the line of a speaker that is ready", log)
	}
	return time.Parse(time.RFC3339Nano, string(all[len(all)-1][1]))
}

// memoryOf returns what a process has resident, and the most that it had, in MB
// (proc(5), VmRSS and VmHWM).
func memoryOf(pid int) (now, peak float64, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	for name, value := range map[string]*float64{"VmRSS": &now, "VmHWM": &peak} {
		m := regexp.MustCompile(name + `:\s+(\d+) kB`).FindSubmatch(status)
		if m == nil {
			return 0, 0, fmt.Errorf("process %d has no %s", pid, name)
		}
		if _, err := fmt.Sscan(string(m[1]), value); err != nil {
			return 0, 0, err
		}
		*value *= 1024 / 1e6
	}
	return now, peak, nil
}
