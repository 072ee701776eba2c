// Command simulate lives through invented fleets, see package test/world: many seeds, or one with its story.
package main

import (
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/lodestone-lb/lodestone/test/world"
)

func main() {
	seed := flag.Int64("seed", -1, "live through this seed alone, and print its story")
	seeds := flag.Int("seeds", 1000, "how many seeds")
	from := flag.Uint64("from", 1, "the first of them")
	nodes := flag.Int("nodes", 0, "how many nodes each world has; 0: drawn from the seed")
	with := flag.String("with", "", "pass over seeds without a fault of this kind, by its name in a story")
	first := flag.Bool("first", false, "end with the first seed that fails")
	shrink := flag.Bool("shrink", false, "with -seed: make the failing scenario smaller first")
	flag.Parse()
	scenario := func(seed uint64) world.Scenario {
		s := world.Draw(seed)
		if *nodes > 0 {
			s = s.WithNodes(*nodes)
		}
		return s
	}
	if *seed >= 0 {
		s := scenario(uint64(*seed))
		if *shrink {
			s = world.Shrink(s)
		}
		fmt.Print(s)
		if world.Run(s, os.Stdout) != nil {
			os.Exit(1)
		}
		return
	}
	begun, failed, lived := time.Now(), 0, time.Duration(0)
	for i := range uint64(*seeds) {
		s := scenario(*from + i)
		if *with != "" && !s.Has(*with) {
			continue
		}
		lived += s.End()
		if f := world.Run(s, nil); f != nil {
			failed++
			fmt.Printf("seed %d: %s\n", s.Seed, f)
			if *first {
				break
			}
		}
	}
	took := time.Since(begun)
	fmt.Printf("simulate seeds=%d failed=%d nodes=%d seeds_per_s=%.1f simulated_hours_per_hour=%.0f\n", *seeds, failed, *nodes,
		float64(*seeds)/took.Seconds(), lived.Seconds()/took.Seconds())
	if failed > 0 {
		os.Exit(1)
	}
}
