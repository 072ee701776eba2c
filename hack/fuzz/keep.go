package main

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// maxKept is the longest input that is kept, in bytes of its file.
const maxKept = 4 << 10

// keep copies the inputs that reach more code from go's cache to the repository, and returns how many.
func (t target) keep(root string) (int, error) {
	found, err := t.command(root, "go", "list", "-f", "{{.ImportPath}}").Output()
	if err != nil {
		return 0, err
	}
	cache, err := t.command(root, "go", "env", "GOCACHE").Output()
	if err != nil {
		return 0, err
	}
	from := filepath.Join(string(bytes.TrimSpace(cache)), "fuzz", string(bytes.TrimSpace(found)), t.name)
	to := filepath.Join(root, t.dir, "testdata", "fuzz", t.name)
	fresh, err := inputs(from, to)
	if err != nil || len(fresh) == 0 {
		return 0, err
	}
	work, err := os.MkdirTemp("", "fuzz")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(work)
	binary := filepath.Join(work, "test")
	build := t.command(root, "go", "test", "-c", "-cover", "-covermode=set", "-coverpkg=./...", "-o", binary)
	if text, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%w: %s", err, text)
	}
	s := &selection{reach: func(tests string) (map[string]bool, error) {
		return reach(t.command(root, binary, "-test.run=^"+t.name+"$"+tests, "-test.coverprofile="+filepath.Join(work, "profile")), work)
	}}
	if s.reached, err = s.reach(""); err != nil {
		return 0, err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return 0, err
	}
	for _, name := range fresh {
		text, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return 0, err
		}
		if err := os.WriteFile(filepath.Join(to, name), text, 0o644); err != nil { //nolint:gosec // it is source
			return 0, err
		}
	}
	kept, err := s.pick(fresh)
	for _, name := range fresh {
		if !slices.Contains(kept, name) {
			os.Remove(filepath.Join(to, name)) //nolint:errcheck // git shows it
		}
	}
	os.Remove(to) //nolint:errcheck // unless it is empty
	return len(kept), err
}

// inputs returns the names of the files in from that are not in to and not too long, the shortest first.
func inputs(from, to string) (names []string, err error) {
	entries, err := os.ReadDir(from)
	if os.IsNotExist(err) {
		return nil, nil
	}
	sizes := map[string]int64{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		if _, err := os.Stat(filepath.Join(to, e.Name())); err != nil && info.Size() <= maxKept {
			sizes[e.Name()] = info.Size()
		}
	}
	return slices.SortedFunc(maps.Keys(sizes), func(a, b string) int {
		return cmp.Or(cmp.Compare(sizes[a], sizes[b]), cmp.Compare(a, b))
	}), err
}

// selection picks inputs of a target that reach more code.
type selection struct {
	// reach returns the blocks of code that inputs reach: those whose names match the expression, all if there is none.
	reach func(names string) (map[string]bool, error)
	// reached is the code that is reached without what was not picked.
	reached map[string]bool
}

// pick returns those of the inputs that reach more than all before them.
func (s *selection) pick(names []string) ([]string, error) {
	if len(names) == 0 {
		return nil, nil
	}
	reached, err := s.reach("/^(" + strings.Join(names, "|") + ")$")
	if err != nil {
		return nil, err
	}
	before := len(s.reached)
	if len(names) == 1 {
		maps.Copy(s.reached, reached)
		if len(s.reached) > before {
			return slices.Clone(names), nil // what is appended to it must not overwrite names
		}
		return nil, nil
	}
	maps.DeleteFunc(reached, func(block string, _ bool) bool { return s.reached[block] })
	if len(reached) == 0 {
		return nil, nil
	}
	first, err := s.pick(names[:len(names)/2])
	if err != nil {
		return nil, err
	}
	rest, err := s.pick(names[len(names)/2:])
	return append(first, rest...), err
}

// reach runs tests, and returns the blocks of code that they reach.
func reach(tests *exec.Cmd, work string) (map[string]bool, error) {
	if text, err := tests.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, text)
	}
	profile, err := os.Open(filepath.Join(work, "profile"))
	if err != nil {
		return nil, err
	}
	defer profile.Close()
	reached := map[string]bool{}
	lines := bufio.NewScanner(profile)
	for lines.Scan() {
		if block, ok := strings.CutSuffix(lines.Text(), " 1"); ok {
			reached[block] = true
		}
	}
	return reached, lines.Err()
}
