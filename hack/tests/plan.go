package main

import (
	"context"
	"fmt"
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
	// turns run one after the other, those after the first when all that runs aside has ended, too.
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
	stories = module + "/test/e2e/scenarios"
	// longestOne is the package beside which others run.
	longestOne = module + "/speaker/direct"
)

// newPlan returns the plan of a kind of tests of the repository: unit, e2e, or all, which is both and what makes a release.
//
// A node without processor time loses packets. So the stories, which count them, have the machine for themselves, with a
// lab in each place; the other end-to-end tests run four packages at a time, and unit tests three, with four tests of each, as two wait
// mostly. What neither waits nor sends anything takes what the unit tests leave.
func newPlan(ctx context.Context, root, kind string) (plan, error) {
	e2e, release := filepath.Join(root, "test", "e2e"), filepath.Join(root, "hack", "release")
	alone, err := list(ctx, root, pure...)
	if err != nil {
		return plan{}, err
	}
	unit := group{dir: root, race: true, flags: []string{"-p=3", "-parallel=4"}}
	if unit.packages, err = but(ctx, root, longestUnit, alone...); err != nil {
		return plan{}, err
	}
	rest := group{dir: e2e, flags: []string{"-p=4", "-parallel=4"}}
	if rest.packages, err = but(ctx, e2e, longestE2E, stories); err != nil {
		return plan{}, err
	}
	computing := group{dir: root, flags: []string{"-p=2"}, packages: pure}
	releases := group{dir: release, flags: []string{"-p=1"}, packages: []string{"./..."}}
	turns := []group{unit, {dir: e2e, packages: []string{stories}}, rest}
	switch kind {
	case "unit":
		return plan{[]group{unit}, []group{computing}, longestOne}, nil
	case "e2e":
		return plan{turns: turns[1:]}, nil
	case "all":
		return plan{turns, []group{computing, releases}, longestOne}, nil
	}
	return plan{}, fmt.Errorf("there are no tests of the kind %q: write unit, e2e or all", kind)
}

// but returns the packages of a module without some, the longest first.
func but(ctx context.Context, dir string, longest []string, without ...string) ([]string, error) {
	all, err := list(ctx, dir, "./...")
	return append(slices.Clone(longest), slices.DeleteFunc(all, func(path string) bool { return slices.Contains(without, path) })...), err
}

// list returns the packages in the folder that fit the patterns.
func list(ctx context.Context, dir string, patterns ...string) ([]string, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-tags=long"}, patterns...)...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the packages in %s: %w", dir, err)
	}
	return strings.Fields(string(out)), nil
}
