package world_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/world"
)

// root is the folder of the module. proven has the defects that are found; those beside them in the folder unproven were
// not found within the seeds, or not looked for: a fault or an invariant is missing, or time.
const root, proven = "../..", "defects"

// defect is an old defect, of a file in the folder defects: what it was, where it was mended, and how the code of today
// is changed to have it again.
type defect struct {
	name  string
	from  uint64            // the first seed that may find it
	edits map[string][]edit // by file
}

// edit replaces text that stands exactly once in its file.
type edit struct{ old, new string }

// defects returns the old defects of a folder.
func defects(t *testing.T, folder string) (all []defect) {
	t.Helper()
	files, err := filepath.Glob(folder + "/*.txt")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		all = append(all, parse(t, strings.TrimSuffix(filepath.Base(file), ".txt"), string(text)))
	}
	return all
}

// parse reads a defect: a line about it, where it was mended, the first seed if that is not 1, and then files with their edits.
func parse(t *testing.T, name, text string) defect {
	t.Helper()
	d, file := defect{name, 1, map[string][]edit{}}, ""
	for part := range strings.SplitSeq(text, "<<<<\n") {
		if file == "" {
			lines := strings.Split(strings.TrimSpace(part), "\n")
			require.Contains(t, part, "\nmended ", "%s does not name where it was mended", name)
			file = lines[len(lines)-1]
			if _, from, ok := strings.Cut(part, "\nseeds from "); ok {
				_, err := fmt.Sscan(from, &d.from)
				require.NoError(t, err, name)
			}
			continue
		}
		old, rest, ok := strings.Cut(part, "====\n")
		require.True(t, ok, "%s: an edit without ====", name)
		changed, next, ok := strings.Cut(rest, ">>>>\n")
		require.True(t, ok, "%s: an edit without >>>>", name)
		d.edits[file] = append(d.edits[file], edit{strings.TrimSuffix(old, "\n"), strings.TrimSuffix(changed, "\n")})
		if next = strings.TrimSpace(next); next != "" {
			file = next
		}
	}
	require.NotEmpty(t, d.edits, name)
	return d
}

// apply returns the changed files. It fails by the defect's name if the code has changed.
func (d defect) apply(t *testing.T) map[string]string {
	t.Helper()
	changed := map[string]string{}
	for file, edits := range d.edits {
		text, err := os.ReadFile(filepath.Join(root, file))
		require.NoError(t, err, d.name)
		changed[file] = string(text)
		for _, e := range edits {
			require.Equal(t, 1, strings.Count(changed[file], e.old), "defect %q does not apply to %s any more:\n%s", d.name, file, e.old)
			changed[file] = strings.Replace(changed[file], e.old, e.new, 1)
		}
	}
	return changed
}

// overlay writes a file for go build that has the changed files in place of those of today.
func overlay(t *testing.T, changed map[string]string) string {
	t.Helper()
	folder, replace := t.TempDir(), map[string]string{}
	for file, text := range changed {
		path, err := filepath.Abs(filepath.Join(root, file))
		require.NoError(t, err)
		replace[path] = filepath.Join(folder, strings.ReplaceAll(file, "/", "_"))
		require.NoError(t, os.WriteFile(replace[path], []byte(text), 0o600))
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	require.NoError(t, err)
	path := filepath.Join(folder, "overlay.json")
	require.NoError(t, os.WriteFile(path, list, 0o600))
	return path
}

// goCommand runs go as the other binaries are built, so that they share what is compiled.
func goCommand(args ...string) ([]byte, error) {
	command := exec.Command("go", args...)
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	return command.CombinedOutput()
}

// TestDefectsApply: a defect that cannot be put back, or does not compile, is not shown to be found any more. Defects of
// different files are compiled together.
func TestDefectsApply(t *testing.T) {
	t.Parallel()
	var builds []map[string]string
	for _, folder := range []string{proven, "defects/unproven"} {
		for _, d := range defects(t, folder) {
			changed := d.apply(t)
			i := slices.IndexFunc(builds, func(files map[string]string) bool {
				return !slices.ContainsFunc(slices.Collect(maps.Keys(changed)), func(file string) bool { return files[file] != "" })
			})
			if i < 0 {
				i, builds = len(builds), append(builds, map[string]string{})
			}
			maps.Copy(builds[i], changed)
		}
	}
	for _, files := range builds {
		build := []string{"build", "-overlay", overlay(t, files)}
		for file := range files {
			build = append(build, root+"/"+filepath.Dir(file))
		}
		out, err := goCommand(build...)
		require.NoError(t, err, "%s", out)
	}
}

// A defect has to be found within so many seeds, in fleets of so many nodes: large ones take their time.
const seeds, nodes = 1000, 3

// find builds the command with the defect, and has a seed from that one on find it.
func (d defect) find(t *testing.T, from uint64) {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "simulate")
	out, err := goCommand("build", "-ldflags=-s -w", "-overlay", overlay(t, d.apply(t)), "-o", binary, root+"/hack/simulate")
	require.NoError(t, err, "%s: %s", d.name, out)
	out, err = exec.Command(binary, "-first", "-from", fmt.Sprint(from), "-seeds", fmt.Sprint(seeds),
		"-nodes", fmt.Sprint(nodes)).CombinedOutput()
	require.Error(t, err, "%s is not found within %d seeds: a fault or an invariant is missing\n%s", d.name, seeds, out)
	found, _, _ := strings.Cut(string(out), "\n")
	var number uint64
	_, err = fmt.Sscanf(found, "seed %d:", &number)
	require.NoError(t, err, "%s: %s", d.name, out)
	require.Nil(t, world.Run(world.Draw(number).WithNodes(nodes), nil), "%s: seed %d fails without the defect, too", d.name, number)
	t.Logf("%s: %s", d.name, found)
}

// TestSomeDefectsAreFound has some of the defects found by every run of the tests, by the seed that the corpus has for it, or
// a later one. TestEveryDefectIsFound, which is long, has all, and looks for the first seed.
func TestSomeDefectsAreFound(t *testing.T) {
	t.Parallel()
	all := corpus(t)
	for _, d := range defects(t, proven) {
		switch d.name {
		case "breaks-before-it-makes", "recorded-claim", "pool-renamed":
			i := slices.IndexFunc(all, func(s seed) bool { return slices.Contains(s.finds, d.name) })
			require.GreaterOrEqual(t, i, 0, d.name)
			d.find(t, all[i].number)
		}
	}
}
