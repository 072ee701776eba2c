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

// ipamAllocate runs the allocator's own Go benchmarks, and prints their cost per
// operation and the allocator's memory per Service. What it waits for is memory,
// which other programs use, too: so it takes the median of five runs, the mix in
// a process that no other benchmark has filled.
func ipamAllocate(ctx context.Context, _ *lodestone.Installation) error {
	cost := func(name string, value measured) {
		result("ipam_allocate", "case=%s ns_per_op=%.0f best=%.0f", name, value.median(perOp)*1e9, value.best(perOp)*1e9)
	}
	return errors.Join(
		goBenchmarks(ctx, "./ipam", "^BenchmarkMix$", "1s", cost, "-count=5"),
		goBenchmarks(ctx, "./ipam", "^Benchmark(Allocate|Sharers|Configure)$", "1s", cost, "-count=5"),
		goBenchmarks(ctx, "./ipam", "^BenchmarkMemory$", "1x", func(name string, value measured) {
			result("ipam_allocate", "case=%s bytes_per_service=%.0f", name, value.median("B/service"))
		}),
	)
}

// configEdit runs the Go benchmark of all that a controller does about an
// edit.
func configEdit(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./controller/servicelb", "^BenchmarkConfigEdit$", "1s", func(name string, value measured) {
		_, sizes, _ := strings.Cut(name, "/")
		result("config_edit", "%s ms=%.1f", strings.ReplaceAll(sizes, "/", " "), value.median(perOp)*1e3)
	})
}

// configWorst validates documents of 1 MiB by the command in a process on one
// core: of each family of documents those that cost most at a smaller size.
func configWorst(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./pkg/config", "^BenchmarkWorst$", "1x", func(_ string, value measured) {
		result("config_worst", "shapes=%.0f of=%.0f max_ms=%.0f max_mb=%.0f",
			value.median("shapes"), value.median("of"), value.median("max-ms"), value.median("max-B")/1e6)
	})
}

// ledger runs the Go benchmarks of the controller's state in memory.
func ledger(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./controller/servicelb", "^BenchmarkLedger$", "1s", func(name string, value measured) {
		result("ledger", "case=%s ns_per_op=%.0f", strings.TrimPrefix(name, "Ledger/"), value.median(perOp)*1e9)
	})
}

// dashboardLoad runs the Go benchmarks of the dashboard: what a browser loads, and
// what one look at the cluster costs the controller.
func dashboardLoad(ctx context.Context, _ *lodestone.Installation) error {
	var look, memory float64
	return errors.Join(
		goBenchmarks(ctx, "./inspect/dashboard", "^BenchmarkLook$", "10x", func(_ string, value measured) {
			look, memory = value.median("look-ms"), value.median("state-B")/1e6
		}),
		goBenchmarks(ctx, "./inspect/dashboard", "^BenchmarkPage$", "100x", func(_ string, value measured) {
			result("dashboard_load", "services=10000 kb=%.0f ms=%.1f look_ms=%.0f state_mb=%.0f", value.median("kB"),
				value.median(perOp)*1e3, look, memory)
		}),
	)
}

// cliStatus runs the Go benchmark of lodestone status as a process, against an
// API server by HTTP.
func cliStatus(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./cmd/lodestone", "^BenchmarkCommands$/^status$", "10x", func(_ string, value measured) {
		result("cli_status", "services=10000 ms=%.0f cpu_ms=%.0f", value.median(perOp)*1e3, value.median("cpu-ms"))
	})
}

// explain runs the Go benchmarks of the commands that explain.
func explain(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./cmd/lodestone", "^BenchmarkCommands$/^explain-", "10x", func(name string, value measured) {
		result("explain", "services=10000 case=%s ms=%.0f cpu_ms=%.0f", strings.TrimPrefix(name, "Commands/explain-"), value.median(perOp)*1e3,
			value.median("cpu-ms"))
	})
}

// bfdTiming runs the Go benchmark of BFD between processes on a busy machine.
func bfdTiming(ctx context.Context, _ *lodestone.Installation) error {
	match, lasts := "^BenchmarkTiming$/"+*cases, cmp.Or(*minutes, 1)
	return goBenchmarks(ctx, "./speaker/bfd", match, "1x", func(name string, value measured) {
		_, details, _ := strings.Cut(name, "/")
		result("bfd_timing", "%s minutes=%d p99_jitter_ms=%.2f max_jitter_ms=%.1f peer_p99_jitter_ms=%.2f peer_max_jitter_ms=%.1f "+
			"false_downs=%.0f",
			strings.ReplaceAll(details, "/", " "), lasts, value.median("node_p99_jitter_ms"), value.median("node_max_jitter_ms"),
			value.median("peer_p99_jitter_ms"), value.median("peer_max_jitter_ms"), value.median("false_downs"))
	}, fmt.Sprintf("-bfd.duration=%dm", lasts))
}

// election runs the Go benchmark of what a speaker computes when a node is
// lost.
func election(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./speaker/plan", "^BenchmarkNodeLost$", "1s", func(name string, value measured) {
		result("l2_election", "nodes=1000 vips=5000 case=%s ms=%.1f", strings.TrimPrefix(name, "NodeLost/"), value.median(perOp)*1e3)
	})
}

// directInKernel runs the Go benchmarks of direct forwarding in network namespaces: how evenly
// new connections are spread, what a packet costs more than one that is dropped where it comes
// in, and how long changes take.
func directInKernel(ctx context.Context, _ *lodestone.Installation) error {
	cost := map[string]float64{}
	return errors.Join(
		goBenchmarks(ctx, "./speaker/direct", "^BenchmarkSpread$", "1x", func(_ string, value measured) {
			result("direct_spread", "nodes=10 flows=100000 max_deviation_percent=%.1f", value.median("max-deviation-%"))
		}, "-count=5"),
		goBenchmarks(ctx, "./speaker/direct", "^BenchmarkPacket$", "1s", func(name string, value measured) {
			_, of, _ := strings.Cut(name, "/")
			if cost[of] = value.median(perOp) * 1e9; len(cost) == 4 {
				result("direct_cost", "ns_per_packet=%.0f after_conntrack_ns_per_packet=%.0f kube_proxy_ns_per_packet=%.0f dropped_ns_per_packet=%.0f",
					cost["direct"]-cost["drop"], cost["after-conntrack"]-cost["drop"], cost["kube-proxy"]-cost["drop"], cost["drop"])
			}
		}, "-count=5"),
		goBenchmarks(ctx, "./speaker/direct", "^BenchmarkChange$", "5x", func(name string, value measured) {
			_, details, _ := strings.Cut(name, "/")
			last := strings.LastIndex(details, "/")
			result("direct_scale", "vips=1000 %s case=%s ms=%.0f kernel_kb=%.0f", strings.ReplaceAll(details[:last], "/", " "), details[last+1:],
				value.median(perOp)*1e3, value.median("kernel-KB"))
		}),
	)
}

// membership loses one of many speakers, in simulated time.
func membership(ctx context.Context, _ *lodestone.Installation) error {
	return goBenchmarks(ctx, "./speaker/detector/watch", "^BenchmarkOneIsLost$", "1x", func(name string, value measured) {
		_, speakers, _ := strings.Cut(name, "/")
		result("l2_membership", "%s first_ms=%.0f median_ms=%.0f last_ms=%.0f packets_per_s=%.1f", speakers,
			value.median("first-ms"), value.median("median-ms"), value.median("last-ms"), value.median("packets/s"))
	})
}

// arpLatency runs the Go benchmarks of answers on a segment, beside those of
// the kernel.
func arpLatency(ctx context.Context, _ *lodestone.Installation) error {
	latency, rate, others := "", map[string]float64{}, 0.0
	err := errors.Join(
		goBenchmarks(ctx, "./speaker/layer2", "^BenchmarkARPLatency$", "20000x", func(_ string, value measured) {
			latency = fmt.Sprintf("p50_us=%.0f p99_us=%.0f kernel_p50_us=%.0f kernel_p99_us=%.0f", value.median("p50-us"), value.median("p99-us"),
				value.median("kernel-p50-us"), value.median("kernel-p99-us"))
		}),
		goBenchmarks(ctx, "./speaker/layer2", "^BenchmarkARPRate$", "100000x",
			func(name string, value measured) { rate[name] = value.median("answers/s") }),
		goBenchmarks(ctx, "./speaker/layer2", "^BenchmarkARPOfOthers$", "10x",
			func(_ string, value measured) { others = value.median("cpu-percent") }),
	)
	if err != nil {
		return err
	}
	result("l2_arp_latency", "%s max_rate=%.0f kernel_max_rate=%.0f others_10000_per_s_cpu_percent=%.1f", latency, rate["ARPRate/ours"],
		rate["ARPRate/kernel"], others)
	return nil
}

// measured returns what the runs of a benchmark have for a unit, lowest first.
type measured func(unit string) []float64

func (m measured) median(unit string) float64 {
	values := m(unit)
	return values[len(values)/2]
}

func (m measured) best(unit string) float64 { return m(unit)[0] }

// perOp is the unit of an operation's duration: benchfmt knows SI units only, and
// makes B of MB.
const perOp = "sec/op"

// goBenchmarks runs the Go benchmarks of a package that match, each for the
// time or number of operations that is given, with flags of the package's own,
// and reports what they measured.
func goBenchmarks(ctx context.Context, pkg, match, benchtime string, report func(name string, value measured), flags ...string) error {
	root, err := lab.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-timeout=0", "-run=^$", "-bench=" + match, "-benchtime=" + benchtime,
		pkg}, flags...)...)
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("run benchmarks of %s: %w: %s", pkg, err, out)
	}
	reader := benchfmt.NewReader(bytes.NewReader(out), pkg)
	var names []string
	runs := map[string][]*benchfmt.Result{}
	for reader.Scan() {
		if record, ok := reader.Result().(*benchfmt.Result); ok {
			name := caseOf(record.Name)
			if runs[name] == nil {
				names = append(names, name)
			}
			runs[name] = append(runs[name], record.Clone())
		}
	}
	if len(names) == 0 {
		return errors.Join(reader.Err(), fmt.Errorf("no benchmark of %s matches %s", pkg, match))
	}
	errs := []error{reader.Err()}
	for _, name := range names {
		report(name, func(unit string) []float64 {
			values, err := sorted(runs[name], unit)
			errs = append(errs, err)
			return values
		})
	}
	return errors.Join(errs...)
}

func sorted(runs []*benchfmt.Result, unit string) (values []float64, err error) {
	for _, run := range runs {
		value, known := run.Value(unit)
		if !known {
			err = fmt.Errorf("benchmark %s does not measure %s", run.Name, unit)
		}
		values = append(values, value)
	}
	slices.Sort(values)
	return values, err
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
func quantile[T cmp.Ordered](values []T, q float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
