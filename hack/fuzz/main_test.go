package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// In a module of two targets the one that finds something fails the run, the other one runs nevertheless, and what it
// found is kept if it reaches more code, until the next run.
func TestATargetThatFailsFailsTheRun(t *testing.T) {
	root := t.TempDir()
	module := "example.com/" + filepath.Base(filepath.Dir(root)) // what an earlier run has found is of another module
	cache, err := exec.Command("go", "env", "GOCACHE").Output()
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(filepath.Join(strings.TrimSpace(string(cache)), "fuzz", module)) })
	for name, text := range map[string]string{
		"go.mod": "module " + module + "\n\ngo 1.24\n",
		"m.go": `package m

func magic(b []byte) int {
	switch {
	case len(b) == 0:
		return 0
	case b[0] < 64:
		return 1
	case b[0] < 128:
		return 2
	case b[0] < 192:
		return 3
	}
	return 4
}
`,
		"m_test.go": `package m

import "testing"

func FuzzBad(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 0 {
			t.Error("not empty")
		}
	})
}

func FuzzGood(f *testing.F) {
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) { magic(b) })
}
`,
		"other/go.mod":    "module example.com/other\n",
		"other/x_test.go": "package x\n\nfunc FuzzOfAnotherModule(f *testing.F) {}\n",
	} {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	var out strings.Builder
	require.ErrorContains(t, fuzz(root, "", 5*time.Second, true, []string{"-parallel=1"}, &out), "1 of 2 targets failed")
	require.Contains(t, out.String(), "FAIL ./. FuzzBad: ")
	require.Contains(t, out.String(), "not empty")
	require.Contains(t, out.String(), "ok ./. FuzzGood: executions: ")
	kept, err := os.ReadDir(filepath.Join(root, "testdata", "fuzz", "FuzzGood"))
	require.NoError(t, err)
	require.Contains(t, out.String(), fmt.Sprintf("kept: %d\n", len(kept)))
	require.NotEmpty(t, kept)

	out.Reset()
	require.NoError(t, fuzz(root, "Good$", time.Second, true, []string{"-parallel=1"}, &out))
	require.Error(t, fuzz(root, "Nothing", time.Second, true, nil, &out), "no target is no success")
}

func TestOnlyInputsThatReachMoreAreKept(t *testing.T) {
	t.Parallel()
	by := map[string]string{"": "0", "a": "1", "b": "1", "c": "02", "d": "", "e": "3", "f": "23", "g": "4", "h": "1"}
	s := &selection{reached: map[string]bool{"0": true}, reach: func(names string) (map[string]bool, error) {
		reached := map[string]bool{}
		for name := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(names, "/^("), ")$"), "|") {
			for block := range strings.SplitSeq(by[name], "") {
				reached[block] = true
			}
		}
		return reached, nil
	}}
	names := strings.Split("abcdefgh", "")
	kept, err := s.pick(names)
	require.NoError(t, err)
	require.Equal(t, []string{"a", "c", "e", "g"}, kept)
	require.Equal(t, strings.Split("abcdefgh", ""), names)
}
