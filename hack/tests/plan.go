package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// group is what one go test runs.
type group struct {
	// dir is the folder of its module.
	dir string
	// race is set for the race detector.
	race bool
	// flags are further ones of go test. packages begin in this order.
	flags, packages []string
}

// plan is which tests run, and when.
type plan struct {
	// turns run one after the other.
	turns []group
	// aside run one after the other, too, with what processor time is left, from the first test of the package beside on.
	aside  []group
	beside string
}

// The longest packages begin first, so that no processor is idle at the end.
var (
	longestUnit = []string{"./speaker/direct", "./speaker/membership", "./speaker/layer2", "./speaker/bgp", "./speaker/bfd",
		"./controller/dhcp"}
	longestE2E = []string{"./fleet", "./tutorial", "./apiservers", "./lab"}
)

// pure packages have no goroutines, so none to race, and their tests take a fifth of the time without the detector.
var pure = []string{".", "./test/world", "./pkg/config", "./pkg/migrate", "./ipam", "./controller/servicelb/ledger", "./inspect/output",
	"./pkg/annotation", "./pkg/buildinfo", "./pkg/compat", "./pkg/config/change", "./pkg/diagnose", "./pkg/report", "./pkg/testcost",
	"./speaker/core", "./speaker/detector/watch", "./speaker/rendezvous", "./speaker/layer2/seal", "./speaker/layer2/segment",
	"./speaker/membership/keys", "./speaker/plan", "./speaker/snapshot"}

const (
	module  = "github.com/lodestone-lb/lodestone"
	testnet = module + "/pkg/testnet"
	stories = module + "/test/e2e/scenarios"
)

// newPlan returns the plan of a kind of tests of the repository: unit, e2e, or all, which is both and what makes a release.
//
// A node without processor time loses packets. So the stories, which count them, have the machine for themselves, with a
// lab in each place; the other end-to-end tests run four packages at a time. Of the unit tests those that send packets run three
// packages at a time, with four tests of each, as two wait mostly. The others compute, and take what the stories leave, from when the
// labs are up and have measured whether the machine is fast enough for so many.
func newPlan(ctx context.Context, root, kind string) (plan, error) {
	e2e, release := filepath.Join(root, "test", "e2e"), filepath.Join(root, "hack", "release")
	ours, err := list(ctx, root, "./...")
	if err != nil {
		return plan{}, err
	}
	alone, err := list(ctx, root, pure...)
	if err != nil {
		return plan{}, err
	}
	labs, err := list(ctx, e2e, "./...")
	if err != nil {
		return plan{}, err
	}
	packets := group{dir: root, race: true, flags: []string{"-p=3", "-parallel=4"}, packages: slices.Clone(longestUnit)}
	others := group{dir: root, race: true, flags: []string{"-p=2", "-parallel=4"}}
	for _, path := range slices.Sorted(maps.Keys(ours)) {
		switch {
		case alone[path] != nil:
		case path == testnet, slices.Contains(ours[path], testnet):
			packets.packages = append(packets.packages, path)
		default:
			others.packages = append(others.packages, path)
		}
	}
	computed := group{dir: root, flags: []string{"-p=1"}, packages: pure}
	rest := group{dir: e2e, flags: []string{"-p=4", "-parallel=4"}, packages: slices.Clone(longestE2E)}
	for _, path := range slices.Sorted(maps.Keys(labs)) {
		if path != stories {
			rest.packages = append(rest.packages, path)
		}
	}
	turns := []group{{dir: e2e, packages: []string{stories}}, rest}
	switch kind {
	case "unit":
		packets.packages = append(packets.packages, others.packages...)
		return plan{turns: []group{packets, computed}}, nil
	case "e2e":
		return plan{turns: turns}, nil
	case "all":
		releases := group{dir: release, flags: []string{"-p=1"}, packages: []string{"./..."}}
		return plan{append([]group{packets}, turns...), []group{computed, releases, others}, stories}, nil
	}
	return plan{}, fmt.Errorf("there are no tests of the kind %q: write unit, e2e or all", kind)
}

// list returns the packages in the folder that fit the patterns, and for each what its tests import.
func list(ctx context.Context, dir string, patterns ...string) (map[string][]string, error) {
	const format = `{{.ImportPath}} {{join .TestImports " "}} {{join .XTestImports " "}}`
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-tags=long", "-f", format}, patterns...)...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the packages in %s: %w", dir, err)
	}
	found := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		found[fields[0]] = fields
	}
	return found, nil
}
