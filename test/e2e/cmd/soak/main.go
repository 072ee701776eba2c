// Command soak brings a lab up, has faults at random happen to it for hours, and prints what it found.
//
//	soak [-hours 2] [-seed N] [-steps N] [-step N] [-dir FOLDER] [-keep]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/soak"
)

func main() {
	hours := flag.Float64("hours", 2, "how long it goes on")
	seed := flag.Uint64("seed", uint64(time.Now().Unix()), "decides what happens")
	steps := flag.Int("steps", 0, "how many steps at most; 0: as many as there is time for")
	only := flag.Int("step", 0, "the step to make alone; 0: all")
	dir := flag.String("dir", "", "where the timeline goes, and all about what was found; empty: .cache/soak-SEED in the repository")
	keep := flag.Bool("keep", false, "use the lab that is up, if any, and leave it up")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	options := soak.Options{For: time.Duration(*hours * float64(time.Hour)), Steps: *steps, Seed: *seed, Only: *only, Dir: *dir,
		Progress: progress}
	found, err := run(ctx, options, *keep)
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
	}
	if err != nil || found {
		os.Exit(1)
	}
}

func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func run(ctx context.Context, options soak.Options, keep bool) (found bool, err error) {
	cluster, err := lab.Open("")
	if err != nil || !keep {
		cluster, err = lab.Up(ctx, lab.Options{DualStack: true, Router: lab.RouterBoth, Place: 1, Progress: progress})
	}
	if cluster != nil && !keep {
		defer func() { err = errors.Join(err, cluster.Down(context.WithoutCancel(ctx))) }()
	}
	if err != nil {
		return false, err
	}
	if options.Dir == "" {
		options.Dir = filepath.Join(cluster.Root, ".cache", fmt.Sprintf("soak-%d", options.Seed))
	}
	installation, err := lodestone.New(cluster)
	if err != nil {
		return false, err
	}
	verdict, err := soak.Run(ctx, installation, options)
	report(options, verdict)
	return len(verdict.Findings) > 0, err
}

// report prints the verdict.
func report(options soak.Options, v soak.Verdict) {
	for _, name := range slices.Sorted(maps.Keys(v.WorstOutage)) {
		fmt.Printf("soak outage_ms=%d fault=%q\n", v.WorstOutage[name].Milliseconds(), name)
	}
	for _, f := range v.Findings {
		fmt.Printf("soak found %s\n", f)
	}
	fmt.Printf("soak seed=%d hours=%.2f steps=%d faults=%d datagrams=%d requests=%d connections=%d ended=%d not_ready=%d grown_mb=%.1f "+
		"found=%d\n", options.Seed, v.Lasted.Hours(), v.Steps, v.Faults, v.Asked, v.Requests, v.Connections, v.Ended, v.NotReady,
		float64(v.Grown)/1e6, len(v.Findings))
	fmt.Println("soak timeline in", options.Dir)
}
