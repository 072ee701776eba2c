package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"golang.org/x/perf/benchfmt"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// ipamAllocate runs the allocator's own Go benchmarks and prints their cost
// per operation.
func ipamAllocate(ctx context.Context, _ *lodestone.Installation) error {
	root, err := lab.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-run=^$", "-bench=.", "-benchtime=1s", "./ipam")
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("run benchmarks of ipam: %w: %s", err, out)
	}
	reader := benchfmt.NewReader(strings.NewReader(string(out)), "ipam")
	for reader.Scan() {
		if record, ok := reader.Result().(*benchfmt.Result); ok {
			seconds, _ := record.Value("sec/op") // benchfmt knows SI units only
			result("ipam_allocate", "case=%s ns_per_op=%.0f", caseOf(record.Name), seconds*1e9)
		}
	}
	return reader.Err()
}

// caseOf turns "Allocate/half-16-2" into "Allocate/half-16".
func caseOf(name benchfmt.Name) string {
	base, parts := name.Parts()
	full := string(base)
	for _, part := range parts {
		if part[0] == '/' {
			full += string(part)
		}
	}
	return full
}

// quantile is the smallest value that at least the share q does not exceed.
func quantile(values []time.Duration, q float64) time.Duration {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
