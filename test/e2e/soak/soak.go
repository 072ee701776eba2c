// Package soak has faults happen at random to a lab with Lodestone, for hours: to nodes, links,
// programs, the API server and routers, and people who change what they want meanwhile. All the
// while clients ask VIPs, by datagrams and over connections that they keep. After each step
// everything has to be as it was before.
//
//	soak.go     Run: step after step
//	faults.go   the faults, and how they are drawn
//	clients.go  the Services and their clients
//	check.go    what has to be true after a step
package soak

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// Options bound a run.
type Options struct {
	// For is how long it goes on, and Steps how many steps it makes at most; 0: as many as there is time for.
	For   time.Duration
	Steps int
	// Seed decides what happens in each step, and Only a step to make alone; 0: all.
	Seed uint64
	Only int
	// Dir is where the timeline goes, and everything about what was found.
	Dir string
	// Progress gets each line of the timeline.
	Progress func(format string, args ...any)
}

// enough is after how many findings a run ends: the next one has the same cause, or the lab is broken.
const enough = 10

// Verdict is what became of a run.
type Verdict struct {
	Steps, Faults int
	Lasted        time.Duration
	// Asked counts datagrams, Requests those on connections, Connections how many were opened,
	// and Ended how many of them ended as they may: with their pods or nodes.
	Asked, Requests, Connections, Ended int
	// NotReady counts the steps in which Kubernetes had all nodes as not ready, as it may after an API server was away, and so no
	// endpoint for anybody. What such a step finds does not count.
	NotReady int
	// WorstOutage is the longest time without an answer of any VIP, by fault.
	WorstOutage map[string]time.Duration
	// Grown is by how many bytes the largest program of Lodestone is larger than at the first step.
	Grown    int64
	Findings []string
}

// soak is a run.
type soak struct {
	*lodestone.Installation
	Options
	clients  clients
	timeline *os.File
	verdict  Verdict
	// resident is how much memory each program had after the first step.
	resident map[string]int64
	// began is when the step did.
	began time.Time
}

// Run has Lodestone live through faults. An error means that the run itself could not go on.
func Run(ctx context.Context, installation *lodestone.Installation, options Options) (verdict Verdict, err error) {
	if err := os.MkdirAll(options.Dir, 0o755); err != nil {
		return Verdict{}, err
	}
	timeline, err := os.Create(filepath.Join(options.Dir, "timeline.txt"))
	if err != nil {
		return Verdict{}, err
	}
	defer func() { err = errors.Join(err, timeline.Close()) }()
	s := &soak{Installation: installation, Options: options, timeline: timeline, began: time.Now(),
		verdict: Verdict{WorstOutage: map[string]time.Duration{}}}
	started := time.Now()
	defer func() { verdict.Lasted = time.Since(started).Round(time.Second) }()
	if err := s.prepare(ctx); err != nil {
		return s.verdict, fmt.Errorf("prepare: %w", err)
	}
	for n := max(1, s.Only); time.Since(started) < s.For && (s.Steps == 0 || n <= s.Steps) && len(s.verdict.Findings) < enough; n++ {
		if err := s.step(ctx, n); err != nil {
			return s.verdict, fmt.Errorf("step %d: %w", n, err)
		}
		if s.Only > 0 {
			break
		}
	}
	err = s.leave(ctx)
	return s.verdict, err
}

// note writes a line of the timeline.
func (s *soak) note(format string, args ...any) {
	line := time.Now().Format("15:04:05.000 ") + fmt.Sprintf(format, args...)
	fmt.Fprintln(s.timeline, line)
	s.Progress("%s", line)
}

// step has one fault happen, or two at a time, and looks at what came of it.
func (s *soak) step(ctx context.Context, n int) error {
	chosen := choose(s.Seed, n, s.Lab.Nodes())
	s.note("step %d: %s", n, chosen)
	var owners map[string]string
	err := lodestone.Wait(ctx, "each VIP has an owner", func() (err error) {
		owners, err = s.owners(ctx)
		return err
	})
	if err != nil {
		return err
	}
	asking, err := s.clients.ask(ctx, s)
	if err != nil {
		return err
	}
	s.began = time.Now()
	var found []string
	if err := s.happens(ctx, chosen); err != nil {
		found = append(found, err.Error())
	}
	over := time.Now()
	if err := lodestone.Wait(ctx, "all is as it was", func() error { return s.settled(ctx, owners, chosen) }); err != nil {
		found = append(found, err.Error())
	} else {
		s.note("  settled after %s", time.Since(over).Round(time.Millisecond))
	}
	more, err := s.clients.answered(ctx, asking, chosen, s)
	if err != nil {
		return err
	}
	found = append(found, more...)
	s.verdict.Steps++
	s.verdict.Faults += len(chosen)
	s.measureMemory(ctx)
	if len(found) == 0 {
		return nil
	}
	if notReady, err := s.allNotReady(ctx); err != nil {
		return err
	} else if notReady {
		s.verdict.NotReady++
		s.note("  Kubernetes had all nodes as not ready: %s", strings.Join(found, "; "))
		return s.clients.open(ctx, s)
	}
	s.verdict.Findings = append(s.verdict.Findings, fmt.Sprintf("step %d, %s: %s", n, chosen, strings.Join(found, "; ")))
	for _, f := range found {
		s.note("  FOUND %s", f)
	}
	s.evidence(ctx, filepath.Join(s.Dir, fmt.Sprintf("step-%d", n)))
	return s.clients.open(ctx, s) // what is broken is not counted again
}

// happens has the faults happen, each for as long as was drawn, and undoes them, the last first.
func (s *soak) happens(ctx context.Context, chosen faults) (failed error) {
	for _, f := range chosen {
		undo, err := f.begin(ctx, s, f.node)
		if undo != nil {
			defer func() { failed = errors.Join(failed, undo(context.WithoutCancel(ctx))) }()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
	}
	return pause(ctx, chosen.lasts())
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
