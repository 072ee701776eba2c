package main

import (
	"bytes"
	"context"
	"errors"
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
	return goBenchmarks(ctx, "./ipam", ".", func(name string, seconds float64) {
		result("ipam_allocate", "case=%s ns_per_op=%.0f", name, seconds*1e9)
	})
}

// configEdit runs the Go benchmark of all that a controller does about an
// edit.
func configEdit(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./pkg/servicelb", "^BenchmarkConfigEdit$", func(name string, seconds float64) {
		_, sizes, _ := strings.Cut(name, "/")
		result("config_edit", "%s ms=%.1f", strings.ReplaceAll(sizes, "/", " "), seconds*1e3)
	})
}

// ledger runs the Go benchmarks of the controller's state in memory.
func ledger(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./pkg/servicelb", "^BenchmarkLedger$", func(name string, seconds float64) {
		result("ledger", "case=%s ns_per_op=%.0f", strings.TrimPrefix(name, "Ledger/"), seconds*1e9)
	})
}

// goBenchmarks runs the Go benchmarks of a package that match and reports the
// time of one operation of each.
func goBenchmarks(ctx context.Context, pkg, match string, report func(name string, seconds float64)) error {
	root, err := lab.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-run=^$", "-bench="+match, "-benchtime=1s", pkg)
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("run benchmarks of %s: %w: %s", pkg, err, out)
	}
	reader, found := benchfmt.NewReader(bytes.NewReader(out), pkg), false
	for reader.Scan() {
		if record, ok := reader.Result().(*benchfmt.Result); ok {
			seconds, _ := record.Value("sec/op") // benchfmt knows SI units only
			report(caseOf(record.Name), seconds)
			found = true
		}
	}
	if !found {
		return errors.Join(reader.Err(), fmt.Errorf("no benchmark of %s matches %s", pkg, match))
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
