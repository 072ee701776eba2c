package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Each package of the repository is in one group, and so each test runs once.
func TestEveryPackageHasItsTurn(t *testing.T) {
	p, err := newPlan(t.Context(), "../..", "all")
	require.NoError(t, err)
	var planned, there []string
	for _, g := range slices.Concat(p.turns, p.aside) {
		packages, err := list(t.Context(), g.dir, g.packages...)
		require.NoError(t, err)
		planned = append(planned, packages...)
	}
	for _, module := range []string{"../..", "../../test/e2e", "../../hack/release"} {
		packages, err := list(t.Context(), module, "./...")
		require.NoError(t, err)
		there = append(there, packages...)
	}
	require.ElementsMatch(t, there, planned)
	require.Contains(t, planned, p.beside)
	_, err = newPlan(t.Context(), "../..", "some")
	require.ErrorContains(t, err, `"some"`)
}

// What runs aside begins with the story that it runs beside, yields to all others, and counts like them.
func TestWhatRunsAside(t *testing.T) {
	root := t.TempDir()
	usual, err := syscall.Getpriority(syscall.PRIO_PROCESS, 0) // these tests may run aside themselves
	require.NoError(t, err)
	began := filepath.Join(root, "began")
	test := func(name, body string) {
		require.NoError(t, os.MkdirAll(filepath.Join(root, name), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(root, name, name+"_test.go"), []byte("package "+name+`

import (
	"os"
	"syscall"
	"testing"
	"time"
)

const (
	began = "`+began+`"
	usual = `+strconv.Itoa(usual)+`
)

func TestIt(t *testing.T) {
	priority, _ := syscall.Getpriority(syscall.PRIO_PROCESS, 0) // 20 less the nice value
	_, err := os.Stat(began)
	for start := time.Now(); time.Since(start) < 10*time.Minute && os.IsNotExist(err) && "`+name+`" == "story"; _, err = os.Stat(began) {
		time.Sleep(time.Millisecond)
	}
	switch { `+body+` }
}
`), 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(root, "go.mod"), []byte("module example.com/m\n\ngo 1.24\n"), 0o600))
	test("before", `case priority != usual, err == nil: t.Error(priority, "what runs aside has begun")`)
	test("story", `case priority != usual: t.Error(priority)`)
	test("aside", `case priority != 1: t.Error(priority); default: os.WriteFile(began, nil, 0o600); t.Error("counted")`)
	p := plan{turns: []group{{dir: root, packages: []string{"./before"}}, {dir: root, packages: []string{"./story"}}},
		aside: []group{{dir: root, packages: []string{"./aside"}}}, beside: "example.com/m/story"}
	var printed strings.Builder
	s := newSummary(&printed)
	require.NoError(t, run(t.Context(), p, []string{"-run=It"}, s))
	require.False(t, s.close(true))
	require.Contains(t, printed.String(), "2 passed, 1 failed, 0 skipped\n")
	require.Contains(t, printed.String(), "counted")

	// Tests that could not be run at all are an error, and the others run nevertheless.
	p.turns[0].dir = filepath.Join(root, "nowhere")
	printed.Reset()
	s = newSummary(&printed)
	require.ErrorContains(t, run(t.Context(), p, nil, s), "nowhere")
	require.False(t, s.close(false))
	require.Contains(t, printed.String(), "1 passed, 1 failed, 0 skipped\n")

	// Who gives up ends what runs aside, too, though it has a session of its own.
	ctx, stop := context.WithCancel(t.Context())
	require.NoError(t, os.Remove(began))
	test("aside", `case priority != 1: t.Error(priority); default: os.WriteFile(began, nil, 0o600); time.Sleep(time.Hour)`)
	waiting := make(chan struct{})
	go func() {
		defer close(waiting)
		for _, err := os.Stat(began); os.IsNotExist(err) && t.Context().Err() == nil; _, err = os.Stat(began) {
			time.Sleep(time.Millisecond)
		}
		stop()
	}()
	require.Error(t, run(ctx, p, nil, newSummary(&printed)))
	<-waiting
}
