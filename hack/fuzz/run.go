package main

import (
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// target is a fuzz test.
type target struct{ dir, name string }

// fuzz runs the targets of the module in the folder root that match the expression.
func fuzz(root, run string, duration time.Duration, keep bool, args []string, out io.Writer) error {
	matches, err := regexp.Compile(run)
	if err != nil {
		return err
	}
	all, err := targets(root)
	if err != nil {
		return err
	}
	ran, failed := 0, 0
	for _, t := range all {
		if !matches.MatchString(t.dir + "." + t.name) {
			continue
		}
		ran++
		text, err := t.run(root, duration, args)
		kept := 0
		if err == nil && keep {
			kept, err = t.keep(root)
		}
		if err != nil {
			failed++
			fmt.Fprintf(out, "FAIL %s %s: %v\n%s\n", t.dir, t.name, err, text)
			continue
		}
		fmt.Fprintf(out, "ok %s %s: %s, kept: %d\n", t.dir, t.name, text, kept)
	}
	if ran == 0 || failed > 0 {
		return fmt.Errorf("%d of %d targets failed", failed, ran)
	}
	return nil
}

var declaration = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(\w+ \*testing\.F\)`)

// targets returns all targets of the module in the folder, by folder and name.
func targets(root string) (all []target, err error) {
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil && path != root || d.Name() == ".git" {
				return filepath.SkipDir // another module
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		for _, m := range declaration.FindAllSubmatch(text, -1) {
			all = append(all, target{"./" + dir, string(m[1])})
		}
		return err
	})
	slices.SortFunc(all, func(a, b target) int { return cmp.Or(cmp.Compare(a.dir, b.dir), cmp.Compare(a.name, b.name)) })
	return all, err
}

// command returns a command that runs in the target's folder.
func (t target) command(root, name string, args ...string) *exec.Cmd {
	c := exec.Command(name, args...)
	c.Dir = filepath.Join(root, t.dir)
	return c
}

// run fuzzes, and returns how far it came, or what it wrote if it failed.
func (t target) run(root string, duration time.Duration, args []string) (string, error) {
	args = append([]string{"test", "-run=^$", "-fuzz=^" + t.name + "$", "-fuzztime=" + duration.String(), "-fuzzminimizetime=1s"}, args...)
	written, err := t.command(root, "go", args...).CombinedOutput()
	if err != nil {
		return string(written), err
	}
	last := ""
	for line := range strings.Lines(string(written)) {
		if _, progress, ok := strings.Cut(line, "execs: "); ok {
			last = "executions: " + strings.TrimSpace(progress)
		}
	}
	return last, nil
}
