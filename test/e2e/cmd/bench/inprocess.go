package main

import (
	"bytes"
	"cmp"
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
// per operation, and its memory per Service.
func ipamAllocate(ctx context.Context, _ *lodestone.Installation) error {
	return errors.Join(
		goBenchmarks(ctx, "./ipam", "^Benchmark(Allocate|Sharers|Configure)$", "1s", func(name string, value measured) {
			result("ipam_allocate", "case=%s ns_per_op=%.0f", name, value(perOp)*1e9)
		}),
		goBenchmarks(ctx, "./ipam", "^BenchmarkMemory$", "1x", func(name string, value measured) {
			result("ipam_allocate", "case=%s bytes_per_service=%.0f", name, value("B/service"))
		}),
	)
}

// configEdit runs the Go benchmark of all that a controller does about an
// edit.
func configEdit(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./pkg/servicelb", "^BenchmarkConfigEdit$", "1s", func(name string, value measured) {
		_, sizes, _ := strings.Cut(name, "/")
		result("config_edit", "%s ms=%.1f", strings.ReplaceAll(sizes, "/", " "), value(perOp)*1e3)
	})
}

// ledger runs the Go benchmarks of the controller's state in memory.
func ledger(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./pkg/servicelb", "^BenchmarkLedger$", "1s", func(name string, value measured) {
		result("ledger", "case=%s ns_per_op=%.0f", strings.TrimPrefix(name, "Ledger/"), value(perOp)*1e9)
	})
}

// dashboardLoad runs the Go benchmarks of the dashboard: what a browser loads, and
// what one look at the cluster costs the controller.
func dashboardLoad(ctx context.Context, _ *lodestone.Installation) error {
	var look, memory float64
	return errors.Join(
		goBenchmarks(ctx, "./pkg/dashboard", "^BenchmarkLook$", "10x", func(_ string, value measured) {
			look, memory = value("look-ms"), value("state-MB")
		}),
		goBenchmarks(ctx, "./pkg/dashboard", "^BenchmarkPage$", "100x", func(_ string, value measured) {
			result("dashboard_load", "services=10000 kb=%.0f ms=%.1f look_ms=%.0f state_mb=%.0f", value("kB"), value(perOp)*1e3, look, memory)
		}),
	)
}

// cliStatus runs the Go benchmark of lodestone status as a process, against an
// API server by HTTP.
func cliStatus(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./cmd/lodestone", "^BenchmarkCommands$/^status$", "10x", func(_ string, value measured) {
		result("cli_status", "services=10000 ms=%.0f cpu_ms=%.0f", value(perOp)*1e3, value("cpu-ms"))
	})
}

// explain runs those of the commands that tell why.
func explain(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./cmd/lodestone", "^BenchmarkCommands$/^explain-", "10x", func(name string, value measured) {
		result("explain", "services=10000 case=%s ms=%.0f cpu_ms=%.0f", strings.TrimPrefix(name, "Commands/explain-"), value(perOp)*1e3, value("cpu-ms"))
	})
}

// bfdTiming runs the Go benchmark of BFD between processes on a busy machine.
func bfdTiming(ctx context.Context, _ *lodestone.Installation) error {
	match, lasts := "^BenchmarkTiming$/"+*cases, cmp.Or(*minutes, 1)
	return goBenchmarks(ctx, "./speaker/bfd", match, "1x", func(name string, value measured) {
		_, details, _ := strings.Cut(name, "/")
		result("bfd_timing", "%s minutes=%d p99_jitter_ms=%.2f max_jitter_ms=%.1f peer_p99_jitter_ms=%.2f peer_max_jitter_ms=%.1f false_downs=%.0f",
			strings.ReplaceAll(details, "/", " "), lasts, value("node_p99_jitter_ms"), value("node_max_jitter_ms"),
			value("peer_p99_jitter_ms"), value("peer_max_jitter_ms"), value("false_downs"))
	}, fmt.Sprintf("-bfd.duration=%dm", lasts))
}

// election runs the Go benchmark of what a speaker computes when a node is
// lost.
func election(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./speaker/plan", "^BenchmarkNodeLost$", "1s", func(name string, value measured) {
		result("l2_election", "nodes=1000 vips=5000 case=%s ms=%.1f", strings.TrimPrefix(name, "NodeLost/"), value(perOp)*1e3)
	})
}

// arpLatency runs the Go benchmarks of answers on a segment, beside those of
// the kernel.
func arpLatency(ctx context.Context, _ *lodestone.Installation) error {
	latency, rate, others := "", map[string]float64{}, 0.0
	err := errors.Join(
		goBenchmarks(ctx, "./speaker/layer2", "^BenchmarkARPLatency$", "20000x", func(_ string, value measured) {
			latency = fmt.Sprintf("p50_us=%.0f p99_us=%.0f kernel_p50_us=%.0f kernel_p99_us=%.0f", value("p50-us"), value("p99-us"), value("kernel-p50-us"), value("kernel-p99-us"))
		}),
		goBenchmarks(ctx, "./speaker/layer2", "^BenchmarkARPRate$", "100000x", func(name string, value measured) { rate[name] = value("answers/s") }),
		goBenchmarks(ctx, "./speaker/layer2", "^BenchmarkARPOfOthers$", "10x", func(_ string, value measured) { others = value("cpu-percent") }),
	)
	if err != nil {
		return err
	}
	result("l2_arp_latency", "%s max_rate=%.0f kernel_max_rate=%.0f others_10000_per_s_cpu_percent=%.1f", latency, rate["ARPRate/ours"], rate["ARPRate/kernel"], others)
	return nil
}

// measured returns a value of a benchmark by its unit.
type measured func(unit string) float64

// perOp is the unit of an operation's duration: benchfmt knows SI units only.
const perOp = "sec/op"

// goBenchmarks runs the Go benchmarks of a package that match, each for the
// time or number of operations that is given, with flags of the package's own,
// and reports what they measured.
func goBenchmarks(ctx context.Context, pkg, match, benchtime string, report func(name string, value measured), flags ...string) error {
	root, err := lab.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-timeout=0", "-run=^$", "-bench=" + match, "-benchtime=" + benchtime, pkg}, flags...)...)
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("run benchmarks of %s: %w: %s", pkg, err, out)
	}
	reader, found := benchfmt.NewReader(bytes.NewReader(out), pkg), false
	for reader.Scan() {
		if record, ok := reader.Result().(*benchfmt.Result); ok {
			report(caseOf(record.Name), func(unit string) float64 {
				value, _ := record.Value(unit)
				return value
			})
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
